"""The report command: a run on one page that opens from disk, for whoever has no W&B.

gradiend-dist report RUN_DIR [RUN_DIR ...]

It reads JSON, YAML and CSV files below RUN_DIR and no model, so it takes a second, also while the run goes on. The page
has no script and asks for nothing from elsewhere; its Content-Security-Policy forbids both.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import SECTIONS
from gradiend_dist.report import charts
from gradiend_dist.report.charts import Point, Series, Strip, escape, exact, short
from gradiend_dist.report.records import (
    Run,
    Seed,
    Weight,
    by_step,
    labels,
    mapping,
    mappings,
    number,
    numbers,
    points,
    read_encodings,
    read_mapping,
)
from gradiend_dist.storage.files import jsonable
from gradiend_dist.storage.layout import GRID_CACHE, METRICS, RUN_CONFIG
from gradiend_dist.storage.provenance import without_secrets

# Second names of other arguments, which would be listed twice.
ALIASES = ("base_gradient_batch_size", "convergence_metric", "convergence_threshold")

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

# A decoder that was not trained may be wrong by any factor: how far below zero it is says nothing more.
LOWEST_PERCENT = -100.0

# At most this part of what it could explain: the decoder was hardly trained.
UNTRAINED = 0.5

HIGH_CORRELATION = 0.5

NO_METRICS = f"This run has no {METRICS}: it was trained by an older version. Train again to have it."


# --- the page


def page(run: Run) -> str:
    sections = [
        ("convergence", "Convergence", convergence(run)),
        ("encodings", "Encodings", encodings(run)),
        ("seeds", "Seeds", seed_table(run)),
        ("rewriting", "Rewriting", rewriting(run)),
        ("pruning", "Pruning", pruning(run)),
        ("speed", "Speed", speed(run)),
        ("health", "Health", health(run)),
        ("configuration", "Configuration", configuration(run)),
    ]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>' for name, title, content in sections)
    style = STYLE + charts.STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(run.name)} · GRADIEND</title><style>{style}</style></head>'
        f"<body><main>{header(run)}<nav>{links}</nav>{body}"
        f"<footer>Written by gradiend-dist report. Trained with {escape(run.made_by) or 'an unknown version'}.</footer>"
        "</main></body></html>\n"
    )


def header(run: Run) -> str:
    look, verdict, sentence = verdict_of(run)
    tiles = "".join(
        f'<div class="tile"><span>{name}</span><b>{escape(value)}</b><i>{escape(more)}</i></div>'
        for name, value, more in facts(run)
    )
    return (
        f'<header><p class="over">GRADIEND · {escape(" / ".join(run.targets()) or "training")}</p>'
        f'<h1>{escape(run.name)} <span id="verdict" class="badge {look}">{verdict}</span></h1>'
        f'<p class="lead">{escape(sentence)}</p>{hint(run)}<div class="tiles">{tiles}</div></header>'
    )


def verdict_of(run: Run) -> tuple[str, str, str]:
    """A look, one or two words, and the sentence that explains them."""
    best = run.selected
    means = ", ".join(f"{name} {signed(mean)}" for name, mean in best.means_at_best().items())
    found = best.score_words() + ("" if best.best_step is None else f" at step {best.best_step}")
    if (share := best.explained_at_best()) is not None:
        limit = or_dash(best.explained_limit, whole_percent)
        found += f"; the decoder explains {whole_percent(share)} of the target (class means: {limit})"
    found += f"; mean encoding {means}" if means else ""
    if not run.finished:
        active = next((seed for seed in reversed(run.seeds) if not seed.record), run.seeds[-1])
        where = f"Seed {active.number} is at step {active.last_step}{_of_steps(run)}{_last_seen(run)}."
        return "busy", "not finished", f"{where} Best so far is seed {best.number}: {found}."
    alone = " was solved in closed form" if best.is_closed_form else " was trained"
    chosen = f"Seed {best.number}" + (f" of {len(run.seeds)} was selected" if len(run.seeds) > 1 else alone)
    if best.converged:
        return "good", "converged", f"{chosen}: {found}."
    return "bad", "not converged", f"{chosen}, but {best.reason or 'it did not converge'}: {found}."


def explained_words(seed: Seed) -> str:
    """What the decoder explains at the best step, of what one latent can: 78 % of 81 %; nothing if not measured."""
    share, limit = seed.explained_at_best(), seed.explained_limit
    if share is None:
        return ""
    return whole_percent(share) if limit is None else f"{whole_percent(share)} of {whole_percent(limit)}"


def hint(run: Run) -> str:
    """The encoder may tell the classes apart long before the decoder is of use: its correlation does not show that."""
    seed = run.selected
    share, limit, correlation = seed.explained_at_best(), seed.explained_limit, seed.correlation
    if not run.finished or share is None or limit is None or correlation is None:
        return ""
    if abs(correlation) < HIGH_CORRELATION or limit <= 0.0 or share >= UNTRAINED * limit:
        return ""
    solved = "spectral" in seed.stats
    remedy = "Raise <code>spectral_items</code>" if solved else "Use <code>initialization=spectral</code>"
    return (
        f'<p class="hint">The decoder explains {whole_percent(max(share, 0.0))} of the target, class means would '
        f"explain {whole_percent(limit)}: the encoder tells the classes apart, but the decoder is hardly trained. "
        f"{remedy}, or <code>learning_rate=auto</code>.</p>"
    )


def _of_steps(run: Run) -> str:
    steps = number(run.config.get("max_steps"))
    return f" of {steps:.0f}" if steps is not None and steps > 0 else ""


def _last_seen(run: Run) -> str:
    last = next((seen for row in reversed(run.rows) if (seen := number(row.get("time"))) is not None), None)
    if last is None or not 0 < last < 1e11:
        return ""
    return f" (last row {datetime.fromtimestamp(last, timezone.utc):%d %B %Y, %H:%M} UTC)"


def facts(run: Run) -> list[tuple[str, str, str]]:
    best = run.selected
    judged = [seed for seed in run.seeds if seed.converged is not None]
    seconds = best.seconds().get("total")
    alerts = sum("alert" in row for row in run.rows)
    by_loss = best.correlation is None and best.loss is not None
    name, score = ("loss", best.loss) if by_loss else ("correlation", best.correlation)
    where = "" if best.best_step is None else f", step {best.best_step}"
    share = f"{percent(run.kept, run.size)} of {run.size:,}" if run.weights else "known at the end"
    health_words = "not recorded" if not run.rows else "see Health" if alerts else "all looks well"
    explained, limit = best.explained_at_best(), or_dash(best.explained_limit, whole_percent)
    return [
        (name, or_dash(score, exact), f"seed {best.number}{where}"),
        *([] if explained is None else [("target explained", whole_percent(explained), f"class means: {limit}")]),
        ("seeds converged", f"{sum(seed.converged is True for seed in judged)} of {len(judged)}", _required(run)),
        ("weights kept", f"{run.kept:,}" if run.weights else "–", share),
        ("time", or_dash(seconds, duration), f"of seed {best.number}"),
        ("alerts", str(alerts) if run.rows else "–", health_words),
    ]


def _required(run: Run) -> str:
    wanted, most = number(run.config.get("min_convergent_seeds")), number(run.config.get("max_seeds"))
    if most is None or most == 1:
        return ""
    return f"up to {most:.0f} tried" + (f", {wanted:.0f} wanted" if wanted is not None else "")


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
            f'<span class="{strip.look} dot"></span>{escape(strip.name)}',
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
    columns = [f"mean {escape(charts.shorten(name))}" for name in classes]
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
        *([escape(explained_words(seed)) or "–"] if measured else []),
        *(or_dash(means.get(name), signed) for name in classes),
        or_dash(seed.last_loss, short),
        or_dash(seed.seconds().get("total"), duration),
        "" if seed.converged else f'<span class="why">{escape(seed.reason)}</span>',
    )


def rewriting(run: Run) -> str:
    """The decoder grid: what the rewritten base model says at each strength."""
    results = mappings(read_mapping(run.directory / GRID_CACHE).get("results")) if run.finished else []
    targets = run.targets()
    lines: dict[float, dict[str, list[Point]]] = {}
    for entry in results:
        point = numbers(entry.get("id"))
        factor, rate = point.get("feature_factor"), point.get("learning_rate")
        if factor is not None and rate is not None and rate > 0.0:
            for name, value in _answers(entry, targets).items():
                lines.setdefault(factor, {}).setdefault(name, []).append((rate, value))
    if not lines or len(targets) < 2:
        return missing("How the base model changes along the feature is shown after", "gradiend-dist evaluate RUN_DIR")
    looks = (charts.POSITIVE, charts.NEGATIVE, charts.NEUTRAL)
    panels = [
        charts.line_chart(
            f"Feature factor {signed(factor, 0)}",
            [Series(name, sorted(found), look) for (name, found), look in zip(by_name.items(), looks, strict=False)],
            y_range=(0.0, 1.0),
            x_name="rate",
            log_x=True,
        )
        for factor, by_name in sorted(lines.items(), reverse=True)
    ]
    base = next((_answers(entry, targets) for entry in results if entry.get("id") == "base"), {})
    words = ", ".join(f"{name} {value:.4f}" for name, value in base.items() if value is not None)
    text = "Probability of a class's words at the blanks of the other, and the language-model score, by learning rate."
    return f'<p class="note">{text} Base model: {escape(words)}.</p><div class="pair">{"".join(panels)}</div>'


def _answers(entry: Mapping[str, Any], targets: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for word, blank in (targets, targets[::-1]) if len(targets) == 2 else ():
        probabilities = numbers(mapping(entry.get("probs_by_dataset")).get(blank))
        found[f"P({charts.shorten(word)}) at {charts.shorten(blank)}"] = probabilities.get(word)
    return {**found, "language-model score": numbers(entry.get("lms")).get("lms")}


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
    cells = [
        (f'<span class="{look} dot"></span>{escape(name)}', duration(seconds), percent(seconds, total))
        for name, look, seconds in parts
    ]
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
            tiles.append(f'<div class="tile"><span>{title}</span><b>{short(float(f"{value:.3g}"))} {unit}</b></div>')
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


def configuration(run: Run) -> str:
    """What differs from the defaults, and folded the rest."""
    if not run.config:
        return missing(f"There is no {RUN_CONFIG}.")
    usual, shared = defaults(), without_secrets(run.config)  # a page is made to be passed on
    chosen = [name for name, value in run.config.items() if name not in usual or usual[name] != value]
    chosen = [name for name in chosen if name not in ALIASES]
    rest = [name for name in run.config if name not in chosen]

    def rows(names: Iterable[str]) -> str:
        cells = [(f"<code>{escape(name)}</code>", f"<code>{escape(shown(shared[name]))}</code>") for name in names]
        return table(("argument", "value"), cells, look="settings")

    return f"{rows(chosen)}<details><summary>{len(rest)} arguments at their defaults</summary>{rows(rest)}</details>"


@functools.cache
def defaults() -> dict[str, Any]:
    from gradiend_dist.data.config import TextPredictionConfig  # imports pandas: half of the command's time

    data = {item.name: item.default for item in dataclasses.fields(TextPredictionConfig)}
    known = {name: value for name, value in data.items() if value is not dataclasses.MISSING}
    return jsonable({**known, **TrainingArguments().to_dict()})


# --- words


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.3g} %"


def whole_percent(share: float) -> str:
    return f"{round(100 * share)} %".replace("-", "−") if share >= -9.99 else "< −999 %"


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def missing(text: str, command: str = "") -> str:
    code = f" <code>{escape(command)}</code>." if command else ""
    return f'<p class="missing">{escape(text)}{code}</p>'


def table(names: Sequence[str], rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Cells are HTML already; the first column names a row, the others are numbers."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{look}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


STYLE = """
:root{color-scheme:light dark;--font:Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
--page:#f5f6f8;--card:#fff;--text:#1b2330;--soft:#667085;--line:#e4e7ec;--good:#067647;--good-bg:#dcfae6;
--bad:#b42318;--bad-bg:#fee4e2;--busy:#175cd3;--busy-bg:#dbeafe}
@media screen and (prefers-color-scheme:dark){:root{--page:#0f141b;--card:#181f29;--text:#e8ecf2;--soft:#98a2b3;
--line:#2b3442;--good:#75e0a7;--good-bg:#0d3b26;--bad:#fda29b;--bad-bg:#50191b;--busy:#9cc8ff;--busy-bg:#16335c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 var(--font);-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;margin:2px 0 8px;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;margin:0 0 10px}
p{margin:0 0 12px}.over{color:var(--soft);font-size:13px;font-weight:600;letter-spacing:.04em;margin:0;
overflow-wrap:anywhere}
.lead{font-size:17px;max-width:60em;overflow-wrap:anywhere}
.badge{display:inline-block;font-size:13px;font-weight:600;letter-spacing:0;line-height:1;padding:6px 10px;
border-radius:99px;vertical-align:.3em;white-space:nowrap}
td .badge{font-size:12px;padding:4px 8px;vertical-align:0}
.good{color:var(--good);background:var(--good-bg)}.bad{color:var(--bad);background:var(--bad-bg)}
.busy{color:var(--busy);background:var(--busy-bg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 14px}
.tile span,.tile i{display:block;font-style:normal;font-size:13px;color:var(--soft)}
.tile b{display:block;font-size:23px;line-height:1.3;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;margin:20px 0 14px;font-size:14px}
a{color:var(--busy);text-decoration:none}a:hover{text-decoration:underline}
section{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:18px 20px;margin:0 0 16px}
section .tile{background:var(--page);border-color:transparent}section .tiles{margin:0 0 14px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px 30px}
.pair>*{min-width:0}
.panel{margin:0;display:flex;flex-direction:column;justify-content:space-between}
figcaption{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:baseline;margin:0 0 6px}
figcaption>span{font-size:13px;color:var(--soft);line-height:1.7}
.hint{border-left:3px solid var(--c3);background:var(--card);border-radius:0 8px 8px 0;padding:8px 14px;max-width:64em}
.note{color:var(--soft);font-size:13.5px}.name{fill:var(--text)!important;font-weight:600}
.scroll{overflow-x:auto;margin:0 0 10px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:500;font-size:13px;color:var(--soft);text-align:right;padding:4px 0 4px 14px;white-space:nowrap;
border-bottom:1px solid var(--line)}
td{text-align:right;padding:6px 0 6px 14px;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child td{border-bottom:0}
th:first-child,td:first-child{text-align:left;padding-left:0}
.bars td{padding-top:3.5px;padding-bottom:3.5px;font-size:13px;border:0}.bars td:nth-child(2){width:40%;min-width:70px}
th:empty{padding:0}.seeds th:nth-child(2),.seeds td:nth-child(2),.seeds td:last-child{text-align:left}
.bars td:first-child{white-space:normal;overflow-wrap:break-word}
.settings th,.settings td{text-align:left;vertical-align:top}
.settings td:last-child{white-space:normal;overflow-wrap:anywhere;width:70%}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;background:var(--c);margin-right:8px}
.chosen{color:var(--soft);font-size:13px;margin-left:4px}.why{color:var(--soft)}
code{font:12.5px var(--mono);overflow-wrap:anywhere}
details{margin:8px 0 0}summary{cursor:pointer;color:var(--busy);font-size:14px;margin:0 0 8px}
.missing,.empty,.fine{color:var(--soft);font-size:14px;margin:4px 0}.fine::before{content:"✓ ";color:var(--good)}
.missing code{color:var(--text)}
.alerts{list-style:none;margin:0;padding:0}
.alerts li{border-left:3px solid var(--c3);background:var(--page);border-radius:0 8px 8px 0;padding:8px 14px;
margin:0 0 8px;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px;overflow-wrap:anywhere}
@media (max-width:560px){main{padding:18px 10px 30px}section{padding:14px 12px;border-radius:10px}h1{font-size:24px}
.lead{font-size:16px}.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:20px}
table{font-size:13px}th,td{padding-left:9px}.bars td:nth-child(2){width:30%}}
@media print{:root{color-scheme:light}body{background:none;font-size:12px}main{max-width:none;padding:0}
nav,details{display:none}section{border:0;padding:0 0 10px}.panel,.tile,tr{break-inside:avoid}table{font-size:11px}
th,td{padding-left:6px}.bars td:nth-child(2){width:20%;min-width:0}.pair{grid-template-columns:1fr 1fr}}
"""
