"""The learning rate of each step, one for all seeds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import get_scheduler

from gradiend_dist.config.arguments import TrainingArguments


class LearningRate:
    """A scheduler of Hugging Face's. They want an optimizer: one without weights carries the rate."""

    def __init__(self, args: TrainingArguments, total_steps: int) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.peak_rate)
        warmup = args.warmup_steps or int(args.warmup_ratio * total_steps)
        # A schedule of no step would divide by its length.
        self._scheduler = get_scheduler(args.lr_scheduler_type, self._optimizer, warmup, max(1, total_steps))

    @property
    def value(self) -> float:
        rate: float = self._scheduler.get_last_lr()[0]
        return rate

    def advance(self) -> None:
        self._optimizer.step()
        self._scheduler.step()

    def progress(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def restore(self, saved: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(saved)
        self._optimizer.param_groups[0]["lr"] = self.value
