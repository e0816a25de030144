"""Pre-pruning: one batched pass finds the weights that many single passes would."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from dry_run import Watch

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments
from gradiend_dist.config.compat import CORRECTED, REFERENCE
from gradiend_dist.demo import reflexive_data
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.gradients.items import ItemRows
from gradiend_dist.model.entries import select_entries_to_keep
from gradiend_dist.space import ParameterSpace, Slices
from gradiend_dist.training import pruning
from gradiend_dist.training.pruning import HOST, computed, pre_prune, sample_positions, sum_of_sizes


def trainer_for(model: Path, frames: Any, **options: Any) -> TextPredictionTrainer:
    return TextPredictionTrainer(
        str(model), data=frames, target_classes=["M", "F"], args=TrainingArguments(train_max_size=30, **options)
    )


@pytest.mark.parametrize("source", ["alternative", "diff"])
@pytest.mark.parametrize("words", ["single", "several pieces"])
def test_pre_prune__equals_the_top_of_the_mean_of_single_gradients(
    masked_lm: Path, feature_frames: Any, source: str, words: str
) -> None:
    """Fails if rows with more pieces weigh more, if directions cancel, or if the sign is dropped within one."""
    frames = feature_frames if words == "single" else reflexive_data()
    trainer = trainer_for(masked_lm, frames, base_micro_batch_size=3)
    session = trainer.session
    rows = trainer.inputs.training.rows
    config = PrePruneConfig(n_samples=7, topk=0.013, source=source, seed=5)
    base = session.base_gradients(session.space)
    kept = pre_prune(base, rows, config, seed=0, behaviour=CORRECTED)
    items = ItemRows(rows, session.objective)
    sums = torch.zeros(2, session.space.size, dtype=torch.float64)
    positions = sample_positions(rows, 7, 5, by_row_number=False)
    for position in positions:
        sums[rows["feature_class_id"][position]] += base.compute(items.item([position]), [source])[source].double()
    counts = rows["feature_class_id"][positions].value_counts()
    mean = sums[0].abs() / counts[0] + sums[1].abs() / counts[1]
    expected = torch.topk(mean.abs(), len(kept)).indices.sort().values
    assert len(kept) == -(-session.space.size * 13 // 1000)
    differing = set(kept.tolist()) ^ set(expected.tolist())
    # Only entries that are as large as the smallest kept one, up to rounding, may change places.
    edge = mean.abs()[expected].min()
    assert all(abs(float(mean[i].abs() / edge) - 1) < 1e-4 for i in differing), differing


def test_pre_prune__threshold_then_topk(masked_lm: Path, feature_frames: Any) -> None:
    trainer = trainer_for(masked_lm, feature_frames)
    session, rows = trainer.session, trainer.inputs.training.rows
    base, items = session.base_gradients(session.space), ItemRows(rows, session.objective)
    positions = sample_positions(rows, 4, 1, by_row_number=False)
    groups = [[p for p in positions if rows["feature_class_id"][p] == direction] for direction in (0, 1)]
    groups = [[items.item(group, per_row_mean=True)] for group in groups]
    importance = sum_of_sizes(computed(base, "alternative"), groups, HOST)
    threshold = float(importance.quantile(0.9))
    above = int((importance >= threshold).sum())
    for topk, wanted in ((None, above), (0.5, -(-above // 2)), (10**9, above)):
        config = PrePruneConfig(n_samples=4, topk=topk, threshold=threshold, seed=1)
        assert len(pre_prune(base, rows, config, seed=0, behaviour=CORRECTED)) == wanted


def test_pre_prune__keeps_what_the_feature_moves(masked_lm: Path, feature_frames: Any) -> None:
    """The class direction, E[diff | M->F] - E[diff | F->M] over all training rows, lives on the weights that are kept.

    With source=diff the reference's mean over both directions cancels it, and keeps less of the direction.
    """
    trainer = trainer_for(masked_lm, feature_frames)
    session, rows = trainer.session, trainer.inputs.training.rows
    base, items = session.base_gradients(session.space), ItemRows(rows, session.objective)
    sides = [rows.index[rows["feature_class_id"] == direction].tolist() for direction in (0, 1)]
    means = [base.compute(items.item(side), ["diff"])["diff"].clone() for side in sides]
    direction = (means[0] - means[1]).square()
    config = PrePruneConfig(n_samples=8, topk=0.01, source="diff", seed=0)
    shares = []
    for mixes in (False, True):
        behaviour = dataclasses.replace(CORRECTED, pre_prune_mixes_directions=mixes)
        kept = pre_prune(base, rows, config, seed=0, behaviour=behaviour)
        shares.append(float(direction[kept].sum() / direction.sum()))
    print(f"share of the class direction in 1 % of the weights: {shares[0]:.3f}, with mixed directions {shares[1]:.3f}")
    assert shares[0] > shares[1] + 0.05


def test_sample__is_stratified_and_a_prefix_of_larger_ones() -> None:
    rows = pd.DataFrame(
        {"feature_class_id": [0] * 20 + [1] * 4 + [2] * 9, "label": [1.0] * 20 + [-1.0] * 4 + [0.0] * 9}
    )
    small = sample_positions(rows, 5, 3, by_row_number=False)
    large = sample_positions(rows, 12, 3, by_row_number=False)
    assert [sum(position < 20 for position in small), sum(20 <= position < 24 for position in small)] == [3, 2]
    assert set(small) <= set(large)
    assert sum(position < 20 for position in large) == 6
    assert sorted(set(p for p in large if p >= 20)) == [20, 21, 22, 23]  # all of the small group, then drawn again


def test_sample__of_the_reference_takes_row_numbers_as_places() -> None:
    """Rows 0..3 of one direction become places 0..3 of an alternating schedule, so both directions come up."""
    rows = pd.DataFrame({"feature_class_id": [0] * 6 + [1] * 6, "label": [1.0] * 6 + [-1.0] * 6})
    ours = sample_positions(rows, 4, 0, by_row_number=False)
    theirs = sample_positions(rows, 4, 0, by_row_number=True)
    place_to_row = [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert theirs == [place_to_row[place] for place in ours]


def test_count__is_exact_beyond_float32() -> None:
    from gradiend_dist.model.entries import count_to_keep

    assert CORRECTED.topk_in_float32 is False and REFERENCE.topk_in_float32 is True
    assert count_to_keep(1.0, 16_777_217) == 16_777_217
    assert count_to_keep(1.0, 16_777_217, in_float32=True) == 16_777_216


def test_after_pre_pruning__only_selected_weights_are_differentiated(masked_lm: Path, feature_frames: Any) -> None:
    trainer = trainer_for(masked_lm, feature_frames, params=["*.layer.1.*"])
    session = trainer.session
    space = trainer.inputs.pre_pruned(PrePruneConfig(n_samples=4, topk=5, source="diff"), seed=0)
    names = {weight.name for weight in space.active()}
    assert 0 < len(names) <= 5 and all(".layer.1." in name for name in names)
    base = session.base_gradients(space)
    assert {weight.name for weight, _, _ in base.weights} == names


@pytest.mark.parametrize("selection", [{"topk": 0.01}, {"topk": 0.01, "threshold": 0.5}], ids=str)
def test_select_over_ranks__lists_no_more_than_it_keeps(selection: dict[str, float], monkeypatch: Any) -> None:
    """Fails if the positions or keys of the whole part are listed: eight bytes each, several times over."""
    n = 1_000_003
    monkeypatch.setattr(pruning, "PIECE", 1000)
    importance = torch.rand(n, generator=torch.Generator().manual_seed(1))
    expected = select_entries_to_keep(n, importance=importance, **selection)
    with Watch() as watch:
        found = pruning.select_over_ranks(Comm(), Slices.whole(n), importance, **selection)
    assert torch.equal(found, expected)
    digits = 8 * 2**pruning.DIGIT_BITS
    besides = watch.peak - 4 * n  # it counts the importance too, whose pieces it sees
    assert besides < 4 * digits + 8 * (3 * len(found) + 10 * pruning.PIECE) < 4 * n


def test_positions_in__of_a_pruned_space_list_no_more_than_it_has() -> None:
    """Fails if all positions of the wider space are listed: 70 billion of eight bytes."""
    wider = ParameterSpace([("a", (200, 300), None), ("b", (70_001,), None)])
    keep = torch.arange(17, wider.size, 997)
    with Watch() as watch:
        found = wider.select(keep).positions_in(wider)
    assert torch.equal(found, keep)
    assert watch.largest <= 2 * len(keep)
