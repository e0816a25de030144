"""The launches of ranks_script.py that several test files read: one for each number of ranks."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from launching import HERE, torchrun

SCRIPT = HERE / "ranks_script.py"
CHECKS = ("pruning", "weight_files", "engines", "memory")
_scratch = tempfile.TemporaryDirectory(prefix="ranks_")


@cache
def results(ranks: int) -> Path:
    """Where the script's results on so many ranks are."""
    directory = Path(_scratch.name) / str(ranks)
    directory.mkdir()
    torchrun(SCRIPT, directory, *CHECKS, ranks=ranks, limit=200.0).require_success()
    return directory


def found(ranks: int, check: str) -> Any:
    return json.loads((results(ranks) / f"{check}.json").read_text())
