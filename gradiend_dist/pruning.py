"""Pruning before training: which weights react to the feature at all."""

from __future__ import annotations

import logging
import random

import pandas as pd
import torch
from torch import Tensor

from gradiend_dist.arguments import PrePruneConfig
from gradiend_dist.compat import Behaviour
from gradiend_dist.errors import UserError
from gradiend_dist.gradients import BaseGradients, ItemRows
from gradiend_dist.model import select_entries_to_keep
from gradiend_dist.schedule import make_schedule

logger = logging.getLogger(__name__)


def pre_prune(
    base: BaseGradients, rows: pd.DataFrame, config: PrePruneConfig, *, seed: int, behaviour: Behaviour
) -> Tensor:
    """Positions of the space to keep: largest |mean gradient| over a few single-row examples.

    The mean of single-row gradients is the gradient of the mean of their losses, so one backward pass serves all
    examples of a micro-batch, and one vector of size n is all the memory there is.
    """
    seed = config.seed if config.seed is not None else seed
    positions = sample_positions(rows, config.n_samples, seed, by_row_number=behaviour.pre_prune_by_row_number)
    item = ItemRows(rows, base.objective).item(positions, per_row_mean=True)
    importance = base.compute(item, [config.source])[config.source].abs_().cpu()
    if not bool(importance.isfinite().all()):
        raise UserError(
            f"The gradient of the pre-prune examples is not finite ({item.name}): check the base model's weights and "
            "these rows."
        )
    keep = select_entries_to_keep(
        base.space.size,
        threshold=config.threshold,
        topk=config.topk,
        importance=importance,
        in_float32=behaviour.topk_in_float32,
    )
    logger.info(
        "pre-prune: kept %s of %s weights by %d examples", f"{keep.numel():,}", f"{base.space.size:,}", len(positions)
    )
    return keep


def sample_positions(rows: pd.DataFrame, n_samples: int, seed: int, *, by_row_number: bool) -> list[int]:
    """Row positions, spread evenly over both directions, drawn again only where a direction has too few rows."""
    rng = random.Random(seed)
    directions = [
        [int(i) for i in (rows["feature_class_id"] == direction).to_numpy().nonzero()[0]] for direction in (0, 1)
    ]
    directions = [pool for pool in directions if pool]
    for pool in directions:
        rng.shuffle(pool)
    chosen: list[int] = []
    for i, pool in enumerate(directions):
        wanted = n_samples // len(directions) + (1 if i < n_samples % len(directions) else 0)
        chosen += pool[:wanted]
        if wanted > len(pool):
            chosen += rng.choices(pool, k=wanted - len(pool))
    rng.shuffle(chosen)
    if not by_row_number:
        return chosen
    # The reference takes these row numbers as places in its alternating schedule, and so gets other rows.
    schedule = make_schedule(rows, 1, seed=seed, reference=True, shuffle=False)
    visited = schedule.epoch(0)
    return [int(schedule.batches[visited[place]][0]) for place in chosen]


def importance_mask(keep: Tensor, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[keep] = True
    return mask
