"""Forward mode = reverse mode: encodings of many rows without their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gradients import ROWS, Base
from torch import Tensor

from gradiend_dist import TextPredictionTrainer, TrainingArguments
from gradiend_dist.demo import reflexive_data
from gradiend_dist.gradients.forward_mode import encode_rows
from gradiend_dist.gradients.items import ItemRows
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.training.evaluator import SeedEvaluator


@pytest.mark.parametrize("kind", ["factual", "alternative", "diff"])
@pytest.mark.parametrize("kept", ["all", "every 777th", "top layer"])
@pytest.mark.parametrize("model", ["masked_lm", "causal_lm"])
def test_encode_rows__equals_encoding_the_gradients(
    model: str, kept: str, kind: str, feature_frames: Any, request: pytest.FixtureRequest
) -> None:
    """Rows of different lengths in batches that do not divide; a wrong position, weight or tangent shows here."""
    args = TrainingArguments(latent_dim=2, train_max_size=20)
    trainer = TextPredictionTrainer(
        str(request.getfixturevalue(model)), data=feature_frames, target_classes=["M", "F"], args=args
    )
    session = trainer.session
    keep = torch.arange(0, session.space.size, 777 if kept == "every 777th" else 1)
    if kept == "top layer":
        last = [weight for weight in session.space.weights if ".1." in weight.name]
        keep = torch.cat([torch.arange(weight.offset, weight.stop) for weight in last])
    space = session.space.select(keep)
    gradiend = session.new_model(space, seed=3).gradiend
    rows = ItemRows(trainer.data.rows("test").iloc[::13].reset_index(drop=True), session.objective)
    items = [rows.item([number]) for number in range(len(rows))]
    base = session.base_gradients(space)
    with torch.no_grad():
        expected = torch.cat([gradiend.forward_encoder(base.compute(item, [kind])[kind][None]) for item in items])
    found = encode_rows(base, items, kind, gradiend, batch_size=5)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-4, atol=3e-6), (found - expected).abs().max()


def test_encode_rows__words_of_several_pieces(masked_lm: Path) -> None:
    """Factual and alternative have different inputs, and a row's loss is the mean over its pieces."""
    args = TrainingArguments()
    trainer = TextPredictionTrainer(str(masked_lm), data=reflexive_data(), target_classes=["M", "F"], args=args)
    session = trainer.session
    gradiend = session.new_model(session.space, seed=0).gradiend
    rows = ItemRows(trainer.data.rows("train").head(7), session.objective)
    items = [rows.item([number]) for number in range(len(rows))]
    assert any(len(item.rows[0].factual.labels) > 1 for item in items)
    base = session.base_gradients(session.space)
    with torch.no_grad():
        expected = torch.cat([gradiend.forward_encoder(base.compute(item, ["diff"])["diff"][None]) for item in items])
    assert torch.allclose(encode_rows(base, items, "diff", gradiend, 3), expected, rtol=1e-4, atol=3e-6)


def test_encode_rows__weights_that_are_used_without_a_call_move_as_well() -> None:
    """Fails if a weight moves only while its module is called: some are used by the module around it."""
    bert = Base("bert")
    gradients, item = bert.gradients(), bert.item(ROWS[:1])
    model = ParamMappedGradiendModel(bert.space, generator=torch.Generator().manual_seed(1))
    expected = encode_rows(gradients, [item], "diff", model, 1)
    dense = bert.model.bert.encoder.layer[0].output.dense
    around = bert.model.bert.encoder.layer[0].output

    def without_call(hidden: Tensor, entered: Tensor) -> Tensor:
        return around.LayerNorm(F.linear(hidden, dense.weight, dense.bias) + entered)

    called, around.forward = around.forward, without_call
    try:
        assert torch.equal(encode_rows(gradients, [item], "diff", model, 1), expected)
        assert dense in gradients.always_moving
    finally:
        around.forward = called
    assert "weight" not in vars(dense)


def test_evaluation__without_room_for_gradients_gives_the_same_scores(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    for budget in (None, 0.0):
        args = TrainingArguments(
            experiment_dir=str(tmp_path / str(budget)), gradient_store_gib=budget, max_steps=4, eval_steps=2,
            train_batch_size=4, max_seeds=1, encoder_eval_max_size=7, learning_rate=1e-3,
            initialization="random",  # a closed form computes gradients before the first step
        )  # fmt: skip
        trainer = TextPredictionTrainer(str(masked_lm), data=feature_frames, target_classes=["M", "F"], args=args)
        if budget == 0.0:
            monkeypatch.setattr(SeedEvaluator, "_record", _counting(SeedEvaluator._record, trainer))
        scores.append(trainer.train().get_training_stats()["training_stats"]["scores"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def _counting(record: Any, trainer: TextPredictionTrainer) -> Any:
    """Only training items and held-out ones are computed by reverse mode: encodings of an evaluation add none."""
    seen: list[int] = []

    def wrapped(evaluator: SeedEvaluator, run: Any, step: int, metrics: Any) -> None:
        seen.append(trainer.session.gradients(run.model.gradiend.space).store.misses)
        held_out = len(evaluator.held_out.items) * len(seen) if evaluator.held_out is not None else 0
        assert seen[-1] == step + held_out, f"{seen} gradients were computed by step {step}"
        record(evaluator, run, step, metrics)

    return wrapped
