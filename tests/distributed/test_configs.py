"""Every file of accelerate_configs/ starts a training with the command that users type, on CPU ranks.

Overrides are the least that make a file run without GPUs: the number of processes, and for several nodes their number,
which are two launchers on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launching import ROOT, Ended, free_port, run
from safetensors.torch import load_file

from gradiend_dist import demo

pytestmark = pytest.mark.timeout(500)

CONFIGS = ROOT / "accelerate_configs"
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
DEEPSPEED = {"ACCELERATE_TORCH_DEVICE": "cpu"}
# Float32 sums in another order, which three steps of Adam carry into single weights.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def run_file(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("configs")
    (root / "data").mkdir()
    for name, frame in demo.feature_data().items():
        frame.to_csv(root / "data" / f"{name}.csv", index=False)
    values = {
        "model": str(masked_lm),
        "data": str(root / "data"),
        "target_classes": ["M", "F"],
        "params": ["*layer.0*"],
        "train_batch_size": 5,
        "encoder_eval_max_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "max_seeds": 1,
    }
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    return root / "run.yaml"


def launch(config: str, run_file: Path, output: Path, environment: dict[str, str], *options: str) -> Ended:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += [*options, "-m", "gradiend_dist.train", "--config", str(run_file), "--experiment_dir", str(output)]
    return run(command, environment=environment, limit=240)


@pytest.fixture(scope="module")
def single(run_file: Path) -> dict[str, Any]:
    output = run_file.parent / "single"
    ended = launch("single", run_file, output, {}).require_success()
    assert "one process: encoder on cpu, decoder on cpu, base model on cpu" in ended.errors
    return result(output)


def result(output: Path) -> dict[str, Any]:
    losses = json.loads((output / "model" / "training.json").read_text())["losses"]
    return {"losses": losses, "weights": load_file(output / "model" / "model.safetensors")}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=TOLERANCE)


ENGINES = {
    "cpu_2": ("2 ranks, engine sliced, base model on every rank", ON_CPU),
    "multi_gpu": ("2 ranks, engine sliced, base model on every rank", ON_CPU),
    "fsdp2": ("2 ranks, engine sliced, base model sharded with FSDP2", ON_CPU),
    "zero1": ("2 ranks, engine zero, base model on every rank", DEEPSPEED),
    "zero2": ("2 ranks, engine zero, base model on every rank", DEEPSPEED),
    "zero3": ("2 ranks, engine zero, base model on every rank", DEEPSPEED),
    "zero3_offload": ("2 ranks, engine zero, base model on every rank", DEEPSPEED),
}
BY_DEFAULT = ("fsdp2", "zero3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in ENGINES]
)
def test_config__starts_its_engine_and_gives_the_single_process_result(name, run_file, single, tmp_path):
    says, environment = ENGINES[name]
    ended = launch(name, run_file, tmp_path / "run", environment, "--num_processes", "2").require_success()
    assert says in ended.errors
    assert_close(result(tmp_path / "run"), single)


@pytest.mark.parametrize("name", ["multi_gpu_nodes", pytest.param("fsdp2_nodes", marks=pytest.mark.slow)])
def test_config__of_several_nodes_joins_their_launchers(name, run_file, single, tmp_path):
    port = str(free_port())

    def node(rank: int) -> Ended:
        options = ("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank))
        return launch(name, run_file, tmp_path / "run", ON_CPU, *options, "--main_process_port", port)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node, (0, 1))
    first.require_success()
    second.require_success()
    assert "2 ranks, engine sliced" in first.errors and "ranks, engine" not in second.errors
    assert_close(result(tmp_path / "run"), single)


def test_files__are_all_covered():
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(
        [*ENGINES, "single", "multi_gpu_nodes", "fsdp2_nodes"]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dry_run", "--", "--config", "run.yaml"], "gradiend-dist train --config run.yaml"),
        (["--engine", "zero3", "--num_processes", "4", "--dry_run", "--config", "x"], "zero3.yaml --num_processes 4"),
        (["--engine", "none", "--", "--config", "run.yaml"], "none.yaml does not exist: choose --engine single"),
        ([], "the arguments of the training are missing"),
        (["--engine"], "--engine needs a value"),
        (["--help"], "usage: launch/single_node.sh"),
    ],
)
def test_single_node__prints_its_command_and_says_what_is_wrong(arguments, says):
    found = subprocess.run(
        [str(ROOT / "launch" / "single_node.sh"), *arguments], capture_output=True, text=True, timeout=20
    )
    assert says in found.stdout + found.stderr
    assert found.returncode == (0 if "--dry_run" in arguments or "--help" in arguments else 2)
