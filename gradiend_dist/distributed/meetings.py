"""Waiting for each other on a store that rank 0 keeps: no rank sits in a collective while rank 0 copies files.

The wait has a timeout of its own, a message that names what is waited for, and an eye on ranks that fail meanwhile.
The launcher's store would not do: a launcher that a signal ends takes it along, while the ranks still have to save
their state together. So they meet on rank 0's, which leaves last (`leave`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gradiend_dist.distributed.collectives import HostCollectives
from gradiend_dist.distributed.interrupt import stop_if_told
from gradiend_dist.distributed.messages import decode, encode
from gradiend_dist.distributed.peers import PeerError, PeerLost, Peers

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How often a waiting rank looks whether another has failed, and how often it says that it waits.
LOOK_SECONDS = 1.0

PATIENCE_SECONDS = 60.0

# How long rank 0 keeps its store for ranks that are about to leave.
FAREWELL_SECONDS = 20.0


@dataclass
class Meetings:
    """The points at which ranks wait for each other. All ranks call each method together, in the same order."""

    peers: Peers = field(default_factory=Peers, repr=False)
    store: Any = field(default=None, repr=False)
    """Rank 0's; None: a single process."""
    timeout: float = 1800.0
    """Seconds after which a rank that does not answer is given up."""
    _count: int = field(default=0, repr=False)
    _left: bool = field(default=False, repr=False)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Rank 0 works, which may take long; the others wait and get its result. A single process works.

        If rank 0 fails, the others end silently: it tells the reason.
        """
        if self.store is None:
            return work()
        self._count += 1
        key = f"first/{self._count}"
        if self.peers.rank == 0:
            try:
                result = work()
            except BaseException:
                self.store.set(key, encode((False, None)))
                raise
            self.store.set(key, encode((True, result)))
            return result
        is_fine, result = decode(self._wait_for(key, lambda: f"rank 0 ({what})"))
        if not is_fine:
            raise PeerError
        return result

    def meet(self, what: str) -> None:
        """Go on when every rank is here; at once in a single process."""
        if self.store is None:
            return
        self._count += 1
        key = f"meet/{self._count}"
        self._arrive(key, self.peers.world_size)
        self._wait_for(f"{key}/all", lambda: f"{self._missing(key)} ({what})")

    def leave(self) -> None:
        """The run ends well. Rank 0 keeps its store until the others need it no more, or are gone.

        All ranks call this; nothing happens in a single process.
        """
        if self.store is None or self._left:
            return
        self._left = True  # once: who arrives twice would count for two
        with contextlib.suppress(RuntimeError):
            if self.peers.rank == 0:
                self.store.wait(["farewell/all"], timedelta(seconds=FAREWELL_SECONDS))
            else:
                self._arrive("farewell", self.peers.world_size - 1)

    def _arrive(self, key: str, expected: int) -> None:
        """Sign; the last one tells everybody, so that each rank waits for one key and not for one per rank."""
        self.store.set(f"{key}/{self.peers.rank}", b"")
        if self.store.add(f"{key}/count", 1) == expected:
            self.store.set(f"{key}/all", b"")

    def _missing(self, key: str) -> str:
        missing = [str(rank) for rank in range(self.peers.world_size) if not self.store.check([f"{key}/{rank}"])]
        return f"rank {', '.join(missing)}"

    def _wait_for(self, key: str, whom: Callable[[], str]) -> bytes:
        """What somebody puts at this key; `whom` names those who have not."""
        start = said = time.monotonic()
        while True:
            try:
                self.store.wait([key], timedelta(seconds=LOOK_SECONDS))
                value: bytes = self.store.get(key)
                return value
            except dist.DistStoreError as error:  # not there yet
                now = time.monotonic()
                stop_if_told()
                if self.peers.have_failed():
                    raise PeerError from error
                if now - start >= self.timeout:
                    raise PeerLost(f"waiting for {whom()} for {now - start:.0f} s") from error
                if now - said >= PATIENCE_SECONDS:
                    logger.info("still waiting for %s, %.0f of %.0f s", whom(), now - start, self.timeout)
                    said = now
            except RuntimeError as error:
                raise PeerLost("waiting for rank 0") from error  # its store is gone, and it with it


def store_of_rank_0(ranks: HostCollectives) -> TCPStore:
    """A store in the process of rank 0, which the other ranks join. All ranks call this, where there are several.

    It listens on one interface: the one of the rendezvous, or on loopback where all ranks are on one host.
    """
    address = _address_of_rank_0(ranks)
    listener = _listener(address) if ranks.is_first else None
    port = int(ranks.decide(0 if listener is None else listener.getsockname()[1]))
    if listener is None:
        return TCPStore(address, port, is_master=False)
    # The store has the socket from here on, and closes it.
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _address_of_rank_0(ranks: HostCollectives) -> str:
    """As the other hosts know it: many a host takes its own name for its loopback. All ranks call this."""
    if ranks.local_world_size == ranks.world_size:
        return "127.0.0.1"
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    known = [str(found) for found in ranks.gather(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])]
    return next((found for found in known if not ipaddress.ip_address(found.partition("%")[0]).is_loopback), known[0])


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError:  # behind a translation of addresses this host has none that the others know
        logger.warning("rank 0 has no interface with the address %s: its store listens on all of them", address)
        return socket.create_server(("", 0), family=family)
