"""Where a weight's gradient goes while a backward pass runs: straight into the vector, or to the rank that owns it.

`Direct` and `ByWeight` are for a rank that keeps what it computes: a single process, or a base model whose own
reduction (FSDP) leaves each rank its shard. `Direct` fills vectors; `ByWeight` hands each weight's gradient on when it
is complete, for who needs no vector. `Reduced` is for replicas of the base model, each with some of the rows: weights
are collected in buckets in the order in which a backward pass completes them, and a complete bucket is sent off while
the pass goes on. At no time does a rank hold a vector of size n: only the buckets in flight, and its own slices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.space import ParameterSpace, Slices, Weight

# Entries that travel together: enough to fill a network, few beside a large model. A larger weight is a bucket alone.
BUCKET = 2**24

IN_FLIGHT = 2

# (item number, kinds and factors, range of the rank's own vector, entries)
Deliver = Callable[[int, list[tuple[str, float]], slice, Tensor], None]


class Destination(ABC):
    """Takes the gradients of one backward pass after the other."""

    @abstractmethod
    def begin(self, into: list[tuple[str, float]]) -> None:
        """The next pass: what it computes is added, times a factor, to the vectors of these kinds."""

    @abstractmethod
    def ranges(self, weight: Weight, *, as_zeros: bool = False) -> Iterator[tuple[Tensor, bool, float]]:
        """Where to add a weight's entries: (place, is there something to keep?, factor).

        Without something to keep, the place holds anything (with `as_zeros`: zeros).
        """

    def add(self, weight: Weight, entries: Tensor, factor: float) -> None:
        """Add a weight's entries, which nobody else holds. What comes first overwrites: half the memory traffic of
        adding to zeros."""
        for place, kept, share in self.ranges(weight):
            if kept:
                place.add_(entries, alpha=share * factor)
            else:
                torch.mul(entries, share * factor, out=place)

    def expect(self, weight: Weight, contributions: int) -> None:  # noqa: B027, only some count
        """So many more contributions to this weight will follow in this pass."""

    def done(self, weight: Weight) -> None:  # noqa: B027
        """One contribution to a weight is complete."""

    @abstractmethod
    def end(self, *, had_rows: bool = True) -> None:
        """The pass is over: what got no gradient has a gradient of zero."""


class Direct(Destination):
    def __init__(self, vectors: dict[str, Tensor], weights: Sequence[Weight]) -> None:
        self.vectors, self.weights = vectors, weights
        self._into: list[tuple[str, float]] = []
        self._written: set[tuple[str, str]] = set()

    def begin(self, into: list[tuple[str, float]]) -> None:
        self._into = into

    def ranges(self, weight: Weight, *, as_zeros: bool = False) -> Iterator[tuple[Tensor, bool, float]]:
        for kind, factor in self._into:
            yield *self._range(kind, weight, as_zeros), factor

    def _range(self, kind: str, weight: Weight, as_zeros: bool) -> tuple[Tensor, bool]:
        entries, kept = self.vectors[kind][weight.offset : weight.stop], (kind, weight.name) in self._written
        self._written.add((kind, weight.name))
        if as_zeros and not kept:
            entries.zero_()
        return entries, kept

    def end(self, *, had_rows: bool = True) -> None:
        pass

    def complete(self) -> None:
        """After the last pass."""
        for kind in self.vectors:
            for weight in self.weights:
                self._range(kind, weight, as_zeros=True)


class ByWeight(Destination):
    """Hands on each weight's gradient of a pass and forgets it; a weight that gets none is not handed on.

    The largest weight's gradient is in memory, and those of embeddings and heads until the pass is over.
    """

    def __init__(self, deliver: Deliver, item: int, device: torch.device) -> None:
        self.deliver, self.item, self.device = deliver, item, device

    def begin(self, into: list[tuple[str, float]]) -> None:
        self._into = into
        self._open: dict[str, Tensor] = {}
        self._weights: dict[str, Weight] = {}
        self._hooked: set[str] = set()

    def ranges(self, weight: Weight, *, as_zeros: bool = False) -> Iterator[tuple[Tensor, bool, float]]:
        kept = weight.name in self._open
        if not kept:
            make = torch.zeros if as_zeros else torch.empty
            self._open[weight.name] = make(weight.num_selected, device=self.device)
        yield self._open[weight.name], kept, 1.0

    def add(self, weight: Weight, entries: Tensor, factor: float) -> None:
        assert factor == 1.0, "a scaled loss may overflow and is repeated: such items are handed out as vectors"
        if weight.name in self._open:
            super().add(weight, entries, factor)
        else:
            self._open[weight.name] = entries

    def expect(self, weight: Weight, contributions: int) -> None:  # noqa: ARG002
        """Some models use such a weight where no hook counts it, so it is complete at the end of the pass."""
        self._hooked.add(weight.name)

    def done(self, weight: Weight) -> None:
        self._weights[weight.name] = weight
        if weight.name not in self._hooked:
            self._hand_on(weight)

    def end(self, *, had_rows: bool = True) -> None:  # noqa: ARG002
        for name in list(self._open):
            self._hand_on(self._weights[name])

    def _hand_on(self, weight: Weight) -> None:
        self.deliver(self.item, self._into, slice(weight.offset, weight.stop), self._open.pop(weight.name))


@dataclass(frozen=True)
class Transfer:
    """What is sent at once: a range of a bucket, and which entries of it are whose."""

    where: slice
    sizes: tuple[int, ...]
    """Entries of each rank: slices ascend with the ranks, so these lie one behind the other."""
    own: tuple[slice, ...]
    """Where this rank's entries go in its own vector, in their order."""


