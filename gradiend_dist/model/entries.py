"""Which entries of a vector survive pruning: a mask, a threshold and the largest k, in this order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradiend_dist.config.checks import check_topk
from gradiend_dist.errors import UserError


def select_entries_to_keep(
    num_entries: int,
    *,
    mask: Tensor | None = None,
    threshold: float | None = None,
    topk: int | float | None = None,
    importance: Tensor | None = None,
    in_float32: bool = False,
) -> Tensor:
    """Positions to keep, ascending: first the mask, then the threshold, then the top k of what is left.

    Ties at the k-th place go to the lowest positions. `in_float32` rounds k as the reference does.
    """
    check_topk("topk", topk)
    if importance is not None and importance.shape != (num_entries,):
        raise UserError(f"importance has shape {tuple(importance.shape)}: pass one of shape ({num_entries},).")
    keep = torch.arange(num_entries)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != (num_entries,):
            raise UserError(
                f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}: pass a torch.bool mask of shape "
                f"({num_entries},)."
            )
        keep = mask.cpu().nonzero().squeeze(1)
    if threshold is not None:
        assert importance is not None, "a threshold compares importances"
        keep = keep[importance[keep] >= threshold]
    if topk is not None and not (isinstance(topk, float) and topk == 1.0):
        assert importance is not None, "top k compares importances"
        keep = _largest(importance, keep, count_to_keep(topk, keep.numel(), in_float32=in_float32))
    if not keep.numel():
        found = "the mask is empty" if importance is None else f"the largest importance is {importance.max():.3g}"
        raise UserError(f"Pruning with threshold={threshold} keeps nothing, {found}: lower it, or widen the mask.")
    return keep


def count_to_keep(topk: int | float, remaining: int, *, in_float32: bool = False) -> int:
    if isinstance(topk, int):
        return min(topk, remaining)
    if in_float32:
        return max(1, int(torch.ceil(torch.tensor(topk * remaining)).item()))
    return min(remaining, math.ceil(topk * remaining))


def _largest(importance: Tensor, keep: Tensor, k: int) -> Tensor:
    """The k positions of `keep` with the largest importance, ascending, ties to the lowest position."""
    if k >= keep.numel():
        return keep
    values = importance if keep.numel() == importance.numel() else importance[keep]
    smallest_kept = torch.topk(values, k, sorted=False).values.min()
    above = (values > smallest_kept).nonzero().squeeze(1)
    tied = (values == smallest_kept).nonzero().squeeze(1)[: k - above.numel()]
    return keep[torch.cat([above, tied]).sort().values]
