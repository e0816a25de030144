"""Gradients that are handed out weight by weight, and forgotten: the same numbers as those of the vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gradients import KINDS, MULTI_TOKEN_ROWS, ROWS, Base
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.items import Item


class Received:
    """Adds up what is handed out, and takes note of how."""

    def __init__(self, base: BaseGradients, count: int) -> None:
        self.vectors = {(number, kind): base.empty().zero_() for number in range(count) for kind in KINDS}
        self.times: dict[tuple[int, str], Tensor] = {key: torch.zeros_like(v) for key, v in self.vectors.items()}

    def __call__(self, item: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        for kind, factor in into:
            self.vectors[item, kind][where].add_(entries, alpha=factor)
            self.times[item, kind][where] += 1


def given(family: str, **options: Any) -> Base:
    return Base(family, **options)


CASES = {
    "bert": ("bert", {}),
    "bert, untied": ("bert", {"tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),  # an embedding that scales its output, tied to the head
}


@pytest.mark.parametrize("selected", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize("family, options", CASES.values(), ids=CASES)
def test_hand_out__gives_the_entries_of_the_vectors_once(family: str, options: dict[str, Any], selected: bool) -> None:
    """Fails if a weight that modules share is handed on before all have fired, or if a kind's factor is lost."""
    base = given(family, **options)
    space = base.space
    if selected:
        space = space.select(torch.arange(0, space.size, 7))
    gradients = base.gradients(space)
    items = [base.item(ROWS), base.item(ROWS[:1])]
    received = Received(gradients, len(items))
    gradients.hand_out(items, KINDS, received, complete=True)
    for number, item in enumerate(items):
        for kind, vector in gradients.compute(item, KINDS).items():
            assert torch.equal(received.vectors[number, kind], vector), (number, kind)
            assert received.times[number, kind].max() == 1


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_hand_out__of_several_passes_adds_up_and_is_whole_where_asked(
    complete: bool, micro_batch_size: int | None
) -> None:
    """Words of other lengths take two forward passes, and micro-batches one each: parts, unless `complete`."""
    base = given("bert")
    gradients = base.gradients(micro_batch_size=micro_batch_size)
    items = [base.item(MULTI_TOKEN_ROWS)]
    received = Received(gradients, 1)
    gradients.hand_out(items, KINDS, received, complete=complete)
    for kind, vector in gradients.compute(items[0], KINDS).items():
        torch.testing.assert_close(received.vectors[0, kind], vector, rtol=1e-5, atol=1e-7)
        assert (received.times[0, kind].max() == 1) == (complete or (kind != "diff" and micro_batch_size is None))


def test_hand_out__of_an_identity_delivers_no_difference() -> None:
    base = given("bert")
    gradients = base.gradients()
    item = base.item([("[MASK] was old", "he", "he")])
    received = Received(gradients, 1)
    gradients.hand_out([item], KINDS, received)
    assert not received.times[0, "diff"].any() and received.times[0, "factual"].any()


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.entries = max(self.entries, leaf.numel())
        return found


def test_hand_out__makes_no_vector() -> None:
    """Fails if something of size n is made on the way."""
    base = given("bert", num_hidden_layers=6)
    gradients = base.gradients()
    items: list[Item] = [base.item(ROWS)]
    gradients.compute(items[0], ["factual"])  # the head is looked at first
    with Largest() as watch:
        gradients.hand_out(items, KINDS, lambda *_: None, complete=True)
    assert 0 < watch.entries < base.space.size / 4
