"""One optimizer step of every engine: time, peak memory and bytes sent per rank, next to the machine's bandwidth.

    python benchmarks/engines.py [--n 1e6 ...] [--engine NAME ...] [--repeat 3] [--json FILE]

Two gloo ranks with one thread each (the single process: one thread), each launched as a user would, with the real
Accelerate files for DeepSpeed. Only the GRADIEND part is timed: `engine.step` with one given x and y. What is printed:

    copy        bytes read and written per second by one of as many processes as there are ranks, copying at once,
                in turns with the steps
    step        the shortest of many steps of a launch; of several launches, the one nearest to its own bandwidth
    / traffic   step time divided by the time that 100 bytes for each of the rank's weights of n take at the copy
                bandwidth. 100 bytes is what the `placed` and `sliced` step reads and writes (see
                engines/placed.py); for ZeRO it is the same yardstick, not its own traffic
    sent        bytes that one rank's sockets sent in a step, as the kernel counts them
    peak        the rank's largest resident memory while it builds the engine and steps, above what the process had
                before, x and y included; next to it what the formulas of `gradiend-dist plan` say

Expected: `sliced` within 2.0 times its traffic's time and at least 5 times faster than `zero3`; forecasts within 10 %.
What is missed is marked. Time is that of the machine: run it on an otherwise idle one; it takes about ten minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENGINES = ("placed", "sliced", "zero1", "zero2", "zero3")
SIZES = (1_000_000, 10_000_000, 50_000_000)
NUM_RANKS = 2
TRAFFIC = 100
"""Bytes per weight of n and step: 8 for h, 12 for loss and dloss/dh, 80 for the update of three weights."""
TRAFFIC_RATIO = 2.0
SPEEDUP = 5.0
FORECAST_RATIO = 0.1
TIMEOUT = 600
# Offset of tcpi_bytes_sent in Linux' struct tcp_info.
BYTES_SENT = 200


# --- one rank


def measure(n: int, seconds: float) -> dict[str, Any]:
    """Build the engine that this process was launched for, step it for a while, and say what it took."""
    import torch

    from gradiend_dist.distributed.launch import launched
    from gradiend_dist.engines.base import GradiendBatch
    from gradiend_dist.space import Slices

    torch.set_num_threads(1)
    launch = launched(TIMEOUT)
    comm = launch.comm
    whole = launch.engine in ("placed", "zero")
    part = Slices.whole(n) if whole else Slices.even(n, comm.rank, comm.world_size)
    warm_up(launch)
    copied = torch.ones(2, 2**24)
    before = start_watching_memory()
    generator = torch.Generator().manual_seed(comm.rank if not whole else 0)
    source, target = (torch.empty(1, part.size).normal_(std=1e-3, generator=generator) for _ in range(2))
    batches = [GradiendBatch(source, target, torch.ones(1, 1))]
    engine = make_engine(launch, n, part)
    building = peak_memory() - before
    start_watching_memory()
    times, copy_times, sent = timed_steps(lambda: engine.step(batches, 1e-5), copied, comm, seconds)
    stepping = peak_memory() - before
    return {
        "engine": launch.engine,
        "rank": comm.rank,
        "num_ranks": comm.world_size,
        "n": n,
        "part": part.size,
        "seconds": min(times),
        "num_steps": len(times),
        "bytes_sent": sent,
        "peak_building": building,
        "peak_stepping": stepping,
        "copy_bytes_per_second": 4 * copied.numel() / min(copy_times),
    }


def make_engine(launch: Any, n: int, part: Any) -> Any:
    import torch

    from gradiend_dist.distributed.devices import Placement
    from gradiend_dist.engines.base import StepOptions
    from gradiend_dist.engines.spread import Spread
    from gradiend_dist.model.gradiend import ParamMappedGradiendModel
    from gradiend_dist.space import ParameterSpace

    device = torch.device("cpu")
    options = StepOptions("adamw", 1e-2, (0.9, 0.999), 1e-8, max_grad_norm=0.0, supervised=None)
    space = ParameterSpace([("weight", (n,), None)])
    model = ParamMappedGradiendModel(space, slices=part, generator=torch.Generator().manual_seed(0))
    return Spread(launch, Placement(device, device, device)).make_engine(model, options)


def warm_up(launch: Any) -> None:
    """What is made once, at the first step of a process, belongs to no engine: libraries, threads, connections."""
    import torch

    from gradiend_dist.engines.base import GradiendBatch
    from gradiend_dist.space import Slices

    n, comm = 1000, launch.comm
    part = Slices.even(n, comm.rank, comm.world_size) if launch.engine == "sliced" else Slices.whole(n)
    engine = make_engine(launch, n, part)
    for _ in range(2):
        engine.step([GradiendBatch(torch.ones(1, part.size), torch.ones(1, part.size), torch.ones(1, 1))], 1e-5)


def timed_steps(
    step: Callable[[], Any], copied: Any, comm: Any, seconds: float
) -> tuple[list[float], list[float], int]:
    """Times of single steps, after two that do not count, of a copy by all ranks at once before each, and bytes sent.

    Step and copy take turns: what else the machine does hits both alike.
    """
    step()
    sent_before = bytes_sent()
    step()
    sent = bytes_sent() - sent_before
    times: list[float] = []
    copy_times: list[float] = []
    end = time.monotonic() + seconds
    while comm.all_agree(len(times) < 2 or time.monotonic() < end):
        copy_times.append(timed(lambda: copied[1].copy_(copied[0])))
        times.append(timed(step))
    return times, copy_times, sent


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def start_watching_memory() -> int:
    """Hand back what was freed, forget the peak so far; returns the resident bytes."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak_memory() -> int:
    return memory("VmHWM")


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def bytes_sent() -> int:
    """By all TCP connections of this process, since they were opened."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # no socket
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_SENT)[0]
    return total


# --- launching ranks


class LaunchFailed(Exception):
    """An engine could not be measured; the others still are."""


def launch(engine: str, n: int, seconds: float) -> list[dict[str, Any]]:
    """What each rank measured, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gradiend_benchmark_") as directory:
        command = [*launcher(engine), str(Path(__file__).resolve()), "--child", directory, str(n), str(seconds)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "ACCELERATE_TORCH_DEVICE": "cpu",
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            # Vectors are mapped one by one and given back when freed: resident memory is then what is in use. Chunks of
            # a step, 2^20 bytes, are not: mapping them again and again would take longer than using them.
            "MALLOC_MMAP_THRESHOLD_": str(2**20 + 2**17),
            "MALLOC_TRIM_THRESHOLD_": str(2**26),
        }
        output = run(command, environment)
        files = sorted(Path(directory).glob("*.json"))
        if len(files) != (1 if engine == "placed" else NUM_RANKS):
            raise LaunchFailed(f"{engine} with n = {n:,} failed:\n{output[-3000:]}")
        return [json.loads(file.read_text()) for file in files]


