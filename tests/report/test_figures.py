"""Figures of an evaluation: every group and every selected point is drawn, under the names that the user gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gradiend_dist.report import figures
from gradiend_dist.report.figures import plot_encoder_distributions, plot_probability_shifts

CLASSES = ("M", "F")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written, still open to look at."""
    kept = []
    plain = figures.write_figure
    monkeypatch.setattr(figures, "write_figure", lambda figure, *rest: kept.append(figure) or plain(figure, *rest))
    return kept


def encodings() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "encoded": sign * 0.8 + 0.1 * rng.standard_normal(),
            "source_id": name,
            "type": "training",
            "data_split": split,
        }
        for name, sign in (("M", 1), ("F", -1), ("N", 0))
        for split in ("train", "test")
        for _ in range(9)
    ]
    rows += [
        {"encoded": 0.1 * i, "source_id": "neutral", "type": "neutral_dataset", "data_split": "test"} for i in range(4)
    ]
    return pd.DataFrame(rows)


def test_encodings__one_column_for_each_class_and_split_the_target_classes_first(drawn, tmp_path):
    path = plot_encoder_distributions(
        encodings(), tmp_path / "e", target_classes=CLASSES, label_name_mapping={"F": "female"}, img_format="svg"
    )
    assert path == tmp_path / "e.svg" and path.read_text().startswith("<?xml")
    names = [tick.get_text().split("\n")[0] for tick in drawn[0].axes[0].get_xticklabels()]
    assert names == ["M", "M", "female", "female", "N", "N", "neutral texts"]


def test_encodings__a_class_whose_encodings_are_all_the_same_is_drawn(tmp_path):
    table = encodings()
    table["encoded"] = 1.0
    assert plot_encoder_distributions(table, tmp_path / "e.png", target_classes=CLASSES).stat().st_size > 0


def grid() -> dict:
    found = {"base": (0.1, 0.1)} | {(f, r): (0.1 + 0.3 * r, 0.2 * r) for f in (-1.0, 1.0) for r in (0.01, 0.1, 1)}
    entries = {
        point: {"probs_by_dataset": {"M": {"M": 0.9, "F": b}, "F": {"M": a, "F": 0.8}}, "lms": {"lms": 0.5}}
        for point, (a, b) in found.items()
    }
    return {
        "grid": entries,
        "M": {"feature_factor": 1.0, "learning_rate": 0.1, "part": "decoder"},
        "F": {"feature_factor": -1.0, "learning_rate": 1, "part": "decoder"},
    }


@pytest.mark.parametrize("on_other_class", [True, False])
def test_grid__a_star_at_every_selected_point_on_the_rows_that_it_is_judged_by(on_other_class, drawn, tmp_path: Path):
    plot_probability_shifts(
        grid(), tmp_path / "g.png", target_classes=CLASSES, factors={"M": 1.0, "F": -1.0}, on_other_class=on_other_class
    )
    panels = np.array(drawn[0].axes).reshape(3, 2)  # rows: blanks of M, of F, score; columns: factor -1, +1
    stars = [[sum(line.get_marker() == "*" for line in axes.lines) for axes in row] for row in panels]
    expected = [[1, 0], [0, 1]] if on_other_class else [[0, 1], [1, 0]]
    assert stars == [*expected, [1, 1]]
    assert "towards F" in panels[0, 0].get_title(loc="left") and "towards M" in panels[0, 1].get_title(loc="left")
