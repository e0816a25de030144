"""Where an experiment's results are, and what of it only rank 0 writes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from test_state import arguments

from gradiend_dist import TextPredictionTrainer, TrainingArguments
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.storage.files import link_tree

COMMUNICATES = ("decide", "first", "meet", "gather", "largest", "smallest", "all_agree")


def make(model: Path, frames: dict[str, Any], args: TrainingArguments) -> TextPredictionTrainer:
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=args)


def test_paths__of_a_temporary_directory_communicate_with_nobody(
    masked_lm: Path, feature_frames: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if one rank that asks for a path shifts the messages of the others."""
    trainer = make(masked_lm, feature_frames, TrainingArguments(max_steps=1))
    for name in COMMUNICATES:
        monkeypatch.setattr(Comm, name, lambda *_: pytest.fail("a property communicates"))
    assert trainer.model_path.parent == trainer.seed_runs_dir.parent == trainer.places.seeds.parent
    assert trainer.experiment_dir is None
    assert not trainer.model_path.parent.exists(), "nothing is made before there is something to write"


def test_temporary_directory__is_agreed_on_by_all_ranks(
    masked_lm: Path, feature_frames: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comm, "decide", lambda _comm, _value: Path("/somewhere/of/rank_0"))
    trainer = make(masked_lm, feature_frames, TrainingArguments(max_steps=1))
    assert trainer.model_path == Path("/somewhere/of/rank_0/model")


def test_train__without_experiment_dir_writes_to_a_private_directory(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trainer = make(masked_lm, feature_frames, arguments(tmp_path, experiment_dir=None, max_seeds=1, max_steps=2))
    trainer.train()
    assert trainer.model_path.is_dir() and trainer.model_path.parent.parent == tmp_path
    assert stat.S_IMODE(trainer.model_path.parent.stat().st_mode) == 0o700


def test_plot_training_convergence__is_drawn_by_rank_0(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(masked_lm, feature_frames, arguments(tmp_path))
    monkeypatch.setattr(Comm, "first", lambda _comm, what, _work: Path(what))
    assert trainer.plot_training_convergence(show=False) == Path("drawing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", ["all_tried", "best_only"])
def test_promotion__links_the_weights_and_keeps_what_was_asked_for(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path, kept: str
) -> None:
    trainer = make(masked_lm, feature_frames, arguments(tmp_path, saved_seed_runs=kept, max_steps=6)).train()
    best = trainer.seed_runs_dir / f"seed_{trainer.get_seed_report()['best_seed']}"
    promoted = trainer.model_path / "model.safetensors"
    assert (best / "training.json").read_text() != (trainer.model_path / "training.json").read_text()
    if kept == "all_tried":
        assert promoted.stat().st_ino == (best / "model.safetensors").stat().st_ino
    else:
        assert promoted.is_file() and not (best / "model.safetensors").exists()
    assert (trainer.model_path / "tokenizer").is_dir()


def test_link_tree__copies_across_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("weights")
    link_tree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/file").read_text() == "weights"
