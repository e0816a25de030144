"""The steps of a training, and what is kept of each seed: its numbers so far and its best checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.data.schedule import Schedule
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.engines.base import Engine, GradiendBatch
from gradiend_dist.errors import NotFinite
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.storage.provenance import without_secrets
from gradiend_dist.tracking.alerts import alert_text
from gradiend_dist.training.callbacks import SeedCallbacks
from gradiend_dist.training.plain_values import plain_fields

# Evaluation fields that are the same at every step or too large to keep for each.
CONSTANT_FIELDS = (
    "label_value_to_class_name", "boundaries", "eval_group_basis", "sample_counts", "n_samples", "explained_limit",
    "explained_centred_limit",
)  # fmt: skip


@dataclass
class StepPlan:
    """How many steps there are and what each one holds; a pure function of arguments and schedule."""

    schedule: Schedule
    items_per_batch: int
    batches_per_step: int
    num_epochs: int
    total_steps: int

    @classmethod
    def of(cls, args: TrainingArguments, schedule: Schedule) -> StepPlan:
        per_step = args.gradiend_batch_size * args.gradient_accumulation_steps
        steps_per_epoch = -(-len(schedule) // per_step)
        epochs = args.num_train_epochs
        if args.max_steps >= 0 and not args.behaviour.max_steps_is_a_cap:
            epochs = -(-args.max_steps // steps_per_epoch)
        total = steps_per_epoch * epochs
        if args.max_steps >= 0:
            total = min(total, args.max_steps)
        return cls(schedule, args.gradiend_batch_size, args.gradient_accumulation_steps, epochs, total)

    @property
    def items_per_step(self) -> int:
        return self.items_per_batch * self.batches_per_step

    def steps(self) -> Iterator[tuple[int, int, list[list[int]]]]:
        """(step from 1, epoch, batches of item numbers), until the last step."""
        step = 0
        for epoch in range(self.num_epochs):
            order = self.schedule.epoch(epoch)
            for start in range(0, len(order), self.items_per_step):
                if step == self.total_steps:
                    return
                step += 1
                items = order[start : start + self.items_per_step]
                yield (
                    step,
                    epoch,
                    [items[i : i + self.items_per_batch] for i in range(0, len(items), self.items_per_batch)],
                )

    def visited(self) -> list[int]:
        """The items that training will see, each once: no later epoch sees one that the first does not."""
        items = self.schedule.epoch(0)[: self.total_steps * self.items_per_step]
        return list(dict.fromkeys(items))

    def visits_items_again(self) -> bool:
        return self.total_steps * self.items_per_step > len(self.schedule.batches)


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


def chooses_by_loss(args: TrainingArguments) -> bool:
    """Is the best checkpoint the one with the lowest loss, and not the one with the highest correlation?"""
    return args.supervised_decoder if args.behaviour.loss_only_supervised else args.convergent_metric == "loss"


@dataclass
class SeedRun:
    """One seed's model in training and its history. Every rank has the same history."""

    seed: int
    model: ModelWithGradiend
    engine: Engine
    output: Path
    callbacks: SeedCallbacks
    stats: dict[str, Any] = field(default_factory=lambda: {"scores": {}, "encoder_norms": {}, "decoder_norms": {}})
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    utilisation: list[float] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    """Kinds that were raised already."""
    best: Best = field(default_factory=Best)
    stopped: bool = False
    unread: list[tuple[int, Tensor, str]] = field(default_factory=list)
    """Steps whose numbers are still on the device: step, what the engine returned, names of the items."""

    @property
    def starts_trained(self) -> bool:
        """Was the start a closed form, which competes with the steps that follow?"""
        return "spectral" in self.stats

    @property
    def best_path(self) -> Path:
        return self.output.with_name(f"{self.output.name}_best")

    def step_path(self, step: int) -> Path:
        return self.output.with_name(f"{self.output.name}_step_{step}")

    def epoch_path(self, epoch: int) -> Path:
        return self.output.with_name(f"{self.output.name}_epoch_{epoch + 1}")

    def step(self, step: int, batches: list[GradiendBatch], learning_rate: float, item_names: str) -> None:
        """One optimizer step; its numbers stay on the device until `read_steps`. All ranks call this."""
        self.unread.append((step, self.engine.step(batches, learning_rate), item_names))
        self.learning_rates.append(learning_rate)

    def read_steps(self) -> None:
        """Bring the numbers of the last steps to the host; a step that was not finite ends the run here.

        No communication, but it waits for the device.
        """
        if not self.unread:
            return
        values = torch.stack([output for _, output, _ in self.unread]).cpu().tolist()
        for (step, _, names), (loss, grad_norm, encoder_norm, decoder_norm) in zip(self.unread, values, strict=True):
            if not all(abs(v) < float("inf") for v in (loss, grad_norm)):  # False for NaN as well
                observed = (
                    f"The loss or its gradient is not finite at step {step} of seed {self.seed} (loss {loss}, gradient "
                    f"norm {grad_norm}): no weight was changed by it; it came from {names}"
                )
                raise NotFinite(f"{alert_text('not_finite', observed)}.", seed=self.seed, step=step)
            self.losses.append(loss)
            self.grad_norms.append(grad_norm)
            self.stats["encoder_norms"][step] = encoder_norm
            self.stats["decoder_norms"][step] = decoder_norm
        self.unread.clear()

    def recent_loss(self, num_steps: int) -> float:
        """Mean of the last steps that were read."""
        recent = self.losses[-num_steps:]
        return sum(recent) / len(recent)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep a value by step, except where it is the same at every step."""
        for name, value in metrics.items():
            if name in CONSTANT_FIELDS:
                self.stats[name] = value
            else:
                self.stats.setdefault(name, {})[step] = value

    def record(self, args: TrainingArguments, clock: Clock) -> dict[str, Any]:
        """What training.json says about the run so far."""
        stats = {"global_step": len(self.losses), **self.stats}
        stats["grad_norms"] = dict(enumerate(self.grad_norms, 1))
        stats["learning_rates"] = dict(enumerate(self.learning_rates, 1))
        return {
            "training_stats": stats,
            "best_score_checkpoint": self.best.as_dict(by_loss=chooses_by_loss(args)),
            "training_args": without_secrets(args.to_dict()),  # it is published with the model
            "time": clock.as_dict(),
            "losses": list(self.losses),
            "seed": self.seed,
        }

    def progress(self) -> dict[str, Any]:
        """All that the rest of this seed's training depends on besides its engine, as plain values."""
        self.read_steps()
        return {
            "stats": self.stats,
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "learning_rates": self.learning_rates,
            "utilisation": self.utilisation,
            "alerts": self.alerts,
            "best": plain_fields(self.best),
            "stopped": self.stopped,
            **self.callbacks.progress(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.stats, self.losses, self.stopped = saved["stats"], saved["losses"], saved["stopped"]
        self.grad_norms, self.learning_rates = saved["grad_norms"], saved["learning_rates"]
        self.utilisation, self.alerts = saved["utilisation"], saved["alerts"]
        self.best = Best(**saved["best"])
        self.callbacks.restore(saved)
