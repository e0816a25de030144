"""What is logged of a training: losses, speed, memory, and alerts when it goes wrong.

The checks are pure functions: the same history gives the same signals, also after a run was killed and went on.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import gpu_utilisation, peak_memory
from gradiend_dist.tracking.alerts import alert_text
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.history import SeedRun, StepPlan, chooses_by_loss

logger = logging.getLogger(__name__)

# Steps before which nothing is said, and the share of a run after which a loss should have moved.
FIRST_STEPS = 40

SHARE_OF_RUN = 0.25

FLAT = 1e-3

SPIKE = 10.0

DIVERGED = 0.3

ALMOST_ZERO = 1e-3

LOW_UTILISATION = 40.0


@dataclass(frozen=True)
class Signal:
    kind: str
    text: str


@dataclass
class History:
    """What is known of one seed after a step."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    learning_rates: Sequence[float]
    scores: Mapping[int, float]
    """Correlation by step."""
    total_steps: int
    window: int
    """Steps since the last look."""
    threshold: float | None = 0.5
    """Correlation from which on a run counts as converged."""
    utilisation: Sequence[float] = field(default_factory=tuple)
    """Per cent, at the last looks; empty without a GPU."""

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def last_score(self) -> float | None:
        return abs(self.scores[max(self.scores)]) if self.scores and max(self.scores) > 0 else None


def signals(history: History) -> Iterator[Signal]:
    """All that looks wrong now; the caller knows what was reported before."""
    checks = (loss_flat, validation_diverging, grad_norm_spike, learning_rate_zero, low_utilisation)
    for check in checks:
        text = check(history)
        if text is not None:
            yield Signal(check.__name__, text)


def loss_flat(history: History) -> str | None:
    """The loss has not moved beyond its noise since step 1, and the encoder has not found the classes either."""
    size = history.step // 5
    if history.step < max(FIRST_STEPS, SHARE_OF_RUN * history.total_steps):
        return None
    if history.last_score is not None and history.threshold is not None and history.last_score >= history.threshold:
        return None
    first, last = history.losses[:size], history.losses[-size:]
    before, now = statistics.fmean(first), statistics.fmean(last)
    # Items differ: two windows of an unchanged model differ by the error of their means.
    noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    if abs(before - now) > 2.0 * noise + FLAT * before:
        return None
    return alert_text(
        "loss_flat",
        f"the loss is flat from step 1 ({before:.3e}, now {now:.3e} at step {history.step} of {history.total_steps})",
    )


def validation_diverging(history: History) -> str | None:
    """Twice in a row the correlation was far below the best one."""
    steps = sorted(history.scores)
    if len(steps) < 3:
        return None
    best = max(abs(history.scores[step]) for step in steps)
    recent = [abs(history.scores[step]) for step in steps[-2:]]
    if not all(best - score > DIVERGED for score in recent):
        return None
    return alert_text(
        "validation_diverging", f"the correlation fell from {best:.3f} to {recent[-1]:.3f} on the evaluation rows"
    )


def grad_norm_spike(history: History) -> str | None:
    before, recent = history.grad_norms[: -history.window], history.grad_norms[-history.window :]
    if len(before) < FIRST_STEPS // 2 or not recent:
        return None
    usual, highest = statistics.median(before[-500:]), max(recent)
    if usual <= 0.0 or highest <= SPIKE * usual:
        return None
    observed = f"the gradient norm jumped to {highest:.3g}, {highest / usual:.0f} times its median"
    return alert_text("grad_norm_spike", observed, clip=2 * usual)


def learning_rate_zero(history: History) -> str | None:
    rates = history.learning_rates
    peak = max(rates, default=0.0)  # still 0 in the first step of a warm-up
    if peak == 0.0 or history.step >= 0.9 * history.total_steps or rates[-1] > ALMOST_ZERO * peak:
        return None
    observed = f"the learning rate is {rates[-1]:.2g} at step {history.step} of {history.total_steps}"
    return alert_text("learning_rate_zero", observed)


