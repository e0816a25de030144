"""Signs that a training goes wrong, read from its history, each with its remedy.

All functions are pure: the same history gives the same signals, also after a run was killed and went on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    """All that looks wrong now; who listens remembers what was said before."""
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
    return (
        f"the loss is flat from step 1 ({before:.3e}, now {now:.3e} at step {history.step} of {history.total_steps}): "
        "use initialization=spectral, raise learning_rate, or lower adam_epsilon if the gradients are tiny"
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
    return (
        f"the correlation fell from {best:.3f} to {recent[-1]:.3f} on the evaluation rows: lower learning_rate, or "
        "stop earlier (max_steps); the best checkpoint is kept"
    )


def grad_norm_spike(history: History) -> str | None:
    before, recent = history.grad_norms[: -history.window], history.grad_norms[-history.window :]
    if len(before) < FIRST_STEPS // 2 or not recent:
        return None
    usual, highest = statistics.median(before[-500:]), max(recent)
    if usual <= 0.0 or highest <= SPIKE * usual:
        return None
    return (
        f"the gradient norm jumped to {highest:.3g}, {highest / usual:.0f} times its median: set max_grad_norm to "
        f"about {2 * usual:.1g}, or lower learning_rate"
    )


def learning_rate_zero(history: History) -> str | None:
    rates = history.learning_rates
    peak = max(rates, default=0.0)  # still 0 in the first step of a warm-up
    if peak == 0.0 or history.step >= 0.9 * history.total_steps or rates[-1] > ALMOST_ZERO * peak:
        return None
    return (
        f"the learning rate is {rates[-1]:.2g} at step {history.step} of {history.total_steps}: choose another "
        "lr_scheduler_type, or check warmup_steps"
    )


def low_utilisation(history: History) -> str | None:
    recent = list(history.utilisation[-3:])
    if len(recent) < 3 or max(recent) >= LOW_UTILISATION:
        return None
    return (
        f"the least used GPU is busy {recent[-1]:.0f} % of the time: raise train_batch_size or base_micro_batch_size, "
        "or use fewer GPUs"
    )
