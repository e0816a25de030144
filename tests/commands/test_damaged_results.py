"""Files of a finished run that were damaged since: what reads them ends in one line, or does without them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from stage import WORDS, Stage, frame

from gradiend_dist.commands import evaluate, report, rewrite, train

WRONG = (
    b'{"architecture": 5, "mapping": [], "metadata": 7, "training_args": [1], "training_stats": 3, "source": 5, '
    b'"feature_class_encoding_direction": [1], "losses": 4, "best_score_checkpoint": "x"}'
)

FILES = [
    "model/config.json", "model/training.json", "model/gradiend_context.json", "model/model.safetensors",
    "model/mapping_masks.safetensors", "run_config.yaml", "metrics.jsonl", "training_stats.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of everything: model, data and a finished run."""
    root = tmp_path_factory.mktemp("finished")
    shutil.copytree(models / "bert", root / "model")
    (root / "data").mkdir()
    for name in WORDS:
        frame(name).to_csv(root / "data" / f"{name}.csv", index=False)
    stage = Stage(root, {"pre_prune_config": {"topk": 0.5, "n_samples": 2}})
    assert train.main(stage.command()) == 0
    return root


def damages(content: bytes) -> dict[str, bytes | None]:
    return {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "garbage": random.Random(0).randbytes(len(content)),
        "list": b"[]",
        "deep": b"[" * 5000,
        "wrong types": WRONG,
        "missing": None,
    }


@pytest.mark.parametrize("name", FILES)
def test_damaged_file__is_one_line_in_every_command(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["--target_class", "M", "--learning_rate", "0.1", "--output_dir", str(tmp_path / "rewritten")]
    commands: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
        "report": (report.main, []),
        "rewrite": (rewrite.main, step),
        "evaluate": (evaluate.main, ["--parts", "encoder", "--plot", "false"]),
    }
    content = (finished / "runs" / name).read_bytes()
    for damage, written in damages(content).items():
        runs = tmp_path / damage
        shutil.copytree(finished / "runs", runs)
        if written is None:
            (runs / name).unlink()
        else:
            (runs / name).write_bytes(written)
        for command, (main, flags) in commands.items():
            if command == "evaluate" and damage not in ("list", "wrong types"):
                continue
            code = main([str(runs), *flags])
            errors = capsys.readouterr().err
            assert code in (0, 2), f"{command} with {name} {damage}"
            assert "Traceback" not in errors
            assert (code == 2) == (": error: " in errors), errors
