"""Which point of a decoder grid to take: what is gained for the feature against what the language model loses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradiend_dist.config.checks import require
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.search import is_gain

logger = logging.getLogger(__name__)

BASE = "base"

WEAKEN = "_weaken"

# Of a scaled direction's best value: what the smallest of its steps has to reach.
SATURATION = 0.99

Results = Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """One rewritten model."""

    id: Mapping[str, float]
    """Its `feature_factor` and `learning_rate`."""
    lms: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def feature_factor(self) -> float:
        return self.id["feature_factor"]

    @property
    def learning_rate(self) -> float:
        return self.id["learning_rate"]


@dataclass(frozen=True)
class BaseContext:
    """The base model, for comparison."""

    base_lms: float


class SelectionPolicy(Protocol):
    def select(self, metric: str, candidates: Sequence[Candidate], ctx: BaseContext) -> Candidate | None: ...


@dataclass(frozen=True)
class LMSThresholdPolicy:
    """The largest metric among models that keep this share of the base's score; the smallest step if none does.

    With a `saturation` below 1, the smallest step among those that reach this share of the largest metric. A
    probability of 1 cannot grow: larger steps do harm that neither it nor the score shows, as to other classes.
    """

    ratio: float = 0.99
    saturation: float = 1.0

    def __post_init__(self) -> None:
        require(0.0 < self.saturation <= 1.0, f"saturation={self.saturation} is not in (0, 1]: pass e.g. 0.99.")

    def select(self, metric: str, candidates: Sequence[Candidate], ctx: BaseContext) -> Candidate | None:
        passing = [found for found in candidates if found.lms >= self.ratio * ctx.base_lms]
        if passing:
            best = max(passing, key=lambda found: found.metrics[metric])
            if self.saturation == 1.0:
                return best
            value = best.metrics[metric]
            enough = value - (1.0 - self.saturation) * abs(value)  # a metric of the user's own may be negative
            return min(
                (found for found in passing if found.metrics[metric] >= enough),
                key=lambda found: abs(found.learning_rate),
            )
        moving = [found for found in candidates if found.learning_rate != 0]
        return min(moving, key=lambda found: abs(found.learning_rate), default=None)


@dataclass(frozen=True)
class LMSTimesMetricPolicy:
    """The largest product of metric and language-model score."""

    def select(self, metric: str, candidates: Sequence[Candidate], ctx: BaseContext) -> Candidate | None:  # noqa: ARG002
        return max(candidates, key=lambda found: found.metrics[metric] * found.lms, default=None)


def default_policy(scaling: str, ratio: float = LMSThresholdPolicy.ratio) -> SelectionPolicy:
    """The reference's for its own direction; a scaled one reaches 1 long before the score falls."""
    return LMSThresholdPolicy(ratio, saturation=1.0 if scaling == "plain" else SATURATION)


Extractor = Callable[[Results], tuple[list[Candidate], BaseContext]]


def extract_candidates(results: Results) -> tuple[list[Candidate], BaseContext]:
    """Metrics of a point: `<class>` to strengthen it, `<class>_factual`, `<class>_weaken`, and numbers of its own."""
    candidates = []
    for name, entry in results.items():
        if name == BASE:
            continue
        metrics = values_of(entry) | {
            key: float(value) for key, value in entry.items() if isinstance(value, int | float)
        }
        candidates.append(Candidate(entry["id"], float(entry["lms"]["lms"]), metrics))
    return candidates, BaseContext(float(results[BASE]["lms"]["lms"]))


def values_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """What an entry says of each class."""
    values = {str(key): float(value) for key, value in entry["probs"].items()}
    for key, value in entry["probs_factual"].items():
        values[f"{key}_factual"] = float(value)
        values[f"{key}{WEAKEN}"] = 1.0 - float(value)
    return values


def strengthening_factor(direction: Mapping[str, float], source: str, name: str) -> float:
    """The feature factor that makes a class more probable.

    The decoder answers an encoding of +1 with the gradient of the class that is encoded so. A gradient of the
    alternative word's loss, added, moves away from the factual word; of the factual word's, the other way round.
    """
    return float(direction[name] if source == "alternative" else -direction[name])


