"""One optimizer step of every engine: time, peak memory and bytes sent per rank, next to the machine's bandwidth.

    python benchmarks/engines.py [--n 1e6 ...] [--engine NAME ...] [--repeat 3] [--json FILE]

Two gloo ranks with one thread each (the single process: one thread), each launched as a user would, with the real
Accelerate files for DeepSpeed. Only the GRADIEND part is timed: `engine.step` with one given x and y. What is printed:

    step        the shortest of many steps, over all launches
    / traffic   step time divided by the time that 100 bytes for each of the rank's weights of n take at the copy
                bandwidth of this machine, measured in the same launch, by as many processes at once. 100 bytes is
                what the `placed` and `sliced` step reads and writes (see engines/placed.py); for ZeRO it is the same
                yardstick, not its own traffic
    sent        bytes that one rank's sockets sent in a step, as the kernel counts them
    peak        the rank's largest resident memory while it builds the engine and steps, above what the process had
                before, x and y included; next to it what `gradiend-dist plan` forecasts for it

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

    from gradiend_dist.engines import GradiendBatch
    from gradiend_dist.space import Part
    from gradiend_dist.spread import launched

    torch.set_num_threads(1)
    launch = launched(TIMEOUT)
    comm = launch.comm
    whole = launch.engine in ("placed", "zero")
    part = Part.whole(n) if whole else Part.even(n, comm.rank, comm.world_size)
    warm_up(launch)
    bandwidth = copy_bandwidth(comm)
    before = start_watching_memory()
    generator = torch.Generator().manual_seed(comm.rank if not whole else 0)
    source, target = (torch.empty(1, part.size).normal_(std=1e-3, generator=generator) for _ in range(2))
    batches = [GradiendBatch(source, target, torch.ones(1, 1))]
    engine = make_engine(launch, n, part)
    building = peak_memory() - before
    start_watching_memory()
    times, sent = timed_steps(lambda: engine.step(batches, 1e-5), comm, seconds)
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
        "copy_bytes_per_second": max(bandwidth, copy_bandwidth(comm)),
    }


def make_engine(launch: Any, n: int, part: Any) -> Any:
    import torch

    from gradiend_dist.devices import Placement
    from gradiend_dist.engines import StepOptions
    from gradiend_dist.model import ParamMappedGradiendModel
    from gradiend_dist.space import ParameterSpace
    from gradiend_dist.spread import Spread

    device = torch.device("cpu")
    options = StepOptions("adamw", 1e-2, (0.9, 0.999), 1e-8, max_grad_norm=0.0, supervised=None)
    space = ParameterSpace([("weight", (n,), None)])
    model = ParamMappedGradiendModel(space, part=part, generator=torch.Generator().manual_seed(0))
    return Spread(launch, Placement(device, device, device)).make_engine(model, options)


def warm_up(launch: Any) -> None:
    """What is made once, at the first step of a process, belongs to no engine: libraries, threads, connections."""
    import torch

    from gradiend_dist.engines import GradiendBatch
    from gradiend_dist.space import Part

    n, comm = 1000, launch.comm
    part = Part.even(n, comm.rank, comm.world_size) if launch.engine == "sliced" else Part.whole(n)
    engine = make_engine(launch, n, part)
    for _ in range(2):
        engine.step([GradiendBatch(torch.ones(1, part.size), torch.ones(1, part.size), torch.ones(1, 1))], 1e-5)


def timed_steps(step: Callable[[], Any], comm: Any, seconds: float) -> tuple[list[float], int]:
    """The times of single steps, after one that does not count, and the bytes sent in each."""
    step()
    times: list[float] = []
    sent_before, end = bytes_sent(), time.monotonic() + seconds
    while comm.all_agree(len(times) < 3 or time.monotonic() < end):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times, (bytes_sent() - sent_before) // len(times)


def copy_bandwidth(comm: Any) -> float:
    """Bytes read and written per second by one of as many processes as there are ranks, all copying at once."""
    import torch

    source, target = torch.ones(2**26), torch.ones(2**26)
    times = []
    comm.meet("copying")
    for _ in range(8):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    comm.meet("copying")
    return 2 * 4 * source.numel() / min(times)


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


if __name__ == "__main__" and "--child" in sys.argv:
    _, _, out, size, seconds = sys.argv
    found = measure(int(size), float(seconds))
    Path(out, f"{found['rank']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)
