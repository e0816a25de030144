"""The decoder grid on several ranks is the one of a single process: replicated bases to the bit, a sharded one too."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import yaml
from safetensors.torch import load_file

from gradiend_dist import demo

CONFIGS = launching.ROOT / "accelerate_configs"
RATES = ["5", "0.5", "0.1", "0.02", "0.001"]


@pytest.fixture(scope="module")
def run_dir(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grid")
    (root / "data").mkdir()
    for name, frame in demo.feature_data().items():
        if name != "N":
            frame.to_csv(root / "data" / f"{name}.csv", index=False)
    values = {
        "model": str(masked_lm), "data": str(root / "data"), "target_classes": ["M", "F"], "max_steps": 20,
        "experiment_dir": str(root / "run"), "train_batch_size": 8, "eval_steps": 10, "max_seeds": 1,
        "learning_rate": 1e-3, "pre_prune_config": {"n_samples": 4, "topk": 0.31, "source": "diff"},
    }  # fmt: skip
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    launching.run([sys.executable, "-m", "gradiend_dist.train", "--config", str(root / "run.yaml")]).require_success()
    return root / "run"


def evaluated(
    run_dir: Path, place: Path, launcher: list[str], environment: dict[str, str], scaling: str = "plain"
) -> tuple[Any, str]:
    """The points of a grid, and what is printed."""
    found, output = command(run_dir, place, launcher, environment, "--lrs", *RATES, "--scaling", scaling)
    return found["results"], output


def command(run_dir: Path, place: Path, launcher: list[str], environment: dict[str, str], *flags: str) -> Any:
    """What an evaluation leaves in its file, and what it prints."""
    shutil.copytree(run_dir, place, ignore=shutil.ignore_patterns("decoder*"))
    flags = (str(place), "--parts", "decoder", "--max_size", "25", "--plot", "false", *flags)
    ended = launching.run([*launcher, "-m", "gradiend_dist.evaluate", *flags], environment=environment)
    ended.require_success()
    return json.loads((place / "decoder_grid_cache.json").read_text()), ended.output


@pytest.fixture(scope="module")
def expected(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return evaluated(run_dir, tmp_path_factory.mktemp("one") / "run", [sys.executable], {})


def launch(config: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file"]
    command += [str(CONFIGS / f"{config}.yaml"), "--num_processes", str(ranks)]
    command += ["--main_process_port", str(launching.free_port())]
    zero = config.startswith("zero")
    return command, {"ACCELERATE_TORCH_DEVICE": "cpu"} if zero else {"ACCELERATE_USE_CPU": "true"}


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("cpu_2", 2),
        pytest.param("cpu_2", 3, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 3, marks=pytest.mark.slow),
        pytest.param("zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_grid__does_not_depend_on_the_ranks(config, ranks, run_dir, expected, tmp_path):
    """A rank that scores another point, moves a part of the weights, or reads gathered ones fails."""
    found, text = evaluated(run_dir, tmp_path / "run", *launch(config, ranks))
    results, table = expected
    assert [entry["id"] for entry in found] == [entry["id"] for entry in results]
    assert len({json.dumps(entry["probs_by_dataset"]) for entry in results}) == len(results), "points differ"
    largest = max(
        abs(one["probs_by_dataset"][d][c] - two["probs_by_dataset"][d][c])
        for one, two in zip(found, results, strict=True)
        for d in "MF"
        for c in "MF"
    )
    print(f"{config} on {ranks} ranks: largest difference {largest:.1e}")
    # Every point is computed by one rank as one process does; over FSDP in batches of the same rows.
    assert largest <= (1e-6 if config == "fsdp2" else 0.0)
    assert [entry["lms"] for entry in found] == [entry["lms"] for entry in results]
    assert text.splitlines()[-3:] == table.splitlines()[-3:]


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        pytest.param("cpu_2", "tensor", marks=pytest.mark.slow),
        pytest.param("cpu_2", "curvature", marks=pytest.mark.slow),
        pytest.param("fsdp2", "tensor", marks=pytest.mark.slow),
        pytest.param("fsdp2", "curvature", marks=pytest.mark.slow),
    ],
)
def test_scaled_grid__does_not_depend_on_the_ranks(config, scaling, run_dir, tmp_path):
    """Fails for sums, a mean or a curvature of one rank's shards alone."""
    results, _ = evaluated(run_dir, tmp_path / "one", [sys.executable], {}, scaling)
    found, _ = evaluated(run_dir, tmp_path / "two", *launch(config, 2), scaling)
    assert [entry["id"] for entry in found] == [entry["id"] for entry in results]
    assert len({json.dumps(entry["probs_by_dataset"]) for entry in results}) == len(results), "points differ"
    for one, two in zip(found, results, strict=True):
        for dataset in "MF":
            expected = pytest.approx(two["probs_by_dataset"][dataset], abs=0.0 if config == "cpu_2" else 1e-5)
            assert one["probs_by_dataset"][dataset] == expected, one["id"]


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("cpu_2", 2),
        pytest.param("cpu_2", 3, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_search__does_not_depend_on_the_ranks(config, ranks, run_dir, tmp_path):
    """Ranks that measured other last bits would go on to other steps, and a rank that is not told waits for ever."""
    expected, table = command(run_dir, tmp_path / "one", [sys.executable], {})
    found, text = command(run_dir, tmp_path / "two", *launch(config, ranks))
    for name in "MF":
        one, two = expected["selected"][name], found["selected"][name]
        assert [t["relative_change"] for t in two["trials"]] == [t["relative_change"] for t in one["trials"]]
        for key in ("learning_rate", "value", "harm"):
            # Over FSDP sums have another order, and harm is a small difference of large ones.
            tolerance = {"rel": 0.0, "abs": 0.0} if config == "cpu_2" else {"rel": 1e-4, "abs": 1e-6}
            assert two[key] == pytest.approx(one[key], **tolerance), key
    assert found["completions"] == expected["completions"]
    assert text.splitlines()[-8:] == table.splitlines()[-8:]


@pytest.mark.slow
def test_scaled_rewrite__of_a_sharded_base_model_is_that_of_one_process(run_dir, tmp_path):
    """Rank 0 puts the curvature of all shards together: one entry in another's place changes the weights."""
    flags = ["--target_class", "F", "--learning_rate", "0.05", "--scaling", "curvature", "--output_dir"]
    for name, (launcher, environment) in (("one", ([sys.executable], {})), ("two", launch("fsdp2", 2))):
        command = [*launcher, "-m", "gradiend_dist.commands.rewrite", str(run_dir), *flags, str(tmp_path / name)]
        launching.run(command, environment=environment).require_success()
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    base = load_file(run_dir.parent / "model" / "model.safetensors")
    assert any(not torch.equal(one[name], base[name]) for name in base)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5)
