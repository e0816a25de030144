"""Where the closed form of the first items does not hold, the remedies are tried by themselves, and each is said."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradiend_dist import TrainingArguments, UserError
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.gradients.items import Item
from gradiend_dist.space import Slices
from gradiend_dist.training.seed_start import SeedStart

N, COUNT = 40, 8
LABELS = [1.0, -1.0] * (COUNT // 2)


def targets(*, is_feature: bool) -> Tensor:
    """Of items whose leading component is their class, or something that has nothing to do with it."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.randn(N, generator=generator)
    other = torch.tensor([1.0, 1.0, -1.0, -1.0] * (COUNT // 4))
    along = torch.tensor(LABELS) if is_feature else other
    return along.unsqueeze(1) * axis + 0.05 * torch.randn(COUNT, N, generator=generator)


class Inputs:
    """Items of three kinds: the first ones, more, and larger ones; `good` says which of them show the feature."""

    def __init__(self, good: str) -> None:
        self.vectors = {kind: targets(is_feature=kind == good) for kind in ("first", "more", "larger")}

    def spectral_items(self, _seed: int, *, more: int = 1, larger: int = 1) -> tuple[list[Item], list[float]]:
        kind = "more" if more > 1 else "larger" if larger > 1 else "first"
        return [Item((f"{kind} {n}",), f"{kind} {n}") for n in range(COUNT)], LABELS  # type: ignore[arg-type]

    def hand_out(self, items: list[Item], kinds: list[str], deliver: Any, **_: bool) -> None:
        for place, item in enumerate(items):
            kind, number = item.name.split()
            for name in kinds:
                deliver(place, [(name, 1.0)], slice(0, N), self.vectors[kind][int(number)])


def started(good: str, **arguments: Any) -> SeedStart:
    inputs: Any = Inputs(good)
    inputs.base = SimpleNamespace(
        comm=Comm(), slices=Slices.whole(N), device=torch.device("cpu"), space=SimpleNamespace(size=N)
    )
    args = TrainingArguments(spectral_items=COUNT, bias_decoder=False, **arguments)
    return SeedStart(args, inputs, inputs, 0, whole_items=False)


@pytest.mark.parametrize(
    ("good", "told"),
    [
        ("first", []),
        ("more", ["trying 4 times as many items"]),
        ("larger", ["trying 4 times as many items", "trying 4 times as many rows in each item"]),
    ],
)
def test_closed_form__is_that_of_the_first_items_that_show_the_feature(good, told, caplog):
    caplog.set_level(logging.WARNING)
    found = started(good).closed_form()
    assert found is not None and found.form.is_feature
    assert found.start.items[0].name == f"{good} 0"
    assert [line for line in caplog.messages if "trying" in line] == [
        line for line in caplog.messages if any(remedy in line for remedy in told)
    ]
    assert len([line for line in caplog.messages if "trying" in line]) == len(told)


def test_no_items_show_the_feature__the_start_is_random_unless_nothing_would_be_trained(caplog):
    caplog.set_level(logging.WARNING)
    assert started("none").closed_form() is None
    assert "the start is random: the closed form does not show the feature" in caplog.messages[-1]
    with pytest.raises(UserError, match="max_steps=0 trains nothing"):
        started("none", max_steps=0).closed_form()
