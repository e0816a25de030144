"""The reference's way to a strength: the base model at every point of feature_factor x learning_rate, and a selection.

One grid serves the strengthening and the weakening of both classes: every point is scored on the rows of both.

    decoder_grid_cache.json    the whole grid, the last one that was asked for
"""

from __future__ import annotations

from collections.abc import Sequence

from gradiend_dist.rewriting.step import Step

# The reference's: 100, 50, 20, ..., 0.002, 0.001.
LEARNING_RATES = tuple(m * 10**e for e in range(2, -4, -1) for m in (5, 2, 1) if m * 10**e <= 100)

# For a scaled direction, which goes from no effect to too much of it within a decade: 100, 63.1, 39.8, ..., 0.001.
FINE_LEARNING_RATES = tuple(float(f"{10 ** (2 - step / 5):.3g}") for step in range(26))


def grid_steps(factors: Sequence[float], rates: Sequence[float], part: str, scaling: str) -> list[Step]:
    """In ascending order, as the reference visits them: ties are broken by it."""
    places = sorted({(factor, plain(rate)) for factor in factors for rate in rates})
    return [Step(rate, factor, part, scaling) for factor, rate in places]


def plain(rate: float) -> float:
    """A whole number is written as one, whatever its type: it is part of a file's name."""
    return int(rate) if float(rate).is_integer() else float(rate)
