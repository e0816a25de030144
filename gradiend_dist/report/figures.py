"""Figures of an evaluation: how the encodings of each class lie, and what rewriting does at each point of the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gradiend_dist.evaluation.metrics import ordered_splits
from gradiend_dist.evaluation.selection import BASE, WEAKEN
from gradiend_dist.report.plots import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    VERMILION,
    finish_axes,
    image_path,
    new_figure,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEUTRAL_NAMES = {"neutral_training_masked": "other words", "neutral_dataset": "neutral texts"}


def plot_encoder_distributions(
    encoded: pd.DataFrame,
    output: str | Path,
    *,
    target_classes: Sequence[str],
    label_name_mapping: Mapping[str, str] | None = None,
    img_format: str | None = None,
    img_dpi: int | None = None,
    show: bool = False,
    title: str | None = None,
) -> Path:
    """A column for each class and split, then neutral rows: a violin, every encoding as a dot, the median as a bar."""
    path, img_format = image_path(output, img_format)
    groups = _encoding_groups(encoded, target_classes, label_name_mapping or {})
    figure = new_figure((max(5.0, 1.6 + 1.3 * len(groups)), 4.6), show)
    axes = figure.subplots()
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    rng = np.random.default_rng(0)  # the dots' places beside each other: the same in every drawing
    for place, (_, values, colour) in enumerate(groups):
        if len(values) > 1 and values.std() > 1e-9:
            violin = axes.violinplot([values], positions=[place], widths=0.85, showextrema=False)
            for body in violin["bodies"]:  # type: ignore[attr-defined]
                body.set(facecolor=colour, alpha=0.25, edgecolor="none")
        spread = rng.uniform(-0.13, 0.13, len(values))
        axes.scatter(place + spread, values, s=9, color=colour, alpha=0.55, linewidths=0)
        axes.hlines(np.median(values), place - 0.3, place + 0.3, color=DARK, linewidth=2.0)
    axes.set_xticks(range(len(groups)), [name for name, _, _ in groups])
    axes.set_ylabel("encoding")
    axes.set_title(title or "Encodings by class", loc="left", fontsize=14, color=DARK, pad=12)
    if encoded["encoded"].abs().max() <= 1.0:
        axes.set_ylim(-1.15, 1.15)
    finish_axes(axes)
    return write_figure(figure, path, img_format, img_dpi, show)


def _encoding_groups(
    encoded: pd.DataFrame, target_classes: Sequence[str], names: Mapping[str, str]
) -> list[tuple[str, np.ndarray, str]]:
    """(label, encodings, colour): the target classes first, then others, then neutral rows."""
    training = encoded[encoded["type"] == "training"]
    splits = ordered_splits(training["data_split"])
    found = sorted(training["source_id"].astype(str).unique())
    classes = [*(c for c in target_classes if c in found), *(c for c in found if c not in target_classes)]
    colours = {target_classes[0]: BLUE, target_classes[1]: VERMILION}
    groups = []
    for name in classes:
        for split in splits:
            mine = training[(training["source_id"].astype(str) == name) & (training["data_split"] == split)]
            if len(mine):
                label = names.get(name, name) + (f"\n{split}" if len(splits) > 1 else "")
                groups.append((f"{label}\n({len(mine)})", mine["encoded"].to_numpy(float), colours.get(name, GREEN)))
    for kind, shown in NEUTRAL_NAMES.items():
        values = encoded.loc[encoded["type"] == kind, "encoded"].to_numpy(float)
        if len(values):
            groups.append((f"{names.get(shown, shown)}\n({len(values)})", values, GREY))
    return groups


def plot_probability_shifts(
    results: Mapping[str, Any],
    output: str | Path,
    *,
    target_classes: Sequence[str],
    factors: Mapping[str, float],
    on_other_class: bool = True,
    label_name_mapping: Mapping[str, str] | None = None,
    img_format: str | None = None,
    img_dpi: int | None = None,
    show: bool = False,
    title: str | None = None,
) -> Path:
    """A column for each feature factor; a row for the blanks of each class, and one for the language-model score."""
    path, img_format = image_path(output, img_format)
    grid, names = results["grid"], dict(label_name_mapping or {})
    columns = sorted({point[0] for point in grid if point != BASE})
    figure = new_figure((1.0 + 4.6 * len(columns), 7.6), show)
    panels = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False)
    selected = {
        (entry["feature_factor"], entry["learning_rate"]): metric
        for metric, entry in results.items()
        if isinstance(entry, Mapping) and "learning_rate" in entry
    }
    for column, factor in enumerate(columns):
        pushes = [names.get(name, name) for name in target_classes if factors.get(name) == factor]
        heading = f"feature factor {factor:+g}" + (f", towards {' and '.join(pushes)}" if pushes else "")
        panels[0][column].set_title(heading, loc="left", fontsize=11, color=DARK)
        chosen = {rate: metric for (where, rate), metric in selected.items() if where == factor}
        for row, dataset in enumerate(target_classes):
            stars = {
                rate: name
                for rate, metric in chosen.items()
                if (name := metric.removesuffix(WEAKEN)) in target_classes
                # Strengthening is judged on the other class's blanks, if not asked otherwise; weakening on its own.
                and (name == dataset) == (metric.endswith(WEAKEN) or not on_other_class)
            }
            _draw_probabilities(panels[row][column], grid, factor, dataset, target_classes, names, stars)
        _draw_lms(panels[2][column], grid, factor, chosen)
        panels[2][column].set_xlabel("learning rate", fontsize=11, color=DARK)
    for axes in panels.flat:
        axes.set_xscale("symlog" if any(point[1] <= 0 for point in grid if point != BASE) else "log")
        finish_axes(axes)
        if axes.get_legend() is not None and axes not in panels[:, -1]:
            axes.get_legend().remove()
    figure.suptitle(title or "Rewriting the base model", x=0.01, ha="left", fontsize=14, color=DARK)
    figure.align_ylabels()
    return write_figure(figure, path, img_format, img_dpi, show)


def _draw_probabilities(
    axes: Axes,
    grid: Mapping[Any, Any],
    factor: float,
    dataset: str,
    target_classes: Sequence[str],
    names: Mapping[str, str],
    stars: Mapping[float, str],
) -> None:
    points = sorted(point for point in grid if point != BASE and point[0] == factor)
    rates = [rate for _, rate in points]
    for name, colour in zip(target_classes, (BLUE, VERMILION), strict=True):
        values = [grid[point]["probs_by_dataset"][dataset][name] for point in points]
        axes.plot(rates, values, color=colour, marker="o", markersize=3.5, label=f"P({names.get(name, name)})")
        axes.axhline(grid[BASE]["probs_by_dataset"][dataset][name], color=colour, linewidth=1.0, linestyle=":")
        for rate, selected in stars.items():
            if selected == name:
                reached = grid[factor, rate]["probs_by_dataset"][dataset][name]
                axes.plot([rate], [reached], color=colour, marker="*", markersize=15, label="selected", linestyle="")
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(f"at blanks of {names.get(dataset, dataset)}")


def _draw_lms(axes: Axes, grid: Mapping[Any, Any], factor: float, chosen: Mapping[float, str]) -> None:
    points = sorted(point for point in grid if point != BASE and point[0] == factor)
    base = grid[BASE]["lms"]["lms"]
    axes.plot(
        [rate for _, rate in points],
        [grid[point]["lms"]["lms"] for point in points],
        color=GREEN, marker="o", markersize=3.5, label="score",
    )  # fmt: skip
    axes.axhline(base, color=GREEN, linewidth=1.0, linestyle=":", label="base model")
    for rate in chosen:
        axes.plot([rate], [grid[factor, rate]["lms"]["lms"]], color=GREEN, marker="*", markersize=15, linestyle="")
    axes.set_ylabel("language-model score")
