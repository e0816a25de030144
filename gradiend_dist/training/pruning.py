"""Pruning: which weights react to the feature at all, before training; which of them were learnt, after it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from gradiend_dist.config.checks import check_topk
from gradiend_dist.config.compat import Behaviour
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig
from gradiend_dist.data.schedule import make_schedule
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.buckets import Deliver
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.model.entries import count_to_keep
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.space import Slices
from gradiend_dist.storage.vectors import VectorPlace

logger = logging.getLogger(__name__)

LARGEST_KEY = 2**31 - 1

# Of keys below the largest, as whole digits.
KEY_BITS = 32

DIGIT_BITS = 16

HOST = VectorPlace(torch.device("cpu"))

# Entries that are looked at together; some fifty bytes each are in memory for a moment.
PIECE = 2**22


def pre_prune(
    base: BaseGradients,
    rows: pd.DataFrame,
    config: PrePruneConfig,
    *,
    seed: int,
    behaviour: Behaviour,
    place: VectorPlace = HOST,
) -> Tensor:
    """Positions of the space to keep: those with the largest |mean gradient| over a few single-row examples.

    The mean of single-row gradients is the gradient of the mean of their losses, so one backward pass serves all
    examples of a micro-batch. The mean is taken within each direction, and the sizes are added: a diff changes its
    sign with the direction, and a mean over both would rank highest what does not depend on the feature.
    Sizes are added up at `place`. All ranks call this.
    """
    seed = config.seed if config.seed is not None else seed
    positions = sample_positions(rows, config.n_samples, seed, by_row_number=behaviour.pre_prune_by_row_number)
    groups = [positions]
    if not behaviour.pre_prune_mixes_directions:
        direction = rows["feature_class_id"].tolist()
        groups = [[p for p in positions if direction[p] == wanted] for wanted in (0, 1)]
    table = ItemRows(rows, base.objective)
    items = [table.item(group, per_row_mean=True) for group in groups if group]

    return keep_largest(computed(base, config.source), [[item] for item in items], config, behaviour, place=place)


def pre_prune_by_items(
    gradients: RankingGradients,
    items: Sequence[Item],
    labels: Sequence[float],
    config: PrePruneConfig,
    behaviour: Behaviour,
    *,
    place: VectorPlace = HOST,
) -> Tensor:
    """The same by items of training. All ranks call this."""
    pairs = list(zip(items, labels, strict=True))
    groups = [[item for item, label in pairs if label == direction] for direction in (1.0, -1.0)]
    return keep_largest(gradients, [group for group in groups if group], config, behaviour, place=place)


@dataclass(frozen=True)
class RankingGradients:
    """The gradients that rank the weights."""

    base: BaseGradients
    hand_out: Callable[[Sequence[Item], Deliver], None]
    """All ranks call this. An entry comes in parts that add up where `is_complete` denies that it comes once."""
    is_complete: Callable[[Item], bool] = lambda _: True


def computed(base: BaseGradients, kind: str) -> RankingGradients:
    """Computed for this, and forgotten weight by weight. All ranks use them together."""

    def hand_out(items: Sequence[Item], deliver: Deliver) -> None:
        base.hand_out(items, [kind], deliver, bar="pre-prune")

    return RankingGradients(base, hand_out, lambda item: base.takes_one_pass(item, [kind]))


def keep_largest(
    gradients: RankingGradients,
    groups: Sequence[Sequence[Item]],
    config: PrePruneConfig,
    behaviour: Behaviour,
    *,
    place: VectorPlace = HOST,
) -> Tensor:
    """Positions of the largest sums of sizes, over all ranks, added up at `place`. All ranks call this."""
    base = gradients.base
    keep = select_over_ranks(
        base.comm,
        base.slices,
        sum_of_sizes(gradients, groups, place),
        threshold=config.threshold,
        topk=config.topk,
        in_float32=behaviour.topk_in_float32,
    )
    num_rows = sum(len(item.rows) for group in groups for item in group)
    logger.info(
        "pre-prune: kept %s of %s weights by %d examples", f"{keep.numel():,}", f"{base.space.size:,}", num_rows
    )
    return keep


def post_prune(model: ModelWithGradiend, config: PostPruneConfig, comm: Comm) -> None:
    """Shrink a trained model, or this rank's slices of it, to its most important weights. All ranks call this."""
    before, gradiend = len(model), model.gradiend
    keep = select_over_ranks(
        comm,
        gradiend.slices,
        gradiend.get_weight_importance(config.part),
        mask=config.mask,
        threshold=config.threshold,
        topk=config.topk,
    )
    gradiend.keep_entries(keep)
    logger.info("post-prune: kept %s of %s weights by %s", f"{len(model):,}", f"{before:,}", config.part)


