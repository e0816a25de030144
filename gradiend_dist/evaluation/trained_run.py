"""What an evaluation asks of who has trained a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.session import Session


class TrainedRun(Protocol):
    """A trainer is one.

    All ranks ask for `comm`, `session`, `get_model`, `saved_at` and `strengthening_factors` together; the rest needs no
    other rank.
    """

    args: TrainingArguments
    config: TextPredictionConfig

    @property
    def comm(self) -> Comm: ...

    @property
    def session(self) -> Session: ...

    @property
    def base_model_name(self) -> str: ...

    @property
    def target_classes(self) -> tuple[str, str]: ...

    @property
    def experiment_dir(self) -> Path | None: ...

    @property
    def loaded_model(self) -> ModelWithGradiend | None:
        """None where nothing was loaded yet."""
        ...

    def get_model(self) -> ModelWithGradiend: ...

    def saved_at(self) -> Path | None: ...

    def strengthening_factors(self) -> dict[str, float]: ...

    def classes_asked_for(self, target_class: str | Sequence[str] | None) -> list[str]: ...
