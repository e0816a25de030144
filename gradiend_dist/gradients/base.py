"""Frozen base model -> gradient vectors, each computed once.

An item is a few rows of one direction; its factual, alternative and diff gradients are vectors over the space.
`BaseGradients` computes them, `GradientStore` keeps what will be used again: the base is frozen, so the same item has
the same gradients in every epoch, for every seed and at every evaluation.

How a gradient gets into its vector: a hook on each weight fires as soon as that weight's gradient is complete, copies
the selected entries to their place, and drops the rest. At no time do all weights have a `.grad`.

A vocabulary's weight has no dense gradient at all, which would cost more than the rest of a small model: as embedding
it hands over the rows that were looked up, as output layer the product of what came in and the gradient of what went
out, written to its place or formed for the rows with selected entries alone.
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
from torch.distributed.tensor import DTensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.gradients.buckets import Buckets, Deliver, Destination, Direct, Reduced
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch, ClozeRow, LogitsAt, Objective
from gradiend_dist.gradients.items import Item
from gradiend_dist.space import ParameterSpace, Slices, Weight, backbone_module, select_entries

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
    """Computes the gradients of items over one parameter space, each rank some of the rows, for its part of it.

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
    ) -> None:
        self.model = model
        self.objective = objective
        self.space = space
        self.micro_batch_size = micro_batch_size
        self.autocast = autocast
        self.comm = comm or Comm()
        self.slices_by_rank = slices_by_rank or [Slices.whole(space.size)]
        self.slices = self.slices_by_rank[self.comm.rank]
        self.is_sharded = shards is not None
        first = next(model.parameters())
        self.device = first.device
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        self.logits_at = LogitsAt(model)
        self._scale = FP16_SCALE if autocast is torch.float16 else 1.0
        parameters = dict(model.named_parameters())
        mapped = space.active() if shards is None else space.within(shards)
        self.weights = [
            (weight, parameters[weight.name], None if weight.selected is None else weight.selected.to(self.device))
            for weight in mapped
        ]
        mine = {id(parameter): (weight, indices) for weight, parameter, indices in self.weights}
        self._embeddings, self._heads = (
            [(module, *mine[id(module.weight)]) for module in modules if id(module.weight) in mine]
            for modules in (plain_embeddings(model), output_layers(model))
        )
        if self.is_sharded:  # FSDP reduces what autograd forms
            self._embeddings, self._heads = [], []
        self._contributions: dict[str, int] = {}
        self._buckets: Buckets | None = None
        self._destination: Destination = Direct({}, [])

    @property
    def largest_slices(self) -> int:
        """Entries of the rank that has most: what all ranks count with, so that they decide alike."""
        return max(slices.size for slices in self.slices_by_rank)

    def compute(self, item: Item, kinds: Sequence[str], *, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """This rank's part of the gradients of the wanted kinds; `out` may hold vectors to overwrite."""
        vectors = out if out is not None else {kind: self.empty() for kind in kinds}
        rows = [item.rows[rank :: self.comm.world_size] for rank in range(self.comm.world_size)]
        while True:
            if self.comm.is_alone or self.is_sharded:
                direct = Direct(vectors, [weight for weight, _, _ in self.weights])
                self._work(rows, item, list(vectors), direct)
                direct.complete()
            else:
                reduced = Reduced(self.buckets, Collect([vectors]), self.device)
                self._work(rows, item, list(vectors), reduced)
            if self._is_finite(vectors.values(), item):
                return vectors

    def compute_round(self, items: Sequence[Item], kinds: Sequence[str], deliver: Deliver) -> None:
        """The gradients of up to as many items as there are ranks, each rank its own; all parts to their owners.

        What arrives is delivered piece by piece: no rank needs to hold the vectors.
        """
        assert self.in_rounds and len(items) <= self.comm.world_size
        rows = [items[rank].rows if rank < len(items) else () for rank in range(self.comm.world_size)]
        mine = items[min(self.comm.rank, len(items) - 1)]
        self._work(rows, mine, list(kinds), Reduced(self.buckets, deliver, self.device, num_items=len(items)))

    @property
    def in_rounds(self) -> bool:
        """Can each rank compute an item of its own and hand it out?

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
        """Under float16: is it? If not, the next try has a smaller scale."""
        if self._scale == 1.0 or self.comm.all_agree(all(bool(vector.isfinite().all()) for vector in vectors)):
            return True
        self._scale /= 2.0
        logger.info("float16 overflow in %s: loss scale is now %g", item.name or "an item", self._scale)
        return False

    def empty(self) -> Tensor:
        return torch.empty(self.slices.size, dtype=torch.float32, device=self.device)

    def _work(
        self, rows: Sequence[tuple[ClozeRow, ...]], item: Item, kinds: list[str], destination: Destination
    ) -> None:
        """Run all passes; `rows` are those of each rank, of which this one reads its own.

        Which passes there are depends on the rows of all ranks, so that all ranks make the same ones.
        """
        self._destination = destination
        size = self.micro_batch_size or max(len(mine) for mine in rows)
        with torch.enable_grad(), self._collecting():
            for start in range(0, max(len(mine) for mine in rows), size):
                now = [mine[start : start + size] for mine in rows]
                for passes, only in plan_passes([row for mine in now for row in mine], kinds):
                    self._run(now[self.comm.rank], item, passes, only)

    def _run(self, rows: tuple[ClozeRow, ...], item: Item, passes: list[Pass], only: str | None) -> None:
        """One forward pass, then one backward pass for each of `passes`; a rank without rows adds nothing."""
        weight = 1.0
        if not rows and self.is_sharded:
            rows, weight = item.rows[:1], 0.0  # a sharded base needs every rank in every pass
        if not rows:
            for step in passes:
                self._destination.begin(step.into)
                self._destination.end(had_rows=False)
            return
        self._contributions.clear()
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
            self._begin(step)
            (loss * (self._scale * weight)).backward(retain_graph=number + 1 < len(passes))
            self._destination.end()

    def _begin(self, step: Pass) -> None:
        self._destination.begin(step.into)
        for weight, _, _ in self.weights:
            if weight.name in self._contributions:
                self._destination.expect(weight, self._contributions[weight.name])

    def _loss(self, log_probability: Tensor, rows: tuple[ClozeRow, ...], item: Item, side: str) -> Tensor:
        """Mean cross-entropy over all places of the item (or, per row, over its rows)."""
        clozes: list[Cloze] = [getattr(row, side) for row in rows]
        labels = torch.tensor([label for cloze in clozes for label in cloze.labels], device=self.device)
        picked = -log_probability[torch.arange(len(labels), device=self.device), labels]
        if item.per_row_mean:
            weights = [1.0 / (len(c.labels) * len(item.rows)) for c in clozes for _ in c.labels]
            return (picked * torch.tensor(weights, device=self.device)).sum()
        total = sum(len(getattr(row, side).labels) for row in item.rows)
        return picked.sum() / total

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        """Only the weights of the space want gradients, and each hands its own over when it is complete."""
        wanted = {id(parameter) for _, parameter, _ in self.weights}
        # FSDP takes note of what wants gradients when it is set up: there it stays as it was then.
        before = [] if self.is_sharded else [(p, p.requires_grad, p.grad) for p in self.model.parameters()]
        for parameter, _, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
            parameter.grad = None  # what a user left there would be added to the first gradient
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._collector(weight, indices))
            for weight, parameter, indices in self.weights
        ]
        if self.is_sharded:  # what a pruned space leaves out gets gradients as well: kept, they would add up
            others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in wanted]
            hooks += [parameter.register_post_accumulate_grad_hook(drop_gradient) for parameter in others]
        hooks += [
            module.register_forward_hook(self._row_collector(weight, indices), with_kwargs=True)
            for module, weight, indices in self._embeddings
        ]
        for module, weight, indices in self._heads:
            hooks.append(module.register_forward_pre_hook(ask_no_gradient))
            hooks.append(module.register_forward_hook(self._product_collector(weight, indices)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, wanted_before, gradient_before in before:
                parameter.requires_grad_(wanted_before)
                parameter.grad = gradient_before

    def _collector(self, weight: Weight, indices: Tensor | None) -> Any:
        def collect(parameter: Tensor) -> None:
            self._add(weight, select_entries(take_gradient(parameter), weight, indices).float())
            self._destination.done(weight)

        return collect

    def _row_collector(self, weight: Weight, indices: Tensor | None) -> Any:
        """A forward hook that cuts an embedding's output off its weight and waits for the gradient of the output."""

        def cut(module: nn.Embedding, args: tuple[Tensor], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            ids = next(iter((*args, *kwargs.values())))
            rows, places = ids.reshape(-1).unique(return_inverse=True)

            def collect(looked_up: Tensor) -> None:
                gradient = take_gradient(looked_up).float().reshape(len(places), -1)
                by_row = torch.ops.aten.embedding_dense_backward(gradient, places, len(rows), -1, False)
                if module.padding_idx is not None:
                    by_row[rows == module.padding_idx] = 0.0
                self._add_rows(weight, indices, rows, by_row)
                self._destination.done(weight)

            self._will_contribute(weight)
            looked_up = output.detach().requires_grad_()
            looked_up.register_post_accumulate_grad_hook(collect)
            return looked_up

        return cut

    def _product_collector(self, weight: Weight, indices: Tensor | None) -> Any:
        """A forward hook that forms a linear layer's gradient from its input and the gradient of its output."""

        def watch(module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
            module.weight.requires_grad_()  # a hook before this one has kept autograd from forming it
            if not output.requires_grad:
                return
            entered = args[0].detach().float().reshape(-1, module.in_features)

            def collect(gradient: Tensor) -> None:
                self._add_product(weight, indices, gradient.float().reshape(len(entered), -1), entered)
                self._destination.done(weight)

            self._will_contribute(weight)
            output.register_hook(collect)

        return watch

    def _will_contribute(self, weight: Weight) -> None:
        self._contributions[weight.name] = self._contributions.get(weight.name, 0) + 1

    def _add(self, weight: Weight, entries: Tensor) -> None:
        """Add to where this pass goes. What comes first overwrites: half the memory traffic of adding to zeros."""
        for place, kept, factor in self._destination.ranges(weight):
            if kept:
                place.add_(entries, alpha=factor / self._scale)
            else:
                torch.mul(entries, factor / self._scale, out=place)

    def _add_rows(self, weight: Weight, indices: Tensor | None, rows: Tensor, gradient: Tensor) -> None:
        """Add the gradient of these rows (each of them once) of a matrix."""
        shape, places, entries = weight.shape, rows, gradient
        if indices is not None:
            shape = (weight.num_selected,)
            places, row, column = entries_of_rows(indices, rows, width=weight.shape[-1])
            entries = gradient[row, column]
        for place, _, factor in self._destination.ranges(weight, as_zeros=True):
            place.view(shape).index_add_(0, places, entries, alpha=factor / self._scale)

    def _add_product(self, weight: Weight, indices: Tensor | None, a: Tensor, b: Tensor) -> None:
        """Add a^T b, a matrix of the weight's shape."""
        if indices is not None:
            width = weight.shape[-1]
            rows, row = (indices // width).unique_consecutive(return_inverse=True)
            self._add(weight, (a[:, rows].T @ b)[row, indices % width])
            return
        for place, kept, factor in self._destination.ranges(weight):
            matrix = place.view(weight.shape)
            torch.addmm(matrix, a.T, b, beta=float(kept), alpha=factor / self._scale, out=matrix)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


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


class Collect:
    """Puts what arrives from other ranks into the vectors of the items."""

    def __init__(self, vectors: Sequence[dict[str, Tensor]]) -> None:
        self.vectors = vectors
        for kinds in vectors:
            for vector in kinds.values():
                vector.zero_()

    def __call__(self, item: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        for kind, factor in into:
            self.vectors[item][kind][where].add_(entries, alpha=factor)


def take_gradient(tensor: Tensor) -> Tensor:
    gradient, tensor.grad = tensor.grad, None
    assert gradient is not None, "the hook fires after accumulation"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def drop_gradient(tensor: Tensor) -> None:
    tensor.grad = None


def ask_no_gradient(module: nn.Linear, _args: Any) -> None:
    module.weight.requires_grad_(False)


def plain_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Tables that are only looked up. Subclasses may do more (some scale the output): those stay with autograd."""
    tables = [module for module in model.modules() if type(module) is nn.Embedding]
    return [table for table in tables if table.max_norm is None and not table.scale_grad_by_freq]


def output_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers above the backbone: one of them may share the weight of the embeddings."""
    below = {id(module) for module in backbone_module(model).modules()}
    return [module for module in model.modules() if type(module) is nn.Linear and id(module) not in below]


def entries_of_rows(indices: Tensor, rows: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the flat `indices` (ascending) lie in `rows` of a matrix: their places, number of the row, column."""
    starts, stops = (torch.searchsorted(indices, edges * width) for edges in (rows, rows + 1))
    lengths = stops - starts
    row = torch.repeat_interleave(lengths)
    places = torch.arange(len(row), device=rows.device) + (stops - lengths.cumsum(0))[row]
    return places, row, indices[places] - rows[row] * width
