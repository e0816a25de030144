"""Frozen base model -> gradient vectors, each computed once.

An item is a few rows of one direction; its factual, alternative and diff gradients are vectors over the space.
`BaseGradients` computes them, `GradientStore` keeps what will be used again: the base is frozen, so the same item has
the same gradients in every epoch, for every seed and at every evaluation.

Rows that share their input are read once, then every wanted gradient is one backward pass; `collector.py` takes each
weight's gradient as soon as it is complete, and `buckets.py` brings it to the rank that owns it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import to_device
from gradiend_dist.gradients.buckets import Buckets, ByWeight, Deliver, Destination, Direct, Reduced
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch, ClozeRow, LogitsAt, Objective
from gradiend_dist.gradients.collector import GradientCollector
from gradiend_dist.gradients.items import Item
from gradiend_dist.space import ParameterSpace, Slices

logger = logging.getLogger(__name__)

# diff = factual - alternative, as weights of the two losses.
LOSS_WEIGHTS = {"factual": (1.0, 0.0), "alternative": (0.0, 1.0), "diff": (1.0, -1.0)}

# float16 loses gradients below 6e-8; losses are scaled up by this and halved until everything is finite.
FP16_SCALE = 2.0**14


@dataclass
class Pass:
    """One backward pass: which mixture of the two losses, added into which vectors."""

    factual: float
    alternative: float
    into: list[tuple[str, float]]


class BaseGradients:
    """Computes the gradients of items over one parameter space, each rank some of the rows, for its slices of it.

    The base model is whole on every rank, or, with `shards`, cut by FSDP: each rank then holds this range of each
    weight's entries and gets the gradient of just that range.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        objective: Objective,
        space: ParameterSpace,
        *,
        micro_batch_size: int | None = None,
        autocast: torch.dtype | None = None,
        comm: Comm | None = None,
        slices_by_rank: Sequence[Slices] | None = None,
        shards: dict[str, tuple[int, int]] | None = None,
        shards_by_rank: Sequence[dict[str, tuple[int, int]]] = (),
    ) -> None:
        self.model = model
        self.objective = objective
        self.space = space
        self.micro_batch_size = micro_batch_size
        self.autocast = autocast
        self.comm = comm or Comm()
        self.slices_by_rank = slices_by_rank or [Slices.whole(space.size)]
        self.slices = self.slices_by_rank[self.comm.rank]
        self.is_sharded, self.shards_by_rank = shards is not None, shards_by_rank
        first = next(model.parameters())
        self.device = first.device
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.logits_at = LogitsAt(model)
        self._scale = FP16_SCALE if autocast is torch.float16 else 1.0
        mapped = space.active() if shards is None else space.weights_of_shards(shards)
        self.collector = GradientCollector(model, mapped, is_sharded=self.is_sharded)
        self.weights = self.collector.weights
        self._buckets: Buckets | None = None
        # Of shards the weights are there in a module's call alone.
        embeddings: set[nn.Module] = set() if self.is_sharded else {model.get_input_embeddings()}  # type: ignore[operator]
        self.always_moving = embeddings
        """Of forward mode: modules whose weights others use without calling them; of the embeddings some heads do."""
        self.rows_in_shards: bool | None = None
        """Does forward mode give the encodings of rows over shards? None: nobody has looked."""

    @property
    def largest_slices(self) -> int:
        """Entries of the rank that has most: what all ranks count with, so that they decide alike."""
        return max(slices.size for slices in self.slices_by_rank)

    @property
    def bytes_per_vector(self) -> int:
        """Memory of one gradient on the rank that has most of it."""
        return vector_bytes(self.largest_slices)

    def compute(self, item: Item, kinds: Sequence[str], *, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """This rank's slices of the gradients of the wanted kinds; `out` may hold vectors to overwrite.

        All ranks call this, with the same item: its rows are split over them.
        """
        vectors = out if out is not None else {kind: self.empty() for kind in kinds}
        rows = self._rows_by_rank(item)
        while True:
            if self.comm.is_alone or self.is_sharded:
                direct = Direct(vectors, [weight for weight, _, _ in self.weights])
                self._run_passes(rows, item, list(vectors), direct)
                direct.complete()
            else:
                reduced = Reduced(self.buckets, AddToVectors([vectors]), self.device)
                self._run_passes(rows, item, list(vectors), reduced)
            if self._is_finite(vectors.values(), item):
                return vectors

    def compute_round(self, items: Sequence[Item], kinds: Sequence[str], deliver: Deliver) -> None:
        """The gradients of up to as many items as there are ranks, each rank its own; all slices to their owners.

        All ranks call this, with the same items. What arrives is delivered piece by piece: no rank holds the vectors.
        """
        assert self.in_rounds and len(items) <= self.comm.world_size
        rows = [items[rank].rows if rank < len(items) else () for rank in range(self.comm.world_size)]
        mine = items[min(self.comm.rank, len(items) - 1)]
        self._run_passes(rows, mine, list(kinds), Reduced(self.buckets, deliver, self.device, num_items=len(items)))

    def hand_out(
        self,
        items: Sequence[Item],
        kinds: Sequence[str],
        deliver: Deliver,
        *,
        complete: bool = False,
        bar: str | None = None,
    ) -> None:
        """The gradients of these items piece by piece, for who needs no vectors; what is not delivered is zero.

        An entry may come in several parts that add up, one for each pass of an item; with `complete` it comes once.
        `bar` is what a progress bar says. All ranks call this, with the same items; each is handed its own slices.
        """
        kinds = list(dict.fromkeys(kinds))
        by_vector = self.autocast is torch.float16 or (
            complete and not all(self.takes_one_pass(item, kinds) for item in items)
        )
        with progress_over(len(items), bar, self.comm) as progress:
            if by_vector:  # a pass may have to be repeated, or is not all of an item
                self._hand_out_vectors(items, kinds, deliver, progress)
            elif self.in_rounds:
                for start in range(0, len(items), self.comm.world_size):
                    together = items[start : start + self.comm.world_size]
                    self.compute_round(together, kinds, _numbered(deliver, start))
                    progress.update(len(together))
            else:
                for number, item in enumerate(items):
                    destination: Destination = ByWeight(deliver, number, self.device)
                    if not (self.comm.is_alone or self.is_sharded):
                        destination = Reduced(self.buckets, _numbered(deliver, number), self.device)
                    self._run_passes(self._rows_by_rank(item), item, kinds, destination)
                    progress.update()

    def _hand_out_vectors(
        self, items: Sequence[Item], kinds: Sequence[str], deliver: Deliver, progress: tqdm[Any]
    ) -> None:
        """All ranks call this."""
        vectors = {kind: self.empty() for kind in kinds}
        for number, item in enumerate(items):
            self.compute(item, kinds, out=vectors)
            progress.update()
            for weight, _, _ in self.weights if self.comm.is_alone or self.is_sharded else ():
                where = slice(weight.offset, weight.stop)
                for kind in kinds:
                    deliver(number, [(kind, 1.0)], where, vectors[kind][where])
            if not (self.comm.is_alone or self.is_sharded):
                for kind in kinds:
                    deliver(number, [(kind, 1.0)], slice(0, self.slices.size), vectors[kind])

    def takes_one_pass(self, item: Item, kinds: Sequence[str]) -> bool:
        """Does one backward pass give all of each kind? Where the rows of ranks do not decide, these are all rows."""
        of_a_rank = len(item.rows) if self.in_rounds else -(-len(item.rows) // self.comm.world_size)
        if self.micro_batch_size is not None and of_a_rank > self.micro_batch_size:
            return False
        passes = [
            kind for together, _ in plan_passes(item.rows, list(kinds)) for step in together for kind, _ in step.into
        ]
        return len(passes) == len(set(passes))

    def _rows_by_rank(self, item: Item) -> list[tuple[ClozeRow, ...]]:
        return [item.rows[rank :: self.comm.world_size] for rank in range(self.comm.world_size)]

    @property
    def in_rounds(self) -> bool:
        """Can each rank compute an item of its own and hand it out? The same on all ranks; no communication.

        Not where a pass needs all ranks, where it may be repeated, or where every rank wants all of every item.
        """
        if self.comm.is_alone or self.is_sharded or self.slices.is_whole:
            return False
        return self.autocast is not torch.float16

    @property
    def buckets(self) -> Buckets:
        if self._buckets is None:
            self._buckets = Buckets(self.space, self.slices_by_rank, self.comm)
        return self._buckets

    def _is_finite(self, vectors: Iterable[Tensor], item: Item) -> bool:
        """Under float16: is it, on all ranks? If not, the next try has a smaller scale. All ranks call this."""
        if self._scale == 1.0 or self.comm.all_agree(all(bool(vector.isfinite().all()) for vector in vectors)):
            return True
        self._scale /= 2.0
        logger.info("float16 overflow in %s: loss scale is now %g", item.name or "an item", self._scale)
        return False

    def empty(self) -> Tensor:
        """A vector of this rank's slices, unset. No communication."""
        return torch.empty(self.slices.size, dtype=torch.float32, device=self.device)

    def _run_passes(
        self, rows: Sequence[tuple[ClozeRow, ...]], item: Item, kinds: list[str], destination: Destination
    ) -> None:
        """Run all passes; `rows` are those of each rank, of which this one reads its own. All ranks call this.

        Which passes there are depends on the rows of all ranks, so that all ranks make the same ones.
        """
        size = self.micro_batch_size or max(len(mine) for mine in rows)
        with torch.enable_grad(), self.collector.collecting(destination, self._scale):
            for start in range(0, max(len(mine) for mine in rows), size):
                now = [mine[start : start + size] for mine in rows]
                for passes, only in plan_passes([row for mine in now for row in mine], kinds):
                    self._forward_backward(now[self.comm.rank], item, passes, only, destination)

    def _forward_backward(
        self, rows: tuple[ClozeRow, ...], item: Item, passes: list[Pass], only: str | None, destination: Destination
    ) -> None:
        """One forward pass, then one backward pass for each of `passes`; a rank without rows adds nothing."""
        weight = 1.0
        if not rows and self.is_sharded:
            rows, weight = item.rows[:1], 0.0  # a sharded base needs every rank in every pass
        if not rows:
            for step in passes:
                destination.begin(step.into)
                destination.end(had_rows=False)
            return
        self.collector.begin_forward()
        read = [row.alternative if only == "alternative" else row.factual for row in rows]
        batch = ClozeBatch.of(read, self.pad_id, self.device)
        with self.precision():
            logits = self.logits_at(batch)
        log_probability = F.log_softmax(logits.float(), dim=-1)
        losses = {
            side: self._loss(log_probability, rows, item, side)
            for side in ("factual", "alternative")
            if only in (None, side)
        }
        for number, step in enumerate(passes):
            loss = sum(
                share * losses[side]
                for side, share in (("factual", step.factual), ("alternative", step.alternative))
                if share
            )
            assert isinstance(loss, Tensor), "a pass mixes at least one loss"
            self.collector.begin_backward(step.into)
            (loss * (self._scale * weight)).backward(retain_graph=number + 1 < len(passes))
            destination.end()

    def _loss(self, log_probability: Tensor, rows: tuple[ClozeRow, ...], item: Item, side: str) -> Tensor:
        """Mean cross-entropy over all places of the item (or, per row, over its rows)."""
        clozes: list[Cloze] = [getattr(row, side) for row in rows]
        labels = to_device([label for cloze in clozes for label in cloze.labels], self.device)
        picked = -log_probability[torch.arange(len(labels), device=self.device), labels]
        if item.per_row_mean:
            weights = [1.0 / (len(c.labels) * len(item.rows)) for c in clozes for _ in c.labels]
            return (picked * to_device(weights, self.device)).sum()
        total = sum(len(getattr(row, side).labels) for row in item.rows)
        return picked.sum() / total

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def vector_bytes(num_entries: int) -> int:
    """Gradients are kept in float32."""
    return 4 * num_entries


def plan_passes(rows: Sequence[ClozeRow], kinds: list[str]) -> Iterator[tuple[list[Pass], str | None]]:
    """The backward passes over these rows, by forward pass: (passes, the side that is read if it is not the same)."""
    if all(row.is_identity for row in rows):
        kinds = [kind for kind in kinds if kind != "diff"]  # exactly zero
    if not kinds:
        return
    if all(row.shares_input for row in rows):
        yield [Pass(*LOSS_WEIGHTS[kind], into=[(kind, 1.0)]) for kind in kinds], None
        return
    for side, index in (("factual", 0), ("alternative", 1)):
        into = [(kind, LOSS_WEIGHTS[kind][index]) for kind in kinds if LOSS_WEIGHTS[kind][index]]
        if into:
            yield [Pass(1.0 - index, float(index), into)], side


def progress_over(count: int, words: str | None, comm: Comm) -> tqdm[Any]:
    """A bar over so many items, with the time that is left, on rank 0's terminal; hidden without words."""
    hidden = None if words and comm.is_first else True
    return tqdm(total=count, desc=words, unit="item", leave=False, disable=hidden)


def _numbered(deliver: Deliver, first: int) -> Deliver:
    """The same for items that begin at `first`."""

    def shifted(item: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        deliver(first + item, into, where, entries)

    return shifted


class AddToVectors:
    """Puts what arrives from other ranks into the vectors of the items."""

    def __init__(self, vectors: Sequence[dict[str, Tensor]]) -> None:
        self.vectors = vectors
        for kinds in vectors:
            for vector in kinds.values():
                vector.zero_()

    def __call__(self, item: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        for kind, factor in into:
            self.vectors[item][kind][where].add_(entries, alpha=factor)
