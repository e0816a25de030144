"""Encodings without gradients: We.x of many rows in one pass, for spaces whose gradients do not fit the store.

The encoder reads a gradient only through We.x, and x is the gradient of a row's loss. So We.x is the derivative of that
loss when the base weights move along We: one forward-mode pass over a batch gives it for every row at once, where
reverse mode takes a pass for each row. No gradient is there, and of We, which may be on another device or in a file,
what belongs to the modules that are at work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradiend_dist.distributed.devices import to_device
from gradiend_dist.distributed.fsdp import reshard
from gradiend_dist.gradients.base import LOSS_WEIGHTS, BaseGradients
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Weight

logger = logging.getLogger(__name__)

# Forward mode has one level for the whole process, and the choice of attention kernels is the process's as well.
_only_level = threading.Lock()


@torch.no_grad()
def encode_rows(base: BaseGradients, items: Sequence[Item], kind: str, model: GradiendModel, batch_size: int) -> Tensor:
    """Encodings [rows, m] of one-row items, equal to encoding their gradients up to the order of float32 sums.

    Each process for itself.
    """
    assert all(len(item.rows) == 1 for item in items), "forward mode tells rows apart, not groups of them"
    encoded = []
    for start in range(0, len(items), batch_size):
        group = items[start : start + batch_size]
        products = [_products(base, group, kind, row) for row in model.encoder_weight]
        pre = torch.stack(products, dim=1).to(model.encoder_bias) + model.encoder_bias
        encoded.append(model.encoder[1](pre))
    return torch.cat(encoded)


@torch.no_grad()
def row_products(
    base: BaseGradients, items: Sequence[Item], kind: str, encoder_weight: Tensor, batch_size: int
) -> Tensor:
    """We.x [items, m] of one-row items over a base model in shards, of which each rank has its slices of We.

    Each rank has rows of its own in a pass; of We a layer's weights are gathered while the layer is at work, as FSDP
    gathers the layer's own. All ranks call this, with the same items.
    """
    comm = base.comm
    shares_input = all(item.rows[0].shares_input for item in items)
    found = torch.zeros(len(items), len(encoder_weight), dtype=torch.float64, device=encoder_weight.device)
    for start in range(0, len(items), batch_size * comm.world_size):
        places = range(start, min(start + batch_size * comm.world_size, len(items)))
        mine = list(places)[comm.rank :: comm.world_size]
        # A rank without rows has to gather with the others.
        group = [items[place] for place in mine] or [items[start]]
        for latent, row in enumerate(encoder_weight):
            products = _products(base, group, kind, row, shares_input=shares_input)
            found[mine, latent] = products[: len(mine)].to(found)
    reshard(base.model)  # a pass without gradients leaves the outermost weights whole
    return found


def _products(
    base: BaseGradients, items: Sequence[Item], kind: str, direction: Tensor, *, shares_input: bool | None = None
) -> Tensor:
    """We_j.x for each item; `shares_input`: of all ranks' items, where they make their passes together.

    Over shards all ranks call this.
    """
    factual, alternative = LOSS_WEIGHTS[kind]
    sides = [("factual", factual), ("alternative", alternative)]
    clozes = {side: [getattr(item.rows[0], side) for item in items] for side, weight in sides if weight}
    if shares_input is None:
        shares_input = all(item.rows[0].shares_input for item in items)
    if len(clozes) == 2 and shares_input:
        derivatives = _loss_derivatives(base, clozes["factual"], list(clozes.values()), direction)
        return factual * derivatives[0] + alternative * derivatives[1]
    total = torch.zeros(len(items), device=base.device)
    for side, weight in sides:
        if weight:
            total += weight * _loss_derivatives(base, clozes[side], [clozes[side]], direction)[0]
    return total


def _loss_derivatives(
    base: BaseGradients, read: list[Cloze], asked: list[list[Cloze]], direction: Tensor
) -> list[Tensor]:
    """Derivative of each row's mean cross-entropy along `direction`, for each set of questions on the same input.

    Over shards all ranks call this.
    """
    batch = ClozeBatch.of(read, base.pad_id, base.device)
    base.logits_at.prepare(batch)
    # Fused attention kernels have no forward mode; the plain one does.
    with _only_level, forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), base.precision():
        logits = _along(base, direction, batch)
        log_probability = F.log_softmax(logits.float(), dim=-1)
        tangent = forward_ad.unpack_dual(log_probability).tangent
    assert tangent is not None, "the head depends on at least one weight of the space"
    return [_row_means(-tangent, clozes, batch.rows) for clozes in asked]


def _along(base: BaseGradients, direction: Tensor, batch: ClozeBatch) -> Tensor:
    """The logits while the weights move along `direction`.

    A weight moves while a module that owns it is called. Some are used by a module around that one, which is not
    called then: those move all the time, as soon as they are known. Over shards all ranks call this.
    """
    if base.is_sharded:
        reshard(base.model)  # weights are known by their shards, and a pass leaves the outermost ones whole
    with _moving(base, direction) as moving:
        logits = base.logits_at(batch)
    resting = moving.resting()
    if resting <= base.always_moving or base.is_sharded:  # of shards the weights are there in a module's call alone
        return logits
    base.always_moving |= resting
    with _moving(base, direction):
        return base.logits_at(batch)


def has_modules_for_experts(model: nn.Module) -> bool:
    """Are there experts that are modules of their own, which not every row's tokens go to?"""
    containers = (nn.ModuleList, nn.ModuleDict)
    return any(isinstance(child, containers) and name.endswith("experts") for name, child in model.named_modules())


