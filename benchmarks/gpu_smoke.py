"""The first minutes on a machine with two or more GPUs: does what was only tried on CPUs hold there?

    python benchmarks/gpu_smoke.py [--directory DIR] [--rehearse]

The embedded example is trained in one process, on ranks that share n (`multi_gpu`), over shards of the base (`fsdp2`)
and with DeepSpeed (`zero2`): the losses must be the same. One rank of a run is killed, which must end it, and the same
command on one rank must go on to the same losses. Then one step of an engine with many entries: nothing in it may wait
for the GPU (`torch.cuda.set_sync_debug_mode("error")`), its traffic is put beside a copy's, its peak beside the formula
of `gradiend-dist plan`. Prints one table, and a line for each thing that is off; exit code 1 if there is one, 2 without
GPUs.

`--rehearse` does the same on CPUs, two ranks, without what only a GPU can tell: to see that this script works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
RANKS = 2
WAYS = ("single", "multi_gpu", "fsdp2", "zero2")
# Long enough to be killed in the middle, short enough for five minutes.
CHANGES = {"max_steps": 100, "eval_steps": 50, "save_steps": 10, "logging_steps": 25, "ddp_timeout": 60}
# Seconds for one of them; DeepSpeed may compile before its first step.
LIMIT = 600.0
# Of losses: float32 sums in another order over 100 steps, on kernels that round otherwise.
LOSS_TOLERANCE = 1e-3
N_ON_GPU, N_ON_CPU = 200_000_001, 1_000_001
NUM_STEPS = 20
# Bytes that a step reads and writes for each entry of n (see benchmarks/engines.py), and how far off it may be.
TRAFFIC = 100
TRAFFIC_RATIO = 2.0
PEAK_RATIO = 1.1


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    found: str
    off: str | None = None
    """What is wrong, and where to look; None: nothing."""


# --- trainings


def command(way: str, run_file: Path, output: Path, ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    launcher += ["--config_file", str(CONFIGS / f"{way}.yaml"), "--num_processes", str(ranks)]
    return [*launcher, "-m", "gradiend_dist.train", "--config", str(run_file), "--experiment_dir", str(output)]


def environment(way: str, *, rehearse: bool) -> dict[str, str]:
    values = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    values["PYTHONPATH"] = os.pathsep.join([str(ROOT), values.get("PYTHONPATH", "")])
    if rehearse:
        values |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        values |= {"ACCELERATE_TORCH_DEVICE": "cpu"} if "zero" in way else {"ACCELERATE_USE_CPU": "true"}
    elif way == "single":
        values["CUDA_VISIBLE_DEVICES"] = values.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return values


def start(way: str, run_file: Path, output: Path, *, rehearse: bool) -> subprocess.Popen[bytes]:
    ranks = 1 if way == "single" else RANKS
    with output.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command(way, run_file, output, ranks),
            stdout=log,
            stderr=log,
            env=environment(way, rehearse=rehearse),
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None: it did not end by itself, and was ended with all ranks."""
    import psutil

    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
    finally:
        for rank in started:
            if rank.is_running():
                rank.kill()


def losses_of(output: Path) -> list[float] | None:
    path = output / "model" / "training.json"
    found: list[float] | None = json.loads(path.read_text())["losses"] if path.exists() else None
    return found


def last_line(output: Path) -> str:
    lines = output.with_suffix(".log").read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")


def compare(what: str, losses: list[float] | None, expected: list[float] | None, seconds: float, log: str) -> Row:
    """Losses beside those of one process."""
    if losses is None:
        return Row(what, "failed", f"{what}: the run ended without a model ({log})")
    if expected is None or len(losses) != len(expected):
        number = "no" if expected is None else str(len(expected))
        return Row(what, f"{len(losses)} steps", f"{what}: {len(losses)} losses, and {number} of one process")
    # A loss that is no number is as far off as can be; max() would pass it over.
    shares = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, expected, strict=True)]
    apart = max(share if math.isfinite(share) else math.inf for share in shares)
    off = None
    if apart > LOSS_TOLERANCE:
        off = f"{what}: losses differ from those of one process by {apart:.1e}; {LOSS_TOLERANCE:.0e} may be rounding"
    return Row(what, f"{seconds:.0f} s, losses differ by {apart:.0e}", off)


