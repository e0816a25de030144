"""What a run has left behind, or leaves while it goes on, read from its files alone: no model, no torch.

Whatever a file holds becomes plain values: it may be of another version, of a killed process, or edited by hand.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradiend_dist.config.checks import require
from gradiend_dist.config.documents import DocumentError, parse_yaml, read_text
from gradiend_dist.errors import UserError
from gradiend_dist.report import charts
from gradiend_dist.report.charts import Point, Strip
from gradiend_dist.report.elements import short, whole_percent
from gradiend_dist.storage.layout import (
    METRICS,
    MODEL_CONFIG,
    MODEL_DIR,
    RUN_CONFIG,
    SEED_DIR,
    SEED_METRICS,
    SEED_REPORT,
    SEEDS_DIR,
    STATS,
    TRAINING,
)
from gradiend_dist.storage.records import find_record, find_training


@dataclass
class Seed:
    """One seed as far as it is known: from its record when it is done, from rows of metrics.jsonl before."""

    number: int
    losses: list[Point]
    scores: list[Point]
    means: dict[str, list[Point]]
    """Mean encoding of each class, that of +1 first."""
    explained: list[Point] = field(default_factory=list)
    """Share of the target that the decoder explains; empty where that was not measured."""
    explained_limit: float | None = None
    """What the class means would explain, the most that one latent can."""
    best_step: int | None = None
    correlation: float | None = None
    loss: float | None = None
    """At the best step, where that was chosen by its loss."""
    converged: bool | None = None
    reason: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Empty while the seed is being trained."""

    @classmethod
    def of_record(cls, seed: int, record: Mapping[str, Any]) -> Seed:
        """What training.json holds, or the same dictionary still in memory: its keys may be numbers or texts."""
        stats, best = mapping(record.get("training_stats")), mapping(record.get("best_score_checkpoint"))
        losses = record.get("losses")
        step = number(best.get("global_step"))
        converged = mapping(record.get("convergence_info")).get("converged")
        return cls(
            seed,
            losses=[(i + 1, number(loss)) for i, loss in enumerate(losses if isinstance(losses, list) else ())],
            scores=[(at, number(score)) for at, score in by_step(stats.get("scores"))],
            means={
                name: [(at, numbers(means).get(key)) for at, means in by_step(stats.get("mean_by_class"))]
                for key, name in labels(stats)
            },
            explained=[(at, number(share)) for at, share in by_step(stats.get("explained"))],
            explained_limit=number(stats.get("explained_limit")),
            best_step=None if step is None else int(step),
            correlation=number(best.get("correlation")),
            loss=number(best.get("loss")),
            converged=converged if isinstance(converged, bool) else None,
            record=record,
        )

    @property
    def info(self) -> Mapping[str, Any]:
        return mapping(self.record.get("convergence_info"))

    @property
    def stats(self) -> Mapping[str, Any]:
        return mapping(self.record.get("training_stats"))

    @property
    def last_step(self) -> int:
        return int(max((step for step, _ in [*self.losses, *self.scores]), default=0))

    @property
    def last_loss(self) -> float | None:
        return next((loss for _, loss in reversed(self.losses) if loss is not None), None)

    @property
    def is_closed_form(self) -> bool:
        """Was it solved for, and no step trained after that?"""
        return "spectral" in self.stats and not self.losses

    def at_best(self, points: Sequence[Point]) -> float | None:
        return None if self.best_step is None else dict(points).get(self.best_step)

    def explained_at_best(self) -> float | None:
        return self.at_best(self.explained)

    def explained_words(self) -> str:
        """What the decoder explains at the best step, of what one latent can: 78 % of 81 %; nothing if not measured."""
        share, limit = self.explained_at_best(), self.explained_limit
        if share is None:
            return ""
        return whole_percent(share) if limit is None else f"{whole_percent(share)} of {whole_percent(limit)}"

    def means_at_best(self) -> dict[str, float]:
        found = {name: dict(points).get(self.best_step or 0) for name, points in self.means.items()}
        return {name: mean for name, mean in found.items() if mean is not None}

    def seconds(self) -> dict[str, float]:
        return numbers(self.record.get("time"))

    def score_words(self) -> str:
        if self.correlation is None:
            return "no score yet" if self.loss is None else f"loss {short(self.loss)}"
        return f"correlation {self.correlation:.4f}"


