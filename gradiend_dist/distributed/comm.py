"""The few collectives, and how ranks wait for each other and end together.

Three kinds of traffic, each on the way that suits it:

    numbers of a step    `total`, `reduce_scatter`, `exchange`: on the devices' own backend (NCCL, or gloo on CPUs)
    decisions            `decide`, `largest`, `smallest`, `gather`: a gloo group of the hosts, not a device's stream
    waiting for rank 0   `first`, `meet`: on a store that rank 0 keeps, with a timeout of its own and a message
                         that names what is being waited for; no rank sits in a collective while rank 0 copies files

The launcher keeps a store too. It outlives every rank, so it tells who has failed; but a launcher that a signal ends
takes it along, while the ranks still have to save their state together. So they meet on rank 0's, which leaves last
(`farewell`).

A single process has a `Comm` as well, and every method is then the identity.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gradiend_dist.distributed.clock import Clock
from gradiend_dist.errors import UserError
from gradiend_dist.space import Slices

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a rank that fails waits for word from the others before it says whom it lost.
LAST_WORDS_SECONDS = 3.0

# How often a rank that waits for rank 0 looks whether it has failed, and how often it says that it waits.
LOOK_SECONDS = 1.0

PATIENCE_SECONDS = 60.0

# How long rank 0 keeps its store for ranks that are about to leave.
FAREWELL_SECONDS = 20.0

VISIBLE_SECONDS = 5.0


class PeerError(Exception):
    """Another rank has failed and has said why: this one ends without a word."""


class PeerLost(Exception):
    """A collective failed: some rank is gone or does not answer."""


@dataclass
class Comm:
    """This process's place among the ranks."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this host: they share its memory."""
    timeout: float = 1800.0
    """Seconds after which a rank that does not answer is given up."""
    group: Any = None
    """Process group of the devices; None: the default one."""
    control: Any = None
    """Gloo group of the hosts."""
    store: Any = None
    """The launcher's: who has failed."""
    meetings: Any = None
    """Rank 0's: who is where."""
    clock: Clock = field(default_factory=Clock, repr=False)
    """Counts the time that collectives take; the training loop puts its own here."""
    _count: int = field(default=0, repr=False)
    _left: bool = field(default=False, repr=False)
    _unshared: set[Path] = field(default_factory=set, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @classmethod
    def join(cls, timeout: float = 1800.0) -> Comm:
        """The ranks of the process group that Accelerate or torchrun has made."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(timeout=timeout)
        control = None
        if dist.get_backend() != "gloo":
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        joined = cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            timeout=timeout,
            control=control,
            store=PrefixStore("gradiend_dist", _get_default_store()),
            meetings=_store_of_rank_0(control),
        )
        atexit.register(joined.farewell)  # also where a script of a user's simply ends
        return joined

    # --- numbers of a step

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; a few numbers."""
        if not self.is_alone:
            with self.telling("a sum"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce(self, contribution: Tensor) -> tuple[Tensor, Any]:
        """The sum of everyone's contribution, in place, once the handle was waited for."""
        with self.telling("gradients"):
            return contribution, dist.all_reduce(contribution, group=self.group, async_op=True)

    def reduce_scatter(self, contribution: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """Rank r gets the sum of everyone's r-th piece; `sizes` may differ and may be 0."""
        mine = contribution.new_empty(sizes[self.rank])
        pieces = list(contribution.split(list(sizes)))
        with self.telling("gradients"):
            return mine, dist.reduce_scatter(mine, pieces, group=self.group, async_op=True)

    def exchange(self, contribution: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """Rank r gets everyone's r-th piece, one below the other: [world_size, sizes[r]]."""
        mine = contribution.new_empty(self.world_size * sizes[self.rank])
        receive = [sizes[self.rank]] * self.world_size
        with self.telling("gradients"):
            handle = dist.all_to_all_single(mine, contribution, receive, list(sizes), group=self.group, async_op=True)
        return mine.view(self.world_size, sizes[self.rank]), handle

    def redistribute(self, mine: Tensor, before: Sequence[Slices], after: Sequence[Slices]) -> Tensor:
        """The same vector cut anew: one range for each rank, in the order of ranks, before and after."""

        def shared(a: Slices, b: Slices) -> int:
            (a_start, a_stop), (b_start, b_stop) = a.ranges[0], b.ranges[0]
            return max(0, min(a_stop, b_stop) - max(a_start, b_start))

        sent = [shared(before[self.rank], slices) for slices in after]
        received = [shared(slices, after[self.rank]) for slices in before]
        found = mine.new_empty(sum(received))
        with self.telling("gradients"):
            dist.all_to_all_single(found, mine.contiguous(), received, sent, group=self.group)
        return found

    # --- decisions, on the host

    def largest(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MIN)

    def all_agree(self, fine: bool) -> bool:
        return self.smallest(float(fine))[0] == 1.0

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        if self.is_alone:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with self.telling("a decision"):
            dist.all_reduce(numbers, op=op, group=self.control)
        return numbers.tolist()

    def total_on_host(self, counts: Tensor) -> Tensor:
        """The sum over all ranks of a small host tensor, in place."""
        if not self.is_alone:
            with self.telling("counts"):
                dist.all_reduce(counts, group=self.control)
        return counts

    def decide(self, value: T) -> T:
        """What rank 0 says."""
        if self.is_alone:
            return value
        box = [value]
        with self.telling("rank 0's decision"):
            dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """What every rank says, on every rank: small things."""
        if self.is_alone:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self.telling("what every rank says"):
            dist.all_gather_object(box, value, group=self.control)
        return box

    def concatenate(self, mine: Tensor) -> Tensor:
        """Everyone's host tensor of one dimension, one after the other in the order of ranks."""
        if self.is_alone:
            return mine
        sizes = [int(size) for size in self.gather(mine.numel())]
        received = [mine.new_empty(size) for size in sizes]
        with self.telling("positions"):
            for source, piece in enumerate(received):
                if source == self.rank:
                    piece.copy_(mine)
                if piece.numel():
                    dist.broadcast(piece, src=source, group=self.control)
        return torch.cat(received)

    def send(self, mine: Tensor, target: int) -> None:
        """Hand a host tensor to another rank, which calls `receive`."""
        with self.telling(f"a part of a file with rank {target}"):
            dist.send(mine.contiguous(), dst=target, group=self.control)

    def receive(self, into: Tensor, source: int) -> Tensor:
        with self.telling(f"rank {source}'s part of a file"):
            dist.recv(into, src=source, group=self.control)
        return into

    def together(self, check: Callable[[], T]) -> T:
        """Every rank checks; if any finds something wrong, one tells it and all end."""
        try:
            found, message = check(), None
        except UserError as error:
            found, message = None, str(error)
        messages = self.gather(message)
        wrong = [rank for rank, told in enumerate(messages) if told is not None]
        if not wrong:
            return found  # type: ignore[return-value]
        if self.rank != wrong[0]:
            raise PeerError
        raise UserError(messages[self.rank] if self.is_first else f"rank {self.rank}: {messages[self.rank]}")

    # --- files

    def shares(self, directory: Path) -> bool:
        """Do all ranks see this directory of rank 0's? They must find a word in it that was not there before."""
        if self.is_alone:
            return True
        word = self.decide(secrets.token_hex(8))
        token = directory / f".{word}"
        self.first(f"marking {directory}", token.touch)
        seen = self.everyone_sees(token)
        if self.is_first:
            token.unlink()
        return seen

    def everyone_sees(self, path: Path) -> bool:
        """Is this there for all ranks? A network file system may take seconds to show what another host has written."""
        if not self.is_alone:
            patience = 0.0 if path.parent in self._unshared else VISIBLE_SECONDS
            deadline = time.monotonic() + patience
            while not path.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    os.listdir(path.parent)  # makes the host ask the server again
                time.sleep(0.1)
        seen = self.all_agree(path.exists())
        if not seen:
            self._unshared.add(path.parent)
        return seen

    # --- waiting for rank 0

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Rank 0 works, which may take long; the others wait on the store and get its result.

        If rank 0 fails, the others end silently: it tells the reason.
        """
        if self.is_alone:
            return work()
        self._count += 1
        key = f"first/{self._count}"
        if self.is_first:
            try:
                result = work()
            except BaseException:
                self.meetings.set(key, pickle.dumps((False, None)))
                raise
            self.meetings.set(key, pickle.dumps((True, result)))
            return result
        fine, found = pickle.loads(self._await(key, lambda: f"rank 0 ({what})"))
        if not fine:
            raise PeerError
        return found

    def meet(self, what: str) -> None:
        """Go on when every rank is here."""
        if self.is_alone:
            return
        self._count += 1
        key = f"meet/{self._count}"
        self._arrive(key, self.world_size)
        self._await(f"{key}/all", lambda: f"{self._missing(key)} ({what})")

    def farewell(self) -> None:
        """The run ends well on every rank. Rank 0 keeps its store until the others need it no more, or are gone."""
        if self.is_alone or self._left:
            return
        self._left = True  # said once: who says it twice would count for two
        with contextlib.suppress(RuntimeError):
            if self.is_first:
                self.meetings.wait(["farewell/all"], timedelta(seconds=FAREWELL_SECONDS))
            else:
                self._arrive("farewell", self.world_size - 1)

    def _arrive(self, key: str, expected: int) -> None:
        """Sign; the last one tells everybody, so that each rank waits for one key and not for one per rank."""
        self.meetings.set(f"{key}/{self.rank}", b"")
        if self.meetings.add(f"{key}/count", 1) == expected:
            self.meetings.set(f"{key}/all", b"")

    def _missing(self, key: str) -> str:
        missing = [str(rank) for rank in range(self.world_size) if not self.meetings.check([f"{key}/{rank}"])]
        return f"rank {', '.join(missing)}"

    def _await(self, key: str, whom: Callable[[], str]) -> bytes:
        start = said = time.monotonic()
        while True:
            try:
                self.meetings.wait([key], timedelta(seconds=LOOK_SECONDS))
                found: bytes = self.meetings.get(key)
                return found
            except dist.DistStoreError as error:  # not there yet
                now = time.monotonic()
                if self._peer_failed():
                    raise PeerError from error
                if now - start >= self.timeout:
                    raise PeerLost(f"waiting for {whom()} for {now - start:.0f} s") from error
                if now - said >= PATIENCE_SECONDS:
                    logger.info("still waiting for %s, %.0f of %.0f s", whom(), now - start, self.timeout)
                    said = now
            except RuntimeError as error:
                raise PeerLost("waiting for rank 0") from error  # its store is gone, and it with it

    # --- ending together

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """A collective that fails is a rank that is gone, not a traceback."""
        try:
            with self.clock.spending("communication"):
                yield
        except RuntimeError as error:  # what gloo and NCCL raise for a lost peer
            raise PeerLost(f"exchanging {what}") from error

    def speaks(self) -> bool:
        """Is this the rank that tells why the run ends? The first one that asks is."""
        if self.is_alone:
            return True
        try:
            return bool(self.store.add("failed", 1) == 1)
        except RuntimeError:  # the store ended with the launcher
            return self.is_first

    def _peer_failed(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self.store.check(["failed"]))
        return False

    def sign(self) -> None:
        """This rank is alive, and has heard that another is not."""
        if not self.is_alone:
            with contextlib.suppress(RuntimeError):  # the launcher and its store are gone
                self.store.set(f"alive/{self.rank}", b"")

    def last_words(self, lost: PeerLost) -> str | None:
        """What to say of a lost peer: None where another rank says it.

        Every rank that is alive and hears of it signs; after a moment the lowest of them names those who did not.
        """
        try:
            self.store.set(f"alive/{self.rank}", b"")
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while time.monotonic() < deadline:
                if self._peer_failed():
                    return None
                time.sleep(0.1)
            alive = [rank for rank in range(self.world_size) if self.store.check([f"alive/{rank}"])]
        except RuntimeError:
            return f"the launcher and its store are gone ({lost})" if self.is_first else None
        if alive and alive[0] != self.rank:
            return None
        silent = [str(rank) for rank in range(self.world_size) if rank not in alive]
        whom = f"rank {', '.join(silent)} is gone or does not answer" if silent else "the ranks lost each other"
        return f"{whom} ({lost}): see its log; the same command goes on from the last saved state"


def _store_of_rank_0(control: Any) -> TCPStore:
    """A store in the process of rank 0, which the other ranks join."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    own = TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port = [None if own is None else own.port]
    dist.broadcast_object_list(port, src=0, group=control, device=torch.device("cpu"))
    return own or TCPStore(host, port[0] or 0, is_master=False)


def is_lost_peer(error: RuntimeError) -> bool:
    """Did a collective of FSDP's or DeepSpeed's fail because a rank is gone? They raise what gloo and NCCL raise."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))
