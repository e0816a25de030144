"""On the embedded example a rewritten model really says the other word, and stays the language model that it was."""

from __future__ import annotations

import pytest
import torch

from gradiend_dist import TextPredictionTrainer, TrainingArguments, demo
from gradiend_dist.evaluation.grid import FINE_LEARNING_RATES


@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_rewriting__moves_the_class_and_a_random_direction_does_not(kind, masked_lm, causal_lm, tmp_path):
    """Fails for a decoder that has learnt nothing, a wrong sign of the factor, a selection that ignores the score."""
    args = TrainingArguments(
        experiment_dir=str(tmp_path),
        train_batch_size=8,
        max_steps=100,
        eval_steps=50,
        learning_rate=1e-3,
        max_seeds=1,
        initialization="random",  # the rates below are of its decoder
    )
    frames = {name: frame for name, frame in demo.feature_data().items() if name != "N"}
    trainer = TextPredictionTrainer(
        str(masked_lm if kind == "masked" else causal_lm),
        data=frames,
        target_classes=["M", "F"],
        eval_neutral_data=demo.neutral_data(),
        args=args,
    ).train()
    # Between the default's steps of 2 and more: where a score within 1 % is asked for, they jump over the best point.
    rates = [rate * step for rate in (0.001, 0.01, 0.1) for step in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)]
    found = trainer.evaluate_decoder(lrs=rates)
    grid, base = found["grid"], found["grid"]["base"]
    for name, other in (("M", "F"), ("F", "M")):
        chosen = found[name]
        point = chosen["feature_factor"], chosen["learning_rate"]
        after, before = (entry["probs_by_dataset"][other] for entry in (grid[point], base))
        print(
            f"{kind}, {name} strengthened at {point}: P({name}) at blanks of {other} {before[name]:.4f} -> "
            f"{after[name]:.4f}, P({other}) {before[other]:.4f} -> {after[other]:.4f}, score "
            f"{chosen['base_lms']:.4f} -> {chosen['lms']:.4f}"
        )
        assert chosen["lms"] >= 0.99 * chosen["base_lms"]
        assert after[name] > 5 * before[name]
        assert after[other] < before[other], "the other word gives way"
        random = grid_of_random_direction(trainer, point)
        moved = random["probs_by_dataset"][other][name]
        print(f"{kind}, a random direction of the same length: {before[name]:.4f} -> {moved:.4f}")
        assert abs(moved - before[name]) < 0.1 * (after[name] - before[name])


@pytest.mark.slow
def test_scaling__reaches_more_at_the_same_score_of_a_masked_model(masked_lm, tmp_path):
    """Weights that every token passes hold much of the learnt direction and nearly all of the damage that it does."""
    args = TrainingArguments(
        experiment_dir=str(tmp_path),
        train_batch_size=8,
        max_steps=100,
        eval_steps=50,
        learning_rate=1e-3,
        max_seeds=1,
        initialization="random",  # the rates below are of its decoder
    )
    frames = {name: frame for name, frame in demo.feature_data().items() if name != "N"}
    neutral = demo.neutral_data()
    trainer = TextPredictionTrainer(
        str(masked_lm), data=frames, target_classes=["M", "F"], eval_neutral_data=neutral, args=args
    ).train()
    found = {}
    for scaling in ("plain", "curvature"):
        # The same rates for both: else a finer grid might make the difference.
        chosen = trainer.evaluate_decoder(lrs=FINE_LEARNING_RATES, scaling=scaling)
        assert all(chosen[name]["lms"] >= 0.99 * chosen[name]["base_lms"] for name in "MF")
        found[scaling] = {name: chosen[name]["value"] for name in "MF"}
        print(f"{scaling}: {found[scaling]}")
    assert min(found["curvature"].values()) > 0.9
    assert min(found["plain"].values()) < 0.5 * min(found["curvature"].values())


def grid_of_random_direction(trainer: TextPredictionTrainer, point: tuple[float, float]) -> dict:
    """The same point with the decoder's vector replaced by a random one of the same length."""
    model = trainer.get_model()
    gradiend = model.gradiend
    kept = {name: tensor.clone() for name, tensor in gradiend.state_dict().items()}
    length = model.rewrite_vector(point[0]).norm()
    vector = torch.randn(len(model), generator=torch.Generator().manual_seed(5))
    gradiend.decoder_weight.copy_((vector * length / vector.norm()).unsqueeze(1))
    assert gradiend.decoder_bias_vector is not None
    gradiend.decoder_bias_vector.zero_()
    try:
        asked = {"summary_metrics": ["M_factual"], "use_cache": False}
        return trainer.evaluate_decoder(lrs=[point[1]], feature_factors=[point[0]], **asked)["grid"][point]
    finally:
        gradiend.load_state_dict(kept)
