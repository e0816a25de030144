"""Figures of a training run, drawn from its record (training.json, or the same dictionary still in memory)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import explained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, which stay apart under every common form of colour blindness.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"

GREY, DARK = "#7A7A7A", "#333333"

DEFAULT_DPI = 150

# Inches of a panel of height 1.
PANEL_HEIGHT = 2.625

# A decoder that was not trained may be wrong by any factor: a share below this is an arrow at the edge of its panel.
LOWEST_SHARE = -1.0

Panel = tuple[float, "Callable[[Axes], None]"]
"""Height and drawing."""

SeedRecords = Sequence[tuple[int, Mapping[str, Any]]]

Looks = Mapping[int, Mapping[str, Any]]


def plot_training_convergence(
    stats: Mapping[str, Any],
    output: str | Path,
    *,
    title: str | None = None,
    label_name_mapping: Mapping[str, str] | None = None,
    img_format: str | None = None,
    img_dpi: int | None = None,
    show: bool = False,
) -> Path:
    """Draw loss, correlation and mean encoding per class over the steps of one run, and return the file written.

    What share of the target the decoder explains has a panel of its own where it was measured.
    `stats` is what training.json holds; its step and label keys may be numbers or, as JSON makes them, strings.
    `label_name_mapping` gives classes another name in the legend. The file's format is `img_format`, else the suffix
    of `output`, else PNG; a suffix that contradicts `img_format` is replaced.
    """
    training_stats = _training_stats(stats, "stats")
    path, img_format = image_path(output, img_format)
    figure = _stack(_panels(stats, training_stats, label_name_mapping or {}), show)
    usual = "Closed form: no step was trained" if _is_closed_form(stats) else "Training convergence"
    _finish(figure, title or usual, _best_step(stats))
    return write_figure(figure, path, img_format, img_dpi, show)


def plot_seed_convergence(
    runs: SeedRecords,
    selected_seed: int,
    output: str | Path,
    *,
    title: str | None = None,
    img_format: str | None = None,
    img_dpi: int | None = None,
    show: bool = False,
) -> Path:
    """Draw the correlations and losses of all seeds, the selected one in front, and return the file written.

    What share of the target the decoders explain has a panel of its own where it was measured.
    `runs` pairs each seed with its record, in the form that `plot_training_convergence` takes.
    """
    seeds = [seed for seed, _ in runs]
    if selected_seed not in seeds:
        raise UserError(f"selected_seed={selected_seed} is not among the seeds of runs ({seeds}): pass one of them.")
    for seed, stats in runs:
        _training_stats(stats, f"The record of seed {seed}")
    path, img_format = image_path(output, img_format)
    figure = _stack(_panels_of_seeds(runs, selected_seed), show)
    best_step = _best_step(dict(runs)[selected_seed])
    _finish(figure, title or f"Convergence of {len(runs)} seeds, seed {selected_seed} selected", best_step)
    return write_figure(figure, path, img_format, img_dpi, show)


# What the record says


def _training_stats(stats: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The evaluation history of a record; a record without one was not written by a training run."""
    if "training_stats" not in stats:
        raise UserError(
            f"{what} has no key 'training_stats' (keys: {sorted(map(str, stats))}): pass the content of the "
            "training.json of a finished run."
        )
    return stats["training_stats"]


def _by_step(series: Mapping[Any, Any] | None) -> tuple[list[int], list[Any]]:
    """Steps in ascending order with their values, whether the keys are numbers or strings of numbers."""
    points = sorted(((int(float(step)), value) for step, value in (series or {}).items()), key=lambda point: point[0])
    return [step for step, _ in points], [value for _, value in points]


def _number(value: float | None) -> float:
    """JSON has no NaN: a value that could not be computed is null there and a gap in the line here."""
    return math.nan if value is None else float(value)


def _losses(stats: Mapping[str, Any]) -> pd.Series:
    """Loss by step; the first entry of the record is the loss of step 1."""
    losses = [_number(value) for value in stats.get("losses") or []]
    return pd.Series(losses, index=range(1, len(losses) + 1), dtype=float)


