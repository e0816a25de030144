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
from gradiend_dist.evaluation.decoder import ModelScores
from gradiend_dist.evaluation.held_out import add_held_out, scored_base, tell_unknown_texts
from gradiend_dist.evaluation.points import Entry, Place, Points, grid_key, shown
from gradiend_dist.evaluation.request import DecoderRequest
from gradiend_dist.evaluation.search import StrengthSearch, Trial, is_gain
from gradiend_dist.evaluation.selection import BASE, WEAKEN
from gradiend_dist.evaluation.texts import Texts
from gradiend_dist.rewriting.move import DirectionNorms
from gradiend_dist.rewriting.step import Step

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
        completions = add_held_out(summary, report, self.points, self.scores, self.name)
        return {**summary, "grid": grid, "too_harmful": dropped, "completions": completions}

    def _base(self) -> Entry:
        """The base model, which all harm is measured against."""
        base, self.losses = scored_base(self.points, self.scores, self.name)
        tell_unknown_texts(self.losses, self.scores.asker.vocabulary, "neutral texts", "eval_neutral_data")
        return base

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
        why = None if rivals else _all_too_harmful(metric, tried, self.request.max_harm)
        if why is not None:  # the least harmful of those whose value is known: for who takes it all the same
            asked = [(trial, way) for way, search in mine.items() for trial in search.trials if trial.value is not None]
            rivals = [min(asked, key=lambda rival: rival[0].harm)] if asked else []
        if not rivals:
            assert why is not None, "where a step is allowed, one of them is the best"
            found |= {"value": found["base_value"], "feature_factor": 1.0, "learning_rate": 0.0}
            return _refused(found, why)
        best, way = max(rivals, key=lambda rival: rival[0].value or 0.0)
        step = self._step(way, best.change)
        entry = self.scored[step]
        found |= {
            "value": best.value,
            **step.point,
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
        if why is not None:
            return _refused(found, why)
        if not is_gain(found["base_value"], found["value"]):
            together = metric == BALANCE and not self.scores.neutral_blanks
            return _refused(found, _no_gain(metric, found, tried) + NO_NEUTRAL_BLANKS * together)
        if best.error > self.request.max_harm:
            known = f"to {100 * best.error:.1f} % only, which is more" if math.isfinite(best.error) else "no better"
            logger.warning("%s: harm is known %s than max_harm: pass more neutral texts", metric, known)
        return found

    def _shown(self, way: SearchDirection, trial: Trial) -> dict[str, Any]:
        return {
            **self._step(way, trial.change).point,
            "relative_change": trial.change,
            "harm": trial.harm,
            "harm_error": trial.error,
            "value": trial.value,
        }


def _refused(found: dict[str, Any], why: str) -> dict[str, Any]:
    logger.warning("%s", why)
    return {**found, "refusal": why}


def _all_too_harmful(metric: str, tried: Sequence[Trial], max_harm: float) -> str:
    smallest = min(trial.change for trial in tried)
    return (
        f"all {len(tried)} steps towards {metric}, of {smallest:.1e} of the weights' norm and more, do more harm "
        f"than max_harm={max_harm:g}"
    )


def _no_gain(metric: str, found: Mapping[str, Any], tried: Sequence[Trial]) -> str:
    largest = max(trial.change for trial in tried)
    return (
        f"no step within max_harm={found['max_harm']:g} changes {metric} by a tenth: {found['base_value']:.4g} "
        f"-> {found['value']:.4g} at best, in {len(tried)} steps of up to {largest:.1e} of the weights' norm"
    )


# Where there are none, the means over both classes' rows may be balanced in a model that is not.
NO_NEUTRAL_BLANKS = " (of both classes' blanks together: pass sentences that either class may fill as neutral_blanks)"
