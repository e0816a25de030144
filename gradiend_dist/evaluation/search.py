"""How far to go along a direction: the largest gain within an allowed harm, in a few evaluations.

A step is stated as its relative change of the weights' norm, which does not depend on the size of the vector, and
aimed by its harm, which grows with the square of the step as long as it is small:

    up       from a small step to the allowed harm, and on to the levels above it, or until the gain falls again
    down     where already the first step is too large
    bisect   between the last allowed step and the first that is not, up to the allowed harm
    zero     of a balance, between two allowed steps of which one prefers either class
    peak     where the gain falls again within the allowed harm, around its largest value
    levels   those below the allowed harm that the way up has passed over: the curve goes through what was measured

`StrengthSearch` is told what was measured and says where to measure next; it knows no model, so any number of them may
be asked in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Harm that the curve of an evaluation is given at.
HARM_LEVELS = (0.001, 0.005, 0.01, 0.02, 0.05)

MAX_HARM = 0.01

MOST_EVALUATIONS = 10

# Of the weights' norm. A harm of 1 % was found at 4e-4 to 1e-3 on models from 1 to 135 million weights.
FIRST_CHANGE = 1e-4

# Of the best value within the allowed harm: the smallest step that reaches it is taken.
SATURATION = 0.99

# Of the allowed harm: a step that does as much is as large as it may be.
CLOSE_ENOUGH = 0.85

# Of a level of harm: what a step aims at, so as not to be above it.
AIM = 0.93

# One step upwards, at most and at least.
LONGEST_STRIDE, SHORTEST_STRIDE = 30.0, 1.25

# Steps nearer to each other than by this factor tell nothing new.
RESOLUTION = 1.015

# A difference of two probabilities that are as good as equal.
BALANCED = 0.03

# Of the base model's value: below it, a step is past the peak.
PAST_PEAK = 0.9


@dataclass(frozen=True)
class Trial:
    """A step and what it does."""

    change: float
    """Of the weights' norm."""
    harm: float
    error: float
    value: float | None
    """What is to be large; None where the harm was clear before it was asked for."""
    gap: float | None = None
    """For a balance: what is zero where the value is largest."""


@dataclass
class Trials:
    """What was tried along one direction, for one value."""

    base_value: float
    max_harm: float = MAX_HARM
    first_change: float = FIRST_CHANGE
    most_evaluations: int = MOST_EVALUATIONS
    levels: Sequence[float] = HARM_LEVELS
    trials: list[Trial] = field(default_factory=list)
    """In ascending order of their change."""

    @property
    def ceiling(self) -> float:
        """No step above it is of interest."""
        return max(self.max_harm, *self.levels)

    def record(self, trial: Trial) -> None:
        self.trials = sorted([*self.trials, trial], key=lambda other: other.change)

    @property
    def usable(self) -> list[Trial]:
        """Below the first step that is above the ceiling: a broken model may score well on anything."""
        broken = next((trial.change for trial in self.trials if trial.harm > self.ceiling), math.inf)
        return [trial for trial in self.trials if trial.change < broken and trial.value is not None]

    @property
    def allowed(self) -> list[Trial]:
        """Below the first step that does more harm than is allowed."""
        above = next((trial.change for trial in self.trials if trial.harm > self.max_harm), math.inf)
        return [trial for trial in self.trials if trial.change < above and trial.value is not None]

    def is_past_peak(self, trial: Trial) -> bool:
        best = max((other.value for other in self.usable if other.value is not None), default=self.base_value)
        return trial.value is not None and trial.value < PAST_PEAK * best and trial.harm > self.max_harm / 10

    def highest(self) -> Trial | None:
        return max(self.allowed, key=lambda trial: trial.value or 0.0, default=None)

    def best(self) -> Trial | None:
        """The smallest allowed step that reaches almost the best value; None where no step is allowed."""
        highest = self.highest()
        if highest is None or highest.value is None:
            return None
        enough = highest.value - (1.0 - SATURATION) * abs(highest.value)
        return next(trial for trial in self.allowed if trial.value is not None and trial.value >= enough)

    def curve(self) -> list[tuple[float, float]]:
        """(harm level, best value up to it), on straight lines between what was measured.

        Above all that was measured it goes on as it is: so much is reached with less harm as well.
        """
        points = [(0.0, self.base_value), *((trial.harm, trial.value or 0.0) for trial in self.usable)]
        return [(level, _best_up_to(level, points)) for level in self.levels]

    def is_known(self, change: float) -> bool:
        return any(1 / RESOLUTION < change / trial.change < RESOLUTION for trial in self.trials)