def launcher(engine: str) -> list[str]:
    if engine == "placed":
        return [sys.executable]
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    config = "cpu_2" if engine == "sliced" else engine
    accelerate += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
    return [*accelerate, "--num_processes", str(NUM_RANKS), "--main_process_port", str(free_port())]


def run(command: list[str], environment: dict[str, str]) -> str:
    """Output of a command, which is ended with all its children if it takes too long."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- reports


def best(launches: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of several launches: the one nearest to its own bandwidth, and the lowest peak; of the ranks, who needs most."""

    def most(ranks: list[dict[str, Any]], name: str) -> Any:
        return max(rank[name] for rank in ranks)

    def ratio(ranks: list[dict[str, Any]]) -> float:
        return max(rank["seconds"] * rank["copy_bytes_per_second"] for rank in ranks)

    fastest = min(launches, key=ratio)
    names = ("seconds", "bytes_sent", "part", "copy_bytes_per_second")
    peak = min(max(most(ranks, "peak_building"), most(ranks, "peak_stepping")) for ranks in launches)
    first = fastest[0]
    return {"n": first["n"], "num_ranks": len(fastest), **{name: most(fastest, name) for name in names}, "peak": peak}


def judge(rows: list[dict[str, Any]]) -> None:
    """Add to each row what follows from it and the others."""
    from gradiend_dist.memory import on_cpu

    steps = {(row["engine"], row["n"]): row["seconds"] for row in rows}
    for row in rows:
        # The memory traffic of a rank is that of its share of the work.
        row["traffic_seconds"] = TRAFFIC * row["n"] / row["num_ranks"] / row["copy_bytes_per_second"]
        row["ratio"] = row["seconds"] / row["traffic_seconds"]
        row["forecast"] = on_cpu(row["engine"], row["n"], row["num_ranks"])
        row["missed"] = missed(row, steps.get(("zero3", row["n"])))


