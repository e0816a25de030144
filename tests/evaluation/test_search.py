"""Searching along made-up curves = a dense scan of them, within its tolerance and its number of evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from gradiend_dist.evaluation.search import CLOSE_ENOUGH, MOST_EVALUATIONS, StrengthSearch, Trial, is_gain, rounded

Curve = Callable[[float], float]


def searched(harm: Curve, value: Curve, *, base: float, error: float = 1e-5, **options: float) -> StrengthSearch:
    search = StrengthSearch(base, **options)  # type: ignore[arg-type]
    while (change := search.next()) is not None:
        found = harm(change)
        dropped = found > 2 * search.ceiling
        search.record(Trial(change, found, error, None if dropped else value(change)))
        assert len(search.trials) <= MOST_EVALUATIONS
    return search


def scanned(harm: Curve, value: Curve, max_harm: float) -> float:
    """The best value of a dense scan, up to the first step that does too much harm."""
    best = 0.0
    for change in np.geomspace(1e-9, 1e3, 100_000):
        if harm(change) > max_harm:
            break
        best = max(best, value(change))
    return best


def logistic(at: float, base: float = 0.02, top: float = 0.95) -> Curve:
    def value(change: float) -> float:
        return top / (1 + (top / base - 1) * math.exp(-change / at))

    return value


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-3, 0.03, 1.0, 50.0], ids=lambda scale: f"{scale:g}")
def test_search__finds_what_a_dense_scan_finds(scale, power):
    """Whatever the scale of the model: a harm of 1 % at `scale`, 1e-7 to 50 of the weights' norm."""

    def harm(change: float) -> float:
        return 0.01 * (change / scale) ** power

    value = logistic(scale / 3)
    search = searched(harm, value, base=value(0.0))
    best = search.best()
    assert best is not None and best.value is not None and best.harm <= 0.01
    assert best.value > 0.98 * scanned(harm, value, CLOSE_ENOUGH * 0.01)
    assert len(search.trials) <= MOST_EVALUATIONS


@pytest.mark.parametrize("peak", [0.1, 0.3, 0.6])
def test_search__finds_a_peak_within_the_allowed_harm(peak):
    def harm(change: float) -> float:
        return 0.01 * (change / 1e-3) ** 2

    def value(change: float) -> float:
        return 0.02 + 0.9 * math.exp(-((math.log(max(change, 1e-12) / (peak * 1e-3)) / 0.7) ** 2))

    best = searched(harm, value, base=0.02).best()
    assert best is not None and best.value is not None
    assert best.value > 0.95 * scanned(harm, value, 0.01)


def test_saturated_value__takes_the_smallest_step_that_reaches_it():
    search = searched(lambda c: 0.01 * (c / 1e-3) ** 2, logistic(2e-5), base=0.02)
    best = search.best()
    assert best is not None and best.harm < 0.009, "nothing is won by more harm"


def test_useless_direction__is_no_gain_and_a_harmful_one_has_no_best():
    search = searched(lambda c: 0.01 * (c / 1e-3) ** 2, lambda _: 0.02, base=0.02)
    best = search.best()
    assert best is not None and best.value is not None and not is_gain(0.02, best.value)
    assert searched(lambda _: 3.0, lambda _: 0.9, base=0.02).best() is None
    assert searched(lambda _: math.inf, lambda _: 0.9, base=0.02).best() is None


def test_broken_model__that_scores_well_is_not_taken():
    """Beyond a step that destroys it, a model may say anything, and its measured harm may even fall again."""

    def harm(change: float) -> float:
        return 0.01 * (change / 1e-3) ** 2 if change < 3e-3 else 0.0

    search = StrengthSearch(0.02)
    for change in (1e-4, 1e-3, 2.9e-3, 5e-3):
        search.record(Trial(change, harm(change), 1e-5, change))
    best = search.best()
    assert best is not None and best.change == 1e-3


def test_curve__is_measured_values_and_lines_between_them():
    search = StrengthSearch(0.1)
    for change, harm, value in ((1e-4, 0.002, 0.3), (3e-4, 0.012, 0.8), (9e-4, 0.06, 0.7)):
        search.record(Trial(change, harm, 1e-5, value))
    found = dict(search.curve())
    assert list(found) == [0.001, 0.005, 0.01, 0.02, 0.05]
    assert found[0.001] == pytest.approx(0.2) and found[0.005] == pytest.approx(0.45)
    assert found[0.02] == found[0.05] == pytest.approx(0.8), "it never falls: less harm is allowed as well"


def test_steps__do_not_depend_on_the_last_bits_of_a_measurement():
    """Ranks that add up in another order measure other last bits, and must propose the same step."""
    trials = [Trial(1e-4, 0.0011, 1e-4, 0.2), Trial(3e-4, 0.021, 1e-4, 0.6)]
    steps = []
    for noise in (0.0, 1e-9, -1e-9):
        search = StrengthSearch(0.02)
        for trial in trials:
            search.record(Trial(trial.change, trial.harm + noise, trial.error, trial.value))
        steps.append(search.next())
    assert len(set(steps)) == 1 and steps[0] == rounded(steps[0])


def test_curve__knows_no_model_beyond_the_ceiling() -> None:
    """Fails if a broken model, which may score well on anything, lifts the curve below it."""
    search = StrengthSearch(0.1)
    search.record(Trial(1e-3, 0.02, 1e-4, 0.5))
    search.record(Trial(1e-2, 0.2, 1e-4, 0.99))
    assert search.curve()[-1] == (0.05, 0.5)
    assert [trial.value for trial in search.usable] == [0.5]