def select_over_ranks(
    comm: Comm,
    slices: Slices,
    importance: Tensor,
    *,
    mask: Tensor | None = None,
    threshold: float | None = None,
    topk: int | float | None = None,
    in_float32: bool = False,
) -> Tensor:
    """`select_entries_to_keep` where each rank knows the importance of its slices; the result is the same on all ranks.

    The k-th largest value is found digit by digit from counts of what every rank has: a few thousand numbers travel,
    whatever n is, and the result is exact. Besides the result there is memory for a piece of the slices at a time.
    All ranks call this, unless the slices are whole.
    """
    check_topk("topk", topk)
    if slices.is_whole:
        comm = Comm()  # every rank has all of it, and finds the same
    candidates = Candidates(slices, importance, None if mask is None else slices.take(mask.cpu()), threshold)
    remaining = _total(comm, candidates.count())
    if topk is not None and not (isinstance(topk, float) and topk == 1.0):
        k = count_to_keep(topk, remaining, in_float32=in_float32)
        if k < remaining:
            _leave_the_largest(comm, candidates, k)
    keep = comm.concatenate(candidates.positions())
    if not keep.numel():
        largest = comm.largest(importance.max().item() if importance.numel() else 0.0)[0]
        raise UserError(
            f"Pruning with threshold={threshold} keeps nothing, the largest importance is {largest:.3g}: lower it, or "
            "widen the mask."
        )
    # Slices one behind the other are in order already.
    return keep if bool((keep[1:] > keep[:-1]).all()) else keep.sort().values


