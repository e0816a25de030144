"""The sections of the page, each about one question that a reader has of a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gradiend_dist.report import charts
from gradiend_dist.report.charts import Point, Series, Strip
from gradiend_dist.report.elements import (
    dotted,
    duration,
    escape,
    exact,
    missing,
    or_dash,
    percent,
    short,
    shorten,
    shown,
    signed,
    table,
)
from gradiend_dist.report.records import (
    Run,
    Seed,
    Weight,
    by_step,
    labels,
    number,
    numbers,
    points,
    read_encodings,
)
from gradiend_dist.report.speed import NO_METRICS
from gradiend_dist.storage.layout import RUN_CONFIG
from gradiend_dist.storage.provenance import without_secrets

# Second names of other arguments, which would be listed twice.
ALIASES = ("base_gradient_batch_size", "convergence_metric", "convergence_threshold")

# A decoder that was not trained may be wrong by any factor: how far below zero it is says nothing more.
LOWEST_PERCENT = -100.0


def convergence(run: Run) -> str:
    seed = run.selected
    star = "" if seed.best_step is None else f" ★ and the dotted line: its best step, {seed.best_step}."
    how = " In closed form: no step was trained." if seed.is_closed_form else star
    limit = " Class means: the most that one latent can explain of the target." if _is_measured(run) else ""
    panels = [*_panels_of_selected(run), *(_panels_of_all(run) if len(run.seeds) > 1 else ())]
    return f'<p class="note">Seed {seed.number}.{how}{limit}</p><div class="pair">{"".join(panels)}</div>'


def _panels_of_selected(run: Run) -> Iterator[str]:
    seed = run.selected
    limits = numbers(seed.info) or numbers(run.config)
    threshold = limits.get("threshold", limits.get("convergent_score_threshold"))
    by_loss = seed.info.get("convergence_metric") == "loss"
    limit = limits.get("convergent_mean_by_class_threshold")
    marks = [] if threshold is None else [threshold]
    of_score, of_loss = ([], marks) if by_loss else (marks, [])
    of_means = [] if limit is None else [limit, -limit]
    means = [Series(name, values, run.look(name)) for name, values in seed.means.items()]
    best = seed.best_step
    scores = [Series("correlation", seed.scores)]
    yield charts.line_chart("Correlation", scores, y_range=(0.0, 1.0), thresholds=of_score, best=best)
    if _is_measured(run):
        yield _explained_chart(run, "Target explained, %", [Series("decoder", percents(seed))], best)
    yield charts.line_chart("Mean encoding of each class", means, y_range=(-1.0, 1.0), thresholds=of_means, best=best)
    if not seed.is_closed_form:
        yield charts.line_chart("Loss", [smoothed(seed.losses)], thresholds=of_loss, best=best)
    if not seed.is_closed_form and len(run.seeds) == 1:
        yield charts.line_chart("Norms of the GRADIEND weights", _norms(run))


def _panels_of_all(run: Run) -> Iterator[str]:
    scores = _seed_lines(run, lambda seed: seed.scores)
    yield charts.line_chart("Correlation of all seeds", scores, y_range=(0.0, 1.0))
    if _is_measured(run):
        yield _explained_chart(run, "Target explained by all seeds, %", _seed_lines(run, percents))


def _is_measured(run: Run) -> bool:
    """Runs of before it was measured do not say what their decoders explain."""
    return any(seed.explained for seed in run.seeds)


def percents(seed: Seed) -> list[Point]:
    return [(step, None if share is None else 100 * share) for step, share in seed.explained]


def _explained_chart(run: Run, title: str, lines: Sequence[Series], best: int | None = None) -> str:
    limit = run.selected.explained_limit
    marks = [] if limit is None else [round(100 * limit, 1)]
    how: dict[str, Any] = {"thresholds": marks, "mark": "class means", "best": best}
    return charts.line_chart(title, lines, y_range=(0.0, 100.0), lowest=LOWEST_PERCENT, **how)


def smoothed(losses: Sequence[Point]) -> Series:
    """Means over a sixtieth of the run, at least 5 steps (classes alternate), with the lowest and highest loss."""
    size = 1 if len(losses) <= 60 else max(5, len(losses) // 60)
    line: list[Point] = []
    band = []
    for start in range(0, len(losses), size):
        steps, found = zip(*losses[start : start + size], strict=True)
        values = [value for value in found if value is not None]
        line.append((steps[-1], statistics.fmean(values) if values else None))
        band += [(steps[-1], min(values), max(values))] if values and size > 1 else []
    return Series("loss" if size == 1 else f"mean and range of {size} steps", line, band=band)


def _seed_lines(run: Run, values: Callable[[Seed], Sequence[Point]]) -> list[Series]:
    others = [seed for seed in run.seeds if seed is not run.selected]
    chosen = "selected" if run.finished else "best so far"
    lines = [Series(f"seed {run.selected.number}, {chosen}", values(run.selected), "c0 wide")]
    for i, seed in enumerate(others):
        lines.append(Series(f"seed {seed.number}", values(seed), f"{charts.LOOKS[1 + i % 6]} thin"))
    return lines


def _norms(run: Run) -> list[Series]:
    """Of the record, or of the rows of a seed that has none yet."""
    seed, lines = run.selected, []
    for name, look in (("encoder", "c0"), ("decoder", "c3")):
        found = [(step, number(norm)) for step, norm in by_step(seed.stats.get(f"{name}_norms"))]
        every = max(1, len(found) // 100)
        lines.append(Series(name, found[::every] or points(run.rows_of(seed), f"{name}_norm"), look))
    return lines


def encodings(run: Run) -> str:
    file, strips = read_encodings(run)
    note = f"each dot a row of {file}, box from quartile to quartile, line at the mean"
    hint = ""
    if not strips:
        strips = _strips_at_best(run)
        note = f"evaluation rows at step {run.selected.best_step or 0}: lowest, quartiles, mean, highest"
        hint = missing("Single rows and neutral texts are shown after", "gradiend-dist evaluate RUN_DIR")
    if not strips:
        return missing("Nothing was evaluated yet. A finished run is evaluated by", "gradiend-dist evaluate RUN_DIR")
    cells = [
        (
            dotted(strip.name, strip.look),
            or_dash(strip.count, lambda count: f"{count:,.0f}"),
            *(signed(value) for value in (strip.mean, strip.low, strip.high)),
        )
        for strip in strips
    ]
    header_row = ("rows of", "count", "mean", "lowest", "highest")
    chart = charts.strip_chart("Encoding of each row", note, strips)
    return f'<div class="pair">{chart}<div>{table(header_row, cells)}{hint}</div></div>'


def _strips_at_best(run: Run) -> list[Strip]:
    stats, step, strips = run.selected.stats, run.selected.best_step or 0, []
    for key, name in labels(stats):
        by_name = {
            what: numbers(dict(by_step(stats.get(f"{what}_by_class"))).get(step)).get(key)
            for what in ("n", "min", "q1", "mean", "q3", "max")
        }
        count = by_name.pop("n")
        ends = [value for value in by_name.values() if value is not None]
        if len(ends) == 5:
            low, q1, mean, q3, high = ends
            rows = None if count is None else int(count)
            strips.append(Strip(name, run.look(name), rows, low, q1, mean, q3, high))
    return strips


STATES = {True: ("good", "converged"), False: ("bad", "not converged"), None: ("busy", "in training")}


def seed_table(run: Run) -> str:
    classes = list(dict.fromkeys(name for seed in run.seeds for name in seed.means))
    columns = [f"mean {escape(shorten(name))}" for name in classes]
    explains = ["explains"] if _is_measured(run) else []
    names = ("seed", "verdict", "best step", "correlation", *explains, *columns, "last loss", "time", "")
    rows = [_seed_row(run, seed, classes, measured=bool(explains)) for seed in run.seeds]
    return table(names, rows, look="seeds")


def _seed_row(run: Run, seed: Seed, classes: Sequence[str], *, measured: bool) -> tuple[str, ...]:
    means = seed.means_at_best()
    look, words = STATES[seed.converged]
    words = "not judged" if seed.converged is None and seed.record else words
    chosen = ("selected" if run.finished else "best so far") if seed is run.selected else ""
    return (
        f'<b>{seed.number}</b> <span class="chosen">{chosen}</span>',
        f'<span class="badge {look}">{words}</span>',
        or_dash(seed.best_step, lambda step: f"{step:,.0f}"),
        or_dash(seed.correlation, exact),
        *([escape(seed.explained_words()) or "–"] if measured else []),
        *(or_dash(means.get(name), signed) for name in classes),
        or_dash(seed.last_loss, short),
        or_dash(seed.seconds().get("total"), duration),
        "" if seed.converged else f'<span class="why">{escape(seed.reason)}</span>',
    )


def pruning(run: Run) -> str:
    if not run.weights:
        where = "The promoted model is not in RUN_DIR/model." if run.finished else "Known when a model is promoted."
        return missing(where)
    if run.kept == run.size:
        return missing(f"Nothing was pruned: all {run.size:,} weights are used. Prune with", "--pre_prune_config")
    steps = [name for name in ("pre_prune_config", "post_prune_config") if run.config.get(name)]
    how = "".join(f"<br><code>{name}: {escape(shown(run.config[name]))}</code>" for name in steps)
    total = f"<b>{run.kept:,}</b> of {run.size:,} weights ({percent(run.kept, run.size)}) carry the feature."
    layers = _shares("by layer", grouped(run.weights, _layer))
    kinds = _shares("by kind of weight", sorted(grouped(run.weights, _kind), key=lambda weight: -weight.share))
    each = [(escape(w.name), f"{w.kept:,}", f"{w.size:,}", percent(w.kept, w.size)) for w in run.weights]
    return (
        f'<p class="note">{total}{how}</p><div class="pair">{layers}{kinds}</div>'
        f"<details><summary>All {len(run.weights)} weights</summary>"
        f"{table(('weight', 'kept', 'of', 'share'), each)}</details>"
    )


def grouped(weights: Sequence[Weight], key: Callable[[str], str]) -> list[Weight]:
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(key(weight.name), []).append(weight)
    return [Weight(name, sum(w.size for w in all_), sum(w.kept for w in all_)) for name, all_ in groups.items()]


# The first number in a name is that of the layer.
NUMBERED = re.compile(r"(.*?)\.?(\d+)\.(.*)")


def _layer(name: str) -> str:
    """bert.encoder.layer.0.output.dense.weight -> encoder.layer.0; bert.embeddings.LayerNorm.bias -> embeddings."""
    found, parts = NUMBERED.fullmatch(name), name.split(".")
    if found:
        return ".".join([*found[1].split(".")[1:], found[2]])
    return parts[1] if len(parts) > 2 else parts[0]


def _kind(name: str) -> str:
    """bert.encoder.layer.0.output.dense.weight -> output.dense."""
    found = NUMBERED.fullmatch(name)
    inner = found[3] if found else name.partition(".")[2]
    return inner.rpartition(".")[0] or inner or name


def _shares(title: str, groups: Sequence[Weight]) -> str:
    """Bars against the largest share: after strong pruning all would be hairlines else."""
    largest = max(weight.share for weight in groups) or 1.0
    cells = [
        (escape(w.name), charts.share_bar(w.share / largest), f"{w.kept:,}", percent(w.kept, w.size)) for w in groups
    ]
    return table((title, "", "kept", "share"), cells, look="bars")


def health(run: Run) -> str:
    if not run.rows:
        return missing(NO_METRICS)
    alerts = [row for row in run.rows if "alert" in row]
    if not alerts:
        return '<p class="fine">No alert: losses, gradients, learning rate and evaluations look as they should.</p>'
    items = []
    for row in alerts:
        where = f"seed {escape(row.get('seed', '–'))}, step {escape(row.get('step', '–'))}"
        name = escape(str(row["alert"]).replace("_", " "))
        items.append(f'<li><b>{name}</b> <span class="note">{where}</span><br>{escape(row.get("text", ""))}</li>')
    return f'<ul class="alerts">{"".join(items)}</ul>'


def configuration(run: Run, usual: Mapping[str, Any]) -> str:
    """What differs from the defaults, and folded the rest."""
    if not run.config:
        return missing(f"There is no {RUN_CONFIG}.")
    shared = without_secrets(run.config)  # a page is made to be passed on
    chosen = [name for name, value in run.config.items() if name not in usual or usual[name] != value]
    chosen = [name for name in chosen if name not in ALIASES]
    rest = [name for name in run.config if name not in chosen]

    def rows(names: Iterable[str]) -> str:
        cells = [(f"<code>{escape(name)}</code>", f"<code>{escape(shown(shared[name]))}</code>") for name in names]
        return table(("argument", "value"), cells, look="settings")

    return f"{rows(chosen)}<details><summary>{len(rest)} arguments at their defaults</summary>{rows(rest)}</details>"
