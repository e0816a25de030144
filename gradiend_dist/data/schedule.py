"""Rows -> gradient items, and the order in which an epoch visits them.

A batch is the rows behind one gradient: all of one transition. Batches never change, since their gradients are computed
once and kept; what changes from epoch to epoch is the order. Transitions take turns, so that every optimizer step
sees both directions equally often, whatever the number of their rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from gradiend_dist.data.splits import stream
from gradiend_dist.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Which rows make which gradient item, and in which order an epoch visits the items."""

    batches: tuple[np.ndarray, ...]
    """Row positions (int64) into the frame the schedule was made for; each batch has one feature_class_id and label."""
    groups: tuple[tuple[int, ...], ...]
    """Batch ids by feature_class_id, in ascending order of the latter."""
    seed: int
    reference: bool = False
    """One order for all epochs, as many items as batches: small groups are repeated, tails of large ones unused."""
    shuffle: bool = True
    """A new order of each group's batches in every epoch."""

    def __len__(self) -> int:
        """Items per epoch: as many turns for each group as the largest one has batches."""
        if self.reference:
            return len(self.batches)
        return len(self.groups) * max(len(group) for group in self.groups)

    def epoch(self, epoch: int) -> list[int]:
        """Batch ids in visiting order: a pure function of (seed, epoch).

        Groups alternate. Every batch is visited, and the visits of two batches of a group differ by at most one
        (`reference` visits only the first of a large group).
        """
        turns = -(-len(self) // len(self.groups))
        orders = [self._group_order(number, group, turns, epoch) for number, group in enumerate(self.groups)]
        return [orders[item % len(orders)][item // len(orders)] for item in range(len(self))]

    def _group_order(self, number: int, group: tuple[int, ...], turns: int, epoch: int) -> list[int]:
        """The group's batches, repeated as a whole until there is one for each turn."""
        if self.reference or not self.shuffle:
            return [group[turn % len(group)] for turn in range(turns)]
        rng = stream(self.seed, "epoch", epoch, number)
        rounds = [rng.permutation(len(group)) for _ in range(-(-turns // len(group)))]
        return [group[index] for index in np.concatenate(rounds)[:turns]]


def make_schedule(
    rows: pd.DataFrame,
    batch_size: int,
    *,
    seed: int,
    reference: bool = False,
    shuffle: bool = True,
    by: str = "feature_class_id",
) -> Schedule:
    """Batches of the rows of each feature_class_id, or of each value of another column.

    By default rows are shuffled by `seed` and cut into ceil(n / batch_size) batches whose sizes differ by at most one:
    no row is dropped. `reference` cuts full batches, drops the remainder and keeps one order. Without `shuffle`
    (evaluation) rows stay in order.
    """
    if batch_size < 1:
        raise UserError(f"The batch size is {batch_size}: it must be at least 1.")
    if rows.empty:
        raise UserError("There are no rows to make batches of: check the split and target_classes.")
    cut = _full_batches if reference else _even_batches
    batches: list[np.ndarray] = []
    groups: list[tuple[int, ...]] = []
    for group_batches in cut(_positions(rows, by), batch_size, seed, shuffle):
        groups.append(tuple(range(len(batches), len(batches) + len(group_batches))))
        batches.extend(group_batches)
    return Schedule(tuple(batches), tuple(groups), seed, reference, shuffle)


Positions = dict[Any, list[np.ndarray]]  # by feature_class_id: the row positions of each label


def _positions(rows: pd.DataFrame, by: str) -> Positions:
    """Row positions by feature_class_id (or another column) and label, both ascending."""
    positions: Positions = {}
    groups, labels = np.array(rows[by].tolist()), rows["label"].to_numpy()
    for group in np.unique(groups):
        own = labels[groups == group]
        positions[group.item()] = [np.flatnonzero((groups == group) & (labels == label)) for label in np.unique(own)]
    return positions


def _even_batches(positions: Positions, batch_size: int, seed: int, shuffle: bool) -> Iterator[list[np.ndarray]]:
    """For each feature_class_id, nearly equal batches of all its rows."""
    for number, by_label in positions.items():
        batches: list[np.ndarray] = []
        for place, rows in enumerate(by_label):
            ordered = stream(seed, "batches", number, place).permutation(rows) if shuffle else rows
            batches += np.array_split(ordered, -(-len(rows) // batch_size))
        yield batches


def _full_batches(positions: Positions, batch_size: int, seed: int, shuffle: bool) -> Iterator[list[np.ndarray]]:
    """The reference's batches: full ones only; one generator shuffles the lists of all feature_class_ids in turn."""
    shuffle = shuffle and batch_size > 1
    rng = random.Random(seed)
    for number, by_label in positions.items():
        batches: list[np.ndarray] = []
        for rows in by_label:
            ordered = pd.Series(rows).sample(frac=1, random_state=seed).to_numpy() if shuffle else rows
            batches += [ordered[end - batch_size : end] for end in range(batch_size, len(rows) + 1, batch_size)]
        if not batches:
            raise UserError(
                f"feature_class_id {number} has only {max(map(len, by_label))} rows, too few for a full batch of "
                f"{batch_size}, as the reference needs: lower train_batch_size, add rows, or run without compat."
            )
        if shuffle:
            rng.shuffle(batches)
        yield batches


def cap_per_group(rows: pd.DataFrame, max_size: int | None, *, column: str, seed: int) -> pd.DataFrame:
    """At most `max_size` random rows for each value of `column`, in ascending order of it.

    A frame that has no more than `max_size` rows in all comes back as it is.
    """
    if max_size is None or len(rows) <= max_size:
        return rows
    if max_size < 1:
        raise UserError(f"The cap on rows per {column} is {max_size}: it must be at least 1.")
    if column not in rows:
        raise UserError(f"Rows cannot be capped per {column!r}: they have no such column.")
    parts = [group.sample(min(len(group), max_size), random_state=seed) for _, group in rows.groupby(column)]
    return pd.concat(parts).reset_index(drop=True)
