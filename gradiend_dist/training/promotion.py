"""The end of a run: the best seed's model becomes the run's model, and what is not to be kept is deleted."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.storage.files import explained, write_json
from gradiend_dist.storage.layout import MODEL_FILES, SEED_REPORT, STATS, TOKENIZER
from gradiend_dist.storage.model_dir import link_model
from gradiend_dist.training.places import Places
from gradiend_dist.training.seeds import SeedResult, convergence_info, seed_report

logger = logging.getLogger(__name__)


def promote(
    results: list[SeedResult],
    best: SeedResult,
    args: TrainingArguments,
    places: Places,
    stability: dict[str, Any] | None,
) -> None:
    """The best seed's model and the report on all seeds; the old model stays until the new one is complete.

    Rank 0 alone. The model shares its files with the seed's directory where the file system can: neither is ever
    changed in place, and either may be deleted.
    """
    info = convergence_info([result.verdict for result in results], args, best.verdict)
    report = seed_report(results, args)
    if stability is not None:
        report["topk_stability"] = info["topk_stability"] = stability
    link_model(best.output, places.model, training={**best.record, "convergence_info": info})
    write_json(places.seeds / SEED_REPORT, report)


def strip_models(results: list[SeedResult], args: TrainingArguments) -> None:
    """Rank 0 alone: delete the model files of the seeds that are not to be kept; records and statistics stay."""
    for result in results:
        # best_only: the promoted model has the files of the best one, no seed's own files are needed.
        kept = args.saved_seed_runs == "all_tried" or (
            args.saved_seed_runs == "all_convergent" and result.verdict.converged
        )
        if not kept or args.delete_models:
            strip_model(result.output)


def strip_model(path: Path) -> None:
    with explained(path):
        for name in MODEL_FILES:
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path / TOKENIZER, ignore_errors=True)


def delete_seeds(surplus: Sequence[int], args: TrainingArguments, places: Places) -> None:
    """Rank 0 alone: seeds that were trained, and turned out not to be needed."""
    for seed in surplus:
        logger.info("seed %d is dropped: enough seeds before it converged", seed)
        path = places.seed(seed, args)
        with explained(path):
            shutil.rmtree(path, ignore_errors=True)


def write_stats(results: list[SeedResult], best: SeedResult, directory: Path) -> None:
    """Rank 0 alone: the documented training_stats.json, with the promoted run's statistics and those of every seed."""
    kept = ("training_stats", "losses", "best_score_checkpoint", "convergence_info", "time")
    per_seed = {result.seed: {name: result.record[name] for name in kept} for result in results}
    stats = {"best_seed": best.seed, **per_seed[best.seed], "seeds": per_seed}
    write_json(directory / STATS, stats, indent=None)