@dataclass(frozen=True)
class _Owned:
    """A weight as an attribute of a module that owns it."""

    module: nn.Module
    attribute: str
    weight: Weight
    indices: Tensor | None


class _Moving:
    """The weights of the space as they move, put over the modules' own ones and taken away again.

    Over shards all ranks make it and call its methods.
    """

    def __init__(self, base: BaseGradients, direction: Tensor) -> None:
        self.base, self.direction, self.called = base, direction, set[nn.Module]()
        known = {id(parameter): (weight, indices) for weight, parameter, indices in base.weights}
        self.owned = [
            _Owned(module, attribute, *known[id(parameter)])
            for module in base.model.modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in known
        ]
        self.moved_always = [one for one in self.owned if one.module in base.always_moving]
        self.moved_in_calls: dict[nn.Module, list[_Owned]] = {}
        for one in self.owned:
            self.moved_in_calls.setdefault(one.module, [])
            if one.module not in base.always_moving:
                self.moved_in_calls[one.module].append(one)

    def resting(self) -> set[nn.Module]:
        """Owners that were not called."""
        return self.moved_in_calls.keys() - self.called

    def put(self, owned: Sequence[_Owned]) -> None:
        for one in owned:
            # An attribute of the object itself is found before the parameter of that name.
            vars(one.module)[one.attribute] = self._moved(one)

    @staticmethod
    def take_away(owned: Sequence[_Owned]) -> None:
        for one in owned:
            vars(one.module).pop(one.attribute, None)

    def _moved(self, one: _Owned) -> Tensor:
        """With its share of the direction as tangent. Over shards all ranks call this, in the order of the calls."""
        weight = one.weight
        # FSDP has put the whole weight in the place of the shard by now.
        parameter = one.module.get_parameter(one.attribute).detach()
        selected = self.direction[weight.offset : weight.stop].to(parameter.device, parameter.dtype)
        tangent = selected
        if one.indices is not None:
            tangent = torch.zeros(weight.numel, dtype=parameter.dtype, device=parameter.device)
            tangent[one.indices] = selected
        if self.base.is_sharded:
            edges = [shards[weight.name] for shards in self.base.shards_by_rank]
            tangent = self.base.comm.gathered(tangent, [stop - start for start, stop in edges])
        return forward_ad.make_dual(parameter, tangent.view(parameter.shape))


@contextlib.contextmanager
def _moving(base: BaseGradients, direction: Tensor) -> Iterator[_Moving]:
    """Inside, each module that is called has its weights moving. Over shards all ranks call this together."""
    moving = _Moving(base, direction)

    def put(module: nn.Module, _args: object) -> None:
        moving.called.add(module)
        moving.put(moving.moved_in_calls[module])

    def take_away(module: nn.Module, _args: object, _output: object) -> None:
        moving.take_away(moving.moved_in_calls[module])

    hooks = []
    for module in moving.moved_in_calls:
        hooks += [module.register_forward_pre_hook(put), module.register_forward_hook(take_away)]
    try:
        moving.put(moving.moved_always)
        yield moving
    finally:
        moving.take_away(moving.owned)
        for hook in hooks:
            hook.remove()


def _row_means(values: Tensor, clozes: list[Cloze], rows: Tensor) -> Tensor:
    labels = to_device([label for cloze in clozes for label in cloze.labels], values.device)
    picked = values[torch.arange(len(labels), device=values.device), labels]
    counts = to_device([len(cloze.labels) for cloze in clozes], values.device)
    return torch.zeros(len(clozes), device=values.device).index_add_(0, rows, picked) / counts
