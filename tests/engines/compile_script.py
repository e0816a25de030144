"""Compiles the kernels as steps launch them, for GPUs that are not there; prints what the assembler says of each.

In a process of its own: Triton's interpreter, which other tests use, cannot be left.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from gradiend_dist.engines import fused
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.model.gradiend import GradiendModel

# n, items, latents, settings of the model and of the step. An odd n takes most registers: every number is loaded by
# itself, and of each it is asked whether it is there.
STEPS: list[tuple[int, int, int, dict[str, Any], dict[str, Any]]] = [
    (4096, 1, 1, {}, {}),
    (4096, 1, 1, {"activation_decoder": "gelu"}, {"moments_dtype": "bfloat16"}),
    (131, 3, 3, {"activation_decoder": "elu", "bias_decoder": False}, {"optim": "adam", "moments_dtype": "bfloat16"}),
    (131, fused.MOST_PRODUCTS, 1, {}, {}),
]


class AbsentGpu:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_steps(capability: int) -> list[dict[str, Any]]:
    driver.set_active(AbsentGpu(capability))
    compiled: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in compiled:
            rows = kwargs.get("sources", kwargs.get("targets"))
            compiled[kernel.hash] = {
                "kernel": self.__name__,
                "capability": capability,
                "products": len(rows) * kwargs["latents"],
                **assembled(kernel.asm["ptx"], capability),
            }
        return kernel

    with mock.patch.object(JITFunction, "run", compile_only):
        for n, items, latents, shape, changes in STEPS:
            options = StepOptions("adamw", 0.01, (0.9, 0.999), 1e-8, max_grad_norm=0.0, supervised=None)
            options = StepOptions(**{**vars(options), **changes})
            engine = SlicedEngine(GradiendModel(n, latents, **shape), options)
            engine.step([GradiendBatch(torch.ones(items, n), torch.ones(items, n), torch.ones(items, 1))], 1e-3)
    return list(compiled.values())


def assembled(ptx: str, capability: int) -> dict[str, Any]:
    """Bytes spilled to local memory and on the stack, registers; and what goes to memory in 16 bytes and in fewer.

    Fewer, and not of one number that a whole program shares: those are not counted.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}", file.name]
        report = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=True).stderr
    stack, stored, loaded = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report).groups()
    )
    moves = re.findall(r"(?:ld|st)\.global((?:\.\w+)*)", ptx)
    return {
        "spills": stored + loaded,
        "stack": stack,
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "wide": sum(".v4" in move for move in moves),
        "narrow": sum(".v2" in move for move in moves),
    }


if __name__ == "__main__":
    fused.uses_kernels = lambda _weight, _options: True
    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        json.dump([one for capability in (80, 90) for one in compile_steps(capability)], sys.stdout)
