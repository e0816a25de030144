"""Encodings without gradients: We.x of many rows in one pass, for spaces whose gradients do not fit the store.

The encoder reads a gradient only through We.x, and x is the gradient of a row's loss. So We.x is the derivative of that
loss when the base weights move along We: one forward-mode pass over a batch gives it for every row at once, where
reverse mode takes a pass for each row. Costs one copy of We in the shape of the base weights, and no gradient.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradiend_dist.distributed.devices import to_device
from gradiend_dist.gradients.base import LOSS_WEIGHTS, BaseGradients
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.gradiend import GradiendModel

logger = logging.getLogger(__name__)

# Forward mode has one level for the whole process, and the choice of attention kernels is the process's as well.
_only_level = threading.Lock()


@torch.no_grad()
def encode_rows(base: BaseGradients, items: Sequence[Item], kind: str, model: GradiendModel, batch_size: int) -> Tensor:
    """Encodings [rows, m] of one-row items, equal to encoding their gradients up to the order of float32 sums."""
    assert all(len(item.rows) == 1 for item in items), "forward mode tells rows apart, not groups of them"
    encoded = []
    for start in range(0, len(items), batch_size):
        group = items[start : start + batch_size]
        products = [_products(base, group, kind, row) for row in model.encoder_weight]
        pre = torch.stack(products, dim=1).to(model.encoder_bias) + model.encoder_bias
        encoded.append(model.encoder[1](pre))
    return torch.cat(encoded)


def _products(base: BaseGradients, items: Sequence[Item], kind: str, direction: Tensor) -> Tensor:
    """We_j.x for each item."""
    factual, alternative = LOSS_WEIGHTS[kind]
    sides = [("factual", factual), ("alternative", alternative)]
    clozes = {side: [getattr(item.rows[0], side) for item in items] for side, weight in sides if weight}
    if len(clozes) == 2 and all(item.rows[0].shares_input for item in items):
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
    """Derivative of each row's mean cross-entropy along `direction`, for each set of questions on the same input."""
    batch = ClozeBatch.of(read, base.pad_id, base.device)
    # Fused attention kernels have no forward mode; the plain one does.
    with _only_level, forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), base.precision():
        logits = base.logits_at(batch, parameters=_moving_weights(base, direction))
        log_probability = F.log_softmax(logits.float(), dim=-1)
        tangent = forward_ad.unpack_dual(log_probability).tangent
    assert tangent is not None, "the head depends on at least one weight of the space"
    return [_row_means(-tangent, clozes, batch.rows) for clozes in asked]


def _moving_weights(base: BaseGradients, direction: Tensor) -> dict[str, Tensor]:
    """The base weights, each with its share of the direction as tangent."""
    moving = {}
    for weight, parameter, indices in base.weights:
        selected = direction[weight.offset : weight.stop].to(parameter.device, parameter.dtype)
        tangent = selected
        if indices is not None:
            tangent = torch.zeros(weight.numel, dtype=parameter.dtype, device=parameter.device)
            tangent[indices] = selected
        moving[weight.name] = forward_ad.make_dual(parameter.detach(), tangent.view(weight.shape))
    return moving


def _row_means(values: Tensor, clozes: list[Cloze], rows: Tensor) -> Tensor:
    labels = to_device([label for cloze in clozes for label in cloze.labels], values.device)
    picked = values[torch.arange(len(labels), device=values.device), labels]
    counts = to_device([len(cloze.labels) for cloze in clozes], values.device)
    return torch.zeros(len(clozes), device=values.device).index_add_(0, rows, picked) / counts
