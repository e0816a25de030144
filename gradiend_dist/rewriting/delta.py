"""A change of a base model without the model: written once, applied to it at any strength, and taken back to the bit.

    delta.safetensors   for each changed weight its float32 numbers, and which entries these are where not all are
    delta.json          of which base model, and by which step
    README.md           the same for people

At a strength of 1 the changed model is the rewritten one, bit for bit; a delta of a pruned GRADIEND model is small.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradiend_dist.config.checks import require
from gradiend_dist.errors import UserError
from gradiend_dist.rewriting.card import Change
from gradiend_dist.rewriting.move import Scaling, Vectors, add_to, changes, chunks, flat_entries
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import Weight
from gradiend_dist.storage.files import new_directory, read_json, write_json, write_text
from gradiend_dist.storage.fingerprint import model_files_hash
from gradiend_dist.storage.layout import DELTA_FACTS, DELTA_WEIGHTS, MODEL_CARD
from gradiend_dist.storage.weight_file import Piece, lay_out, write_pieces

logger = logging.getLogger(__name__)

VALUES, INDICES = "values.", "indices."

FORMAT = 1


def save_delta(
    output_dir: str | Path,
    base_model: nn.Module,
    weights: list[Weight],
    vectors: Vectors,
    change: Change,
    scaling: Scaling | None = None,
) -> Path:
    """Write what a step adds to `base_model`, which stays as it is; piece by piece, so it may be larger than memory."""
    path = Path(output_dir)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for weight in weights:
        tensors[VALUES + weight.name] = (torch.float32, (weight.num_selected,))
        if weight.selected is not None:
            tensors[INDICES + weight.name] = (_index_dtype(weight), (weight.num_selected,))

    def pieces() -> Iterator[Piece]:
        for weight in weights:
            if weight.selected is not None:
                yield Piece(INDICES + weight.name, 0, weight.selected.to(_index_dtype(weight)))
        for weight, inside, values in changes(base_model, weights, vectors, change.step, scaling):
            if not bool(torch.isfinite(values).all()):
                raise UserError(f"The change of {weight.name} is not finite: pass a smaller learning_rate.")
            yield Piece(VALUES + weight.name, inside.start, values)

    facts = {
        "format": FORMAT,
        "base_model": change.base_model,
        "base_model_files": model_files_hash(change.base_model),
        "shapes": {weight.name: list(weight.shape) for weight in weights},
        "offsets": {weight.name: weight.base_offset for weight in weights},
        "purpose": change.purpose,
        "step": vars(change.step),
        "run": change.run,
        "effect": [list(row) for row in change.effect],
        "relative_change": change.relative_change,
    }
    with new_directory(path) as directory:
        offsets = lay_out(directory / DELTA_WEIGHTS, tensors)
        write_pieces(directory / DELTA_WEIGHTS, pieces(), offsets)
        write_json(directory / DELTA_FACTS, facts)
        write_text(directory / MODEL_CARD, change.card(alone=True))
    return path


def _index_dtype(weight: Weight) -> torch.dtype:
    return torch.int32 if weight.numel < 2**31 else torch.int64


@dataclass(frozen=True)
class Delta:
    """A change of a base model, on disk; its numbers are read as they are needed."""

    path: Path
    base_model: str
    """A path or hub id."""
    base_model_files: str | None
    """Hash of a local base model's files."""
    purpose: str | None
    step: Step
    run: str | None
    """The GRADIEND model that it comes from."""
    effect: tuple[tuple[str, float, float], ...]
    """What was measured at a strength of 1: (name, before, after)."""
    shapes: dict[str, tuple[int, ...]]
    """Of the weights that it changes."""
    offsets: dict[str, int]
    """Where these begin among all weights of the model: what rounding to bfloat16 goes by."""
    relative_change: float | None
    """Of the norm of the weights that move, where it was measured."""

    def tell_other_base(self, name: str) -> None:
        """Say so where `name` has other weights than the model that the change was made for."""
        files = model_files_hash(name)
        other = (
            name != self.base_model
            if files is None or self.base_model_files is None
            else files != self.base_model_files
        )
        if other:
            logger.warning(
                "%s was made for %s, and %s is another model: what was measured does not hold",
                self.path,
                self.base_model,
                name,
            )

    def change(self, model: nn.Module, name: str, strength: float) -> Change:
        """What was done to a model, for its card."""
        with self._open() as file:
            changed = sum(file.get_slice(VALUES + weight).get_shape()[0] for weight in self.shapes)
        total = sum(parameter.numel() for parameter in model.parameters())
        return Change(
            name, changed, total, self.step, self.purpose, self.run, self.effect, strength, self.relative_change
        )

    def check(self, model: nn.Module) -> None:
        """Has this model such weights?"""
        parameters = dict(model.named_parameters())
        for name, shape in self.shapes.items():
            found = parameters.get(name)
            if found is None or tuple(found.shape) != shape:
                what = "no such weight" if found is None else f"shape {tuple(found.shape)}"
                raise UserError(
                    f"{self.path} changes {name} of shape {shape}, the model has {what}: pass the base model that it "
                    f"was made for, {self.base_model}."
                )
            require(
                not isinstance(found, DTensor),
                f"{self.path} cannot be applied to a model in shards: apply it before the model is sharded.",
            )

    @torch.no_grad()
    def apply(self, model: nn.Module, strength: float = 1.0) -> nn.Module:
        """Change a model for good; returns it."""
        require(math.isfinite(strength), f"strength={strength} is not finite: pass a number, 1 for the change as made.")
        self.check(model)
        parameters = dict(model.named_parameters())
        for name, selected, inside, values in self._pieces():
            flat = flat_entries(parameters[name])
            change = values.to(flat.device)
            add_to(flat, self.offsets[name], selected, inside, change if strength == 1.0 else change * strength)
        return model

    @contextlib.contextmanager
    def applied(self, model: nn.Module, strength: float = 1.0) -> Iterator[nn.Module]:
        """Change a model inside a `with` block, and take it back to the bit; one copy of what is touched is held."""
        self.check(model)
        # Where they are is kept as well: the file may be gone when the model is taken back.
        before = [(flat, selected, flat[selected].clone()) for flat, selected in self._places(model)]
        try:
            yield self.apply(model, strength)
        finally:
            for flat, selected, entries in before:
                flat[selected] = entries

    def _places(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor | slice]]:
        """(a weight's entries, which of them are changed)."""
        parameters = dict(model.named_parameters())
        with self._open() as file:
            for name in self.shapes:
                flat, selected = flat_entries(parameters[name]), self._selected(file, name)
                yield flat, slice(None) if selected is None else selected.to(flat.device)

    def _pieces(self) -> Iterator[tuple[str, Tensor | None, slice, Tensor]]:
        """(weight, its changed entries, which of these, numbers)."""
        with self._open() as file:
            for name in self.shapes:
                selected, values = self._selected(file, name), file.get_slice(VALUES + name)
                for inside in chunks(values.get_shape()[0], torch.device("cpu")):
                    yield name, selected, inside, values[inside.start : inside.stop]

    @staticmethod
    def _selected(file: Any, name: str) -> Tensor | None:
        found: Tensor | None = file.get_tensor(INDICES + name).long() if INDICES + name in file.keys() else None  # noqa: SIM118
        return found

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        with safe_open(str(self.path / DELTA_WEIGHTS), framework="pt") as file:
            yield file


