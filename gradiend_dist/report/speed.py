"""The section on speed: where the time of a step goes, and what comes out of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradiend_dist.distributed.clock import SECTIONS
from gradiend_dist.report import charts
from gradiend_dist.report.charts import Series
from gradiend_dist.report.elements import dotted, duration, missing, percent, short, table, tile
from gradiend_dist.report.records import Run, Seed, numbers, points
from gradiend_dist.storage.layout import METRICS

# Where the time goes, by the names of metrics.jsonl and by those of the reference, with a look for each.
TIMES = {
    "data": ("data", "c3"),
    "base_gradient": ("gradients of the base model", "c0"),
    "data_preparation": ("data and gradients of the base model", "c0"),
    "gradiend": ("GRADIEND step", "c4"),
    "model_with_gradiend": ("GRADIEND step", "c4"),
    "communication": ("communication", "c5"),
    "evaluation": ("evaluation", "c6"),
    "eval": ("evaluation", "c6"),
    "save": ("saving", "c1"),
}

REFERENCE_TIMES = ("data_preparation", "model_with_gradiend", "eval", "save")

RATES = (
    ("gradients_per_second", "gradients a second", ""),
    ("rows_per_second", "rows a second", ""),
    ("memory_gib", "most memory", "GiB"),
    ("gpu_utilisation", "GPU busy", "%"),
)

NO_METRICS = f"This run has no {METRICS}: it was trained by an older version. Train again to have it."


def speed(run: Run) -> str:
    """Of the seed that runs or was selected: where the time of a step goes, and what comes out of it."""
    seed = run.selected if run.finished else next((s for s in reversed(run.seeds) if not s.record), run.selected)
    rows = [row for row in run.rows_of(seed) if "step_seconds" in row and "step" in row]
    parts, total = _time_of_rows(rows) if rows else _time_of_record(seed)
    why = "No step was trained: there is no time per step." if run.rows else NO_METRICS
    if total <= 0.0:
        return missing(why)
    unit = "of a mean step" if rows else "of the whole seed"
    bar = charts.split_bar("where the time goes", [(name, look, seconds / total) for name, look, seconds in parts])
    cells = [(dotted(name, look), duration(seconds), percent(seconds, total)) for name, look, seconds in parts]
    times = f'<p class="note">Time {unit}, seed {seed.number}: {duration(total)}.</p>{bar}{table(("", "", ""), cells)}'
    if not rows:
        return f'<div class="pair"><div>{times}</div>{missing(why)}</div>'
    rate = Series("gradients/s", points(rows, "gradients_per_second"))
    chart = charts.line_chart("Gradients a second", [rate], y_range=(0.0, 0.0))
    return f'<div class="tiles">{_rates(rows)}</div><div class="pair"><div>{times}</div>{chart}</div>'


def _rates(rows: Sequence[Mapping[str, Any]]) -> str:
    tiles = []
    for name, title, unit in RATES:
        values = [value for _, value in points(rows, name) if value is not None]
        if values:
            value = max(values) if name == "memory_gib" else statistics.fmean(values)
            tiles.append(tile(title, f"{short(float(f'{value:.3g}'))} {unit}"))
    return "".join(tiles)


Times = tuple[list[tuple[str, str, float]], float]


def _time_of_rows(rows: Sequence[Mapping[str, Any]]) -> Times:
    """Each row is the mean of the steps since the one before."""
    sums: dict[str, float] = {}
    steps = before = 0
    for row in rows:
        weight = max(row["step"] - before, 1)
        steps, before = steps + weight, row["step"]
        for name, value in numbers(row).items():
            sums[name] = sums.get(name, 0.0) + weight * value
    means = {
        name.removeprefix("seconds/"): value / steps for name, value in sums.items() if name.startswith("seconds/")
    }
    return _with_rest(means, sums.get("step_seconds", 0.0) / steps)


def _time_of_record(seed: Seed) -> Times:
    seconds = seed.seconds()
    names = SECTIONS if "base_gradient" in seconds else REFERENCE_TIMES
    return _with_rest({name: seconds[name] for name in names if name in seconds}, seconds.get("total", 0.0))


def _with_rest(seconds: Mapping[str, float], total: float) -> Times:
    known = {name: value for name, value in seconds.items() if value > 0.0}
    total = max(total, sum(known.values()))
    parts = [(*TIMES.get(name, (name, charts.NEUTRAL)), value) for name, value in known.items()]
    rest = total - sum(known.values())
    return [*parts, *([("everything else", charts.NEUTRAL, rest)] if rest > 1e-3 * total else [])], total
