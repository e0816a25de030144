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
from gradiend_dist.report.charts import Point
from gradiend_dist.report.elements import whole_percent
from gradiend_dist.report.records import Seed, labels, parsed
from gradiend_dist.storage.files import explained, require_regular

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

Curves = Sequence[tuple[str, Seed, Mapping[str, Any]]]
"""Seeds with their names in a legend and their looks."""


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
    seed = _seed(0, stats, "stats")
    path, img_format = image_path(output, img_format)
    look = {"color": BLUE, "linewidth": 1.8}
    loss: Panel = (1.0, lambda axes: _draw_loss(axes, seed))
    scores: Panel = (1.0, lambda axes: _draw_scores(axes, [("correlation", seed, look)], seed))
    shares: Panel = (1.0, lambda axes: _draw_explained(axes, [("decoder", seed, look)], seed))
    means: Panel = (1.2, lambda axes: _draw_class_means(axes, seed, label_name_mapping or {}))
    panels = [*([] if seed.is_closed_form else [loss]), scores, *([shares] if seed.explained else []), means]
    usual = "Closed form: no step was trained" if seed.is_closed_form else "Training convergence"
    return write_figure(_stack(panels, title or usual, seed.best_step, show), path, img_format, img_dpi, show)


def plot_seed_convergence(
    runs: Sequence[tuple[int, Mapping[str, Any]]],
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
    seeds = {number: _seed(number, stats, f"The record of seed {number}") for number, stats in runs}
    if selected_seed not in seeds:
        raise UserError(f"selected_seed={selected_seed} is not among the seeds of runs ({[*seeds]}): pass one of them.")
    path, img_format = image_path(output, img_format)
    selected, looks = seeds[selected_seed], _seed_looks([*seeds], selected_seed)
    names = {number: f"seed {number}{', selected' if number == selected_seed else ''}" for number in seeds}
    curves = [(names[number], seed, looks[number]) for number, seed in seeds.items()]
    scores: Panel = (1.3, lambda axes: _draw_scores(axes, curves, selected))
    shares: Panel = (1.1, lambda axes: _draw_explained(axes, curves, selected))
    losses: Panel = (1.1, lambda axes: _draw_losses_of_seeds(axes, curves, selected))
    measured = any(seed.explained for seed in seeds.values())
    trained = not all(seed.is_closed_form for seed in seeds.values())
    panels = [scores, *([shares] if measured else []), *([losses] if trained else [])]
    title = title or f"Convergence of {len(runs)} seeds, seed {selected_seed} selected"
    return write_figure(_stack(panels, title, selected.best_step, show), path, img_format, img_dpi, show)


def _seed(number: int, stats: Mapping[str, Any], what: str) -> Seed:
    """A record without an evaluation history was not written by a training run."""
    if "training_stats" not in stats:
        raise UserError(
            f"{what} has no key 'training_stats' (keys: {sorted(map(str, stats))}): pass the content of the "
            "training.json of a finished run."
        )
    return Seed.of_record(number, stats)


# What is drawn


def _stack(panels: Sequence[Panel], title: str, best_step: int | None, show: bool) -> Figure:
    """Panels from top to bottom, and what they share: the best step, the step axis, the title, the look."""
    heights = [height for height, _ in panels]
    figure = new_figure((9.0, PANEL_HEIGHT * sum(heights)), show)
    stacked = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    top, bottom = stacked[0], stacked[-1]
    for axes, (_, draw) in zip(stacked, panels, strict=True):
        draw(axes)
    for axes in stacked:
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
    return figure


def _draw_points(axes: Axes, points: Sequence[Point], **look: Any) -> None:
    """A line with dots, which shrink before they merge into a band; JSON has no NaN: null is a gap."""
    values = np.array([value for _, value in points], dtype=float)
    size = float(np.clip(250 / max(len(points), 1), 0.0, 5.0))
    axes.plot([step for step, _ in points], values, **{"marker": "o", "markersize": size, **look})


def _draw_star(axes: Axes, step: int | None, value: float | None, name: str) -> None:
    if step is not None and value is not None and value >= LOWEST_SHARE:
        look: dict[str, Any] = {"marker": "*", "markersize": 15.0, "markeredgecolor": "white", "linestyle": "none"}
        axes.plot([step], [value], color=VERMILION, label=name, zorder=5, **look)


def _draw_level(axes: Axes, value: float | None, name: str) -> None:
    """A dashed line across the panel, where there is such a value."""
    if value is not None:
        axes.axhline(value, color=DARK, linewidth=1.2, linestyle="--", label=name)


def _draw_threshold(axes: Axes, seed: Seed, metric: str) -> None:
    """The threshold that a converged run passes, if it is one of this metric."""
    if seed.info.get("convergence_metric", "correlation") == metric:
        threshold = seed.info.get("threshold")
        _draw_level(axes, threshold, f"threshold {threshold or 0.0:g}")


def _losses(seed: Seed) -> pd.Series:
    return pd.Series(dict(seed.losses), dtype=float)


def _smooth(losses: pd.Series) -> pd.Series:
    """Centred mean over a fiftieth of the run, never under 5 steps: classes alternate from step to step."""
    return losses.rolling(max(5, len(losses) // 50), min_periods=1, center=True).mean()


def _draw_loss(axes: Axes, seed: Seed) -> None:
    """Every step's loss in a light line under its smoothed course."""
    axes.set_ylabel("loss")
    losses = _losses(seed)
    if losses.empty:
        _say_empty(axes, "no loss recorded")
        return
    axes.plot(losses.index, losses, color=SKY, linewidth=0.7, alpha=0.55, label="each step")
    axes.plot(losses.index, _smooth(losses), color=BLUE, linewidth=1.8, label="smoothed")
    _draw_threshold(axes, seed, "loss")
    _scale_loss(axes, losses)


def _draw_losses_of_seeds(axes: Axes, curves: Curves, selected: Seed) -> None:
    smoothed = [_smooth(_losses(seed)) for _, seed, _ in curves]
    for (_, _, look), losses in zip(curves, smoothed, strict=True):
        axes.plot(losses.index, losses, **look)
    _draw_threshold(axes, selected, "loss")
    _scale_loss(axes, pd.concat(smoothed))
    axes.set_ylabel("loss (smoothed)")


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


def _draw_scores(axes: Axes, curves: Curves, selected: Seed) -> None:
    """Correlation at each evaluation; of several seeds, this panel's legend names them for all."""
    axes.set_ylabel("correlation")
    if not any(seed.scores for _, seed, _ in curves):
        _say_empty(axes, "no evaluation recorded")
        return
    for name, seed, look in curves:
        _draw_points(axes, seed.scores, label=name, **look)
    _draw_threshold(axes, selected, "correlation")
    if len(curves) == 1:
        axes.axhline(0.0, color=GREY, linewidth=0.8, zorder=1.9)
        best = selected.at_best(selected.scores)
        _draw_star(axes, selected.best_step, best, f"best: {best or 0.0:.3f}")
    _scale_unit(axes)


def _draw_explained(axes: Axes, curves: Curves, selected: Seed) -> None:
    """Share of the target that the decoder explains, under the most that one latent can; arrows where it is below."""
    alone = len(curves) == 1
    below_name = f"below {whole_percent(LOWEST_SHARE)}"
    for name, seed, look in curves:
        low = [step for step, share in seed.explained if share is not None and share < LOWEST_SHARE]
        inside = [(step, None if step in low else share) for step, share in seed.explained]
        _draw_points(axes, inside, label=name if alone else None, **look)
        if low:
            arrows = {"marker": "v", "markersize": 8.0, "linestyle": "none", "color": look["color"], "zorder": 3}
            axes.plot(low, [LOWEST_SHARE] * len(low), label=below_name, **arrows)
            below_name = ""  # in the legend once: matplotlib leaves out empty names
    limit = selected.explained_limit
    _draw_level(axes, limit, f"class means: {whole_percent(limit or 0.0)}")
    if alone:
        share = selected.explained_at_best()
        _draw_star(axes, selected.best_step, share, f"at the best step: {whole_percent(share or 0.0)}")
    _scale_share(axes)


def _scale_share(axes: Axes) -> None:
    """Per cent, from zero or what is below it to all of the target."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylabel("target explained")
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.set_ylim(min(axes.get_ylim()[0], -0.05), 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _draw_class_means(axes: Axes, seed: Seed, names: Mapping[str, str]) -> None:
    """Mean encoding of each class; colour, line and marker all tell the classes apart."""
    axes.set_ylabel("mean encoding")
    if not seed.means:
        _say_empty(axes, "no evaluation recorded")
        return
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    for key, name in labels(seed.stats):
        color, line, marker = _class_style(parsed(key) or 0.0)
        look = {"color": color, "linestyle": line, "marker": marker, "linewidth": 1.8}
        _draw_points(axes, seed.means[name], label=names.get(name, name), **look)
    threshold = seed.info.get("convergent_mean_by_class_threshold")
    if threshold is not None:
        axes.axhline(threshold, color=GREY, linewidth=1.0, linestyle=":", label=f"threshold ±{threshold:g}")
        axes.axhline(-threshold, color=GREY, linewidth=1.0, linestyle=":")
    _scale_unit(axes)


def _class_style(label: float) -> tuple[str, str, str]:
    if label > 0:
        return BLUE, "-", "o"
    return (VERMILION, "-", "s") if label < 0 else (DARK, "--", "D")


def _seed_looks(seeds: Sequence[int], selected_seed: int) -> dict[int, dict[str, Any]]:
    """Colour and weight by seed: the selected one blue, thick and on top; the palette comes back dashed after six."""
    palette = (ORANGE, GREEN, PURPLE, SKY, VERMILION, GREY)
    looks: dict[int, dict[str, Any]] = {}
    for rank, seed in enumerate(seed for seed in seeds if seed != selected_seed):
        line = "-" if rank < len(palette) else "--"
        looks[seed] = {"color": palette[rank % len(palette)], "linewidth": 1.3, "linestyle": line, "zorder": 2}
    looks[selected_seed] = {"color": BLUE, "linewidth": 2.6, "linestyle": "-", "zorder": 4}
    return looks


def _say_empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=11)


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
    require_regular(path)
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
