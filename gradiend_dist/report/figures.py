"""Figures of an evaluation: how the encodings of each class lie, and what rewriting does at each point of the grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gradiend_dist.evaluation.balance import BALANCE
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
    from matplotlib.figure import Figure

# In percent.
LEAST_HARM_SHOWN = 0.01

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
    """A column for each feature factor; a row for the blanks of each class, and one for the language-model score.

    Of a search: what is gained over the harm that is done.
    """
    path, img_format = image_path(output, img_format)
    names = dict(label_name_mapping or {})
    searched = {m: e for m, e in results.items() if isinstance(e, Mapping) and e.get("trials")}
    if searched:
        figure = _harm_figure(searched, names, title or "Rewriting the base model", show)
        return write_figure(figure, path, img_format, img_dpi, show)
    figure = _grid_figure(results, names, target_classes, factors, on_other_class, show)
    figure.suptitle(title or "Rewriting the base model", x=0.01, ha="left", fontsize=14, color=DARK)
    return write_figure(figure, path, img_format, img_dpi, show)


def _grid_figure(
    results: Mapping[str, Any],
    names: Mapping[str, str],
    target_classes: Sequence[str],
    factors: Mapping[str, float],
    on_other_class: bool,
    show: bool,
) -> Figure:
    grid = results["grid"]
    columns = sorted({point[0] for point in grid if point != BASE})
    figure = new_figure((1.0 + 4.6 * len(columns), 7.6), show)
    panels = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False)
    for column, factor in enumerate(columns):
        pushes = [names.get(name, name) for name in target_classes if factors.get(name) == factor]
        heading = f"feature factor {factor:+g}" + (f", towards {' and '.join(pushes)}" if pushes else "")
        panels[0][column].set_title(heading, loc="left", fontsize=11, color=DARK)
        chosen = _chosen_at(results, factor)
        for row, dataset in enumerate(target_classes):
            stars = _judged_at(dataset, chosen, target_classes, on_other_class)
            axes = panels[row][column]
            for name, colour in zip(target_classes, (BLUE, VERMILION), strict=True):
                look = {"color": colour, "name": f"P({names.get(name, name)})", "star": "selected"}
                of_class = [rate for rate, selected_class in stars.items() if selected_class == name]
                _draw_curve(axes, grid, factor, partial(_probability, dataset, name), of_class, look)
            axes.set(ylim=(-0.03, 1.03), ylabel=f"at blanks of {names.get(dataset, dataset)}")
        look = {"color": GREEN, "name": "score", "base": "base model"}
        _draw_curve(panels[2][column], grid, factor, lambda entry: entry["lms"]["lms"], chosen, look)
        panels[2][column].set_ylabel("language-model score")
        panels[2][column].set_xlabel("learning rate", fontsize=11, color=DARK)
    for axes in panels.flat:
        axes.set_xscale("symlog" if any(point[1] <= 0 for point in grid if point != BASE) else "log")
        finish_axes(axes)
        if axes.get_legend() is not None and axes not in panels[:, -1]:
            axes.get_legend().remove()
    figure.align_ylabels()
    return figure


def _chosen_at(results: Mapping[str, Any], factor: float) -> dict[float, str]:
    """The metrics that chose a point with this feature factor, by its learning rate."""
    entries = ((metric, entry) for metric, entry in results.items() if isinstance(entry, Mapping))
    return {
        entry["learning_rate"]: metric
        for metric, entry in entries
        if "learning_rate" in entry and entry["feature_factor"] == factor
    }


def _judged_at(
    dataset: str, chosen: Mapping[float, str], target_classes: Sequence[str], on_other_class: bool
) -> dict[float, str]:
    """Of the chosen points those that were judged at the blanks of a class: learning rate -> class.

    Strengthening is judged on the other class's blanks, if not asked otherwise; weakening on its own.
    """
    return {
        rate: name
        for rate, metric in chosen.items()
        if (name := metric.removesuffix(WEAKEN)) in target_classes
        and (name == dataset) == (metric.endswith(WEAKEN) or not on_other_class)
    }


def _harm_figure(searched: Mapping[str, Any], names: Mapping[str, str], title: str, show: bool) -> Figure:
    """A line for each metric through all that was measured, dotted the base model, a star at what was chosen; hollow
    stars at its harm on texts that had no part in the choice."""
    figure = new_figure((7.6, 4.8), show)
    axes = figure.subplots()
    limit = 0.0
    for (metric, entry), colour in zip(searched.items(), (BLUE, VERMILION, GREEN), strict=False):
        limit = max(limit, 100 * entry["max_harm"])
        name = "BPI" if metric == BALANCE else f"P({names.get(metric, metric)})"
        for number, trials in enumerate(trials_by_direction(entry["trials"])):
            harms, values = [_percent(t["harm"]) for t in trials], [t["value"] for t in trials]
            axes.plot(harms, values, color=colour, marker="o", markersize=4, label=name if number == 0 else None)
        axes.axhline(entry["base_value"], color=colour, linewidth=1.0, linestyle=":")
        for kind, face in (("harm", colour), ("held_out", "none"), ("second", "none")):
            harm = entry.get(kind) if kind == "harm" else entry.get(kind, {}).get("harm")
            if harm is not None and math.isfinite(harm):
                look: dict[str, Any] = {
                    "marker": "*" if kind != "second" else "D",
                    "s": 210 if kind != "second" else 60,
                }
                axes.scatter([_percent(harm)], [entry["value"]], color=colour, facecolors=face, zorder=3, **look)
    for marker, face, text in (("*", DARK, "chosen"), ("*", "none", "on other texts"), ("D", "none", "second corpus")):
        axes.scatter([], [], marker=marker, color=DARK, facecolors=face, label=text)
    axes.axvspan(limit, 1e3, color=GREY, alpha=0.12, linewidth=0)
    shown = [t for e in searched.values() for t in (*e["trials"], e.get("held_out", {}), e.get("second", {}))]
    harms = [t["harm"] for t in shown if t.get("harm") is not None and t.get("value", 0.0) is not None]
    largest = max((_percent(harm) for harm in harms if math.isfinite(harm)), default=limit)
    axes.set(xscale="log", xlim=(LEAST_HARM_SHOWN * 0.8, max(2 * largest, 2 * limit)), ylim=(-0.03, 1.03))
    axes.set_xlabel("growth of perplexity on neutral texts, % (grey: more than allowed)", fontsize=11, color=DARK)
    balance = searched.keys() == {BALANCE}
    axes.set_ylabel("balance of both classes (BPI)" if balance else "reached at the other class's blanks")
    axes.set_title(title, loc="left", fontsize=14, color=DARK, pad=12)
    finish_axes(axes)
    return figure


def trials_by_direction(trials: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Those of a search that were scored, along each of its directions, in the order of their harm."""
    found: dict[tuple[Any, bool], list[Mapping[str, Any]]] = {}
    for trial in trials:
        if trial["value"] is not None and trial["harm"] is not None and math.isfinite(trial["harm"]):
            factor = trial["feature_factor"]
            key = tuple(factor) if isinstance(factor, list) else factor, trial["learning_rate"] > 0
            found.setdefault(key, []).append(trial)
    return [sorted(mine, key=lambda trial: trial["harm"]) for mine in found.values()]


def _percent(harm: float) -> float:
    """On a logarithmic axis; no harm, or less, is on its left edge."""
    return max(LEAST_HARM_SHOWN, 100 * harm)


def _draw_curve(
    axes: Axes,
    grid: Mapping[Any, Any],
    factor: float,
    value: Callable[[Any], float],
    stars: Iterable[float],
    look: Mapping[str, str],
) -> None:
    """A value of the rewritten model over the learning rates; dotted that of the base model, starred what is chosen."""
    points = sorted(point for point in grid if point != BASE and point[0] == factor)
    values = [value(grid[point]) for point in points]
    axes.plot([rate for _, rate in points], values, color=look["color"], marker="o", markersize=3.5, label=look["name"])
    axes.axhline(value(grid[BASE]), color=look["color"], linewidth=1.0, linestyle=":", label=look.get("base"))
    for rate in stars:
        star: dict[str, Any] = {"color": look["color"], "marker": "*", "markersize": 15, "linestyle": ""}
        axes.plot([rate], [value(grid[factor, rate])], label=look.get("star"), **star)


def _probability(dataset: str, name: str, entry: Mapping[str, Any]) -> float:
    return entry["probs_by_dataset"][dataset][name]
