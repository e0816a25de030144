"""DeepSpeed ZeRO 1, 2, 3 and 3 with offload, on two gloo ranks with the real Accelerate files, against one process.

One launch for each file runs all cases of zero_script.py; the tests read what it found. The tolerance is that of
float32 summation order: a millionth of the largest number of each kind, after 6 steps.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from zero_script import CASES, RESUMED, RESUMED_AT_STAGE_3, STAGE_3_CASES

from gradiend_dist.engines.base import StepOptions
from gradiend_dist.engines.deepspeed_config import resolve_config
from gradiend_dist.engines.deepspeed_engine import make_optimizer
from gradiend_dist.errors import UserError

ROOT = Path(__file__).parents[2]
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
# Offload itself is a case of every launch; the file of its own costs half a minute more.
BY_DEFAULT = ("zero1", "zero3")
CONFIGS = [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in STAGES]
TOLERANCE = 1e-6
TIMEOUT = 180


@cache
def launched(config: str) -> dict[str, Any]:
    """What the script found under this Accelerate file; the least that makes a GPU file run on CPUs is overridden."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.json"
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml"), "--num_processes", "2"]
        command += ["--main_process_port", str(free_port()), str(ROOT / "tests/distributed/zero_script.py")]
        output = run([*command, str(results)])
        assert results.is_file(), f"the launch with {config}.yaml failed:\n{output[-5000:]}"
        return json.loads(results.read_text())


def run(command: list[str]) -> str:
    """Output of a command that is ended with all its children if it does not end by itself."""
    environment = {**os.environ, "ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"did not end within {TIMEOUT} s\n{process.communicate()[0]}"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- trained by DeepSpeed as by one process


@pytest.mark.parametrize("config", CONFIGS)
def test_launch__has_two_ranks_and_the_stage_of_the_file(config):
    """Fails if the launch silently is two worlds of one, or no DeepSpeed at all."""
    facts = launched(config)["facts"]
    print(f"{config}: {facts['seconds']} s")
    assert (facts["stage"], facts["world_size"]) == (STAGES[config], 2)


@pytest.mark.parametrize(
    ("config", "case"),
    [
        pytest.param(config, case, marks=() if config in BY_DEFAULT else pytest.mark.slow)
        for config, stage in STAGES.items()
        for case in [*CASES, *(STAGE_3_CASES if stage == 3 else ())]
    ],
)
def test_step__equals_a_single_process(config, case):
    """Fails by averaging twice, by a clipping of DeepSpeed's own, by a lost flip or by a step taken on NaN."""
    found = launched(config)[case]
    kinds = ("report", "weights")
    print(f"{config} {case}: largest difference " + ", ".join(f"{kind} {found[kind]:.1e}" for kind in kinds))
    assert found["moved"] > 0.1, "the case must train something"
    assert all(found[kind] <= TOLERANCE for kind in kinds)
    assert found["same_on_all_ranks"] and found["encoding_model"]
    assert found["bad_step_shows"] and found["unchanged_by_bad_step"]


@pytest.mark.parametrize(
    ("config", "case"),
    [
        pytest.param(config, case, marks=() if config in BY_DEFAULT else pytest.mark.slow)
        for config, stage in STAGES.items()
        for case in [*RESUMED, *(RESUMED_AT_STAGE_3 if stage == 3 else ())]
    ],
)
def test_load_own__goes_on_bit_for_bit(config, case):
    """Fails by moments, step counts, a flipped frozen half or masters that the checkpoint lacks."""
    found = launched(config)[f"resume_{case}"]
    assert found["same_reports"] and found["same_weights"]


@pytest.mark.parametrize("config", CONFIGS)
def test_load_own__refuses_another_world_size_or_stage(config):
    found = launched(config)["resume_flip"]
    assert "world_size=3 and this run has 2" in found["world_size"]
    assert f"zero_stage=0 and this run has {STAGES[config]}" in found["zero_stage"]
    assert "no training state" in found["empty"]


@pytest.mark.parametrize("config", CONFIGS)
def test_engines__train_side_by_side_with_settings_of_their_own(config):
    """Fails if the second engine of an Accelerator takes the clipping, or the weights, of the first."""
    assert launched(config)["together"]["weights"] <= TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
def test_engine__leaves_torch_as_it_was(config):
    """By default stage 3 replaces torch's linear by one that evaluation in forward mode cannot go through."""
    assert launched(config)["together"]["linear_is_torchs"]


@pytest.mark.parametrize("config", CONFIGS)
def test_engine__leaves_no_memory_behind(config):
    found = launched(config)["memory"]
    assert found["left"] == [0, 0, 0], "engine, optimizer or model outlive their use"
    assert found["large_tensors"] == 0


# --- what a configuration may say


def options(**changes: Any) -> StepOptions:
    defaults = {"optim": "adamw", "weight_decay": 0.0, "betas": (0.9, 0.999), "epsilon": 1e-8}
    return StepOptions(**{**defaults, "max_grad_norm": 0.0, "supervised": None, **changes})


def resolve(config: dict[str, Any], max_grad_norm: float = 0.0) -> dict[str, Any]:
    accelerator: Any = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    return resolve_config(accelerator, options(max_grad_norm=max_grad_norm), world_size=2)


def test_resolve_config__writes_clipping_out_and_drops_auto():
    """Left out, DeepSpeed clips at 1.0; left "auto", Accelerate asks a `model.config` that there is not."""
    given = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 7},
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
    }
    found = resolve(given)
    assert found["gradient_clipping"] == 0.0
    assert found["zero_optimization"] == {"stage": 3, "sub_group_size": 7, "memory_efficient_linear": False}
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (2, 1)
    assert given["gradient_clipping"] == "auto", "the next engine has settings of its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "multi_gpu.yaml"),
        ({"fp16": {"enabled": True}}, "float32"),
        ({"bf16": {"enabled": True}}, "float32"),
        ({"optimizer": {"type": "AdamW"}}, "section optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "section scheduler"),
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu=8"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer"),
        ({"communication_data_type": "bf16"}, "rounds gradients"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer to nvme"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "stage 3"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "compute_grad_norm"),
    ],
    ids=str,
)
def test_resolve_config__refuses_what_would_change_the_result(changes, message):
    with pytest.raises(UserError, match=message):
        resolve({"zero_optimization": {"stage": 1}, **changes})


def test_resolve_config__needs_a_deepspeed_launch():
    accelerator: Any = SimpleNamespace(deepspeed_plugin=None, distributed_type=SimpleNamespace(value="MULTI_GPU"))
    with pytest.raises(UserError, match="zero1.yaml"):
        resolve_config(accelerator, options(), world_size=2)


def test_make_optimizer__refuses_8_bits():
    with pytest.raises(UserError, match="adamw_8bit"):
        make_optimizer([], options(optim="adamw_8bit"))
    with pytest.raises(UserError, match="moments_dtype=bfloat16 .*: leave it out"):
        make_optimizer([], options(moments_dtype="bfloat16"))
