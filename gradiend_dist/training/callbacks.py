"""Hugging Face callbacks of one seed: its own copies, and the state and control objects that they read and write."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.training.plain_values import plain_fields

logger = logging.getLogger(__name__)

# They say which process this is: a saved state may be read by another rank.
OF_THE_PROCESS = ("is_world_process_zero", "is_local_process_zero")


class SeedCallbacks:
    """Called by every rank; a callback that communicates must do so on all of them."""

    def __init__(self, args: TrainingArguments, model: ModelWithGradiend, callbacks: Sequence[TrainerCallback]) -> None:
        self.args, self.model = args, model
        self.callbacks = [copy.deepcopy(callback) for callback in callbacks]  # they keep counters
        self.state, self.control = TrainerState(), TrainerControl()

    def call(self, event: str, **values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, model=self.model, **values)

    def begin_training(self, total_steps: int, num_epochs: int, *, is_first: bool) -> None:
        self.state.is_world_process_zero = self.state.is_local_process_zero = is_first
        self.state.max_steps, self.state.num_train_epochs = total_steps, num_epochs
        self.call("on_train_begin")

    def progress(self) -> dict[str, Any]:
        return {
            "state": plain_fields(self.state),
            "control": plain_fields(self.control),
            "callbacks": [[_kind(callback), plain_fields(callback)] for callback in self.callbacks],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Each callback as it was, the first of a class as the first of that class was.

        A run may be gone on with by other callbacks: those that are new start as they are.
        """
        _set(self.state, saved["state"])
        _set(self.control, saved["control"])
        left = list(saved["callbacks"])
        for callback in self.callbacks:
            entry = next((entry for entry in left if entry[0] == _kind(callback)), None)
            if entry is not None:
                left.remove(entry)
                _set(callback, entry[1])
        strange = sorted({kind for kind, fields in left if fields})
        if strange and self.state.is_world_process_zero:
            logger.warning("the saved state is of callbacks that are not there any more: %s", ", ".join(strange))


def _kind(callback: TrainerCallback) -> str:
    """By its name alone: the module of a user's script is called otherwise when it is imported."""
    return type(callback).__qualname__


def _set(target: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name not in OF_THE_PROCESS:
            setattr(target, name, value)