def missed(row: dict[str, Any], zero3: float | None) -> list[str]:
    found = []
    if row["engine"] == "sliced" and row["ratio"] > TRAFFIC_RATIO:
        found.append(f"traffic > {TRAFFIC_RATIO:g}")
    if row["engine"] == "sliced" and zero3 is not None and zero3 < SPEEDUP * row["seconds"]:
        found.append(f"zero3 / sliced < {SPEEDUP:g}")
    if abs(row["forecast"] / row["peak"] - 1.0) > FORECAST_RATIO:
        found.append("forecast")
    return found


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| n | engine | ranks | copy | step | / traffic | / sliced | sent per step | peak | plan | |",
        "|---" * 11 + "|",
    ]
    sliced = {row["n"]: row["seconds"] for row in rows if row["engine"] == "sliced"}
    for row in rows:
        against = f"{row['seconds'] / sliced[row['n']]:.1f}" if row["n"] in sliced else ""
        speed = row["copy_bytes_per_second"] / 1e9
        change = 100 * (row["forecast"] / row["peak"] - 1.0)
        words = f"MISSED: {', '.join(row['missed'])}" if row["missed"] else ""
        lines.append(
            f"| {row['n']:.0e} | {row['engine']} | {row['num_ranks']} | {speed:.1f} GB/s | "
            f"{1000 * row['seconds']:.1f} ms | "
            f"{row['ratio']:.2f} | {against} | {size(row['bytes_sent'])} | {size(row['peak'])} | "
            f"{size(row['forecast'])} ({change:+.1f} %) | {words} |"
        )
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:.0f} B"


def measure_all(engines: list[str], sizes: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for n in sizes:
        launches: dict[str, list[list[dict[str, Any]]]] = {engine: [] for engine in engines}
        for _ in range(options.repeat):  # taking turns, so that a slow minute does not hit all launches of one engine
            for engine in engines:
                try:
                    launches[engine].append(launch(engine, n, options.seconds))
                except LaunchFailed as error:
                    print(error, file=sys.stderr, flush=True)
        rows += [{"engine": engine, **best(found)} for engine, found in launches.items() if found]
        print(f"n = {n:,} done", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=float, nargs="+", default=list(SIZES))
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeat", type=int, default=3, help="launches of each; the best counts")
    parser.add_argument("--seconds", type=float, default=3.0, help="of stepping in each launch")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    rows = measure_all(options.engine, [int(n) for n in options.n], options)
    judge(rows)
    print(as_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["missed"] for row in rows) or len(rows) < len(options.engine) * len(options.n))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        directory, entries, seconds = sys.argv[2:]
        measured = measure(int(entries), float(seconds))
        Path(directory, f"{measured['rank']}.json").write_text(json.dumps(measured))
        os._exit(0)  # DeepSpeed's and gloo's threads need not be waited for
    sys.exit(main())
