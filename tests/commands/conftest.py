"""A good training command in a directory of its own, and base models for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import transformers
from stage import WORDS, Stage, frame


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked and a causal base model of a few thousand weights."""
    root = tmp_path_factory.mktemp("models")
    for family, tokenizer in (("bert", tiny.wordpiece_tokenizer()), ("gpt2", tiny.byte_level_tokenizer())):
        tiny.base_model(family, len(tokenizer)).save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
    return root


@pytest.fixture
def stage(models: Path, tmp_path: Path) -> Stage:
    """Fresh copies, and an experiment directory that holds an earlier result."""
    shutil.copytree(models / "bert", tmp_path / "model")
    (tmp_path / "data").mkdir()
    for name in WORDS:
        frame(name).to_csv(tmp_path / "data" / f"{name}.csv", index=False)
    earlier = tmp_path / "runs" / "model"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text('{"architecture": {}, "mapping": {}}')
    (earlier / "model.safetensors").write_bytes(b"the weights of an earlier run")
    (tmp_path / "runs" / "run_config.yaml").write_text("seed: 17\n")
    return Stage(tmp_path)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads weights now does it in vain: the input was known to be wrong."""

    def from_pretrained(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the base model was loaded before the input was checked")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", from_pretrained)