def summarize(
    results: Results,
    metrics: Sequence[str],
    selector: SelectionPolicy,
    factors: Mapping[str, float],
    extractor: Extractor = extract_candidates,
    *,
    part: str = "decoder",
    scaling: str = "plain",
) -> dict[str, dict[str, Any]]:
    """For each metric the selected point: only those that push the right way compete for strengthening or weakening."""
    candidates, base = extractor(results)
    known = sorted({name for candidate in candidates for name in candidate.metrics})
    summary = {}
    for metric in metrics:
        if metric not in known:
            raise UserError(f"summary_metrics has {metric!r}, a grid point has {', '.join(known)}: name one of these.")
        rivals = [found for found in candidates if pushes(found.feature_factor, metric, factors)]
        chosen = selector.select(metric, rivals, base)
        if chosen is None:
            raise UserError(f"The selector takes none of the {len(rivals)} points for {metric!r}: pass other lrs.")
        summary[metric] = {
            "value": chosen.metrics[metric],
            "feature_factor": float(chosen.feature_factor),
            "learning_rate": float(chosen.learning_rate),
            "id": dict(chosen.id),
            "part": part,
            **({} if scaling == "plain" else {"scaling": scaling}),
            "strengthen": not metric.endswith(WEAKEN),
            "lms": chosen.lms,
            "base_lms": base.base_lms,
        }
        if isinstance(selector, LMSThresholdPolicy) and chosen.lms < selector.ratio * base.base_lms:
            why = (
                f"no point of the grid for {metric} keeps {selector.ratio:g} of the language-model score: the smallest "
                f"step, {chosen.learning_rate:g}, leaves {chosen.lms:.4g} of {base.base_lms:.4g}; pass smaller lrs, or "
                "none for a search"
            )
            logger.warning("%s", why)
            summary[metric]["refusal"] = why
        else:
            _tell_no_gain(metric, chosen, values_of(results[BASE]).get(metric))
    return summary


def _tell_no_gain(metric: str, chosen: Candidate, before: float | None) -> None:
    """Not refused, as a search's would be: whoever passes learning rates has chosen them. `before` is the base's."""
    if before is not None and not is_gain(before, chosen.metrics[metric]):
        logger.warning(
            "no point of the grid changes %s by a tenth: %.4g -> %.4g at learning rate %g; pass other lrs, or none for "
            "a search",
            metric,
            before,
            chosen.metrics[metric],
            chosen.learning_rate,
        )


def tell_edges(summary: Mapping[str, Mapping[str, Any]], rates: Sequence[float]) -> None:
    """Say where the best point is the last of a grid: a better one may lie beyond it."""
    edges = {min(rates): "smallest", max(rates): "largest"} if len(rates) > 1 else {}
    for metric, entry in summary.items():
        where = edges.get(entry["learning_rate"])
        if where is not None and "refusal" not in entry:
            logger.warning(
                "the best point for %s is at the %s learning rate of the grid, %g: a better one may lie beyond it",
                metric,
                where,
                entry["learning_rate"],
            )


def pushes(feature_factor: float, metric: str, factors: Mapping[str, float]) -> bool:
    """Does this factor strengthen (or weaken) the class that the metric is about? `factors` strengthen each class."""
    name = metric.removesuffix(WEAKEN)
    if name not in factors:
        return True  # a metric of the user's own
    if metric.endswith(WEAKEN):
        return feature_factor in {factor for other, factor in factors.items() if other != name}
    return feature_factor == factors[name]


def require_pushing(feature_factors: Sequence[float], metrics: Sequence[str], factors: Mapping[str, float]) -> None:
    """Before anything is scored: some factor must push the way that each metric is about."""
    for metric in metrics:
        if not any(pushes(factor, metric, factors) for factor in feature_factors):
            wanted = sorted({f for f in factors.values() if pushes(f, metric, factors)})
            raise UserError(
                f"feature_factors={list(feature_factors)} has none that pushes towards {metric!r}: include "
                f"{' or '.join(f'{factor:g}' for factor in wanted)}, or pass target_class."
            )