@dataclass(frozen=True)
class Weight:
    """A weight of the base model, or several."""

    name: str
    size: int
    kept: int

    @property
    def share(self) -> float:
        return self.kept / self.size if self.size else 0.0


@dataclass
class Run:
    directory: Path
    config: dict[str, Any]
    made_by: str
    rows: list[dict[str, Any]]
    """Of metrics.jsonl."""
    seeds: list[Seed]
    selected: Seed
    finished: bool
    weights: list[Weight]
    """Of the promoted model; none before there is one."""

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def kept(self) -> int:
        return sum(weight.kept for weight in self.weights)

    @property
    def size(self) -> int:
        return sum(weight.size for weight in self.weights)

    def targets(self) -> list[str]:
        """The classes of +1 and -1."""
        given = self.config.get("target_classes")
        if isinstance(given, list) and len(given) == 2:
            return [str(name) for name in given]
        names = list(self.selected.means)
        return [names[0], names[-1]] if len(names) > 1 else names

    def look(self, name: str) -> str:
        looks = dict(zip(self.targets(), (charts.POSITIVE, charts.NEGATIVE), strict=False))
        return looks.get(name, charts.NEUTRAL)

    def rows_of(self, seed: Seed) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("seed") == seed.number]


def read_run(directory: Path) -> Run:
    """All that RUN_DIR says; paths inside its files are not followed, since the directory may have been moved."""
    require(directory.is_dir(), f"RUN_DIR={directory} is no directory: pass the experiment_dir of a run.")
    config, made_by = read_config(directory / RUN_CONFIG)
    rows = [row for path in _metrics_files(directory) for row in read_rows(path)]
    stats, report = find_record(directory / STATS), find_record(directory / SEEDS_DIR / SEED_REPORT)
    goes_on = _goes_on(rows)
    if goes_on:  # what an earlier run has left here is not about this one: only seeds count that have rows, and an end
        stats, report = {}, {}
    records = read_records(directory, stats)
    if goes_on:
        ended = {row["seed"] for row in rows if "seed" in row and "step" not in row}
        records = {seed: record for seed, record in records.items() if seed in ended}
    seeds = read_seeds(records, rows, report)
    require(bool(seeds), _nothing_in(directory))
    finished = not goes_on and (bool(stats) or (directory / MODEL_DIR / TRAINING).is_file())
    best = stats.get("best_seed", report.get("best_seed"))
    selected = next((seed for seed in seeds if seed.number == best), None) or max(seeds, key=_selection_key)
    weights = read_weights(directory / MODEL_DIR / MODEL_CONFIG) if finished else []
    config = config or dict(mapping(selected.record.get("training_args")))
    return Run(directory, config, made_by, rows, seeds, selected, finished, weights)


