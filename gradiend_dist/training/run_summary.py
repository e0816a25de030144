"""What trackers are told at the end of a run: its numbers, the table of its seeds, plots, the promoted model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.storage.files import jsonable
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.places import Places
from gradiend_dist.training.seeds import SeedResult, explained_at_best, select_best


def track_results(
    results: list[SeedResult], args: TrainingArguments, places: Places, tracking: Tracking, *, space_size: int
) -> None:
    """No communication: ranks other than 0 do nothing."""
    if not tracking.is_first:
        return
    best, score, _ = select_best(results, args)
    values = {
        "best_seed": best.seed,
        "selection_score": score,
        "converged": best.verdict.converged,
        "convergent_count": sum(result.verdict.converged for result in results),
        "best_step": best.record["best_score_checkpoint"]["global_step"],
        "space_size": space_size,
        "pruned_size": best.record["cache_fingerprint"]["gradiend_input_dim"],
    }
    rows = [{"seed": r.seed, **seed_summary(r), "selected": r.seed == best.seed} for r in results]
    images = _plots(results, best, places.logs) if args.trackers else {}
    tracking.summary(values, rows, images, places.model)


def seed_summary(result: SeedResult) -> dict[str, Any]:
    best = result.record["best_score_checkpoint"]
    return {
        "converged": result.verdict.converged,
        "best_step": best["global_step"],
        "best_correlation": best["correlation"],
        "selection_score": result.selection_score,
        **{name: value for name, value in explained_at_best(result.record).items() if value is not None},
    }


def _plots(results: list[SeedResult], best: SeedResult, directory: Path) -> dict[str, Path]:
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    from gradiend_dist.report.plots import plot_seed_convergence, plot_training_convergence

    records = [(result.seed, jsonable(result.record)) for result in results]
    name = "training_convergence"
    images = {f"plots/{name}": plot_training_convergence(dict(records)[best.seed], directory / f"{name}.png")}
    if len(records) > 1:
        name = "seed_convergence"
        images[f"plots/{name}"] = plot_seed_convergence(records, best.seed, directory / f"{name}.png")
    return images
