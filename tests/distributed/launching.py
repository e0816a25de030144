"""Starts scripts on several ranks of this machine, bounded in time, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# What a launcher needs to end its ranks after it was asked to.
GRACE_SECONDS = 10.0
# Gloo and the rendezvous stay on this machine, one thread for each rank: the cores are shared already.
LOCAL = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "TQDM_DISABLE": "1",
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@dataclass(frozen=True)
class Ended:
    """A launch that is over."""

    code: int | None
    """None: it did not end by itself."""
    output: str
    errors: str
    seconds: float

    def require_success(self) -> Ended:
        assert self.code == 0, (
            f"exit code {self.code} after {self.seconds:.0f} s\n{self.output[-2000:]}\n{self.errors[-6000:]}"
        )
        return self


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    limit: float = 180.0,
) -> Ended:
    """Run a command in a session of its own; after `limit` seconds it is ended with everything that it started."""
    # What pytest or an outer launcher has set for itself is not for the ranks.
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE), inherited.get("PYTHONPATH", "")])
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            list(command),
            env={**inherited, **LOCAL, "PYTHONPATH": path, **(environment or {})},
            cwd=directory,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return Ended(code, *texts, time.monotonic() - start)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and its ranks: torch gives each a session of its own, which no signal to the
    launcher's group reaches."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in started:
        if rank.is_running():
            rank.kill()
    psutil.wait_procs(started, GRACE_SECONDS)


def python(
    script: str | Path, *arguments: object, environment: Mapping[str, str] | None = None, limit: float = 180.0
) -> Ended:
    """A script in one process."""
    return run([sys.executable, str(script), *map(str, arguments)], environment=environment, limit=limit)


def torchrun(
    script: str | Path,
    *arguments: object,
    ranks: int,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    limit: float = 180.0,
) -> Ended:
    """A script on `ranks` processes; the launcher finds a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
    return run(command, environment=environment, directory=directory, limit=limit)


def accelerate(
    config: Path, script: str | Path, *arguments: object, ranks: int, limit: float = 180.0, **options: str
) -> Ended:
    """A script under `accelerate launch` with a configuration file of the project."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    command += ["--num_processes", str(ranks), "--main_process_port", str(free_port())]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    return run(
        [*command, str(script), *map(str, arguments)], environment={"ACCELERATE_TORCH_DEVICE": "cpu"}, limit=limit
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