def _goes_on(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Was a step logged after the last summary of a run?"""
    told = [row for row in rows if "step" in row or "seed" not in row]
    return bool(told) and "step" in told[-1]


def read_seeds(
    records: Mapping[int, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]
) -> list[Seed]:
    """Those with a record, and those that have only rows yet; the report is none of theirs if it names other seeds."""
    entries = {number(entry.get("seed")): entry for entry in mappings(report.get("runs"))}
    entries = entries if entries.keys() == records.keys() else {}
    of_rows = {row["seed"] for row in rows if "seed" in row} if _goes_on(rows) or not records else set()
    seeds = []
    for number_ in sorted({*records, *of_rows}):
        own = [row for row in rows if row.get("seed") == number_]
        seed = Seed.of_record(number_, records[number_]) if number_ in records else _from_rows(number_, own)
        seeds.append(_judged(seed, mapping(entries.get(number_)), own))
    return seeds


def _nothing_in(directory: Path) -> str:
    inner = sorted(path.parent.name for path in directory.glob(f"*/{RUN_CONFIG}"))
    remedy = f"pass a run inside it ({', '.join(inner[:5])})" if inner else "pass the experiment_dir of a run"
    return (
        f"RUN_DIR={directory} has no record of a finished seed and no {METRICS}: {remedy}, or wait for its first rows."
    )


def _selection_key(seed: Seed) -> tuple[bool, float]:
    best = -math.inf if seed.loss is None else -seed.loss
    return seed.converged is True, best if seed.correlation is None else seed.correlation


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The arguments of a run, and the version that it was made with; nothing for a run started from Python."""
    if not path.is_file():
        return {}, ""
    try:
        text = read_text(path)
        values = parse_yaml(text)
    except DocumentError as error:
        raise UserError(f"{path} is no valid YAML ({error}): it is damaged or no file of ours.") from error
    return dict(mapping(values)), text.partition("\n")[0].removeprefix("# ") if text.startswith("# ") else ""


def _metrics_files(directory: Path) -> list[Path]:
    """The tasks of a job array log into a file each, until the last step of the array makes one of them."""
    whole, parts = directory / METRICS, sorted(directory.glob(SEED_METRICS.format(seed="*")))
    known = whole.stat().st_mtime if whole.is_file() else -math.inf
    return parts if any(part.stat().st_mtime > known for part in parts) else [whole]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what a killed process did not finish; seeds and steps are whole numbers."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        names = {name for name in ("seed", "step") if isinstance(row, dict) and name in row}
        if isinstance(row, dict) and all(number(row[name]) is not None for name in names):
            rows.append({**row, **{name: int(row[name]) for name in names}})
    return rows


def read_records(directory: Path, stats: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """By seed: training_stats.json has those of a finished run; before, each seed that is done has left its own."""
    records = {seed: mapping(record) for seed, record in by_step(stats.get("seeds"))}
    of_seeds = (directory / SEEDS_DIR).glob(SEED_DIR.format(seed="*"))
    for path in [directory / MODEL_DIR, *of_seeds] if not records else ():
        found = re.fullmatch(rf"{MODEL_DIR}|{SEED_DIR.format(seed='([0-9]+)')}", path.name)
        record = find_training(path) if found else {}
        if found and record:
            records[int(found[1] or number(record.get("seed")) or 0)] = record
    return records


def _from_rows(seed: int, rows: Sequence[Mapping[str, Any]]) -> Seed:
    scores = points(rows, "correlation")
    names = {name for row in rows for name in row if name.startswith("mean_encoding/")}
    means = {name.partition("/")[2]: points(rows, name) for name in names}
    last = {name: dict(found).get(scores[-1][0]) if scores else None for name, found in means.items()}
    best = max(scores, key=lambda point: -math.inf if point[1] is None else point[1], default=(None, None))
    return Seed(
        seed,
        losses=points(rows, "loss"),
        scores=scores,
        means=dict(sorted(means.items(), key=lambda item: -(last[item[0]] or 0.0))),
        explained=points(rows, "explained"),
        explained_limit=next((limit for _, limit in reversed(points(rows, "explained_limit"))), None),
        best_step=None if best[1] is None or best[0] is None else int(best[0]),
        correlation=best[1],
    )


def _judged(seed: Seed, entry: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Seed:
    """With the verdict of the seed report, else of its last row; a record of its own has one already."""
    told = [row.get("converged") for row in rows if "step" not in row]
    verdict = entry.get("converged", told[-1] if told and seed.converged is None else seed.converged)
    seed.converged = verdict if isinstance(verdict, bool) else None
    reason = entry.get("convergence_reason")
    seed.reason = reason if isinstance(reason, str) else _why_not(seed)
    return seed


def _why_not(seed: Seed) -> str:
    limits = numbers(seed.info)
    threshold, lowest = limits.get("threshold"), limits.get("convergent_min_target_class_abs_mean")
    limit = limits.get("convergent_mean_by_class_threshold")
    if seed.converged is not False or seed.correlation is None:
        return ""
    if threshold is not None and seed.correlation < threshold:
        return f"correlation {seed.correlation:.4f} is below {threshold:g}"
    if lowest is not None and limit is not None and lowest < limit:
        return f"a target class has mean encoding {lowest:.3f}, below {limit:g}"
    return ""


def read_weights(path: Path) -> list[Weight]:
    """The weights that the model was made over, with how many entries of each were kept."""
    found = []
    for entry in mappings(mapping(find_record(path).get("mapping")).get("param_map")):
        shape, kept = entry.get("shape"), number(entry.get("num_selected"))
        sizes = [number(size) for size in shape] if isinstance(shape, list) else [None]
        if kept is not None and None not in sizes:
            found.append(Weight(str(entry.get("name")), int(math.prod(size or 0.0 for size in sizes)), int(kept)))
    return found


def read_encodings(run: Run) -> tuple[str, list[Strip]]:
    """The newest file of encodings that `gradiend-dist evaluate` left: a strip for each class and kind of text."""
    files = sorted(run.directory.glob("encoded_values*.csv"), key=lambda path: path.stat().st_mtime)
    if not files or not run.finished:
        return "", []
    names = dict(labels(run.selected.stats))
    values: dict[tuple[float, str], list[float]] = {}
    try:
        with files[-1].open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                kind, value, label = row.get("type") or "", parsed(row.get("encoded")), parsed(row.get("label"))
                if value is not None:
                    of_class = kind == "training" and label is not None
                    name = names.get(str(label), f"label {label}") if of_class else kind.replace("_", " ")
                    values.setdefault((-(label or 0.0) if of_class else 2.0, name), []).append(value)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{files[-1]} is no valid CSV ({error}): delete it and evaluate again.") from error
    strips = [_strip_of(name, run.look(name), sorted(found)) for (_, name), found in sorted(values.items())]
    return files[-1].name, strips


def _strip_of(name: str, look: str, values: list[float]) -> Strip:
    q1, _, q3 = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return Strip(name, look, len(values), values[0], q1, statistics.fmean(values), q3, values[-1], values)


# --- plain values of JSON, whatever a file holds


def number(value: object) -> float | None:
    """A number that can be drawn; null, text and infinity are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def parsed(text: object) -> float | None:
    try:
        return number(float(str(text)))
    except ValueError:
        return None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def numbers(value: object) -> dict[str, float]:
    found = {name: number(item) for name, item in mapping(value).items()}
    return {name: item for name, item in found.items() if item is not None}


def by_step(series: object) -> list[tuple[int, Any]]:
    """In order of the steps, which are texts in JSON."""
    found = [(parsed(step), value) for step, value in mapping(series).items()]
    return sorted(((int(step), value) for step, value in found if step is not None), key=lambda pair: pair[0])


def points(rows: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """A series of metrics.jsonl; of a step that was trained twice the later row counts."""
    return sorted({row["step"]: number(row[name]) for row in rows if name in row and "step" in row}.items())


def labels(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels as they are written in the record, with the names of their classes, from +1 to -1."""
    names = mapping(stats.get("label_value_to_class_name"))
    keys = {key for _, means in by_step(stats.get("mean_by_class")) for key in mapping(means)}
    known = [(value, key) for key in keys if (value := parsed(key)) is not None]
    return [
        (key, str(names.get(key, f"label {value:+g}" if value else "neutral")))
        for value, key in sorted(known, reverse=True)
    ]
