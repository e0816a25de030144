"""Seeds as tasks of a job array, and what a training tells while it runs: the same run, however it is shared out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_state import Crash, CrashAt, arguments

from gradiend_dist import TextPredictionTrainer, UserError
from gradiend_dist.commands import train
from gradiend_dist.report.records import read_rows

CHANGING = ("time", "seconds", "per_second", "memory_gib")


def run(model: Path, frames: dict[str, Any], directory: Path, *callbacks: Any, **changes: Any) -> TextPredictionTrainer:
    args = arguments(directory, logging_steps=2, **{"initialization": "random", **changes})
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=args).train(
        callbacks=list(callbacks)
    )


def result(directory: Path) -> dict[str, Any]:
    stats = json.loads((directory / "training_stats.json").read_text())
    for seed in (stats, *stats["seeds"].values()):
        del seed["time"]
    report = json.loads((directory / "seeds" / "seed_report.json").read_text())
    for entry in report["runs"]:
        for name in ("output_dir", "trained", "used_cache"):
            del entry[name]
    return {"stats": stats, "report": report, "model": (directory / "model" / "model.safetensors").read_bytes()}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the machine's speed."""
    return [
        {name: value for name, value in row.items() if not any(word in name for word in CHANGING)}
        for row in read_rows(directory / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def plain(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gradiend_dist.demo import feature_data

    directory = tmp_path_factory.mktemp("plain") / "run"
    run(masked_lm, feature_data(), directory)
    return directory


def test_array__and_selection_are_one_run(
    masked_lm: Path, feature_frames: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    """Fails if a task trains other rows, weights or a space of its own, or the selection sees anything differently."""
    for seed in (4, 3):  # in any order
        trainer = run(masked_lm, feature_frames, tmp_path / "run", only_seed=seed)
        assert not (tmp_path / "run" / "model").exists(), "a task promotes nothing"
        assert not list((tmp_path / "run").glob("state*"))
    trainer = run(masked_lm, feature_frames, tmp_path / "run", select_only=True)
    assert result(tmp_path / "run") == result(plain)
    assert metrics(tmp_path / "run") == metrics(plain)
    again = run(masked_lm, feature_frames, tmp_path / "run", select_only=True)
    assert again.model_path == trainer.model_path and result(tmp_path / "run") == result(plain)


@pytest.mark.slow
def test_task__that_was_killed_goes_on_beside_the_others(
    masked_lm: Path, feature_frames: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    """Two unfinished tasks in one experiment: each has a state of its own."""
    for seed in (3, 4):
        with pytest.raises(Crash):
            run(masked_lm, feature_frames, tmp_path / "run", CrashAt(13), only_seed=seed)
    assert sorted(path.name for path in (tmp_path / "run").glob("state*")) == ["state_seed_3", "state_seed_4"]
    for seed in (4, 3):
        run(masked_lm, feature_frames, tmp_path / "run", CrashAt(None), only_seed=seed)
    run(masked_lm, feature_frames, tmp_path / "run", select_only=True)
    assert result(tmp_path / "run") == result(plain)
    assert metrics(tmp_path / "run") == metrics(plain)


def test_selection__without_all_seeds_says_which_is_missing(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path
) -> None:
    run(masked_lm, feature_frames, tmp_path / "run", only_seed=3)
    with pytest.raises(UserError, match=r"no finished model of seed 4 in .*: train it with only_seed"):
        run(masked_lm, feature_frames, tmp_path / "run", select_only=True)


def test_commands__of_an_array_print_their_seed_and_the_table(
    masked_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradiend_dist.demo import feature_data

    (tmp_path / "data").mkdir()
    for name, frame in feature_data().items():
        frame.to_csv(tmp_path / "data" / f"{name}.csv", index=False)
    flags = (
        f"--model {masked_lm} --data {tmp_path}/data --target_classes M F --experiment_dir {tmp_path}/run --max_steps 2"
    )
    flags += " --train_batch_size 4 --train_max_size 8 --encoder_eval_max_size 2 --max_seeds 2 --params *layer.0*"
    for seed in ("0", "1"):
        assert train.main([*flags.split(), "--only_seed", seed]) == 0
        said = capsys.readouterr().out
        assert f"model of seed {seed}" in said and "--select_only true promotes the best seed" in said
    assert train.main([*flags.split(), "--select_only", "true"]) == 0
    assert "<- selected" in capsys.readouterr().out
    config = (tmp_path / "run" / "run_config.yaml").read_text()
    assert "only_seed: null" in config and "select_only: false" in config, "run again, it is one whole run"


def test_metrics__of_a_run_that_was_killed_are_those_of_one_that_was_not(
    masked_lm: Path, feature_frames: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        run(masked_lm, feature_frames, tmp_path / "run", CrashAt(13))
    before = metrics(tmp_path / "run")
    assert before[-1]["step"] == 12, "rows after the last state are there until the run goes on"
    run(masked_lm, feature_frames, tmp_path / "run", CrashAt(None))
    assert metrics(tmp_path / "run") == metrics(plain)


def test_metrics__are_the_numbers_of_the_record(plain: Path) -> None:
    stats = json.loads((plain / "training_stats.json").read_text())
    rows = read_rows(plain / "metrics.jsonl")
    for seed, record in stats["seeds"].items():
        own = [row for row in rows if row.get("seed") == int(seed)]
        scores = {str(row["step"]): row["correlation"] for row in own if "correlation" in row}
        assert scores == record["training_stats"]["scores"]
        means = {row["step"]: (row["mean_encoding/M"], row["mean_encoding/F"]) for row in own if "correlation" in row}
        recorded = record["training_stats"]["mean_by_class"]
        assert means == {int(step): (found["1.0"], found["-1.0"]) for step, found in recorded.items()}
        trained = [row for row in own if "loss" in row]
        assert [row["step"] for row in trained] == [2, 4, 6, 8, 10, 12, 14, 16, 17]
        assert trained[0]["loss"] == pytest.approx(sum(record["losses"][:2]) / 2)
        for row in trained:
            parts = [value for name, value in row.items() if name.startswith("seconds/")]
            assert len(parts) == 6 and 0.0 < sum(parts) <= row["step_seconds"] * 1.001
            assert row["gradients_per_second"] == pytest.approx(1.0 / row["step_seconds"])
            assert row["rows_per_second"] == pytest.approx(7.0 / row["step_seconds"], rel=0.5)
    summary = rows[-1]
    assert summary["best_seed"] == stats["best_seed"] and summary["pruned_size"] < summary["space_size"]