@dataclass(frozen=True)
class Bucket:
    """Weights that are complete together, in ascending order."""

    weights: tuple[Weight, ...]

    @property
    def size(self) -> int:
        return sum(weight.num_selected for weight in self.weights)

    def places(self) -> Iterator[tuple[str, slice]]:
        offset = 0
        for weight in self.weights:
            yield weight.name, slice(offset, offset + weight.num_selected)
            offset += weight.num_selected

    def transfers(self, slices_by_rank: Sequence[Slices], rank: int, limit: int) -> Iterator[Transfer]:
        """The bucket in ranges of at most `limit` entries: a vocabulary's weight is too large to be sent at once."""
        places = [place.start for _, place in self.places()]
        positions = list(zip(places, (weight.offset for weight in self.weights), strict=True))
        for start in range(0, self.size, limit):
            stop = min(start + limit, self.size)
            runs = list(_runs(positions, self.size, start, stop))
            overlaps = [[where for run in runs for where in _overlap(slices, *run)] for slices in slices_by_rank]
            sizes = tuple(sum(where.stop - where.start for where in mine) for mine in overlaps)
            yield Transfer(slice(start, stop), sizes, tuple(overlaps[rank]))


def _runs(positions: list[tuple[int, int]], size: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Which ranges of the space lie at [start, stop) of a bucket whose weights begin at (place, position)."""
    ends = [place for place, _ in positions[1:]] + [size]
    for (place, position), end in zip(positions, ends, strict=True):
        low, high = max(place, start), min(end, stop)
        if low < high:
            yield position + low - place, position + high - place


def _overlap(slices: Slices, start: int, stop: int) -> Iterator[slice]:
    """Where a range of the space is in a rank's own vector."""
    for own, there in slices.range_pairs():
        low, high = max(there.start, start), min(there.stop, stop)
        if low < high:
            shift = own.start - there.start
            yield slice(low + shift, high + shift)


class Buckets:
    """The space in buckets, last weights first, as a backward pass completes them.

    Weights that got no gradient in the first pass (a pooler, experts that were not asked) are waited for by nobody:
    they travel at the end of a pass, whether or not they have one this time.
    """

    def __init__(
        self, space: ParameterSpace, slices_by_rank: Sequence[Slices], comm: Comm, size: int | None = None
    ) -> None:
        self.space, self.slices_by_rank, self.comm, self.size = space, slices_by_rank, comm, size or BUCKET
        self.everyone_all = all(slices.is_whole for slices in slices_by_rank)
        self.silent: frozenset[str] | None = None
        self._lay_out(frozenset())

    def learn(self, fired: set[str] | None) -> None:
        """After the first pass: which weights got a gradient on this rank (None: it had no rows).

        All ranks call this.
        """
        if self.silent is None:
            names = [weight.name for weight in self.space.active()]
            mine = [] if fired is None else [name for name in names if name not in fired]
            self.silent = frozenset(name for silent in self.comm.gather(mine) for name in silent)
            self._lay_out(self.silent)

    def _lay_out(self, silent: frozenset[str]) -> None:
        active = list(reversed(self.space.active()))
        waited_for = self._cut([weight for weight in active if weight.name not in silent])
        self.buckets = waited_for + self._cut([weight for weight in active if weight.name in silent])
        self.num_waited_for = len(waited_for)
        self.of = {weight.name: number for number, bucket in enumerate(self.buckets) for weight in bucket.weights}
        self.place = {name: where for bucket in self.buckets for name, where in bucket.places()}
        self._transfers: dict[tuple[int, int], list[Transfer]] = {}

    def transfers(self, number: int, limit: int) -> list[Transfer]:
        if (number, limit) not in self._transfers:
            bucket = self.buckets[number]
            self._transfers[number, limit] = list(bucket.transfers(self.slices_by_rank, self.comm.rank, limit))
        return self._transfers[number, limit]

    def _cut(self, descending: list[Weight]) -> list[Bucket]:
        buckets: list[Bucket] = []
        together: list[Weight] = []
        for weight in descending:
            if together and sum(other.num_selected for other in together) + weight.num_selected > self.size:
                buckets.append(Bucket(tuple(together[::-1])))
                together = []
            together.append(weight)
        if together:
            buckets.append(Bucket(tuple(together[::-1])))
        return buckets


class Reduced(Destination):
    """Adds up over the ranks what they compute for one item, or hands round what each computes for its own.

    All ranks make the same passes through it: a bucket travels when it is complete, at the latest at a pass's end.
    """

    def __init__(self, buckets: Buckets, deliver: Deliver, device: torch.device, *, num_items: int = 1) -> None:
        self.layout, self.comm, self.deliver, self.device = buckets, buckets.comm, deliver, device
        self.num_items = num_items
        """1: all ranks work on one item. More: rank r on item r."""

    def begin(self, into: list[tuple[str, float]]) -> None:
        self._into = into
        self._buffers: dict[int, Tensor] = {}
        self._written: set[str] = set()
        self._waiting = [{weight.name: 1 for weight in bucket.weights} for bucket in self.layout.buckets]
        self._next = 0
        self._in_flight: deque[tuple[Transfer, Tensor, Any]] = deque()

    def ranges(self, weight: Weight, *, as_zeros: bool = False) -> Iterator[tuple[Tensor, bool, float]]:
        number = self.layout.of[weight.name]
        assert number >= self._next, f"{weight.name} got a gradient after its bucket was sent"
        if number not in self._buffers:
            self._buffers[number] = torch.empty(self.layout.buckets[number].size, device=self.device)
        place, kept = self._buffers[number][self.layout.place[weight.name]], weight.name in self._written
        self._written.add(weight.name)
        if as_zeros and not kept:
            place.zero_()
        yield place, kept, 1.0

    def expect(self, weight: Weight, contributions: int) -> None:
        self._waiting[self.layout.of[weight.name]][weight.name] = contributions

    def done(self, weight: Weight) -> None:
        waiting = self._waiting[self.layout.of[weight.name]]
        waiting[weight.name] -= 1
        if not waiting[weight.name]:
            del waiting[weight.name]
        while self._next < self.layout.num_waited_for and not self._waiting[self._next]:
            self._send()

    def end(self, *, had_rows: bool = True) -> None:
        while self._next < len(self.layout.buckets):
            self._send()
        while self._in_flight:
            self._store_received()
        self.layout.learn(self._written if had_rows else None)

    def _send(self) -> None:
        """Always in the same order, whatever a rank has computed: collectives meet in their order."""
        number, bucket = self._next, self.layout.buckets[self._next]
        buffer = self._buffers.pop(number, None)
        self._next += 1
        if buffer is None:
            buffer = torch.zeros(bucket.size, device=self.device)
        else:
            for name, where in bucket.places():
                if name not in self._written:
                    buffer[where].zero_()
        # Each rank hands round an item of its own: what arrives from all of them together must not be larger.
        limit = self.layout.size if self.num_items == 1 else max(1, self.layout.size // self.comm.world_size)
        for transfer in self.layout.transfers(number, limit):
            self._in_flight.append((transfer, *self._dispatch(buffer[transfer.where], transfer.sizes)))
            if len(self._in_flight) > IN_FLIGHT:
                self._store_received()

    def _dispatch(self, entries: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Any]:
        """All ranks call this, in the order of the buckets."""
        if self.layout.everyone_all:
            return self.comm.all_reduce(entries)
        if self.num_items == 1:
            return self.comm.reduce_scatter(entries, sizes)
        return self.comm.exchange(entries, sizes)

    def _store_received(self) -> None:
        transfer, received, handle = self._in_flight.popleft()
        with self.comm.exchanging("gradients"):
            handle.wait()
        rows = received.view(1, -1) if self.num_items == 1 else received[: self.num_items]
        for item, entries in enumerate(rows):
            offset = 0
            for where in transfer.own:
                self.deliver(item, self._into, where, entries[offset : offset + where.stop - where.start])
                offset += where.stop - where.start