def trainings(run_file: Path, directory: Path, *, rehearse: bool) -> Iterator[Row]:
    expected: list[float] | None = None
    for way in WAYS:
        output, begun = directory / way, time.monotonic()
        end(start(way, run_file, output, rehearse=rehearse), LIMIT)
        losses = losses_of(output)
        expected = losses if way == "single" else expected
        yield compare(way, losses, expected, time.monotonic() - begun, last_line(output))
    yield from killed_and_resumed(run_file, directory / "killed", expected, rehearse=rehearse)


def killed_and_resumed(run_file: Path, output: Path, expected: list[float] | None, *, rehearse: bool) -> Iterator[Row]:
    process = start("multi_gpu", run_file, output, rehearse=rehearse)
    killed = kill_one_rank(process, output)
    begun = time.monotonic()
    code = end(process, LIMIT)
    yield judge_kill(killed, code, time.monotonic() - begun)
    begun = time.monotonic()
    end(start("single", run_file, output, rehearse=rehearse), LIMIT)
    yield compare(f"resumed on 1 of {RANKS} ranks", losses_of(output), expected, time.monotonic() - begun,
                  last_line(output))  # fmt: skip


def kill_one_rank(process: subprocess.Popen[bytes], output: Path) -> bool:
    """Once a state is complete; False: the run was over before."""
    import psutil

    deadline = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if str(output) in each.cmdline()]
        if len(ranks) >= RANKS and any((output / "state").glob("step_*/complete.json")):
            ranks[-1].kill()
            return True
        time.sleep(0.02)
    return False


def judge_kill(killed: bool, code: int | None, seconds: float) -> Row:
    what = "one rank killed"
    if not killed:
        return Row(what, "not done", f"{what}: the run was over before a state was there: see its log")
    if code is None:
        return Row(what, "hangs", f"{what}: the other ranks did not end within {LIMIT:.0f} s")
    off = f"{what}: the launcher says that all is well" if code == 0 else None
    return Row(what, f"exit code {code} after {seconds:.0f} s", off)


# --- a step


def measure_step(result: Path) -> None:
    """As one of the ranks that were launched: a step of `sliced` with many entries. All ranks call this."""
    import torch

    from gradiend_dist.distributed.devices import peak_memory
    from gradiend_dist.distributed.launch import launched
    from gradiend_dist.engines.base import GradiendBatch, StepOptions
    from gradiend_dist.engines.sliced import SlicedEngine
    from gradiend_dist.memory import Head, sliced
    from gradiend_dist.model.gradiend import ParamMappedGradiendModel
    from gradiend_dist.model.start import draw_start
    from gradiend_dist.space import ParameterSpace, Slices

    launch = launched(LIMIT)
    device = torch.device(launch.accelerator.device)
    on_gpu = device.type == "cuda"
    n = N_ON_GPU if on_gpu else N_ON_CPU
    part = Slices.even(n, launch.comm.rank, launch.comm.world_size)
    space = ParameterSpace([("weight", (n,), None)])
    model = ParamMappedGradiendModel(space, slices=part, device=device, initialize=False)
    draw_start(model, 0)
    options = StepOptions("adamw", 1e-2, (0.9, 0.999), 1e-8, max_grad_norm=1.0, supervised=None)
    engine = SlicedEngine(model, options, launch.comm)
    source, target = (torch.full((1, part.size), value, device=device) for value in (1e-3, 2e-3))
    batches = [GradiendBatch(source, target, torch.ones(1, 1))]
    for _ in range(2):
        engine.step(batches, 1e-5)
    waits = step_without_waiting(engine, batches) if on_gpu else "not asked of a CPU"
    peak = peak_memory(device)
    seconds = timed(lambda: engine.step(batches, 1e-5), device)
    copied = torch.ones(2, 2**26 if on_gpu else 2**22, device=device)
    copy_seconds = timed(lambda: copied[1].copy_(copied[0]), device)
    found = {
        "waits": waits,
        "bytes_per_second": TRAFFIC * part.size / seconds,
        "copy_bytes_per_second": 8 * copied.shape[1] / copy_seconds,
        "peak": peak if on_gpu else None,
        "forecast": sliced(Head(n), part.size).peak,
    }
    if launch.comm.is_first:
        result.write_text(json.dumps(found))
    launch.comm.meet("the measurement")
    launch.comm.leave()


