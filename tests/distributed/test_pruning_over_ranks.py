"""The pruning threshold over ranks is exact: the same entries as in one process, ties to the lowest position."""

from __future__ import annotations

import pytest
from together import found

RANKS = [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]


@pytest.mark.parametrize("ranks", RANKS)
def test_select_over_ranks__keeps_what_one_process_keeps(ranks: int) -> None:
    """Even and interleaved parts, ties, masks, thresholds, fewer entries than ranks. Fails if a rank ranks alone, if a
    tie is broken by rank, or if a count is rounded otherwise."""
    checks = [check for check in found(ranks, "pruning") if check["name"].startswith("n=")]
    assert [check for check in checks if check["ours"] != check["theirs"]] == []
    assert len(checks) == 3 * 5 * 9 * 2
    assert {str(check["theirs"]) for check in checks} > {"nothing is kept", "[0]", "[0, 1]"}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("of", ["top ", "-th smallest", "one rank has no key", "nothing left", "the largest of"])
def test_over_ranks__agrees_with_one_process(ranks: int, of: str) -> None:
    """The most important weights in their order, the k-th smallest of all keys, and one message on every rank."""
    checks = [check for check in found(ranks, "pruning") if of in check["name"]]
    assert checks and [check for check in checks if check["ours"] != check["theirs"]] == []
