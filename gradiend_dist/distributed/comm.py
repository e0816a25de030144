"""How ranks talk: `Comm`, which everything that runs on several ranks is handed.

Three kinds of traffic, each on the way that suits it:

    numbers of a step    `total`, `reduce_scatter`, `exchange`: on the devices' own backend (collectives.py)
    decisions            `decide`, `largest`, `smallest`, `gather`: a gloo group of the hosts (collectives.py)
    waiting for rank 0   `first`, `meet`: on a store that rank 0 keeps (meetings.py)

and `peers`, notes of who has failed, for the end of a run that goes wrong (peers.py).

A single process has a `Comm` as well, and every method is then the identity.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gradiend_dist.distributed.collectives import DeviceCollectives, HostCollectives
from gradiend_dist.distributed.meetings import Meetings, store_of_rank_0
from gradiend_dist.distributed.peers import PeerError, Peers
from gradiend_dist.errors import UserError

T = TypeVar("T")


@dataclass
class Comm(DeviceCollectives, HostCollectives, Meetings):
    """This process among the ranks. All ranks call each method together and in the same order."""

    unshared: set[Path] = field(default_factory=set, repr=False)
    """Directories of rank 0's that were found to be invisible to others: their files are not waited for again."""

    @classmethod
    def join(cls, timeout: float = 1800.0) -> Comm:
        """The ranks of the process group that Accelerate or torchrun has made. All ranks call this, once."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(timeout=timeout)
        control = None
        if dist.get_backend() != "gloo":
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        joined = cls(
            rank=rank,
            world_size=world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            control=control,
            timeout=timeout,
            peers=Peers(rank, world_size, PrefixStore("gradiend_dist", _get_default_store())),
        )
        joined.store = store_of_rank_0(joined)
        atexit.register(joined.leave)  # also where a script of a user's simply ends
        return joined

    def together(self, check: Callable[[], T]) -> T:
        """Every rank checks; if any finds something wrong, one tells it and all end. A single process just checks."""
        try:
            result, message = check(), None
        except UserError as error:
            result, message = None, str(error)
        messages = self.gather(message)
        wrong = [rank for rank, told in enumerate(messages) if told is not None]
        if not wrong:
            return result  # type: ignore[return-value]
        if self.rank != wrong[0]:
            raise PeerError
        raise UserError(messages[self.rank] if self.is_first else f"rank {self.rank}: {messages[self.rank]}")
