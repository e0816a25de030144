"""Pruning before training: which weights react to the feature at all."""

from __future__ import annotations

import logging
import random

import pandas as pd
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
    """Positions of the space to keep: those with the largest |mean gradient| over a few single-row examples.

    The mean of single-row gradients is the gradient of the mean of their losses, so one backward pass serves all
    examples of a micro-batch. The mean is taken within each direction, and the sizes are added: a diff changes its
    sign with the direction, and a mean over both would rank highest what does not depend on the feature.
    """
    seed = config.seed if config.seed is not None else seed
    positions = sample_positions(rows, config.n_samples, seed, by_row_number=behaviour.pre_prune_by_row_number)
    groups = [positions]
    if not behaviour.pre_prune_mixes_directions:
        direction = rows["feature_class_id"].tolist()
        groups = [[p for p in positions if direction[p] == wanted] for wanted in (0, 1)]
    importance = sum_of_sizes(base, ItemRows(rows, base.objective), [group for group in groups if group], config.source)
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


def sum_of_sizes(base: BaseGradients, rows: ItemRows, groups: list[list[int]], source: str) -> Tensor:
    """Mean over the groups of |mean gradient of the group's rows|, on the CPU; two vectors of size n at a time."""
    total: Tensor | None = None
    for group in groups:
        item = rows.item(group, per_row_mean=True)
        size = base.compute(item, [source])[source].abs_().div_(len(groups))
        if not bool(size.isfinite().all()):
            raise UserError(
                f"The gradient of the pre-prune examples is not finite ({item.name}): check the base model's weights "
                "and these rows."
            )
        total = size if total is None else total.add_(size)
    assert total is not None, "there is at least one example"
    return total.cpu()


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
