"""How far to rewrite for each class, found by search: see `search` for the rule and `harm` for its measure.

The base model is scored first. Then every search says where to look next, the ranks look there in rounds, and all are
told. What is chosen is measured once more, on texts that had no part in the choice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradiend_dist.evaluation.balance import BALANCE, balance_by_blanks, balance_of, gap_of
from gradiend_dist.evaluation.completions import completed, sentences
from gradiend_dist.evaluation.decoder import ModelScores
from gradiend_dist.evaluation.harm import UNKNOWN_TEXTS, Harm, TextLosses, TextScores, kept_losses, losses_as_kept
from gradiend_dist.evaluation.points import Entry, Place, Points, grid_key, shown
from gradiend_dist.evaluation.request import DecoderRequest
from gradiend_dist.evaluation.search import StrengthSearch, Trial, is_gain
from gradiend_dist.evaluation.selection import BASE, WEAKEN
from gradiend_dist.evaluation.texts import Texts
from gradiend_dist.rewriting.move import DirectionNorms
from gradiend_dist.rewriting.step import Step
from gradiend_dist.storage.fingerprint import text_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchDirection:
    """One way along one direction."""

    direction: Step
    sign: float = 1.0


class ClassSearches:
    """The searches of one evaluation: one for each metric and each way that may serve it.

    All ranks make it and call its methods.
    """

    def __init__(
        self,
        request: DecoderRequest,
        scores: ModelScores,
        points: Points,
        ways: Mapping[str, Sequence[SearchDirection]],
        name: Callable[[Place], str],
    ) -> None:
        self.request, self.scores, self.points, self.ways, self.name = request, scores, points, ways, name
        self.classes = scores.session.data.target_classes
        self.scored: dict[Step, Entry] = {}
        self.extents: dict[Step, DirectionNorms] = {}

    def results(self, report: Mapping[str, Texts | None]) -> dict[str, Any]:
        """What was found for each metric, and every point; what is chosen is measured on the texts of `report` too."""
        base = self._base()
        searches = self._searches(base)
        while self._go_on(searches):
            pass
        summary = {metric: self._selected(metric, searches, base) for metric in self.ways}
        grid: dict[Any, Entry] = {BASE: base}
        grid |= {grid_key(step): entry for step, entry in self.scored.items() if "probs" in entry}
        dropped = [entry for entry in self.scored.values() if "probs" not in entry]
        completions = self._report(summary, report)
        return {**summary, "grid": grid, "too_harmful": dropped, "completions": completions}

    def _base(self) -> Entry:
        """The base model, which all harm is measured against."""
        base, self.losses = scored_base(self.points, self.scores, self.name)
        self._tell_unknown_texts(self.losses, "neutral texts", "eval_neutral_data")
        return base

    def _tell_unknown_texts(self, losses: TextLosses, what: str, argument: str) -> None:
        usual = math.log(self.scores.asker.vocabulary)
        if losses.mean > UNKNOWN_TEXTS * usual:
            logger.warning(
                "the base model predicts the %s hardly better than by chance (loss %.2f of %.2f), so they do not show "
                "what harms it: pass texts of its own kind as %s",
                what,
                losses.mean,
                usual,
                argument,
            )

    def _searches(self, base: Entry) -> dict[tuple[str, SearchDirection], StrengthSearch]:
        found = {}
        for metric, ways in self.ways.items():
            for way in ways:
                found[metric, way] = StrengthSearch(self._value(metric, base), self.request.max_harm)
        return found

    def _go_on(self, searches: Mapping[tuple[str, SearchDirection], StrengthSearch]) -> bool:
        """One evaluation for each search that wants one, in an order that all ranks know; False when none does."""
        proposed = {key: change for key, search in searches.items() if (change := search.next()) is not None}
        steps = {key: self._step(key[1], change) for key, change in proposed.items()}
        self._score(list(dict.fromkeys(steps.values())))
        for key, change in proposed.items():
            entry = self.scored[steps[key]]
            value = self._value(key[0], entry) if "probs" in entry else None
            gap = gap_of(entry, self.classes) if value is not None and key[0] == BALANCE else None
            searches[key].record(Trial(change, entry["harm"], entry["harm_error"], value, gap))
        return bool(proposed)

    def _extent(self, direction: Step) -> DirectionNorms:
        if direction not in self.extents:
            self.extents[direction] = self.points.extent(direction, f"extent_{self.name(direction)}")
        return self.extents[direction]

    def _step(self, way: SearchDirection, change: float) -> Step:
        """Six digits of the learning rate: the last ones depend on the order in which ranks add up."""
        rate = way.sign * self._extent(way.direction).rate(change)
        return way.direction.of_rate(float(f"{rate:.6g}"))

    def _score(self, steps: Sequence[Step]) -> None:
        ceiling = StrengthSearch(0.0, self.request.max_harm).ceiling
        found = self.points.each(
            [step for step in steps if step not in self.scored],
            lambda: self.scores.measure(self.losses, ceiling),
            name=self.name,
            holds=lambda entry: "probs" in entry or entry["harm"] is None or entry["harm"] > ceiling,
        )
        for place, entry in found.items():
            assert place is not None
            self.scored[place] = shown(place, entry)

    def _value(self, metric: str, entry: Entry) -> float:
        if metric == BALANCE:
            return balance_of(entry, self.classes)["bpi"]
        if metric.endswith(WEAKEN):
            return 1.0 - float(entry["probs_factual"][metric.removesuffix(WEAKEN)])
        return float(entry["probs"][metric])

    def _selected(
        self, metric: str, searches: Mapping[tuple[str, SearchDirection], StrengthSearch], base: Entry
    ) -> dict[str, Any]:
        """The best step of a metric, with its curve, and why it should not be taken where it should not."""
        mine = {way: search for (name, way), search in searches.items() if name == metric}
        tried = [trial for search in mine.values() for trial in search.trials]
        found: dict[str, Any] = {
            "part": self.request.part,
            "scaling": self.points.scaling,
            "strengthen": not metric.endswith(WEAKEN),
            "base_value": self._value(metric, base),
            "base_lms": float(base["lms"]["lms"]),
            "max_harm": self.request.max_harm,
            "evaluations": len(tried),
            "trials": [self._shown(way, trial) for way, search in mine.items() for trial in search.trials],
        }
        rivals = [(best, way) for way, search in mine.items() if (best := search.best()) is not None]
        if not rivals:
            found |= {"value": found["base_value"], "feature_factor": 1.0, "learning_rate": 0.0}
            return _refused(found, self._all_too_harmful(metric, tried))
        best, way = max(rivals, key=lambda rival: rival[0].value or 0.0)
        step = self._step(way, best.change)
        entry = self.scored[step]
        found |= {
            "value": best.value,
            "feature_factor": step.feature_factor,
            "learning_rate": step.learning_rate,
            "id": entry["id"],
            "lms": float(entry["lms"]["lms"]),
            "harm": best.harm,
            "harm_error": best.error,
            "relative_change": best.change,
            "curve": [{"harm": harm, "value": value} for harm, value in mine[way].curve()],
        }
        if metric == BALANCE:
            for name, of in (("indices", entry), ("base_indices", base)):
                found[name] = {**balance_of(of, self.classes), "by_blanks": balance_by_blanks(of, self.classes)}
        if not is_gain(found["base_value"], found["value"]):
            return _refused(found, self._no_gain(metric, found, tried))
        if best.error > self.request.max_harm:
            known = f"to {100 * best.error:.1f} % only, which is more" if math.isfinite(best.error) else "no better"
            logger.warning("%s: harm is known %s than max_harm: pass more neutral texts", metric, known)
        return found

    def _shown(self, way: SearchDirection, trial: Trial) -> dict[str, Any]:
        step = self._step(way, trial.change)
        return {
            "feature_factor": step.feature_factor,
            "learning_rate": step.learning_rate,
            "relative_change": trial.change,
            "harm": trial.harm,
            "harm_error": trial.error,
            "value": trial.value,
        }

    def _all_too_harmful(self, metric: str, tried: Sequence[Trial]) -> str:
        smallest = min(trial.change for trial in tried)
        return (
            f"all {len(tried)} steps towards {metric}, of {smallest:.1e} of the weights' norm and more, do more harm "
            f"than max_harm={self.request.max_harm:g}"
        )

    def _no_gain(self, metric: str, found: Mapping[str, Any], tried: Sequence[Trial]) -> str:
        largest = max(trial.change for trial in tried)
        told = (
            f"no step within max_harm={self.request.max_harm:g} changes {metric} by a tenth: {found['base_value']:.4g} "
            f"-> {found['value']:.4g} at best, in {len(tried)} steps of up to {largest:.1e} of the weights' norm"
        )
        if metric == BALANCE and not self.scores.neutral_blanks:
            told += " (of both classes' blanks together: pass sentences that either class may fill as neutral_blanks)"
        return told

    def _report(self, summary: dict[str, dict[str, Any]], report: Mapping[str, Texts | None]) -> dict[str, list[str]]:
        """Add the harm of what was chosen on other texts to the summary; returns sentences that all models complete."""
        chosen = {
            metric: Step(entry["learning_rate"], entry["feature_factor"], self.request.part, self.points.scaling)
            for metric, entry in summary.items()
            if entry["learning_rate"] != 0.0
        }
        asker, asked = self.scores.asker, sentences(self.scores.rows, self.classes)
        given = {name: texts for name, texts in report.items() if texts is not None and texts.texts}
        scores = {name: TextScores(asker, texts, by_search=True) for name, texts in given.items()}

        def look() -> Entry:
            losses = {name: losses_as_kept(of.measure().losses) for name, of in scores.items()}
            return {"losses": losses, "completions": completed(asker, asked)}

        digest = text_hash([*(list(texts.texts) for texts in given.values()), *map(list, asked)])[:12]
        places: list[Place] = list(dict.fromkeys([None, *chosen.values()]))
        found = self.points.each(places, look, name=lambda place: f"report_{digest}_{self.name(place)}")
        base = found[None]
        if "second" in scores:
            self._tell_unknown_texts(kept_losses(base["losses"]["second"]), "second texts", "second_neutral_data")
        for metric, step in chosen.items():
            for name in scores:
                after, before = (kept_losses(entry["losses"][name]) for entry in (found[step], base))
                harm = after.harm_against(before)
                summary[metric][name] = harm.fields()
                self._tell_exceeded(metric, name, harm)
        return {BASE: base["completions"], **{m: found[step]["completions"] for m, step in chosen.items()}}

    def _tell_exceeded(self, metric: str, texts: str, harm: Harm) -> None:
        """The allowed harm is that of the texts of the search; on others it may be larger."""
        if harm.is_above(self.request.max_harm):
            logger.warning(
                "%s: on %s, which had no part in the choice, the harm is %.2f ± %.2f %%, more than max_harm=%g: lower "
                "max_harm, or pass more neutral texts",
                metric,
                "texts of the second corpus" if texts == "second" else "held-out texts",
                100 * harm.value,
                100 * harm.error,
                self.request.max_harm,
            )


def scored_base(points: Points, scores: ModelScores, name: Callable[[Place], str]) -> tuple[Entry, TextLosses]:
    """The base model, which all harm is measured against, and its losses text by text. All ranks call this."""
    entry = points.each([None], scores.measure_base, name=name)[None]
    return shown(None, entry), kept_losses(entry["text_losses"])


def _refused(found: dict[str, Any], why: str) -> dict[str, Any]:
    logger.warning("%s", why)
    return {**found, "refusal": why}