def _smooth(losses: pd.Series) -> pd.Series:
    """Centred mean over a fiftieth of the run, never under 5 steps: classes alternate from step to step."""
    return losses.rolling(max(5, len(losses) // 50), min_periods=1, center=True).mean()


def _scores(stats: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    steps, scores = _by_step(stats["training_stats"].get("scores"))
    return steps, [_number(score) for score in scores]


def _explained(stats: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Share of the target that the decoder explains, by step."""
    steps, shares = _by_step(stats["training_stats"].get("explained"))
    return steps, [_number(share) for share in shares]


def _is_measured(stats: Mapping[str, Any]) -> bool:
    """Records of before it was measured have no such share."""
    return bool(_explained(stats)[0])


def _limit(stats: Mapping[str, Any]) -> float | None:
    """The share that the class means would explain."""
    limit = _number(stats["training_stats"].get("explained_limit"))
    return limit if math.isfinite(limit) else None


def _best_step(stats: Mapping[str, Any]) -> int | None:
    step = (stats.get("best_score_checkpoint") or {}).get("global_step")
    return None if step is None else int(step)


def _is_closed_form(stats: Mapping[str, Any]) -> bool:
    """Was it solved for, and no step trained after that?"""
    return "spectral" in stats["training_stats"] and not stats.get("losses")


def _threshold(stats: Mapping[str, Any], metric: str) -> float | None:
    """The convergence threshold, if it is one of this metric."""
    info = stats.get("convergence_info") or {}
    return info.get("threshold") if info.get("convergence_metric", "correlation") == metric else None


def _class_threshold(stats: Mapping[str, Any]) -> float | None:
    return (stats.get("convergence_info") or {}).get("convergent_mean_by_class_threshold")


def _class_means(training_stats: Mapping[str, Any]) -> tuple[list[int], dict[float, list[float]]]:
    """Steps, and for each label (+1 first, -1 last) its mean encoding at each of them."""
    steps, means_by_step = _by_step(training_stats.get("mean_by_class"))
    rows = [{float(label): _number(mean) for label, mean in means.items()} for means in means_by_step]
    labels = sorted({label for row in rows for label in row}, reverse=True)
    return steps, {label: [row.get(label, math.nan) for row in rows] for label in labels}


def _class_name(label: float, training_stats: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The class behind a label, under the name that the user wants to read."""
    known = {float(key): name for key, name in (training_stats.get("label_value_to_class_name") or {}).items()}
    name = known.get(label, "neutral" if label == 0 else f"label {label:+g}")
    return names.get(name, name)


# What is drawn


def _panels(stats: Mapping[str, Any], training_stats: Mapping[str, Any], names: Mapping[str, str]) -> list[Panel]:
    """Of one run, from top to bottom."""
    threshold = _class_threshold(stats)
    loss: Panel = (1.0, lambda axes: _draw_loss(axes, stats))
    scores: Panel = (1.0, lambda axes: _draw_scores(axes, stats))
    shares: Panel = (1.0, lambda axes: _draw_explained(axes, stats))
    means: Panel = (1.2, lambda axes: _draw_class_means(axes, training_stats, threshold, names))
    trained, measured = not _is_closed_form(stats), _is_measured(stats)
    return [*([loss] if trained else []), scores, *([shares] if measured else []), means]


def _panels_of_seeds(runs: SeedRecords, selected_seed: int) -> list[Panel]:
    selected, looks = dict(runs)[selected_seed], _seed_looks([seed for seed, _ in runs], selected_seed)
    scores: Panel = (1.3, lambda axes: _draw_scores_of_seeds(axes, runs, selected_seed, looks))
    shares: Panel = (1.1, lambda axes: _draw_explained_of_seeds(axes, runs, selected, looks))
    losses: Panel = (1.1, lambda axes: _draw_losses_of_seeds(axes, runs, selected, looks))
    trained = not all(_is_closed_form(stats) for _, stats in runs)
    measured = any(_is_measured(stats) for _, stats in runs)
    return [scores, *([shares] if measured else []), *([losses] if trained else [])]


def _stack(panels: Sequence[Panel], show: bool) -> Figure:
    heights = [height for height, _ in panels]
    figure = new_figure((9.0, PANEL_HEIGHT * sum(heights)), show)
    stacked = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (_, draw) in zip(stacked, panels, strict=True):
        draw(axes)
    return figure


def _draw_loss(axes: Axes, stats: Mapping[str, Any]) -> None:
    """Every step's loss in a light line under its smoothed course."""
    axes.set_ylabel("loss")
    losses = _losses(stats)
    if losses.empty:
        _say_empty(axes, "no loss recorded")
        return
    axes.plot(losses.index, losses, color=SKY, linewidth=0.7, alpha=0.55, label="each step")
    axes.plot(losses.index, _smooth(losses), color=BLUE, linewidth=1.8, label="smoothed")
    _draw_threshold(axes, _threshold(stats, "loss"))
    _scale_loss(axes, losses)


def _scale_loss(axes: Axes, losses: pd.Series) -> None:
    """Logarithmic once the bulk of the losses spans more than a factor of 20, where a linear axis shows one edge."""
    low, high = losses.replace([math.inf], math.nan).quantile([0.02, 0.98])
    if low > 0 and high / low > 20:
        axes.set_yscale("log")


def _scale_unit(axes: Axes) -> None:
    """The same scale in every figure, -1 to 1; wider only for what leaves it (an encoder without tanh)."""
    low, high = axes.get_ylim()
    if low >= -1.15 and high <= 1.15:
        axes.set(ylim=(-1.1, 1.1), yticks=(-1.0, -0.5, 0.0, 0.5, 1.0))


def _draw_scores(axes: Axes, stats: Mapping[str, Any]) -> None:
    """Correlation at each evaluation, with the threshold that a converged run passes."""
    axes.set_ylabel("correlation")
    steps, scores = _scores(stats)
    if not steps:
        _say_empty(axes, "no evaluation recorded")
        return
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.plot(steps, scores, color=BLUE, linewidth=1.8, marker="o", markersize=_marker_size(steps), label="correlation")
    _draw_threshold(axes, _threshold(stats, "correlation"))
    best = _best_step(stats)
    if best in steps:
        score = scores[steps.index(best)]
        _draw_star(axes, best, score, f"best: {score:.3f}")
    _scale_unit(axes)


def _draw_star(axes: Axes, step: int, value: float, name: str) -> None:
    look: dict[str, Any] = {"marker": "*", "markersize": 15.0, "markeredgecolor": "white", "linestyle": "none"}
    axes.plot([step], [value], color=VERMILION, label=name, zorder=5, **look)


def _draw_explained(axes: Axes, stats: Mapping[str, Any]) -> None:
    """Share of the target that the decoder explains at each evaluation, under the most that one latent can."""
    steps, shares = _explained(stats)
    _draw_shares(axes, steps, shares, label="decoder", color=BLUE, linewidth=1.8)
    _draw_limit(axes, _limit(stats))
    best = _best_step(stats)
    if best in steps and (share := shares[steps.index(best)]) >= LOWEST_SHARE:
        _draw_star(axes, best, share, f"at the best step: {_percent(share)}")
    _scale_share(axes)


def _draw_shares(axes: Axes, steps: Sequence[int], shares: Sequence[float], **look: Any) -> None:
    """A line, and arrows where it is below the panel."""
    inside = [share if share >= LOWEST_SHARE else math.nan for share in shares]
    axes.plot(steps, inside, marker="o", markersize=_marker_size(steps), **look)
    below = [step for step, share in zip(steps, shares, strict=True) if share < LOWEST_SHARE]
    if below:
        arrows: dict[str, Any] = {"marker": "v", "markersize": 8.0, "linestyle": "none", "color": look["color"]}
        named = any(line.get_marker() == "v" for line in axes.lines)
        name = None if named else f"below {_percent(LOWEST_SHARE)}"
        axes.plot(below, [LOWEST_SHARE] * len(below), label=name, zorder=3, **arrows)


def _draw_limit(axes: Axes, limit: float | None) -> None:
    if limit is not None:
        name = f"class means: {_percent(limit)}"
        axes.axhline(limit, color=DARK, linewidth=1.2, linestyle="--", label=name)


def _scale_share(axes: Axes) -> None:
    """Per cent, from zero or what is below it to all of the target."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylabel("target explained")
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.set_ylim(min(axes.get_ylim()[0], -0.05), 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _percent(share: float) -> str:
    return f"{round(100 * share)} %".replace("-", "−")


def _draw_class_means(
    axes: Axes, training_stats: Mapping[str, Any], threshold: float | None, names: Mapping[str, str]
) -> None:
    """Mean encoding of each class; colour, line and marker all tell the classes apart."""
    axes.set_ylabel("mean encoding")
    steps, means = _class_means(training_stats)
    if not steps:
        _say_empty(axes, "no evaluation recorded")
        return
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    for label, values in means.items():
        color, line, marker = _class_style(label)
        name = _class_name(label, training_stats, names)
        size = _marker_size(steps)
        axes.plot(steps, values, line, color=color, linewidth=1.8, marker=marker, markersize=size, label=name)
    if threshold is not None:
        axes.axhline(threshold, color=GREY, linewidth=1.0, linestyle=":", label=f"threshold ±{threshold:g}")
        axes.axhline(-threshold, color=GREY, linewidth=1.0, linestyle=":")
    _scale_unit(axes)


def _class_style(label: float) -> tuple[str, str, str]:
    if label > 0:
        return BLUE, "-", "o"
    return (VERMILION, "-", "s") if label < 0 else (DARK, "--", "D")


def _draw_scores_of_seeds(axes: Axes, runs: SeedRecords, selected_seed: int, looks: Looks) -> None:
    """One line per seed; this panel's legend names them for all."""
    for seed, stats in runs:
        steps, scores = _scores(stats)
        name = f"seed {seed}, selected" if seed == selected_seed else f"seed {seed}"
        axes.plot(steps, scores, marker="o", markersize=_marker_size(steps), label=name, **looks[seed])
    _draw_threshold(axes, _threshold(dict(runs)[selected_seed], "correlation"))
    _scale_unit(axes)
    axes.set_ylabel("correlation")


def _draw_explained_of_seeds(axes: Axes, runs: SeedRecords, selected: Mapping[str, Any], looks: Looks) -> None:
    for seed, stats in runs:
        _draw_shares(axes, *_explained(stats), **looks[seed])
    _draw_limit(axes, _limit(selected))
    _scale_share(axes)


def _draw_losses_of_seeds(axes: Axes, runs: SeedRecords, selected: Mapping[str, Any], looks: Looks) -> None:
    smoothed = [_smooth(_losses(stats)) for _, stats in runs]
    for (seed, _), losses in zip(runs, smoothed, strict=True):
        axes.plot(losses.index, losses, **looks[seed])
    _draw_threshold(axes, _threshold(selected, "loss"))
    _scale_loss(axes, pd.concat(smoothed))
    axes.set_ylabel("loss (smoothed)")


def _seed_looks(seeds: Sequence[int], selected_seed: int) -> dict[int, dict[str, Any]]:
    """Colour and weight by seed: the selected one blue, thick and on top; the palette comes back dashed after six."""
    palette = (ORANGE, GREEN, PURPLE, SKY, VERMILION, GREY)
    looks: dict[int, dict[str, Any]] = {}
    for rank, seed in enumerate(seed for seed in seeds if seed != selected_seed):
        line = "-" if rank < len(palette) else "--"
        looks[seed] = {"color": palette[rank % len(palette)], "linewidth": 1.3, "linestyle": line, "zorder": 2}
    looks[selected_seed] = {"color": BLUE, "linewidth": 2.6, "linestyle": "-", "zorder": 4}
    return looks


def _draw_threshold(axes: Axes, threshold: float | None) -> None:
    if threshold is not None:
        axes.axhline(threshold, color=DARK, linewidth=1.2, linestyle="--", label=f"threshold {threshold:g}")


def _marker_size(steps: Sequence[int]) -> float:
    """Dots that shrink before they merge into a band."""
    return float(np.clip(250 / max(len(steps), 1), 0.0, 5.0))


def _say_empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=11)


def _finish(figure: Figure, title: str, best_step: int | None) -> None:
    """What all panels share: the best step, the step axis, the title, the look."""
    top, bottom = figure.axes[0], figure.axes[-1]
    for axes in figure.axes:
        if best_step is not None:
            name = f"best step ({best_step})" if axes is top else None
            axes.axvline(best_step, color=VERMILION, linewidth=1.2, linestyle=":", zorder=1, label=name)
        finish_axes(axes)
    bottom.set_xlabel("training step", fontsize=11, color=DARK)
    bottom.locator_params(axis="x", integer=True)
    low, high = bottom.get_xlim()
    if high - low < 1.0:  # a single step, around which matplotlib would number fractions
        bottom.set_xticks([round((low + high) / 2)])
    # Over the left edge of the panels: centred, it would stand between panels and legends.
    top.set_title(title, loc="left", fontsize=14, color=DARK, pad=16)
    figure.align_ylabels()


def finish_axes(axes: Axes) -> None:
    """Light grid, no box, and the legend beside the panel, where it hides no data."""
    axes.grid(True, color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=10, colors=DARK)
    axes.yaxis.label.set(fontsize=11, color=DARK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=10, labelcolor=DARK)


# What leaves the process


def image_path(output: str | Path, img_format: str | None) -> tuple[Path, str]:
    """Where the figure goes and in which format."""
    formats = _supported_formats()
    if img_format is not None:
        check_format(img_format)
    path = Path(output)
    suffix = path.suffix.lower().lstrip(".")
    # "run.v1" ends in a name, not in a format: only a known format is taken for a suffix.
    stem = path.with_suffix("") if suffix in formats else path
    chosen = img_format.lower().lstrip(".") if img_format is not None else (suffix if suffix in formats else "png")
    return (path if chosen == suffix else stem.with_name(f"{stem.name}.{chosen}")), chosen


def check_format(img_format: str) -> None:
    formats = _supported_formats()
    if img_format.lower().lstrip(".") not in formats:
        raise UserError(f"img_format={img_format!r} cannot be written: choose one of {', '.join(sorted(formats))}.")


def _supported_formats() -> Mapping[str, str]:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise UserError('Plots need matplotlib, which is not installed: pip install "gradiend_dist[plot]".') from error
    return FigureCanvasBase.get_supported_filetypes()


def new_figure(size: tuple[float, float], show: bool) -> Figure:
    """A figure of its own, outside pyplot's list of open figures, unless it is to be shown and can be."""
    from matplotlib.figure import Figure

    shown = _pyplot_figure(size) if show else None
    return shown if shown is not None else Figure(figsize=size, layout="constrained")


def _pyplot_figure(size: tuple[float, float]) -> Figure | None:
    """A figure with a window or notebook cell behind it; None, and one line in the log, where there is no display."""
    from matplotlib.backends.registry import BackendFilter, backend_registry

    try:
        from matplotlib import pyplot

        backend = pyplot.get_backend()
        if backend.lower() not in backend_registry.list_builtin(BackendFilter.NON_INTERACTIVE):
            return pyplot.figure(figsize=size, layout="constrained")
        reason = f"matplotlib found no display and draws with {backend!r}"
    except ImportError as error:  # a backend chosen by name (MPLBACKEND) whose window system is not there
        reason = str(error)
    logger.warning("show=True only writes the file here: %s", reason)
    return None


def write_figure(figure: Figure, path: Path, img_format: str, img_dpi: int | None, show: bool) -> Path:
    """Save under a temporary name and rename, so that a reader never meets half an image."""
    partial = path.with_name(f".{path.name}.part")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(partial, format=img_format, dpi=img_dpi or DEFAULT_DPI)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    logger.info("Wrote %s", path)
    if show and figure.canvas.manager is not None:
        from matplotlib import pyplot

        pyplot.show(block=False)  # a job must not wait for a window to be closed
    return path
