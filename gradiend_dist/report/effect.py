"""The section on rewriting: what the changed base model says, and what it has lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradiend_dist.evaluation.balance import BALANCE
from gradiend_dist.report import charts
from gradiend_dist.report.charts import Point, Series
from gradiend_dist.report.elements import escape, exact, missing, or_dash, shorten, signed, table
from gradiend_dist.report.records import Run, mapping, mappings, number, numbers
from gradiend_dist.storage.layout import GRID_CACHE
from gradiend_dist.storage.records import find_record

LOOKS = (charts.POSITIVE, charts.NEGATIVE, charts.NEUTRAL)

# In percent: what is below it, or has made the model better, lies on the left edge of a chart.
LEAST_HARM = 0.01


def rewriting(run: Run) -> str:
    """What the rewritten base model says: over the harm that is done, or at each point of a grid."""
    found = find_record(run.directory / GRID_CACHE) if run.finished else {}
    searched = {name: entry for name, entry in mapping(found.get("selected")).items() if mapping(entry).get("trials")}
    if searched:
        return _by_harm(searched, mapping(found.get("completions")))
    return _by_rate(mappings(found.get("results")), run.targets())


def _by_harm(searched: Mapping[str, Any], completions: Mapping[str, Any]) -> str:
    series = [
        Series(shorten(name) + " (opposite)" * number, points, look, chosen=None if number else _point(mapping(entry)))
        for (name, entry), look in zip(searched.items(), LOOKS, strict=False)
        for number, points in enumerate(_lines(mapping(entry)))
    ]
    chart = charts.line_chart(
        "What is gained, over the growth of perplexity in %", series, y_range=(0.0, 1.0), x_name="%", log_x=True
    )
    what = (
        "How balanced both classes are (BPI)"
        if set(searched) == {BALANCE}
        else ("Probability of a class's words at the blanks of the other class")
    )
    text = (
        f"{what}, by how much the perplexity on neutral texts has grown. The chosen step (star) is the one that gains "
        "most within the allowed harm."
    )
    names = ("", "base model", "rewritten", "harm", "on other texts", "second corpus", "weights move by", "rate", "")
    rows = [_chosen(name, mapping(entry)) for name, entry in searched.items()]
    sentences = "".join(_completed(completions))
    found = f"{table(names, rows)}{_curves(searched)}{sentences}"
    return f'<p class="note">{text}</p><div class="pair">{chart}</div>{found}'


def _curves(searched: Mapping[str, Any]) -> str:
    """What each class reaches within harms of other sizes."""
    curves = {}
    for name, entry in searched.items():
        points = [numbers(point) for point in mappings(mapping(entry).get("curve"))]
        curves[name] = {point["harm"]: point["value"] for point in points if point.keys() >= {"harm", "value"}}
    levels = sorted({level for curve in curves.values() for level in curve})
    if not levels:
        return ""
    head = ("reached within", *(f"{100 * level:g} %" for level in levels))
    rows = [(escape(shorten(name)), *(or_dash(c.get(level), exact) for level in levels)) for name, c in curves.items()]
    return table(head, rows)


def _lines(entry: Mapping[str, Any]) -> list[list[Point]]:
    """The points along each direction that a search has gone; first that of what it has chosen."""
    lines: dict[tuple[Any, bool], list[Point]] = {_direction(entry): []}
    for trial in mappings(entry.get("trials")):
        point = _point(trial)
        if point is not None:
            lines.setdefault(_direction(trial), []).append(point)
    return [sorted(points) for points in lines.values() if points]


def _direction(entry: Mapping[str, Any]) -> tuple[Any, bool]:
    return number(entry.get("feature_factor")), (number(entry.get("learning_rate")) or 0.0) < 0.0


def _point(trial: Mapping[str, Any]) -> Point | None:
    harm, value = number(trial.get("harm")), number(trial.get("value"))
    return None if harm is None or value is None else (max(LEAST_HARM, 100 * harm), value)


def _chosen(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    harms = (_percent(found) for found in (entry, mapping(entry.get("held_out")), mapping(entry.get("second"))))
    value, before = number(entry.get("value")), number(entry.get("base_value"))
    change, rate = number(entry.get("relative_change")), number(entry.get("learning_rate"))
    why = entry.get("refusal")
    return (
        escape(shorten(name)),
        or_dash(before, exact),
        or_dash(value, exact),
        *harms,
        or_dash(change, lambda found: f"{100 * found:.3g} %"),
        or_dash(rate, lambda found: f"{found:.3g}"),
        f'<span class="why">{escape(why)}</span>' if why else "",
    )


def _percent(found: Mapping[str, Any]) -> str:
    harm, error = number(found.get("harm")), number(found.get("harm_error"))
    return "–" if harm is None or error is None else f"{signed(100 * harm, 2)} ± {100 * error:.2f} %"


def _completed(completions: Mapping[str, Any]) -> Iterator[str]:
    """Each sentence, as the base model and the rewritten ones complete it."""
    by_model = {name: texts for name, texts in completions.items() if isinstance(texts, list)}
    count = min((len(texts) for texts in by_model.values()), default=0)
    for place in range(count):
        shown = {"base": "base model"}
        rows = [(escape(shorten(shown.get(name, name))), escape(texts[place])) for name, texts in by_model.items()]
        yield table(("model", "completes"), rows)


def _by_rate(results: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> str:
    """A panel for each feature factor of the grid."""
    lines: dict[float, dict[str, list[Point]]] = {}
    for entry in results:
        point = numbers(entry.get("id"))
        factor, rate = point.get("feature_factor"), point.get("learning_rate")
        if factor is not None and rate is not None and rate > 0.0:
            for name, value in _answers(entry, targets).items():
                lines.setdefault(factor, {}).setdefault(name, []).append((rate, value))
    if not lines or len(targets) < 2:
        return missing("How the base model changes along the feature is shown after", "gradiend-dist evaluate RUN_DIR")
    panels = [
        charts.line_chart(
            f"Feature factor {signed(factor, 0)}",
            [Series(name, sorted(found), look) for (name, found), look in zip(by_name.items(), LOOKS, strict=False)],
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
        found[f"P({shorten(word)}) at {shorten(blank)}"] = probabilities.get(word)
    return {**found, "language-model score": numbers(entry.get("lms")).get("lms")}
