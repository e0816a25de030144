"""Signs of ill health: each is told when it is there, with its remedy, and not when a run is well."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gradiend_dist.training.monitor import History, signals


def history(**changes: Any) -> History:
    """A run that is well: the loss falls, the correlation rises, halfway through."""
    rng = random.Random(0)
    steps = 100
    values: dict[str, Any] = {
        "losses": [1.0 - 0.004 * step + 0.02 * rng.random() for step in range(steps)],
        "grad_norms": [0.1 + 0.02 * rng.random() for _ in range(steps)],
        "learning_rates": [1e-5] * steps,
        "scores": {0: 0.1, 50: 0.6, 100: 0.8},
        "total_steps": 200,
        "window": 10,
        "utilisation": [90.0, 85.0, 95.0],
    }
    return History(**{**values, **changes})


def kinds(found: History) -> list[str]:
    return [signal.kind for signal in signals(found)]


def test_run_that_is_well__gives_no_signal() -> None:
    assert kinds(history()) == []


def noisy(level: float, steps: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [level * (1.0 + 0.3 * rng.uniform(-1, 1)) for _ in range(steps)]


ILL: dict[str, tuple[dict[str, Any], str]] = {
    "loss_flat": ({"losses": noisy(1e-4, 100), "scores": {0: 0.1, 50: 0.12}}, "raise learning_rate"),
    "validation_diverging": ({"scores": {0: 0.1, 25: 0.9, 50: 0.5, 100: 0.55}}, "lower learning_rate"),
    "grad_norm_spike": ({"grad_norms": [0.1] * 95 + [5.0] + [0.1] * 4}, "set max_grad_norm to about 0.2"),
    "learning_rate_zero": ({"learning_rates": [1e-5] * 50 + [1e-9] * 50}, "lr_scheduler_type"),
    "low_utilisation": ({"utilisation": [90.0, 30.0, 20.0, 25.0]}, "raise train_batch_size"),
}


@pytest.mark.parametrize("kind", ILL)
def test_ill_run__gives_its_signal_with_the_remedy(kind: str) -> None:
    changes, remedy = ILL[kind]
    found = list(signals(history(**changes)))
    assert [signal.kind for signal in found] == [kind]
    assert remedy in found[0].text


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": noisy(1e-4, 100), "scores": {0: 0.1, 50: 0.9}},  # flat, but the encoder has found the classes
        {"losses": noisy(1e-4, 30), "scores": {0: 0.1}},  # too early to tell
        {"losses": noisy(1e-4, 45), "scores": {0: 0.1}, "total_steps": 1000},  # less than a quarter of the run
        {"scores": {0: 0.1, 50: 0.9, 100: 0.5}},  # one bad evaluation
        {"grad_norms": [0.1] * 8 + [5.0]},  # nothing to compare with
        {"learning_rates": [0.0]},  # the first step of a warm-up
        {"learning_rates": [1e-5] * 99 + [0.0], "total_steps": 105},  # where a schedule ends
        {"utilisation": []},  # no GPU
        {"utilisation": [10.0, 20.0]},  # not three looks yet
        {"grad_norms": [0.0] * 100},
        {"losses": [], "grad_norms": [], "learning_rates": [], "scores": {}},
    ],
)
def test_run_that_may_be_well__gives_no_signal(changes: dict[str, Any]) -> None:
    assert kinds(history(**changes)) == []


def test_flat_loss__without_evaluation_is_told_too() -> None:
    assert kinds(history(losses=noisy(1e-4, 100), scores={})) == ["loss_flat"]
