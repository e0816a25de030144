"""Taking each weight's gradient out of a backward pass as soon as it is complete.

A hook on each weight copies the selected entries of its gradient to where they go and drops the rest: at no time do all
weights have a `.grad`.

A vocabulary's weight has no dense gradient at all, which would cost more than the rest of a small model: as embedding
it hands over the rows that were looked up, as output layer the product of what came in and the gradient of what went
out, written to its place or formed for the rows with selected entries alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradiend_dist.gradients.buckets import Destination, Direct
from gradiend_dist.space import Weight, backbone_module, select_entries


class GradientCollector:
    """The hooks on a frozen model that hand the gradients of `weights` to a `Destination`.

    All ranks that compute a gradient together use it alike: a destination may send what it is handed to other ranks.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Weight], *, is_sharded: bool) -> None:
        self.model, self.is_sharded = model, is_sharded
        device = next(model.parameters()).device
        parameters = dict(model.named_parameters())
        self.weights = [
            (weight, parameters[weight.name], None if weight.selected is None else weight.selected.to(device))
            for weight in weights
        ]
        mine = {id(parameter): (weight, indices) for weight, parameter, indices in self.weights}
        self._embeddings, self._heads = (
            # FSDP reduces what autograd forms: there no weight goes around autograd.
            [(module, *mine[id(module.weight)]) for module in modules if id(module.weight) in mine and not is_sharded]
            for modules in (plain_embeddings(model), output_layers(model))
        )
        # Once: how many there are depends on values, which the host would wait for.
        self._rows_of_heads = {
            weight.name: (indices // weight.shape[-1]).unique_consecutive()
            for _, weight, indices in self._heads
            if indices is not None
        }
        self._shared_with_autograd = self._other_owners(mine)
        self._contributions: dict[str, int] = {}
        self._autograd_counted: set[str] = set()
        self._destination: Destination = Direct({}, [])
        self._scale = 1.0

    def _other_owners(self, mine: dict[int, tuple[Weight, Tensor | None]]) -> list[tuple[nn.Module, Weight]]:
        """Modules whose weight a hooked module shares and whose own part of its gradient autograd forms, such as an
        embedding that scales its output, tied to the output layer."""
        hooked = {id(module) for module, _, _ in (*self._embeddings, *self._heads)}
        shared = {id(module.weight) for module, _, _ in (*self._embeddings, *self._heads)}
        return [
            (module, mine[id(parameter)][0])
            for module in self.model.modules()
            if id(module) not in hooked
            for parameter in module.parameters(recurse=False)
            if id(parameter) in shared
        ]

    @contextlib.contextmanager
    def collecting(self, destination: Destination, scale: float) -> Iterator[None]:
        """Only these weights want gradients; each goes to `destination`, divided by `scale`, when it is complete."""
        self._destination, self._scale = destination, scale
        wanted = {id(parameter) for _, parameter, _ in self.weights}
        # FSDP takes note of what wants gradients when it is set up: there it stays as it was then.
        before = [] if self.is_sharded else [(p, p.requires_grad, p.grad) for p in self.model.parameters()]
        for parameter, _, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
            parameter.grad = None  # what a user left there would be added to the first gradient
        hooks = self._register_hooks(wanted)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, wanted_before, gradient_before in before:
                parameter.requires_grad_(wanted_before)
                parameter.grad = gradient_before

    def _register_hooks(self, wanted: set[int]) -> list[Any]:
        hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._plain_hook(weight, indices))
            for weight, parameter, indices in self.weights
        ]
        if self.is_sharded:  # what a pruned space leaves out gets gradients as well: kept, they would add up
            others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in wanted]
            hooks += [parameter.register_post_accumulate_grad_hook(drop_gradient) for parameter in others]
        hooks += [
            module.register_forward_hook(self._embedding_hook(weight, indices), with_kwargs=True)
            for module, weight, indices in self._embeddings
        ]
        hooks += [
            module.register_forward_hook(self._autograd_hook(weight)) for module, weight in self._shared_with_autograd
        ]
        for module, weight, indices in self._heads:
            hooks.append(module.register_forward_pre_hook(ask_no_gradient))
            hooks.append(module.register_forward_hook(self._head_hook(weight, indices)))
        return hooks

    def begin_forward(self) -> None:
        """Call before each forward pass: its hooks count the contributions that the backward passes will make."""
        self._contributions.clear()
        self._autograd_counted.clear()

    def begin_backward(self, into: list[tuple[str, float]]) -> None:
        """Call before each backward pass: what it computes is added, times a factor, to the vectors of these kinds."""
        self._destination.begin(into)
        for weight, _, _ in self.weights:
            if weight.name in self._contributions:
                self._destination.expect(weight, self._contributions[weight.name])

    def _plain_hook(self, weight: Weight, indices: Tensor | None) -> Any:
        def collect(parameter: Tensor) -> None:
            self._add(weight, select_entries(take_gradient(parameter), weight, indices).float())
            self._destination.done(weight)

        return collect

    def _embedding_hook(self, weight: Weight, indices: Tensor | None) -> Any:
        """A forward hook that cuts an embedding's output off its weight and waits for the gradient of the output."""

        def cut(module: nn.Embedding, args: tuple[Tensor], kwargs: dict[str, Tensor], output: Tensor) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None  # a pass that looks at the head first
            ids = next(iter((*args, *kwargs.values())))
            rows, places = looked_up_rows(ids.reshape(-1))

            def collect(looked_up: Tensor) -> None:
                gradient = take_gradient(looked_up).float().reshape(len(places), -1)
                by_row = torch.ops.aten.embedding_dense_backward(gradient, places, len(rows), -1, False)
                if module.padding_idx is not None:
                    by_row.masked_fill_((rows == module.padding_idx).unsqueeze(1), 0.0)
                self._add_rows(weight, indices, rows, by_row)
                self._destination.done(weight)

            self._will_contribute(weight)
            looked_up = output.detach().requires_grad_()
            looked_up.register_post_accumulate_grad_hook(collect)
            return looked_up

        return cut

    def _head_hook(self, weight: Weight, indices: Tensor | None) -> Any:
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

    def _autograd_hook(self, weight: Weight) -> Any:
        """A forward hook that expects what autograd adds up for a weight that has hooks as well: once for each pass."""

        def expect(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if output.requires_grad and weight.name not in self._autograd_counted:
                self._autograd_counted.add(weight.name)
                self._will_contribute(weight)

        return expect

    def _will_contribute(self, weight: Weight) -> None:
        self._contributions[weight.name] = self._contributions.get(weight.name, 0) + 1

    def _add(self, weight: Weight, entries: Tensor) -> None:
        self._destination.add(weight, entries, 1.0 / self._scale)

    def _add_rows(self, weight: Weight, indices: Tensor | None, rows: Tensor, gradient: Tensor) -> None:
        """Add the gradient of these rows of a matrix."""
        shape, places, entries = weight.shape, rows, gradient
        if indices is not None:
            shape = (weight.num_selected,)
            places, entries = selected_of_rows(indices, rows, gradient)
        for place, _, factor in self._destination.ranges(weight, as_zeros=True):
            place.view(shape).index_add_(0, places, entries, alpha=factor / self._scale)

    def _add_product(self, weight: Weight, indices: Tensor | None, a: Tensor, b: Tensor) -> None:
        """Add a^T b, a matrix of the weight's shape."""
        if indices is not None:
            width, rows = weight.shape[-1], self._rows_of_heads[weight.name]
            row = torch.searchsorted(rows, indices // width)
            self._add(weight, (a[:, rows].T @ b)[row, indices % width])
            return
        for place, kept, factor in self._destination.ranges(weight):
            matrix = place.view(weight.shape)
            torch.addmm(matrix, a.T, b, beta=float(kept), alpha=factor / self._scale, out=matrix)


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


def looked_up_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are looked up, each of them once, and for each id the place of its row among them.

    There are as many rows as ids, the last of them 0 and without an id: a GPU would have to tell the host how many
    `unique` finds, and the host would wait for all that it has asked the GPU to do.
    """
    ordered, order = ids.sort(stable=True)
    number = (ordered != ordered.roll(1)).cumsum(0)
    number = number - number[:1]
    rows = torch.zeros_like(ids).scatter_(0, number, ordered)
    return rows, torch.empty_like(ids).scatter_(0, order, number)


def selected_of_rows(indices: Tensor, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of these rows at the flat `indices` (ascending) alone: places among the indices, entries.

    Of fixed size, for the same reason: as many as the rows have, where an index is missing a zero for another place.
    """
    start, width = rows.unsqueeze(1) * gradient.shape[1], gradient.shape[1]
    places = torch.searchsorted(indices, start) + torch.arange(width, device=rows.device)
    there = places < len(indices)
    places.clamp_(max=len(indices) - 1)
    column = indices[places] - start
    there &= column < width
    entries = gradient.gather(1, column.clamp_(0, width - 1)).masked_fill_(~there, 0.0)
    return places.reshape(-1), entries.reshape(-1)
