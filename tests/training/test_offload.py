"""Streamed and offloaded = kept in memory: the same model, entries, encodings and rewritten weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments
from gradiend_dist.errors import UserError
from gradiend_dist.storage.vectors import mapped

WAYS = {"kept": {}, "streamed": {"gradient_store_gib": 0.0}, "offloaded": {"gradient_store_gib": 0.0, "offload": True}}


def trained(model: Path, frames: Any, directory: Path, **args: Any) -> TextPredictionTrainer:
    arguments = TrainingArguments(
        experiment_dir=str(directory), max_seeds=1, max_steps=0, train_batch_size=8, spectral_items=6, **args
    )
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=arguments).train()


def numbers(trainer: TextPredictionTrainer) -> dict[str, Any]:
    tensors = load_file(trainer.model_path / "model.safetensors")
    indices = trainer.model_path / "mapping_indices.safetensors"
    encoded = trainer.evaluate_encoder(split="validation", max_size=5, return_df=True, use_cache=False)
    rewritten = trainer.get_model().rewrite_base_model(1e-3, 1.0)
    held_out = trainer.get_training_stats()["training_stats"]
    return {
        **tensors,
        **(load_file(indices) if indices.exists() else {}),
        "encoded": torch.tensor(encoded["encoder_df"]["encoded"].astype(float).tolist()),
        "explained": torch.tensor(list(held_out["explained"].values())),
        "rewritten": torch.cat([parameter.detach().reshape(-1) for parameter in rewritten.parameters()]),
    }


@pytest.mark.parametrize("pruned", [False, True], ids=["all", "pruned"])
@pytest.mark.parametrize("model", ["masked_lm", "causal_lm"])
def test_closed_form__is_the_same_kept_streamed_and_offloaded(
    model: str, pruned: bool, feature_frames: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Fails if a weight's gradient is lost, counted twice, or put elsewhere."""
    options = {"pre_prune_config": PrePruneConfig(n_samples=6, topk=0.03)} if pruned else {}
    found = {
        way: numbers(trained(request.getfixturevalue(model), feature_frames, tmp_path / way, **options, **arguments))
        for way, arguments in WAYS.items()
    }
    for way in ("streamed", "offloaded"):
        assert found[way].keys() == found["kept"].keys()
        for name, expected in found["kept"].items():
            if expected.is_floating_point():
                scale = float(expected.abs().max())
                torch.testing.assert_close(
                    found[way][name],
                    expected,
                    rtol=0,
                    atol=2e-5 * scale,
                    msg=lambda text, what=(way, name): f"{what}: {text}",
                )
            else:
                assert torch.equal(found[way][name], expected), (way, name)


def test_offload__evaluates_and_rewrites_as_in_memory(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """The search over a base model whose copy, curvature and vectors are in files; the base is itself afterwards."""
    found = {}
    for way in ("kept", "offloaded"):
        trainer = trained(masked_lm, feature_frames, tmp_path / way, **WAYS[way])
        before = [parameter.clone() for parameter in trainer.session.base_model.parameters()]
        result = trainer.evaluate_decoder(max_size=12, max_size_neutral=12, use_cache=False)
        found[way] = {name: result[name]["learning_rate"] for name in ("M", "F")}
        after = trainer.session.base_model.parameters()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        trainer.rewrite_base_model(result, "M", output_dir=str(tmp_path / way / "rewritten"))
    assert found["offloaded"] == pytest.approx(found["kept"], rel=1e-3)
    kept, offloaded = (load_file(tmp_path / way / "rewritten" / "model.safetensors") for way in ("kept", "offloaded"))
    for name, expected in kept.items():
        torch.testing.assert_close(offloaded[name], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_offload__leaves_no_file_behind(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trained(masked_lm, feature_frames, tmp_path, **WAYS["offloaded"])
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".vector")]


def test_mapped__takes_its_space_at_once(tmp_path: Path) -> None:
    """Fails if a full disk is met only when the numbers are written: the process would be killed."""
    vector = mapped(1001, torch.float32, tmp_path)
    assert vector.shape == (1001,) and not vector.any() and not list(tmp_path.iterdir())
    vector.fill_(2.0)
    assert float(vector.sum()) == 2002.0
    with pytest.raises(UserError, match="cannot be written"):
        mapped(2**50, torch.float32, tmp_path)
    assert not list(tmp_path.iterdir())


def test_offload__and_other_places_are_refused_together() -> None:
    with pytest.raises(UserError, match="offload puts encoder and decoder on the host"):
        TrainingArguments(offload=True, device_encoder="cpu")