def load_delta(path: str | Path) -> Delta:
    """A delta that `rewrite` has written, checked; its numbers stay on disk."""
    path = Path(path)
    require(
        (path / DELTA_FACTS).is_file() and (path / DELTA_WEIGHTS).is_file(),
        f"{path} holds no delta ({DELTA_FACTS} and {DELTA_WEIGHTS}): pass a directory that rewrite --as delta wrote.",
    )
    facts = read_json(path / DELTA_FACTS)
    try:
        require(facts["format"] == FORMAT, f"{path} is of format {facts['format']}, known is {FORMAT}: write it again.")
        shapes = {str(name): tuple(int(size) for size in shape) for name, shape in facts["shapes"].items()}
        step, effect = Step(**facts["step"]), tuple((str(n), float(a), float(b)) for n, a, b in facts["effect"])
        change = facts.get("relative_change")
        found = Delta(
            path,
            str(facts["base_model"]),
            facts["base_model_files"],
            facts["purpose"],
            step,
            facts["run"],
            effect,
            shapes,
            {name: int(facts["offsets"][name]) for name in shapes},
            None if change is None else float(change),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path / DELTA_FACTS} is damaged or no file of ours: write the delta again.") from error
    _check_tensors(found)
    return found


def _check_tensors(delta: Delta) -> None:
    """Are all numbers there, and do the indices point into their weights?"""
    try:
        with delta._open() as file:
            for name, shape in delta.shapes.items():
                count, selected = file.get_slice(VALUES + name).get_shape()[0], Delta._selected(file, name)
                whole = math.prod(shape)
                if (
                    (count != whole)
                    if selected is None
                    else (len(selected) != count or not _points_into(selected, whole))
                ):
                    raise UserError(f"{delta.path / DELTA_WEIGHTS} does not fit its {name}: write the delta again.")
    except SafetensorError as error:
        raise UserError(f"{delta.path / DELTA_WEIGHTS} is damaged ({error}): write the delta again.") from error


def _points_into(selected: Tensor, count: int) -> bool:
    return not len(selected) or bool((selected.min() >= 0) & (selected.max() < count))