def step_without_waiting(engine: Any, batches: Any) -> str | None:
    """What a step waits for; None: nothing."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(batches, 1e-5)
    except RuntimeError as error:
        return str(error).split("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def timed(work: Any, device: Any) -> float:
    """Seconds of one of many."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    begun = time.perf_counter()
    for _ in range(NUM_STEPS):
        work()
    wait()
    return (time.perf_counter() - begun) / NUM_STEPS


def judge_step(found: dict[str, Any] | None) -> Iterator[Row]:
    if found is None:
        yield Row("a step", "failed", "a step: the ranks ended without a result: see step.log")
        return
    on_gpu = found["peak"] is not None
    if on_gpu:
        off = None if found["waits"] is None else f"a step waits for the GPU: {found['waits']}"
        yield Row("waits of a step", "some" if off else "none", off)
    share = found["copy_bytes_per_second"] / found["bytes_per_second"]
    gigabytes = found["bytes_per_second"] / 1e9
    slow = f"a step takes {share:.1f} times as long as a copy of its bytes, {TRAFFIC_RATIO:.0f} is expected"
    is_slow = on_gpu and share > TRAFFIC_RATIO
    yield Row("bandwidth of a step", f"{gigabytes:.1f} GB/s, a copy {share:.1f} times that", slow if is_slow else None)
    if on_gpu:
        ratio = found["peak"] / found["forecast"]
        more = f"a step needs {ratio:.2f} times what `plan` says: {found['peak']} bytes"
        yield Row("peak memory / plan", f"{ratio:.2f}", more if ratio > PEAK_RATIO else None)


def one_step(directory: Path, *, rehearse: bool) -> Iterator[Row]:
    result = directory / "step.json"
    train = command("multi_gpu", Path(), directory, RANKS)
    with (directory / "step.log").open("wb") as log:
        process = subprocess.Popen(
            [*train[: train.index("-m", 3)], str(Path(__file__)), "--as-rank", str(result)],
            stdout=log,
            stderr=log,
            env=environment("multi_gpu", rehearse=rehearse),
            start_new_session=True,
        )
        end(process, LIMIT)
    yield from judge_step(json.loads(result.read_text()) if result.exists() else None)


# --- all of it


def write_run(directory: Path) -> Path:
    import torch
    import yaml

    from gradiend_dist.demo import write_demo

    torch.set_num_threads(1)  # a model this small gains nothing from more
    path = write_demo(directory / "example")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **CHANGES}))
    return path


def table(rows: Sequence[Row]) -> str:
    width = max(len(row.what) for row in rows)
    lines = [f"{row.what:{width}}  {row.found}{'' if row.off is None else '  <- off'}" for row in rows]
    return "\n".join([*lines, *(f"off: {row.off}" for row in rows if row.off is not None)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What must hold on GPUs, in five minutes.")
    parser.add_argument("--directory", type=Path, help="where to leave runs and logs; by default they are deleted")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, to see that this script works")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.as_rank is not None:
        measure_step(options.as_rank)
        return 0
    import torch

    if not options.rehearse and torch.cuda.device_count() < RANKS:
        seen = torch.cuda.device_count()
        shown = "no GPU" if seen == 0 else f"{seen} GPU"
        print(f"gpu_smoke: error: {shown} is visible and {RANKS} are needed: start it where they are.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu_smoke_") as scratch:
        directory = (options.directory or Path(scratch)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in [trainings(write_run(directory), directory, rehearse=options.rehearse),
                    one_step(directory, rehearse=options.rehearse)]:  # fmt: skip
            rows += row
    print(table(rows))
    return 1 if any(row.off is not None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
