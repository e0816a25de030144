"""What was chosen, once more: its harm on texts that had no part in the choice, and sentences that it completes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from gradiend_dist.evaluation.completions import completed, sentences
from gradiend_dist.evaluation.decoder import ModelScores
from gradiend_dist.evaluation.harm import UNKNOWN_TEXTS, Harm, TextLosses, TextScores, kept_losses, losses_as_kept
from gradiend_dist.evaluation.points import Entry, Place, Points, shown
from gradiend_dist.evaluation.selection import BASE
from gradiend_dist.evaluation.texts import Texts
from gradiend_dist.rewriting.step import Step
from gradiend_dist.storage.fingerprint import text_hash

logger = logging.getLogger(__name__)

# How a warning names the texts.
SHOWN = {"held_out": "held-out texts", "second": "texts of the second corpus"}


def scored_base(points: Points, scores: ModelScores, name: Callable[[Place], str]) -> tuple[Entry, TextLosses]:
    """The base model, which all harm is measured against, and its losses text by text. All ranks call this."""
    entry = points.each([None], scores.measure_base, name=name)[None]
    return shown(None, entry), kept_losses(entry["text_losses"])


def add_held_out(
    summary: Mapping[str, dict[str, Any]],
    given: Mapping[str, Texts | None],
    points: Points,
    scores: ModelScores,
    name: Callable[[Place], str],
) -> dict[str, list[str]]:
    """Add the harm on other texts to what was chosen; returns sentences that all models complete. All ranks call it."""
    chosen = {metric: Step.of_entry(entry) for metric, entry in summary.items() if entry["learning_rate"] != 0.0}
    asker, asked = scores.asker, sentences(scores.rows, scores.session.data.target_classes)
    texts = {kind: found for kind, found in given.items() if found is not None and found.texts}
    measures = {kind: TextScores(asker, found, by_search=True) for kind, found in texts.items()}

    def look() -> Entry:
        losses = {kind: losses_as_kept(measure.measure().losses) for kind, measure in measures.items()}
        return {"losses": losses, "completions": completed(asker, asked)}

    digest = text_hash([*(list(found.texts) for found in texts.values()), *map(list, asked)])[:12]
    places: list[Place] = list(dict.fromkeys([None, *chosen.values()]))
    found = points.each(places, look, name=lambda place: f"report_{digest}_{name(place)}")
    base = {kind: kept_losses(losses) for kind, losses in found[None]["losses"].items()}
    if "second" in base:
        tell_unknown_texts(base["second"], asker.vocabulary, "second texts", "second_neutral_data")
    for metric, step in chosen.items():
        for kind, before in base.items():
            harm = kept_losses(found[step]["losses"][kind]).harm_against(before)
            summary[metric][kind] = harm.fields()
            tell_exceeded(metric, kind, harm, summary[metric]["max_harm"])
    return {BASE: found[None]["completions"], **{m: found[step]["completions"] for m, step in chosen.items()}}


def tell_unknown_texts(losses: TextLosses, vocabulary: int, what: str, argument: str) -> None:
    usual = math.log(vocabulary)
    if losses.mean > UNKNOWN_TEXTS * usual:
        logger.warning(
            "the base model predicts the %s hardly better than by chance (loss %.2f of %.2f), so they do not show "
            "what harms it: pass texts of its own kind as %s",
            what,
            losses.mean,
            usual,
            argument,
        )


def tell_exceeded(metric: str, kind: str, harm: Harm, max_harm: float) -> None:
    """The allowed harm is that of the texts of the search; on others it may be larger."""
    if harm.is_above(max_harm):
        logger.warning(
            "%s: on %s, which had no part in the choice, the harm is %.2f ± %.2f %%, more than max_harm=%g: lower "
            "max_harm, or pass more neutral texts",
            metric,
            SHOWN[kind],
            100 * harm.value,
            100 * harm.error,
            max_harm,
        )
