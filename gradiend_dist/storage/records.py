"""The records of a run: how a model was trained (training.json) and what became of its seeds (seed_report.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradiend_dist.config.checks import first_mismatch
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import read_object
from gradiend_dist.storage.layout import SEED_REPORT, TRAINING

# What every record of ours and of the reference has, as examples of its types.
OF_TRAINING: dict[str, Any] = {
    "training_stats": {},
    "losses": [],
    "best_score_checkpoint": {"correlation": None, "global_step": None},
}


def read_training(directory: Path) -> dict[str, Any]:
    """What a model directory says about its training; whoever reads on may rely on its parts being there."""
    record = read_object(directory / TRAINING)
    wrong = first_mismatch(record, OF_TRAINING, TRAINING)
    if wrong is not None:
        raise UserError(f"{directory / TRAINING} is damaged ({wrong}): remove {directory} to train it again.")
    return record


def find_training(directory: Path) -> dict[str, Any]:
    """The same as far as it is there, and unchecked: for who asks for one thing that may be missing."""
    return find_record(directory / TRAINING)


def read_seed_report(directory: Path) -> dict[str, Any]:
    """The report on all seeds, in the directory of the seeds."""
    return read_object(directory / SEED_REPORT)


def find_record(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    return read_object(path) if path.is_file() else {}
