"""Do all ranks see a file? Hosts of a cluster may share a file system, or each have its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from gradiend_dist.distributed.comm import Comm

# How long a network file system may take to show on one host what another has written.
VISIBLE_SECONDS = 5.0


def is_shared(directory: Path, comm: Comm) -> bool:
    """Do all ranks see this directory of rank 0's? They must find a file in it that was not there before.

    All ranks call this; a single process sees it.
    """
    if comm.is_alone:
        return True
    mark = directory / f".{comm.decide(secrets.token_hex(8))}"
    comm.first(f"marking {directory}", mark.touch)
    seen = everyone_sees(mark, comm)
    if comm.is_first:
        mark.unlink()
    return seen


def everyone_sees(path: Path, comm: Comm) -> bool:
    """Is this there for all ranks, at once or in a moment? All ranks call this; a single process looks."""
    if not comm.is_alone:
        patience = 0.0 if path.parent in comm.unshared else VISIBLE_SECONDS
        deadline = time.monotonic() + patience
        while not path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes the host ask the server again
            time.sleep(0.1)
    seen = comm.all_agree(path.exists())
    if not seen:
        comm.unshared.add(path.parent)
    return seen
