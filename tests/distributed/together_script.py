"""Several jobs, one after another, on the ranks of one launch: starting the ranks takes longer than most of the jobs.

python together_script.py '[["world", MODELS, RESULTS, CASE, ...], ["ranks", RESULTS], ["traffic", MODEL, RESULTS]]'
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

import ranks_script
import torch
import traffic_script
import world_script

from gradiend_dist.distributed.launch import Launch, launched


def do(launch: Launch, job: str, *arguments: str) -> None:
    """All ranks call this."""
    if job == "world":
        world_script.work(launch, Path(arguments[0]), Path(arguments[1]), *arguments[2:])
    elif job == "ranks":
        ranks_script.work(launch.comm, Path(arguments[0]), *arguments[1:])
    else:
        traffic_script.work(launch, arguments[0], Path(arguments[1]))


def devices() -> contextlib.AbstractContextManager[object]:
    """The CPU, or pretend GPUs: so many for a single process, one for each of several ranks."""
    count = int(os.environ.get("PRETEND_GPUS", "0"))
    if not count:
        return contextlib.nullcontext()
    import pretend_gpu

    if "WORLD_SIZE" in os.environ:
        return pretend_gpu.pretend_ranks(float(world_script.TIMEOUT))
    return pretend_gpu.pretend_gpus(count)


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    with devices():
        launch = launched(float(world_script.TIMEOUT))
        assert launch.comm.world_size == int(os.environ.get("WORLD_SIZE", "1"))
        for job in json.loads(sys.argv[1]):
            do(launch, *job)
    launch.comm.leave()  # os._exit runs no exit handlers, and rank 0 must leave last
    os._exit(0)  # DeepSpeed and FSDP take their time to go


if __name__ == "__main__":
    main()
