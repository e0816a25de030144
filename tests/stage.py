"""A good training command and all that it reads and writes, for tests that change one thing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gradiend_dist.commands import train

PREFIX = "gradiend-dist train: error: "
LEFT_OUT = object()
WORDS = {"M": "he", "F": "she", "N": "they"}
SPLITS = ["train"] * 4 + ["validation", "test"]

Changes = dict[str, Any]


@dataclass
class Stage:
    """A good command and all that it reads and writes; a case changes one thing of it."""

    root: Path
    changes: Changes = field(default_factory=dict)
    """To the good configuration; LEFT_OUT removes a line."""
    flags: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    def command(self) -> list[str]:
        """The command line; its configuration file is written here, unless the case brought its own."""
        good = {
            "model": str(self.model),
            "data": str(self.data),
            "experiment_dir": str(self.runs),
            "target_classes": ["M", "F"],
            "train_batch_size": 2,
            "max_steps": 3,
            "eval_steps": 2,
            "max_seeds": 1,
            "learning_rate": 1e-3,
        }
        values = {name: value for name, value in {**good, **self.changes}.items() if value is not LEFT_OUT}
        if not self.config.exists():
            self.config.write_text(yaml.safe_dump(values))
        return ["--config", str(self.config), *self.flags]

    def edit_class(self, name: str, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
        edit(pd.read_csv(self.data / f"{name}.csv")).to_csv(self.data / f"{name}.csv", index=False)

    def edit_all(self, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
        for name in WORDS:
            self.edit_class(name, edit)

    def edit_json(self, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
        values = json.loads((self.model / name).read_text())
        edit(values)
        (self.model / name).write_text(json.dumps(values))

    def edit_weights(self, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        tensors = load_file(self.model / "model.safetensors")
        edit(tensors)
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})


def frame(name: str) -> pd.DataFrame:
    subjects = ["man", "woman", "nurse", "doctor", "old man", "old woman"]
    rows = [f"the {subject} said that [MASK] was tired ." for subject in subjects]
    return pd.DataFrame({"masked": rows, "label": WORDS[name], "split": SPLITS})


def content(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes; directories with None."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def refusal(stage: Stage, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which must be refused; the sentence that it says."""
    command = stage.command()
    before = content(stage.runs)
    code = train.main(command)
    written = capsys.readouterr()
    lines = written.err.splitlines()
    assert code == 2, written.err
    assert len(lines) == 1 and lines[0].startswith(PREFIX), written.err
    assert written.out == ""
    assert content(stage.runs) == before, "the experiment directory was changed"
    return lines[0].removeprefix(PREFIX)


def assert_says(sentence: str, fragments: tuple[str, ...]) -> None:
    missing = [fragment for fragment in fragments if fragment not in sentence]
    assert not missing, f"{missing} is not in: {sentence}"