def low_utilisation(history: History) -> str | None:
    recent = list(history.utilisation[-3:])
    if len(recent) < 3 or max(recent) >= LOW_UTILISATION:
        return None
    return alert_text("low_utilisation", f"the least used GPU is busy {recent[-1]:.0f} % of the time")


class Monitor:
    """Logs the seeds of a training. All ranks call `log`, at the same steps: memory is that of the fullest rank."""

    def __init__(
        self,
        args: TrainingArguments,
        plan: StepPlan,
        device: torch.device,
        tracking: Tracking,
        comm: Comm,
        clock: Clock,
    ) -> None:
        self.args, self.plan, self.device = args, plan, device
        self.tracking, self.comm, self.clock = tracking, comm, clock
        self._last: tuple[int, int, dict[str, float]] = (0, 0, {})
        """Step, rows and seconds when speed was last measured."""
        self._speed: tuple[int, dict[str, float]] = (0, {})

    def start(self, steps_done: int) -> None:
        """Speed counts from here: steps of an earlier process took their time there."""
        self._last = (steps_done, 0, self._seconds())

    def log(self, run: SeedRun, step: int, num_rows: int) -> None:
        """Log, track and check one seed; `num_rows` counts all rows since the start."""
        logs = {
            "loss": run.recent_loss(self.args.logging_steps),
            "grad_norm": run.grad_norms[-1],
            "learning_rate": run.learning_rates[-1],
            "encoder_norm": run.stats["encoder_norms"][step],
            "decoder_norm": run.stats["decoder_norms"][step],
        }
        if self._speed[0] != step:  # one measurement serves all seeds of a step
            self._speed = (step, self._measure_speed(step, num_rows))
        speed = self._speed[1]
        logs["gradients_per_second"] = speed["gradients_per_second"]
        run.callbacks.state.log_history.append({**logs, "step": step})
        logger.info(
            "seed %d step %d/%d: %s",
            run.seed,
            step,
            self.plan.total_steps,
            ", ".join(f"{name} {value:.4g}" for name, value in logs.items()),
        )
        self.tracking.row(run.seed, step, {**logs, **speed})
        if "gpu_utilisation" in speed:
            run.utilisation.append(speed["gpu_utilisation"])
        self._raise_alerts(run, step)
        run.callbacks.call("on_log", logs=logs)

    def _seconds(self) -> dict[str, float]:
        return {"total": self.clock.total(), **self.clock.sections()}

    def _measure_speed(self, step: int, num_rows: int) -> dict[str, float]:
        """Means per step since the last measurement, and the fullest rank's memory. All ranks call this."""
        last_step, last_rows, before = self._last
        now = self._seconds()
        steps = max(1, step - last_step)
        spent = {name: (now[name] - before[name]) / steps for name in now}
        total = max(spent.pop("total"), 1e-9)
        utilisation = gpu_utilisation(self.device)
        memory, idle = self.comm.largest(peak_memory(self.device) / 2**30, 100.0 - (utilisation or 0.0))
        self._last = (step, num_rows, now)
        speed = {
            "step_seconds": total,
            **{f"seconds/{name}": seconds for name, seconds in spent.items()},
            "gradients_per_second": self.plan.items_per_step / total,
            "rows_per_second": (num_rows - last_rows) / steps / total,
            "memory_gib": memory,
        }
        if utilisation is not None:
            speed["gpu_utilisation"] = 100.0 - idle  # of the least busy one
        return speed

    def _raise_alerts(self, run: SeedRun, step: int) -> None:
        """Each kind once, with its remedy."""
        history = History(
            run.losses,
            run.grad_norms,
            run.learning_rates,
            run.stats["scores"],
            self.plan.total_steps,
            window=self.args.logging_steps,
            threshold=None if chooses_by_loss(self.args) else self.args.convergent_score_threshold,
            utilisation=run.utilisation,
        )
        for signal in signals(history):
            if signal.kind not in run.alerts:
                run.alerts.append(signal.kind)
                logger.warning("seed %d step %d: %s", run.seed, step, signal.text)
                self.tracking.alert(run.seed, step, signal.kind, signal.text, len(run.alerts))