@dataclass
class Candidates:
    """This rank's entries that may be kept, found anew piece by piece: there may be too many to list."""

    slices: Slices
    importance: Tensor
    mask: Tensor | None
    """Of the slices."""
    threshold: float | None
    last: tuple[int, int] | None = None
    """Key of the least important ones that are kept, and the last position of those."""

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(places in the slices, keys: the smaller, the more important) of one piece after the other."""
        for start in range(0, len(self.importance), PIECE):
            values = self.importance[start : start + PIECE]
            places = torch.arange(start, start + len(values), device=values.device)
            if self.mask is not None:
                allowed = self.mask[start : start + PIECE]
                values, places = values[allowed], places[allowed]
            if self.threshold is not None:
                allowed = values >= self.threshold
                values, places = values[allowed], places[allowed]
            # The bits of non-negative floats, read as integers, are in the order of the floats.
            keys = LARGEST_KEY - values.float().contiguous().view(torch.int32).long()
            if self.last is not None:
                key, position = self.last
                kept = (keys < key) | ((keys == key) & (self.slices.positions(places) <= position))
                places, keys = places[kept], keys[kept]
            yield places, keys

    def keys(self) -> Iterator[Tensor]:
        for _, keys in self.pieces():
            yield keys

    def positions_of(self, key: int) -> Iterator[Tensor]:
        for places, keys in self.pieces():
            yield self.slices.positions(places[keys == key])

    def count(self) -> int:
        everything = self.mask is None and self.threshold is None and self.last is None
        return len(self.importance) if everything else sum(len(keys) for keys in self.keys())

    def positions(self) -> Tensor:
        """In the whole vector, of all of them."""
        found = [self.slices.positions(places).cpu() for places, _ in self.pieces()]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _leave_the_largest(comm: Comm, candidates: Candidates, k: int) -> None:
    """Leave the k most important of all ranks; ties at the k-th place go to the lowest positions.

    All ranks call this.
    """
    key, above, tied = kth_smallest(comm, candidates.keys, k, num_bits=KEY_BITS)
    position = candidates.slices.total
    if above + tied > k:
        position, _, _ = kth_smallest(comm, lambda: candidates.positions_of(key), k - above)
    candidates.last = key, position


def top_over_ranks(comm: Comm, model: ParamMappedGradiendModel, part: str, topk: int) -> list[int]:
    """Base-global positions of the most important entries, most important first, where each rank has its slices.

    All ranks call this.
    """
    importance = model.get_weight_importance(part)
    best = torch.sort(importance, descending=True, stable=True).indices[:topk]
    mine = list(zip((-importance[best]).tolist(), model.slices.positions(best).tolist(), strict=True))
    found = [mine] if model.slices.is_whole else comm.gather(mine)
    positions = [position for _, position in sorted(pair for pairs in found for pair in pairs)[:topk]]
    return model.space.base_global(torch.tensor(positions, dtype=torch.int64)).tolist()


def kth_smallest(
    comm: Comm, pieces: Callable[[], Iterable[Tensor]], k: int, *, num_bits: int = 64
) -> tuple[int, int, int]:
    """The k-th smallest (from 1) of all ranks' non-negative 64-bit keys; how many are smaller, and how many the same.

    `pieces` hands out this rank's keys, once for every digit. All ranks call this.
    """
    found = smaller = same = 0
    for shift in range(num_bits - DIGIT_BITS, -1, -DIGIT_BITS):
        counts = torch.zeros(2**DIGIT_BITS, dtype=torch.int64)
        for keys in pieces():
            digits = keys >> shift
            begun = digits[(digits >> DIGIT_BITS) == found]
            counts += torch.bincount(begun & (2**DIGIT_BITS - 1), minlength=2**DIGIT_BITS).cpu()
        below = comm.total_on_host(counts).cumsum(0)
        digit = int(torch.searchsorted(below, k - smaller))
        same = int(counts[digit])
        smaller += int(below[digit]) - same
        found = (found << DIGIT_BITS) | digit
    return found, smaller, same


def _total(comm: Comm, count: int) -> int:
    """All ranks call this."""
    return int(comm.total_on_host(torch.tensor([count])))


def sum_of_sizes(gradients: RankingGradients, groups: Sequence[Sequence[Item]], place: VectorPlace) -> Tensor:
    """Mean over the groups of |mean gradient of the group's items|, of this rank's slices, at `place`.

    There it takes one vector, and where a group has several items or passes a second one, for their mean.
    All ranks call this.
    """
    base = gradients.base
    adds_up = any(len(group) > 1 or not gradients.is_complete(group[0]) for group in groups)
    total, mean = _rooms(place, base.slices.size, 2 if adds_up else 1)
    for group in groups:
        share = 1.0 / len(group)

        def take(
            _item: int, into: list[tuple[str, float]], where: slice, entries: Tensor, share: float = share
        ) -> None:
            ((_, factor),) = into
            if mean is None:
                total[where].add_(entries.to(total.device).abs(), alpha=abs(factor) / len(groups))
            else:
                mean[where].add_(entries.to(mean.device), alpha=factor * share)

        gradients.hand_out(group, take)
        if mean is not None:
            total.add_(mean.abs_(), alpha=1.0 / len(groups))
            mean.zero_()
        # A number that is not finite stays one in the sum.
        if not base.comm.all_agree(_is_finite(total)):
            raise UserError(
                f"The gradient of the pre-prune examples is not finite ({group[0].name}): check the base model's "
                "weights and these rows."
            )
    return total


def _rooms(place: VectorPlace, size: int, count: int) -> tuple[Tensor, Tensor | None]:
    """One vector or two, in one place."""
    room = place.zeros(count * size)
    return room[:size], room[size:] if count == 2 else None


def _is_finite(vector: Tensor) -> bool:
    """Without a mask of its size."""
    return all(bool(piece.isfinite().all()) for piece in vector.split(PIECE)) if len(vector) else True


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
