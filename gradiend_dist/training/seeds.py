"""Several seeds: which of them converged, which is the best, what is reported and what is kept."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.messages import sendable
from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)

# Of the largest score: seeds that are nearer to it than this are as good.
EQUAL_SCORES = 1e-5


@sendable
@dataclass(frozen=True)
class Verdict:
    """Did a run converge, by which numbers, and if not, why not."""

    converged: bool
    metric_value: float | None
    min_abs_mean: float | None
    reason: str


@sendable
@dataclass
class SeedResult:
    seed: int
    output: Path
    record: dict[str, Any]
    trained: bool
    verdict: Verdict
    eval_correlation: float | None = None

    @property
    def training_score(self) -> float | None:
        """The best score in training, larger is better: the correlation, or the negative loss."""
        best = self.record["best_score_checkpoint"]
        if best.get("loss") is not None:
            return -float(best["loss"])
        return best["correlation"]

    @property
    def selection_score(self) -> float | None:
        return self.eval_correlation if self.eval_correlation is not None else self.training_score


def judge(record: dict[str, Any], args: TrainingArguments, *, among_seeds: bool) -> Verdict:
    """Convergence of one run: the metric at its best step, and class means that are large and of opposite signs.

    `among_seeds`: it is judged as one of several, not on its own.
    """
    best = record["best_score_checkpoint"]
    if args.convergent_metric == "loss":
        return _judge_loss(best, args)
    signed = among_seeds if args.behaviour.signed_convergence else args.normalize_gradiend
    return _judge_correlation(record, args, signed=signed)


def _judge_loss(best: dict[str, Any], args: TrainingArguments) -> Verdict:
    threshold, loss = args.convergent_score_threshold, best.get("loss")
    if loss is None:
        return Verdict(False, None, None, "the best checkpoint was not chosen by its loss")
    if threshold is None:
        return Verdict(True, loss, None, "there is no threshold for the loss")
    return Verdict(loss <= threshold, loss, None, f"loss {loss:.4g}, threshold {threshold:.4g}")


def _is_trained(record: dict[str, Any]) -> bool:
    """Are the weights of the best step more than random? At step 0 only those that were solved for are."""
    step = record["best_score_checkpoint"]["global_step"]
    return step is not None and (step > 0 or "spectral" in record["training_stats"])


def _at_best(record: dict[str, Any], series: str) -> Any:
    """A series at the best step, None where it has no such step; keys are numbers in memory, strings from a file."""
    by_step, step = record["training_stats"].get(series) or {}, record["best_score_checkpoint"]["global_step"]
    return by_step.get(step, by_step.get(str(step)))


def _means_at_best(record: dict[str, Any]) -> list[float]:
    """Mean encodings of the target classes at the best step."""
    means = _at_best(record, "mean_by_class") or {}
    return [float(mean) for label, mean in means.items() if float(label) != 0.0]


def _judge_correlation(record: dict[str, Any], args: TrainingArguments, *, signed: bool) -> Verdict:
    correlation, means = record["best_score_checkpoint"]["correlation"], _means_at_best(record)
    threshold = args.convergent_score_threshold
    assert threshold is not None, "TrainingArguments sets a threshold for the correlation"
    min_abs_mean = min((abs(mean) for mean in means), default=None)
    mean_threshold = _mean_threshold(args)
    if not _is_trained(record):
        return Verdict(False, correlation, min_abs_mean, "no trained step was evaluated as best")
    score = correlation if signed else abs(correlation)
    if score < threshold:
        return Verdict(False, correlation, min_abs_mean, f"correlation {correlation:.4f} is below {threshold}")
    if len(means) != 2 or means[0] * means[1] >= 0:
        return Verdict(False, correlation, min_abs_mean, "the target classes are not encoded with opposite signs")
    if mean_threshold is not None and min_abs_mean is not None and min_abs_mean < mean_threshold:
        reason = f"a target class has mean encoding {min_abs_mean:.3f}, below {mean_threshold}"
        return Verdict(False, correlation, min_abs_mean, reason)
    return Verdict(True, correlation, min_abs_mean, f"correlation {correlation:.4f}")


def _mean_threshold(args: TrainingArguments) -> float | None:
    """The threshold in force: a loss has no class means."""
    return None if args.convergent_metric == "loss" else args.convergent_mean_by_class_threshold


def reason_to_stop(results: list[SeedResult], args: TrainingArguments) -> str | None:
    """Why no further seed is needed, or None."""
    count = sum(result.verdict.converged for result in results)
    if args.min_convergent_seeds is None or count < args.min_convergent_seeds:
        return None
    return (
        f"min_convergent_seeds reached: {count} >= {args.min_convergent_seeds} "
        f"with metric={args.convergent_metric} threshold={args.convergent_score_threshold}"
    )


def wants_selection_evaluation(result: SeedResult, earlier: list[SeedResult], args: TrainingArguments) -> bool:
    """Is the evaluation for seed selection worth its time? Not without a correlation, nor after a converged seed."""
    if args.convergent_metric == "loss":
        return False
    threshold, score = args.convergent_score_threshold, result.training_score
    if score is not None and threshold is not None and score < threshold:
        return False
    return not any(other.verdict.converged for other in earlier)


def select_best(results: list[SeedResult], args: TrainingArguments) -> tuple[SeedResult, float | None, str]:
    """The seed to promote, its score, and the rule that chose it; the first of equals."""
    assert results, "at least one seed was trained"
    converged = [result for result in results if result.verdict.converged]
    if converged:
        best = _first_of_the_best(converged, args)
        return best, best.selection_score, "best_convergent_selection_score"
    best = _first_of_the_best(results, args)
    fallback = "best_available_selection_score" if args.convergent_metric == "loss" else "highest_correlation_fallback"
    return best, best.selection_score, fallback


def _first_of_the_best(results: list[SeedResult], args: TrainingArguments) -> SeedResult:
    """Rounding differs between numbers of ranks, and a run may go on with another: it decides nothing."""
    scores = [_or_lowest(result.selection_score) for result in results]
    apart = 0.0 if args.behaviour.last_digit_selects else EQUAL_SCORES * abs(max(scores))
    least = max(scores) - apart if math.isfinite(max(scores)) else max(scores)
    return next(result for result, score in zip(results, scores, strict=True) if score >= least)


def _or_lowest(score: float | None) -> float:
    return float("-inf") if score is None or math.isnan(score) else score


def seed_report(results: list[SeedResult], args: TrainingArguments) -> dict[str, Any]:
    """The documented report on all seeds that were tried."""
    best, score, strategy = select_best(results, args)
    converged = [result.seed for result in results if result.verdict.converged]
    return {
        "convergence_metric": args.convergent_metric,
        "threshold": args.convergent_score_threshold,
        "convergent_mean_by_class_threshold": _mean_threshold(args),
        "min_convergent_seeds": args.min_convergent_seeds,
        "max_seeds": args.max_seeds,
        "seeds_tried": [result.seed for result in results],
        "convergent_count": len(converged),
        "convergent_seeds": converged,
        "best_seed": best.seed,
        "best_selection_score": score,
        "best_seed_selection_strategy": strategy,
        "early_stop_reason": reason_to_stop(results, args),
        "runs": [_report_entry(result, args) for result in results],
    }


def _report_entry(result: SeedResult, args: TrainingArguments) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "output_dir": str(result.output),
        "trained": result.trained,
        "used_cache": not result.trained,
        "training_score": result.training_score,
        "eval_correlation": result.eval_correlation,
        "selection_score": result.selection_score,
        "convergence_metric": args.convergent_metric,
        "convergence_metric_value": result.verdict.metric_value,
        "best_checkpoint_global_step": result.record["best_score_checkpoint"]["global_step"],
        "threshold": args.convergent_score_threshold,
        "convergent_mean_by_class_threshold": _mean_threshold(args),
        "convergent_min_target_class_abs_mean": result.verdict.min_abs_mean,
        "converged": result.verdict.converged,
        "convergence_reason": result.verdict.reason,
        "split_cycle_index": None,
        "split_cycle_length": None,
        **explained_at_best(result.record),
    }


def explained_at_best(record: dict[str, Any]) -> dict[str, float | None]:
    """Share of the target that the decoder explains at the best step, and the most that it could; None: not measured.

    A correlation near 1 says nothing of the decoder: the encoder may tell the classes apart long before it is trained.
    """
    stats = record["training_stats"]
    return {
        "explained": _finite(_at_best(record, "explained")),
        "explained_centred": _finite(_at_best(record, "explained_centred")),
        "explained_limit": _finite(stats.get("explained_limit")),
        "explained_centred_limit": _finite(stats.get("explained_centred_limit")),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def convergence_info(verdicts: list[Verdict], args: TrainingArguments, verdict: Verdict) -> dict[str, Any]:
    """What training.json says of convergence: the verdicts that count, and the one on the model beside it."""
    count, required, alone = sum(one.converged for one in verdicts), args.min_convergent_seeds, len(verdicts) == 1
    one_is_enough = alone or args.behaviour.one_converged_is_enough
    return {
        "converged": required is None or count >= (1 if one_is_enough else required),
        "convergent_count": None if alone and required is None else count,
        "min_convergent_seeds": args.min_convergent_seeds,
        "convergence_metric": args.convergent_metric,
        "threshold": args.convergent_score_threshold,
        "convergent_mean_by_class_threshold": _mean_threshold(args),
        "convergent_min_target_class_abs_mean": verdict.min_abs_mean,
    }


def topk_stability(
    results: list[SeedResult], args: TrainingArguments, top_weights: Callable[[Path, str, int], list[int]]
) -> dict[str, Any] | None:
    """How far the converged seeds agree on the most important weights; None where fewer than two were asked for."""
    converged = [result for result in results if result.verdict.converged]
    if args.seed_stability_topk is None or (args.min_convergent_seeds or 0) < 2 or len(converged) < 2:
        return None
    top = {}
    for result in converged:
        top[result.seed] = frozenset(top_weights(result.output, args.seed_stability_part, args.seed_stability_topk))
    paths = {result.seed: str(result.output) for result in converged}
    return _overlap(top, paths, args)


def _overlap(top: dict[int, frozenset[int]], paths: dict[int, str], args: TrainingArguments) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for a, b in itertools.combinations(sorted(top, key=lambda seed: f"seed_{seed}"), 2):
        common = len(top[a] & top[b])
        rows.append(
            {
                "run_a": f"seed_{a}",
                "run_b": f"seed_{b}",
                "overlap_count": common,
                "overlap_fraction": common / min(len(top[a]), len(top[b])),
                "jaccard": common / len(top[a] | top[b]),
                "topk_size_a": len(top[a]),
                "topk_size_b": len(top[b]),
                "seed_a": a,
                "output_dir_a": paths[a],
                "seed_b": b,
                "output_dir_b": paths[b],
            }
        )
    rows.sort(key=lambda row: -row["overlap_fraction"])
    overlaps = [row["overlap_fraction"] for row in rows]
    jaccards = [row["jaccard"] for row in rows]
    union = frozenset().union(*top.values())
    counts = [sum(index in indices for indices in top.values()) for index in sorted(union)]
    names = sorted(f"seed_{seed}" for seed in top)
    return {
        "computed": True,
        "num_runs": len(top),
        "run_ids": names,
        "seeds": [int(name.removeprefix("seed_")) for name in names],
        "part": args.seed_stability_part,
        "topk": args.seed_stability_topk,
        "topk_size_by_run": {f"seed_{seed}": len(indices) for seed, indices in top.items()},
        "mean_topk_size": statistics.fmean(len(indices) for indices in top.values()),
        "union_size": len(union),
        "intersection_size": counts.count(len(top)),
        "parameters_seen_once": counts.count(1),
        "parameters_seen_in_all_runs": counts.count(len(top)),
        "mean_presence_fraction": statistics.fmean(counts) / len(top),
        "mean_pairwise_overlap_fraction": statistics.fmean(overlaps),
        "pairwise_overlap_std": statistics.pstdev(overlaps),
        "min_pairwise_overlap_fraction": min(overlaps),
        "max_pairwise_overlap_fraction": max(overlaps),
        "mean_pairwise_jaccard": statistics.fmean(jaccards),
        "pairwise_jaccard_std": statistics.pstdev(jaccards),
        "pairwise_overlap_rows": rows,
    }


def check_convergence(results: list[SeedResult], args: TrainingArguments) -> None:
    """Tell, or fail if asked to, when fewer seeds converged than required; the best one is promoted by then."""
    required = args.min_convergent_seeds
    count = sum(result.verdict.converged for result in results)
    if args.analyze_seed_stability and count < 2:
        raise UserError(
            f"analyze_seed_stability needs two converged seeds and {count} of {len(results)} converged: raise "
            "max_seeds, or try another learning_rate or more steps."
        )
    if required is None or count >= required:
        return
    reasons = "; ".join(f"seed {r.seed}: {r.verdict.reason}" for r in results if not r.verdict.converged)
    message = (
        f"{count} of {len(results)} seeds converged, {required} required ({reasons}): try "
        f"{'' if args.starts_trained else 'initialization=spectral, '}another learning_rate, more steps or more "
        "max_seeds."
    )
    if args.fail_on_non_convergence:
        raise UserError(message)
    logger.warning(message)
