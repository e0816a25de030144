"""The steps of a training, and what is kept of each seed: its numbers so far and its best checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.data.schedule import Schedule
from gradiend_dist.engines.base import Engine
from gradiend_dist.errors import NotFinite, UserError
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.training.state import plain_fields

# Evaluation fields that are the same at every step or too large to keep for each.
CONSTANT_FIELDS = (
    "label_value_to_class_name", "boundaries", "eval_group_basis", "sample_counts", "n_samples", "explained_limit",
    "explained_centred_limit",
)  # fmt: skip


@dataclass
class Plan:
    """How many steps there are and what each one holds; a pure function of arguments and schedule."""

    schedule: Schedule
    items_per_batch: int
    batches_per_step: int
    num_epochs: int
    total_steps: int

    @classmethod
    def of(cls, args: TrainingArguments, schedule: Schedule) -> Plan:
        per_step = args.gradiend_batch_size * args.gradient_accumulation_steps
        steps_per_epoch = -(-len(schedule) // per_step)
        epochs = args.num_train_epochs
        if args.max_steps >= 0 and not args.behaviour.max_steps_is_a_cap:
            epochs = -(-args.max_steps // steps_per_epoch)
        total = steps_per_epoch * epochs
        if args.max_steps >= 0:
            total = min(total, args.max_steps)
        return cls(schedule, args.gradiend_batch_size, args.gradient_accumulation_steps, epochs, total)

    def steps(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        """(step from 1, epoch, batches of item numbers), until the last step."""
        step = 0
        for epoch in range(self.num_epochs):
            order = self.schedule.epoch(epoch)
            for start in range(0, len(order), self.items_per_batch * self.batches_per_step):
                if step == self.total_steps:
                    return
                step += 1
                mine = order[start : start + self.items_per_batch * self.batches_per_step]
                yield (
                    step,
                    epoch,
                    [mine[i : i + self.items_per_batch] for i in range(0, len(mine), self.items_per_batch)],
                )

    def visited(self) -> list[int]:
        """The items that training will see, each once: no later epoch sees one that the first does not."""
        items = self.schedule.epoch(0)[: self.total_steps * self.items_per_batch * self.batches_per_step]
        return list(dict.fromkeys(items))

    def visits_items_again(self) -> bool:
        return self.total_steps * self.items_per_batch * self.batches_per_step > len(self.schedule.batches)


@dataclass
class Best:
    """The best checkpoint so far; `score` is larger for better ones."""

    score: float | None = None
    correlation: float | None = None
    loss: float | None = None
    step: int | None = None
    epoch: int | None = None
    saved: bool = False

    def as_dict(self, *, by_loss: bool) -> dict[str, Any]:
        out: dict[str, Any] = {"correlation": self.correlation, "global_step": self.step, "epoch": self.epoch}
        return {**out, "loss": self.loss} if by_loss else out


@dataclass
class SeedRun:
    """One seed's model in training and its history."""

    seed: int
    model: ModelWithGradiend
    engine: Engine
    output: Path
    callbacks: list[TrainerCallback]
    stats: dict[str, Any] = field(default_factory=lambda: {"scores": {}, "encoder_norms": {}, "decoder_norms": {}})
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    """Kinds that were told already."""
    best: Best = field(default_factory=Best)
    stopped: bool = False
    unread: list[tuple[int, Tensor, str]] = field(default_factory=list)
    state: TrainerState = field(default_factory=TrainerState)
    control: TrainerControl = field(default_factory=TrainerControl)

    @property
    def best_path(self) -> Path:
        return self.output.with_name(f"{self.output.name}_best")

    def step_path(self, step: int) -> Path:
        return self.output.with_name(f"{self.output.name}_step_{step}")

    def epoch_path(self, epoch: int) -> Path:
        return self.output.with_name(f"{self.output.name}_epoch_{epoch + 1}")

    def progress(self) -> dict[str, Any]:
        return {
            "stats": self.stats,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "learning_rates": self.learning_rates,
            "utilisation": self.utilisation,
            "alerts": self.alerts,
            "best": plain_fields(self.best),
            "stopped": self.stopped,
            "state": plain_fields(self.state),
            "control": plain_fields(self.control),
            "callbacks": [plain_fields(callback) for callback in self.callbacks],
        }

    def restore(self, found: dict[str, Any]) -> None:
        self.stats, self.losses, self.stopped = found["stats"], found["losses"], found["stopped"]
        self.grad_norms, self.learning_rates = found["grad_norms"], found["learning_rates"]
        self.utilisation, self.alerts = found["utilisation"], found["alerts"]
        for target, fields in (
            (self.best, found["best"]),
            (self.state, found["state"]),
            (self.control, found["control"]),
            *zip(self.callbacks, found["callbacks"], strict=True),
        ):
            for name, value in fields.items():
                if name not in ("is_world_process_zero", "is_local_process_zero"):
                    setattr(target, name, value)

    def read_steps(self) -> None:
        """Bring the numbers of the last steps to the host; a step that was not finite ends the run here."""
        if not self.unread:
            return
        values = torch.stack([output for _, output, _ in self.unread]).cpu().tolist()
        for (step, _, names), (loss, grad_norm, encoder_norm, decoder_norm) in zip(self.unread, values, strict=True):
            if not all(abs(v) < float("inf") for v in (loss, grad_norm)):  # False for NaN as well
                raise NotFinite(
                    f"The loss or its gradient is not finite at step {step} of seed {self.seed} (loss {loss}, gradient "
                    f"norm {grad_norm}): no weight was changed by it; it came from {names}. Lower learning_rate, or "
                    "check these rows.",
                    seed=self.seed,
                    step=step,
                )
            self.losses.append(loss)
            self.grad_norms.append(grad_norm)
            self.stats["encoder_norms"][step] = encoder_norm
            self.stats["decoder_norms"][step] = decoder_norm
        self.unread.clear()


def keep_series(run: SeedRun, step: int, values: Mapping[str, Any]) -> None:
    """By step, but for what is the same at every one."""
    for name, value in values.items():
        if name in CONSTANT_FIELDS:
            run.stats[name] = value
        else:
            run.stats.setdefault(name, {})[step] = value


def own_copies(callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
    """Callbacks keep counters; every seed gets its own."""
    return [copy.deepcopy(callback) for callback in callbacks]


def as_plain(value: Any) -> Any:
    """What a user's evaluation returns, as values that files can hold: numbers of numpy and torch become Python's."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"evaluate_fn returned a {type(value).__name__}: return numbers, texts, and lists or dicts of them."
    )