class StrengthSearch(Trials):
    """Where to try next. No communication: all ranks are told the same and ask for the same."""

    def next(self) -> float | None:
        """The change to try next; None when there is nothing more to learn."""
        if not self.trials:
            return rounded(self.first_change)
        if len(self.trials) >= self.most_evaluations:
            return None
        for propose in (self._down, self._up, self._zero, self._bisect, self._peak, self._level):
            found = propose()
            if found is not None and not self.is_known(found):
                return rounded(found)
        return None

    def _down(self) -> float | None:
        if self.allowed:
            return None
        smallest = self.trials[0]
        aim = math.sqrt(0.5 * self.max_harm / smallest.harm) if math.isfinite(smallest.harm) else 0.0
        return smallest.change * min(0.5, max(aim, 1 / 30))

    def _up(self) -> float | None:
        """From the largest step that is of interest, and not as far as one that is known not to be."""
        if not self.usable or self.is_past_peak(self.usable[-1]):
            return None
        last = self.usable[-1]
        broken = next((trial.change for trial in self.trials if trial.change > last.change), math.inf)
        found = self._stride(last) * last.change
        return found if found < broken / SHORTEST_STRIDE else None

    def _stride(self, last: Trial) -> float:
        """To the allowed harm, then from level to level above it; harm grows with the square of the step, or with the
        power that it was seen to grow with."""
        above = [level for level in self.levels if level > 1.3 * last.harm]
        aim = self.max_harm if last.harm < CLOSE_ENOUGH * self.max_harm else min(above, default=1.3 * self.ceiling)
        worst = max(last.harm + 2.0 * last.error, 1e-9)
        stride = (AIM * aim / worst) ** (1.0 / self._power(last))
        return min(LONGEST_STRIDE, max(SHORTEST_STRIDE, stride))

    def _power(self, last: Trial) -> float:
        place = self.trials.index(last)
        before = self.trials[place - 1] if place else None
        if before is None or before.harm <= 2.0 * before.error or last.harm <= before.harm:
            return 2.0
        power = math.log(last.harm / before.harm) / math.log(last.change / before.change)
        return min(3.0, max(1.0, power))

    def _bisect(self) -> float | None:
        """Between the last allowed step and the first that is not: along a power law through both."""
        if not self.allowed:
            return None
        low = self.allowed[-1]
        high = next((trial for trial in self.trials if trial.change > low.change), None)
        if high is None or low.harm >= CLOSE_ENOUGH * self.max_harm:
            return None
        if low is not self.best() or (high.value is not None and high.value <= (low.value or 0.0)):
            return None  # nothing is gained by a larger step
        middle = math.sqrt(low.change * high.change)
        if low.harm <= 0.0 or not math.isfinite(high.harm):
            return middle
        return _between(low, high, AIM * self.max_harm)

    def _zero(self) -> float | None:
        """Where a line through the last step before the gap changes its sign and the first one after it is zero."""
        for low, high in pairwise(self.allowed):
            if low.gap is None or high.gap is None or low.gap * high.gap > 0.0:
                continue
            if min(abs(low.gap), abs(high.gap)) <= BALANCED:
                return None
            share = abs(low.gap) / (abs(low.gap) + abs(high.gap))
            return low.change * (high.change / low.change) ** min(0.9, max(0.1, share))
        return None

    def _peak(self) -> float | None:
        """The wider of the two intervals around an inner maximum, in halves."""
        best = self.highest()
        if best is None:
            return None
        place = self.trials.index(best)
        if place + 1 == len(self.trials):
            return None
        after = self.trials[place + 1]
        if after.value is None or best.value is None or after.value >= SATURATION * best.value:
            return None
        before = self.trials[place - 1].change if place else best.change / 2.0
        below, above = best.change / before, after.change / best.change
        if max(below, above) < 1.2:
            return None
        return best.change * (math.sqrt(above) if above > below else 1.0 / math.sqrt(below))

    def _level(self) -> float | None:
        """A step for the largest level below the allowed harm that none is near to."""
        for level in sorted((level for level in self.levels if level < CLOSE_ENOUGH * self.max_harm), reverse=True):
            low = max((trial for trial in self.allowed if 0.0 < trial.harm < level), key=_change, default=None)
            high = min((trial for trial in self.allowed if trial.harm >= level), key=_change, default=None)
            if high is None or high.harm < 2.0 * level or (low is not None and low.harm > 0.5 * level):
                continue
            if low is None:
                return high.change * math.sqrt(level / high.harm)
            return _between(low, high, level)
        return None


def _change(trial: Trial) -> float:
    return trial.change


def _between(low: Trial, high: Trial, harm: float) -> float:
    """The change that does this harm, on a power law through two trials; not too near to either."""
    power = math.log(high.harm / low.harm) / math.log(high.change / low.change)
    found = low.change * (harm / low.harm) ** (1.0 / max(power, 0.5))
    inside = (high.change / low.change) ** 0.1
    return min(high.change / inside, max(low.change * inside, found))


def _best_up_to(level: float, points: Sequence[tuple[float, float]]) -> float:
    """The largest of the measured values below a harm and of the line at it."""
    found = [value for harm, value in points if harm <= level]
    for (harm, value), (next_harm, next_value) in zip(points, points[1:], strict=False):
        if harm < level < next_harm:
            found.append(value + (next_value - value) * (level - harm) / (next_harm - harm))
    return max(found)


def rounded(change: float) -> float:
    """To three digits: the last bits of a measurement, which differ between machines, do not move the next one."""
    return float(f"{change:.3g}")


def is_gain(before: float, after: float) -> bool:
    """A tenth more, or a tenth less of what was missing."""
    return after >= 1.1 * before + 1e-12 or 1.0 - after <= 0.9 * (1.0 - before) - 1e-12
