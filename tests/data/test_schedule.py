"""Batches and orders: every row is used, both directions take turns, and an epoch depends on (seed, epoch) alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from gradiend_dist.data.schedule import cap_per_group, make_schedule
from gradiend_dist.errors import UserError


def rows(*sizes: int) -> pd.DataFrame:
    """Mixed rows of as many transitions as sizes; the third and later are identities."""
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    frame = pd.DataFrame({"feature_class_id": ids, "label": [{0: 1.0, 1: -1.0}.get(number, 0.0) for number in ids]})
    return frame.sample(frac=1, random_state=1).reset_index(drop=True)


@pytest.mark.parametrize(("sizes", "batch_size"), [((40, 9), 4), ((7, 7, 3), 3), ((1, 5), 32), ((13,), 5), ((4, 4), 1)])
def test_batches__hold_every_row_once_and_are_nearly_equal(sizes, batch_size):
    """Fails if remainders are dropped, if groups mix, or if one batch gets all that does not divide."""
    frame = rows(*sizes)
    schedule = make_schedule(frame, batch_size, seed=3)
    assert sorted(np.concatenate(schedule.batches)) == list(range(len(frame)))
    for number, group in enumerate(schedule.groups):
        lengths = [len(schedule.batches[batch]) for batch in group]
        assert len(group) == -(-sizes[number] // batch_size)
        assert max(lengths) <= batch_size and max(lengths) - min(lengths) <= 1
        for batch in group:
            assert schedule.batches[batch].dtype == np.int64
            assert set(frame["feature_class_id"].iloc[schedule.batches[batch]]) == {number}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("sizes", "batch_size"), [((40, 9), 4), ((7, 7, 3), 3), ((1, 5), 32), ((13,), 5), ((2, 11), 1)]
)
def test_epoch__alternates_groups_and_visits_every_batch(sizes, batch_size, shuffle):
    """Fails if the tail of a large group is never used, or if a small group repeats one batch and forgets another."""
    schedule = make_schedule(rows(*sizes), batch_size, seed=3, shuffle=shuffle)
    group_of = {batch: number for number, group in enumerate(schedule.groups) for batch in group}
    for epoch in range(3):
        order = schedule.epoch(epoch)
        assert len(order) == len(schedule) == len(sizes) * max(map(len, schedule.groups))
        assert [group_of[batch] for batch in order] == [item % len(sizes) for item in range(len(order))]
        visits = Counter(order)
        for group in schedule.groups:
            counts = [visits[batch] for batch in group]
            assert min(counts) >= 1 and max(counts) - min(counts) <= 1


def test_epoch__is_a_pure_function_of_seed_and_epoch():
    frame = rows(40, 25)
    one, two = make_schedule(frame, 4, seed=3), make_schedule(frame.set_index(np.arange(65) + 100), 4, seed=3)
    assert [one.epoch(2), one.epoch(0)] == [two.epoch(2), two.epoch(0)]
    assert one.epoch(0) != one.epoch(1)
    other = make_schedule(frame, 4, seed=4)
    assert other.epoch(0) != one.epoch(0)
    assert [batch.tolist() for batch in other.batches] != [batch.tolist() for batch in one.batches]


@pytest.mark.parametrize("reference", [True, False])
def test_schedule__without_shuffle_keeps_the_row_order(reference):
    frame = rows(6, 4)
    schedule = make_schedule(frame, 1, seed=3, reference=reference, shuffle=False)
    first = [int(schedule.batches[batch][0]) for batch in schedule.groups[0]]
    assert first == np.flatnonzero(frame["feature_class_id"] == 0).tolist()
    visited = [int(schedule.batches[batch][0]) for batch in schedule.epoch(0)][::2]
    assert visited == (first[:5] if reference else first)
    assert schedule.epoch(0) == schedule.epoch(5)


def test_reference_schedule__never_reaches_the_tail_of_a_large_group():
    """40 and 9 rows in batches of 4: 24 of the 40 are seen, in every epoch the same."""
    frame = rows(40, 9)
    schedule = make_schedule(frame, 4, seed=3, reference=True)
    seen = {row for batch in schedule.epoch(0) for row in schedule.batches[batch].tolist()}
    assert Counter(frame["feature_class_id"].iloc[sorted(seen)]) == {0: 24, 1: 8}
    assert schedule.epoch(0) == schedule.epoch(1)


def test_reference_schedule__names_the_group_that_is_too_small():
    with pytest.raises(UserError, match="feature_class_id 1 has only 3 rows, too few for a full batch of 4"):
        make_schedule(rows(9, 3), 4, seed=3, reference=True)


@pytest.mark.parametrize(("frame", "batch_size"), [(rows(3), 0), (rows(0), 2)])
def test_schedule__rejects_nothing_to_do(frame, batch_size):
    with pytest.raises(UserError):
        make_schedule(frame, batch_size, seed=0)


def test_cap_per_group__takes_random_rows_of_each_group():
    frame = rows(10, 3, 6).assign(text=[f"row {row}" for row in range(19)])
    capped = cap_per_group(frame, 4, column="feature_class_id", seed=2)
    assert capped["feature_class_id"].tolist() == [0] * 4 + [1] * 3 + [2] * 4
    assert capped["text"].is_unique and set(capped["text"]) <= set(frame["text"])
    assert cap_per_group(frame, 4, column="feature_class_id", seed=2).equals(capped)
    assert not cap_per_group(frame, 4, column="feature_class_id", seed=3).equals(capped)


@pytest.mark.parametrize("max_size", [None, 19, 100])
def test_cap_per_group__leaves_small_data_alone(max_size):
    frame = rows(10, 3, 6)
    assert cap_per_group(frame, max_size, column="feature_class_id", seed=2).equals(frame)


@pytest.mark.parametrize(("max_size", "column"), [(0, "label"), (2, "nowhere")])
def test_cap_per_group__rejects_wrong_arguments(max_size, column):
    with pytest.raises(UserError, match=column):
        cap_per_group(rows(4), max_size, column=column, seed=2)
