"""A rewritten model on disk: a Hugging Face directory with a card that says what was changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradiend_dist import __version__
from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.errors import UserError
from gradiend_dist.rewriting.step import Step
from gradiend_dist.storage.files import new_directory, write_text
from gradiend_dist.storage.layout import MODEL_CARD

# By this line of its card a directory is known as a rewritten model.
SIGNATURE = "| rewritten with | gradiend_dist"

SAVED_AS = ("model", "delta")

HOW_TO_APPLY = (
    "This directory holds the change alone. `gradiend-dist apply` writes the changed model, at any strength; in "
    "Python, `gradiend_dist.load_delta(...)` changes a model that is loaded, for good or inside a `with` block.\n"
)

DTYPES = ("float32", "bfloat16", "float16", "float64")

SCALED_BY = {
    "tensor": "tensor: what each base weight gets of the vector has that weight's own size",
    "curvature": "curvature: entries that the language model's loss is sensitive to move less",
}


def save_rewritten(
    model: nn.Module, tokenizer: Any, output_dir: str | Path, card: str, *, max_shard_size: str | int = "5GB"
) -> Path:
    """A complete Hugging Face model with its tokenizer and a card, or nothing at all."""
    path = Path(output_dir)
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"The changed model would have numbers in {name} that are not finite: the run may be damaged; if it is "
                "not, pass a smaller learning_rate or another dtype."
            )
    with new_directory(path) as directory:
        model.save_pretrained(directory, max_shard_size=max_shard_size)  # type: ignore[operator]
        tokenizer.save_pretrained(directory)
        write_text(directory / MODEL_CARD, card)
    return path


@dataclass(frozen=True)
class Change:
    """What was done to a base model, for its card."""

    base_model: str
    num_changed: int
    num_weights: int
    step: Step
    purpose: str | None = None
    """Such as: F strengthened."""
    run: str | None = None
    """The GRADIEND model that it comes from."""
    effect: Sequence[tuple[str, float, float]] = ()
    """What was measured: (name, before, after)."""
    strength: float = 1.0
    """Of the step; what was measured is about 1."""
    relative_change: float | None = None
    """Of the norm of the weights that move, where it was measured."""

    def card(self, *, alone: bool = False) -> str:
        """`alone`: of a directory that holds the change without the model."""
        name = Path(self.base_model).name
        on_hub = "" if Path(self.base_model).is_dir() else f"base_model: {self.base_model}\n"
        step = self.step
        factor = "" if step.part != "decoder" else f", feature factor {step.feature_factor}"
        vector = "the decoder's vector" if step.part == "decoder" else f"the vector `{step.part}`"
        moved = self.strength * (self.relative_change or 0.0)
        verb, stay = ("are", "stay as they are") if alone else ("were", "are as they were")
        lines = [
            f"---\n{on_hub}library_name: transformers\ntags:\n- gradiend\n---\n",
            f"# {'A change of ' * alone}{name}, rewritten{'' if self.purpose is None else f': {self.purpose}'}\n",
            f"{self.num_changed:,} of the {self.num_weights:,} weights of `{self.base_model}` {verb} moved along a "
            f"direction that GRADIEND has learnt from the gradients of that model; all others {stay}.\n",
            *([HOW_TO_APPLY] if alone else []),
            "| | |",
            "|---|---|",
            f"| changed by | learning rate {step.learning_rate:g} times {vector}{factor} |",
            *([] if self.relative_change is None else [f"| moves these by | {100 * moved:.3g} % of their norm |"]),
            *([] if self.strength == 1.0 else [f"| strength | {self.strength:g} times that |"]),
            *([] if step.scaling == "plain" else [f"| scaled by | {SCALED_BY[step.scaling]} |"]),
            f"| learnt by | `{self.run or 'a model in memory'}` |",
            f"{SIGNATURE} {__version__} |\n",
        ]
        if self.effect and self.strength == 1.0:
            lines += ["Measured on the evaluation split, in the precision of the evaluation:\n"]
            lines += ["| | base model | this model |", "|---|---|---|"]
            lines += [f"| {what} | {before:.4g} | {after:.4g} |" for what, before, after in self.effect]
            lines += [""]
        return "\n".join(lines)


def check_output(output_dir: str | Path, dtype: str | None, max_shard_size: str | int) -> None:
    """Before any work: can the changed model be saved like this? Only a rewritten model is replaced by another."""
    as_dtype(dtype)
    if isinstance(max_shard_size, str) and not re.fullmatch(r"[1-9]\d*(\.\d+)?[KMGT]B", max_shard_size.upper()):
        raise UserError(f"max_shard_size={max_shard_size!r} is no size: write e.g. 5GB or 500MB.")
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise UserError(f"output_dir={str(output_dir)!r} is a file: pass a directory.")
    card = path / MODEL_CARD
    ours = card.is_file() and SIGNATURE in card.read_text(encoding="utf-8", errors="replace")
    if path.is_dir() and any(path.iterdir()) and not ours:
        raise UserError(
            f"output_dir={str(output_dir)!r} holds other files than a rewritten model: pass another directory."
        )


def check_saving(save_as: str, output_dir: str | Path | None, dtype: str | None) -> None:
    """As what a change is saved: the changed model, or the change alone."""
    require_choice("save_as", save_as, SAVED_AS)
    if save_as == "delta":
        require(output_dir is not None, "save_as=delta writes the change to disk: pass output_dir.")
        require(
            dtype is None, f"dtype={dtype} has no effect on save_as=delta, whose numbers are float32: leave it out."
        )


def as_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    require_choice("dtype", name, DTYPES)
    found: torch.dtype = getattr(torch, name)
    return found
