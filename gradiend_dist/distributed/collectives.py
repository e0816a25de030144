"""The collectives: numbers of a step between devices, small things between hosts.

All ranks call each method together and in the same order, except `send` and `receive`. Where a method says nothing of
a single process, it is never called there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradiend_dist.distributed.clock import Clock
from gradiend_dist.distributed.messages import check_length, decode, encode
from gradiend_dist.distributed.peers import PeerLost
from gradiend_dist.space import Slices

T = TypeVar("T")


@dataclass
class Ranks:
    """This process's place among the ranks. No communication."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Ranks on this host: they share its memory."""
    group: Any = None
    """Process group of the devices (NCCL, or gloo on CPUs); None: the default one."""
    control: Any = None
    """Gloo group of the hosts; None: the default one is of gloo."""
    clock: Clock = field(default_factory=Clock, repr=False)
    """Counts the time that collectives take; the training loop puts its own here."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @contextlib.contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """The time counts as communication; a collective that fails is a rank that is gone, not a traceback."""
        try:
            with self.clock.spending("communication"):
                yield
        except RuntimeError as error:  # what gloo and NCCL raise for a lost peer
            raise PeerLost(f"exchanging {what}") from error


class DeviceCollectives(Ranks):
    """Numbers of a step, on the devices' own backend. Large ones return a handle: work goes on while they travel."""

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; a few numbers. In a single process they are the sum."""
        if not self.is_alone:
            with self.exchanging("a sum"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce(self, contribution: Tensor) -> tuple[Tensor, Any]:
        """The sum of everyone's contribution, in place, once the handle was waited for."""
        with self.exchanging("gradients"):
            return contribution, dist.all_reduce(contribution, group=self.group, async_op=True)

    def reduce_scatter(self, contribution: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """Rank r gets the sum of everyone's r-th piece; `sizes` may differ and may be 0."""
        mine = contribution.new_empty(sizes[self.rank])
        pieces = list(contribution.split(list(sizes)))
        with self.exchanging("gradients"):
            return mine, dist.reduce_scatter(mine, pieces, group=self.group, async_op=True)

    def exchange(self, contribution: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """Rank r gets everyone's r-th piece, one below the other: [world_size, sizes[r]]."""
        mine = contribution.new_empty(self.world_size * sizes[self.rank])
        receive = [sizes[self.rank]] * self.world_size
        with self.exchanging("gradients"):
            handle = dist.all_to_all_single(mine, contribution, receive, list(sizes), group=self.group, async_op=True)
        return mine.view(self.world_size, sizes[self.rank]), handle

    def gathered(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Everyone's piece of one dimension, one behind the other, on every rank; `sizes` may differ and may be 0."""
        largest = max(sizes)
        padded, received = mine.new_zeros(largest), mine.new_empty(self.world_size * largest)
        padded[: sizes[self.rank]] = mine
        with self.exchanging("weights of the encoder"):
            dist.all_gather_into_tensor(received, padded, group=self.group)
        if all(size == largest for size in sizes):
            return received
        return torch.cat([piece[:size] for piece, size in zip(received.split(largest), sizes, strict=True)])

    def redistribute(self, mine: Tensor, before: Sequence[Slices], after: Sequence[Slices]) -> Tensor:
        """The same vector cut anew: one range for each rank, in the order of ranks, before and after."""

        def shared(a: Slices, b: Slices) -> int:
            (a_start, a_stop), (b_start, b_stop) = a.ranges[0], b.ranges[0]
            return max(0, min(a_stop, b_stop) - max(a_start, b_start))

        sent = [shared(before[self.rank], slices) for slices in after]
        received = [shared(slices, after[self.rank]) for slices in before]
        cut_anew = mine.new_empty(sum(received))
        with self.exchanging("gradients"):
            dist.all_to_all_single(cut_anew, mine.contiguous(), received, sent, group=self.group)
        return cut_anew


class HostCollectives(Ranks):
    """Decisions and small host tensors, on a gloo group of the hosts: no device waits for them."""

    def decide(self, value: T) -> T:
        """What rank 0 says; in a single process what it says itself."""
        if self.is_alone:
            return value
        message = encode(value) if self.is_first else b""
        with self.exchanging("rank 0's decision"):
            length = torch.tensor([len(message)])
            dist.broadcast(length, src=0, group=self.control)
            sent = _as_tensor(message, check_length(int(length)))
            dist.broadcast(sent, src=0, group=self.control)
        decided: T = value if self.is_first else decode(sent.numpy().tobytes())
        return decided

    def gather(self, value: T) -> list[T]:
        """What every rank says, on every rank: small things. A list of one in a single process."""
        if self.is_alone:
            return [value]
        message = encode(value)
        with self.exchanging("what every rank says"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(lengths, torch.tensor([len(message)]), group=self.control)
            sizes = [check_length(int(length)) for length in lengths]
            said = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
            dist.all_gather(said, _as_tensor(message, max(sizes)), group=self.control)
        return [decode(each[:size].numpy().tobytes()) for each, size in zip(said, sizes, strict=True)]

    def largest(self, *values: float) -> list[float]:
        """The largest of every rank's first value, second value, ...; in a single process the values."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def smallest(self, *values: float) -> list[float]:
        """The smallest of every rank's first value, second value, ...; in a single process the values."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def all_agree(self, fine: bool) -> bool:
        """Is it so on every rank? In a single process: is it so?"""
        return self.smallest(float(fine))[0] == 1.0

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        if self.is_alone:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with self.exchanging("a decision"):
            dist.all_reduce(numbers, op=op, group=self.control)
        return numbers.tolist()

    def total_on_host(self, counts: Tensor) -> Tensor:
        """The sum over all ranks of a small host tensor, in place. In a single process it is the sum."""
        if not self.is_alone:
            with self.exchanging("counts"):
                dist.all_reduce(counts, group=self.control)
        return counts

    def concatenate(self, mine: Tensor) -> Tensor:
        """Everyone's host tensor of one dimension, one after the other in the order of ranks, on every rank."""
        if self.is_alone:
            return mine
        sizes = [int(size) for size in self.gather(mine.numel())]
        received = [mine.new_empty(size) for size in sizes]
        with self.exchanging("positions"):
            for source, piece in enumerate(received):
                if source == self.rank:
                    piece.copy_(mine)
                if piece.numel():
                    dist.broadcast(piece, src=source, group=self.control)
        return torch.cat(received)

    def send(self, mine: Tensor, target: int) -> None:
        """Hand a host tensor to rank `target`, which calls `receive`; the others call nothing."""
        with self.exchanging(f"a part of a file with rank {target}"):
            dist.send(mine.contiguous(), dst=target, group=self.control)

    def receive(self, into: Tensor, source: int) -> Tensor:
        """What rank `source` hands over with `send`."""
        with self.exchanging(f"rank {source}'s part of a file"):
            dist.recv(into, src=source, group=self.control)
        return into


def _as_tensor(message: bytes, length: int) -> Tensor:
    """The message's bytes, and after them what makes all messages equally long."""
    padded = torch.zeros(length, dtype=torch.uint8)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return padded
