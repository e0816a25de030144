"""The table of seeds that a run ends with: what the decoder explains stands beside the correlation."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from gradiend_dist.commands import summary as report
from gradiend_dist.report.records import Seed


def record(
    explained: dict[Any, float | None] | None = None, limit: float | None = None, *, step: int | None = 10
) -> Any:
    """As read from training.json, or still in memory."""
    stats: dict[str, Any] = {"mean_by_class": {"10": {"1.0": 0.9, "-1.0": -0.8}}, "explained_limit": limit}
    stats |= {"label_value_to_class_name": {"1.0": "M", "-1.0": "F"}} | ({"explained": explained} if explained else {})
    best = {"correlation": 0.97, "global_step": step}
    return {"seed": 3, "training_stats": stats, "best_score_checkpoint": best, "losses": [0.5] if step else []}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (record({"0": -3.0, "10": 0.7849, "20": 0.9}, 0.8111), "78 % of 81 %"),
        (record({0: -3.0, 10: 0.7849, 20: 0.9}, 0.8111), "78 % of 81 %"),
        (record({"10": 0.7849}), "78 %"),
        (record({"10": -0.001}, 0.8), "0 % of 80 %"),
        (record({"10": -0.04}, 0.8), "-4 % of 80 %"),
        (record({"10": -1.2e6}, 0.8), "< -999 % of 80 %"),
        (record({"0": 0.79}, 0.8, step=0), "79 % of 80 %"),
        (record({"20": 0.9}, 0.8), "-"),
        (record({"10": None}, 0.8), "-"),
        (record({10: math.nan}, math.nan), "-"),
        (record(None, 0.8), "-"),
        (record({"10": 0.5}, 0.8, step=None), "-"),
        (record(), "-"),
    ],
)
def test_table__explained_share_of_the_limit_stands_beside_the_correlation(given: Any, words: str) -> None:
    seed = Seed.of_record(3, given)
    cells = dict(zip(report._header(seed), report._row(True, seed, 3), strict=True))
    assert cells["explains"] == words
    assert list(cells)[3:5] == ["correlation", "explains"]
    assert (cells["seed"], cells["correlation"], cells[""]) == ("3", "0.9700", "<- selected")


def test_table__closed_form_alone_has_no_loss_and_stays_narrow() -> None:
    seed = Seed.of_record(3, record({"0": 0.79}, 0.8, step=0))
    lines = report.table(report._header(seed), [report._row(True, seed, 3)]).splitlines()
    assert re.split("  +", lines[2]) == ["3", "yes", "0", "0.9700", "79 % of 80 %", "-", "-", "<- selected"]
    assert max(map(len, lines)) <= 100
