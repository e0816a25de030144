"""What is asked of `evaluate_decoder`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.evaluation.search import MAX_HARM
from gradiend_dist.evaluation.selection import Extractor, SelectionPolicy, extract_candidates
from gradiend_dist.rewriting.step import SCALINGS, VECTORS


@dataclass(frozen=True, kw_only=True)
class DecoderRequest:
    """The arguments of `evaluate_decoder`, with the reference's names where it has them."""

    lrs: Sequence[float] | None = None
    """Learning rates of a grid. None: the strength is searched for."""
    feature_factors: Sequence[float] | None = None
    """What the decoder is asked for. None: what strengthens each target class."""
    use_cache: bool | None = None
    split: str = "test"
    max_size: int | None = None
    """Rows per direction and neutral texts, at most."""
    max_size_training_like: int | None = None
    max_size_neutral: int | None = None
    eval_batch_size: int | None = None
    training_like_df: pd.DataFrame | None = None
    """Other rows than those of the split."""
    neutral_df: pd.DataFrame | None = None
    """Other neutral texts than `eval_neutral_data`."""
    second_neutral_data: pd.DataFrame | Sequence[str] | str | Path | None = None
    """Texts of another kind, on which the harm of what was chosen is measured as well."""
    neutral_blanks: pd.DataFrame | Sequence[str] | str | Path | None = None
    """Sentences with a blank that either class may fill, which `target_class=balance` is about."""
    part: str = "decoder"
    scaling: str | None = None
    """plain, tensor or curvature. None: curvature for a search, plain for a grid."""
    max_harm: float = MAX_HARM
    """By how much a rewritten model's perplexity on neutral text may grow."""
    selector: SelectionPolicy | None = None
    summary_extractor: Extractor = extract_candidates
    summary_metrics: Sequence[str] | None = None
    target_class: str | Sequence[str] | None = None
    increase_target_probabilities: bool = True

    def __post_init__(self) -> None:
        require_choice("scaling", self.scaling or "plain", SCALINGS)
        require_choice("part", self.part, VECTORS)
        require(self.max_harm > 0.0, f"max_harm={self.max_harm} must be positive: pass e.g. 0.01 for 1 %.")
        require(
            self.feature_factors is None or len(self.feature_factors) > 0,
            "feature_factors is empty: pass at least one, or None for the default.",
        )
        require(
            self.feature_factors is None or self.part == "decoder",
            f"feature_factors has no effect on part={self.part}, which is one vector: leave it out.",
        )
        require(
            self.lrs is None or len(self.lrs) > 0,
            "lrs is empty: pass at least one learning rate, or None for the default.",
        )
        for name in ("lrs", "feature_factors"):
            given = vars(self)[name]
            for value in () if given is None else given:
                require(math.isfinite(value), f"{name}={value} is no finite number: pass e.g. 0.1.")
        for value in () if self.lrs is None else self.lrs:
            require(value != 0.0, "lrs=0 rewrites nothing: pass other learning rates.")
        for name in ("max_size", "max_size_training_like", "max_size_neutral", "eval_batch_size"):
            value = vars(self)[name]
            require(value is None or value >= 1, f"{name}={value} must be at least 1: pass a larger number.")

    @property
    def selects_by_hand(self) -> bool:
        """Is there a grid or a rule of the user's own? A search has its own rule."""
        own = (self.lrs, self.selector, self.summary_metrics)
        return any(value is not None for value in own) or self.summary_extractor is not extract_candidates


def first_given(*values: Any) -> Any:
    """The first one that is not None."""
    return next((value for value in values if value is not None), None)
