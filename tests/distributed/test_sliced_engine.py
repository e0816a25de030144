"""The engine `sliced` on real ranks, step by step beside `placed`, also with fewer entries than ranks."""

from __future__ import annotations

import pytest
from together import found

RANKS = [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]
# Only the order of float32 sums differs: a share of the largest number of each kind, after 5 steps and a flip.
TOLERANCE = 2e-6


@pytest.mark.parametrize("ranks", RANKS)
def test_step__equals_placed(ranks: int) -> None:
    """Fails by a sum that lacks a rank or counts one twice, by an encoder bias that drifts apart, by an empty part."""
    cases = {name: case for name, case in found(ranks, "engines").items() if name != "bad step"}
    assert len(cases) == 4 * 5 * 2
    kinds = ("reports", "weights", "encodings")
    largest = {kind: max(case[kind] for case in cases.values()) for kind in kinds}
    print(f"{ranks} ranks, largest differences: " + ", ".join(f"{kind} {value:.1e}" for kind, value in largest.items()))
    wrong = {name: case for name, case in cases.items() if max(case[kind] for kind in kinds) > TOLERANCE}
    assert wrong == {}
    assert all(case["same on all ranks"] for case in cases.values())
    assert min(case["moved"] for case in cases.values()) > 0.01, "every case trains something"


@pytest.mark.parametrize("ranks", RANKS)
def test_step__not_finite_on_one_rank_changes_none(ranks: int) -> None:
    check = found(ranks, "engines")["bad step"]
    assert check == {"unchanged": [True] * ranks, "heard": [True] * ranks}
