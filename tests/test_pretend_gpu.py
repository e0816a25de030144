"""The pretend device itself; what a step and a gradient may wait for on it; and what runs on it nowhere else.

Whole trainings on it, on one and more devices and ranks, are among the launches of test_world_size.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from pretend_gpu import OnGpu, Refused, pretend_gpus, strict, waits
from safetensors.torch import load_file
from torch import Tensor

from gradiend_dist import TextPredictionTrainer, TrainingArguments
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import choose_objective
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.space import ParameterSpace
from gradiend_dist.training.history import SeedRun
from gradiend_dist.training.state import StateKeeper

GPU = torch.device("gpu:1")


# --- the device


def mistakes() -> Iterator[Callable[[Tensor, Tensor, Tensor], Any]]:
    yield lambda a, _, host: a + host
    yield lambda a, b, _: torch.dot(a, b)
    yield lambda a, b, _: torch.stack([a, b])
    yield lambda a, _, host: a.add_(host)
    yield lambda a, _, host: host.add_(a.sum())
    yield lambda a, _, host: torch.addcmul(a, a, host)
    yield lambda a, _, host: host[a.long()]
    yield lambda a, b, _: a[b.long()]
    yield lambda a, _, __: a.uniform_(generator=torch.Generator())
    yield lambda a, _, __: a.numpy()


@pytest.mark.parametrize("mistake", list(mistakes()))
def test_device__refuses_what_a_gpu_would(mistake):
    with pretend_gpus(2):
        a, b = (torch.zeros(3, device=f"gpu:{i}") for i in (1, 2))
        with pytest.raises(Refused):
            mistake(a, b, torch.zeros(3))


def test_device__allows_what_a_gpu_allows():
    with pretend_gpus(2), waits() as counted:
        a, b = (torch.ones(3, device=f"gpu:{i}") for i in (1, 2))
        moved = (a.to(b) + b) * torch.tensor(2.0) + torch.zeros((), device="gpu:2")
        assert (str(moved.device), str(moved[1:].data.device), str(torch.zeros_like(a).device)) == (
            *("gpu:2", "gpu:2"), "gpu:1",
        )  # fmt: skip
        assert not counted
        assert a[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a number is read": lambda a: float(a.sum()),
    "a copy from the device": lambda a: a.cpu(),
    "a copy to the device": lambda _: torch.ones(2).to(GPU),
    "numbers are copied to the device": lambda _: torch.tensor([1.0], device=GPU),
    "a mask as index": lambda a: a[a > 0],
    "an index is copied to the device": lambda a: a[torch.tensor([0])],
    "the size of nonzero depends on values": lambda a: a.nonzero(),
    "the size of _unique2 depends on values": lambda a: a.unique(),
    "the size of repeat_interleave depends on values": lambda a: torch.repeat_interleave(a.long()),
}


@pytest.mark.parametrize("reason", list(WAITS))
def test_waits__are_counted_with_their_reason(reason):
    with pretend_gpus(1):
        a = torch.ones(3, device=GPU)
        with waits() as counted:
            WAITS[reason](a)
    assert counted == {f"elsewhere: {reason}": 1}


def test_waits__are_told_by_file_and_line():
    """At the line of the package that waits: of a read, the last one within it."""
    with pretend_gpus(1), waits() as counted:
        run = SeedRun.__new__(SeedRun)
        run.unread = [(1, torch.zeros(4, device=GPU), "")]
        run.losses, run.grad_norms, run.stats = [], [], {"encoder_norms": {}, "decoder_norms": {}}
        run.read_steps()
    ((told, count),) = counted.items()
    assert told.startswith("gradiend_dist/training/history.py:") and told.endswith("a copy from the device")
    assert count == 1


def test_device__weights_that_are_one_stay_one():
    with pretend_gpus(1):
        model = tiny.base_model("bert", 40).to(GPU)
        tied = model.get_input_embeddings().weight
        assert tied is model.get_output_embeddings().weight and isinstance(tied, OnGpu)


def test_nccl__refuses_what_it_does():
    used: Counter[str] = Counter()
    collective = strict(lambda *_, **__: None, "all_reduce", used)
    with pretend_gpus(1):
        good, matrix = torch.ones(3, device=GPU), torch.ones(3, 2, device=GPU)
        for bad, group in ((torch.ones(3), None), (good > 0, None), (matrix.T, None), (good, "hosts")):
            with pytest.raises(Refused):
                collective(bad, group=group)
        collective(good, group=None)
        collective(torch.ones(3), group="hosts")
    assert used == {"all_reduce of devices": 4, "all_reduce of hosts": 2}


# --- what may be waited for


def gradients_of(named: str, keep: int | None, device: Any) -> tuple[BaseGradients, list[Item]]:
    """Of a small model on the device; with `keep` over every so-manieth entry."""
    family, untied, _ = named.partition(", untied")
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    model = tiny.base_model(family, len(tokenizer), **({"tie_word_embeddings": False} if untied else {}))
    space = ParameterSpace.of_model(model)
    if keep is not None:
        space = space.select(torch.arange(1, space.size, keep))
    objective = choose_objective("auto", model, tokenizer, max_length=30, mask_placeholder="[MASK]", as_reference=False)
    rows = [("the man said that [MASK] was tired .", "he", "she"), ("the nurse said [MASK] left early .", "she", "he")]
    table = pd.DataFrame(rows, columns=["masked", "factual", "alternative"]).assign(transition="M->F", label=1.0)
    model = model.to(device)
    if not untied:
        model.tie_weights()  # which moving to a pretend GPU has undone
    return BaseGradients(model, tokenizer, objective, space), [
        ItemRows(table, objective).item(numbers) for numbers in ([0], [0, 1])
    ]


@pytest.mark.parametrize("keep", [None, 7], ids=["whole", "pruned"])
@pytest.mark.parametrize("family", ["bert", "bert, untied", "gpt2", "llama", "gemma2"])
def test_gradient__is_the_hosts_and_waits_at_most_twice(family, keep):
    """transformers asks in a pass whether the mask hides anything, twice for a causal one; nothing else is left.

    Fails if a number is read, a size depends on values, or a list goes to the device in a way that is waited for.
    """
    kinds = ["alternative", "diff"]
    on_host, (_, item) = gradients_of(family, keep, "cpu")
    expected = on_host.compute(item, kinds)
    with pretend_gpus(1):
        base, (first, item) = gradients_of(family, keep, GPU)
        base.compute(first, kinds)  # finds out about the head, once
        received = {kind: base.empty().zero_() for kind in kinds}

        def take(_item: int, into: list[tuple[str, float]], where: slice, entries: torch.Tensor) -> None:
            for kind, factor in into:
                received[kind][where].add_(entries, alpha=factor)

        with waits() as counted:
            found = base.compute(item, kinds)
        with waits() as counted_by_weight:
            base.hand_out([item], kinds, take, complete=True)
        for kind, vector in expected.items():
            torch.testing.assert_close(found[kind].cpu(), vector)
            torch.testing.assert_close(received[kind].cpu(), vector)
    for told in (counted, counted_by_weight):
        print(dict(told))
        assert sum(told.values()) <= 2, dict(told)
        assert all(place.startswith("transformers/") for place in told), dict(told)


# --- what runs on it nowhere else


def trainer_of(directory: Path, model: str, frames: dict[str, Any], **changes: Any) -> TextPredictionTrainer:
    values = {
        "experiment_dir": str(directory),
        "train_batch_size": 5,
        "train_max_size": 20,
        "encoder_eval_max_size": 3,
        "encoder_eval_train_max_size": 3,
        "max_steps": 6,
        "eval_steps": 3,
        "save_steps": 2,
        "initialization": "random",
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-5,
        "max_seeds": 1,
        "min_convergent_seeds": None,
        "decoder_eval_max_size_training_like": 4,
        "decoder_eval_max_size_neutral": 4,
    }
    args = TrainingArguments(**{**values, **changes})
    return TextPredictionTrainer(model, data=frames, target_classes=["M", "F"], args=args)


class Killed(Exception):
    pass


def test_state__on_a_gpu_goes_on_where_it_was(masked_lm, feature_frames, tmp_path, monkeypatch):
    """Fails if a state is read onto another device than that of the run, or its numbers not at all."""
    save = StateKeeper.save

    def save_and_end(self: StateKeeper, loop: Any, step: int, **_: Any) -> None:
        save(self, loop, step, wait=True)
        if step == 4:
            raise Killed

    weights = {}
    with pretend_gpus(2):
        trainer_of(tmp_path / "whole", str(masked_lm), feature_frames).train()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(StateKeeper, "save", save_and_end)
            trainer_of(tmp_path / "killed", str(masked_lm), feature_frames).train()
        trainer_of(tmp_path / "killed", str(masked_lm), feature_frames).train()
        for name in ("whole", "killed"):
            weights[name] = load_file(tmp_path / name / "model" / "model.safetensors")
    assert all(torch.equal(tensor, weights["killed"][name]) for name, tensor in weights["whole"].items())


def test_rewriting__on_a_gpu_scores_as_on_the_host(masked_lm, feature_frames, tmp_path):
    """The grid in place and a direction scaled by curvature, from the same promoted model."""
    trainer_of(tmp_path / "run", str(masked_lm), feature_frames).train()
    found = []
    for on_gpu in (False, True):
        with pretend_gpus(2) if on_gpu else contextlib.nullcontext():
            trainer = trainer_of(tmp_path / "run", str(masked_lm), feature_frames)
            grid = trainer.evaluate_decoder(lrs=[0.1, 1.0], use_cache=False, plot=False)
            changed = trainer.rewrite_base_model(
                target_class="M", learning_rate=1.0, feature_factor=1.0, scaling="curvature"
            )
            assert isinstance(next(trainer.session.base_model.parameters()), OnGpu) == on_gpu
            vector = torch.cat([weight.detach().cpu().reshape(-1) for weight in changed.parameters()])
            found.append((grid, vector))
    (grid, vector), (grid_on_gpu, vector_on_gpu) = found
    torch.testing.assert_close(vector_on_gpu, vector, rtol=1e-4, atol=1e-5)
    ours, theirs = (dict(numbers(tree)) for tree in (grid_on_gpu, grid))
    assert ours.keys() == theirs.keys() and len(theirs) > 10
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def numbers(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from numbers(value, f"{path}.{name}")
    elif isinstance(tree, float):
        yield path, tree
