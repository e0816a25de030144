"""Which ranks have failed and which are gone: notes on the launcher's store, which outlives every rank.

A rank that fails leaves a note, so that one of them tells the reason and the others end silently. Where a rank is gone
without a note, those that are left find out together which one.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# How long ranks that have lost one wait for notes of the others before they name it.
LAST_WORDS_SECONDS = 3.0


class PeerError(Exception):
    """Another rank has failed and has said why: this one ends without a word."""


class PeerLost(Exception):
    """A collective failed: some rank is gone or does not answer."""


@dataclass
class Peers:
    """Notes of failures. Each rank calls these by itself, when it fails: nobody waits for another to call them."""

    rank: int = 0
    world_size: int = 1
    store: Any = None
    """The launcher's; None: a single process."""

    def may_report(self) -> bool:
        """Is this the rank that tells why the run ends? The first one that asks is; a single process always."""
        if self.store is None:
            return True
        try:
            return bool(self.store.add("failed", 1) == 1)
        except RuntimeError:  # the store ended with the launcher
            return self.rank == 0

    def have_failed(self) -> bool:
        """Has any rank asked to report? Never in a single process."""
        with contextlib.suppress(RuntimeError):
            return self.store is not None and bool(self.store.check(["failed"]))
        return False

    def note_alive(self) -> None:
        """This rank is alive, and has heard that another is not; nothing in a single process."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the launcher and its store are gone
                self.store.set(f"alive/{self.rank}", b"")

    def describe_loss(self, lost: PeerLost) -> str | None:
        """What to say of a lost peer: None where another rank says it. Never called in a single process.

        Every rank that is alive and hears of it leaves a note; after a moment the lowest of them names those who did
        not.
        """
        try:
            self.store.set(f"alive/{self.rank}", b"")
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while time.monotonic() < deadline:
                if self.have_failed():
                    return None
                time.sleep(0.1)
            alive = [rank for rank in range(self.world_size) if self.store.check([f"alive/{rank}"])]
        except RuntimeError:
            return f"the launcher and its store are gone ({lost})" if self.rank == 0 else None
        if alive and alive[0] != self.rank:
            return None
        if not self.may_report():
            return None  # on a busy machine another one has heard of it, and waited, long before
        silent = [str(rank) for rank in range(self.world_size) if rank not in alive]
        whom = f"rank {', '.join(silent)} is gone or does not answer" if silent else "the ranks lost each other"
        return f"{whom} ({lost}): see its log; the same command goes on from the last saved state"


def is_lost_peer(error: RuntimeError) -> bool:
    """Did a collective of FSDP's or DeepSpeed's fail because a rank is gone? They raise what gloo and NCCL raise."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))
