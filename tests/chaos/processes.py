"""Launches that signals are sent to: forked from a process that has imported everything, or by the real launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from launching import FSDP, LOCAL
from test_faults import Launched
from torch.distributed import TCPStore

from gradiend_dist.commands.start import main_of, run_process

# A rank has to be gone this long after its launch was told, killed, or left by another rank.
END_WITHIN = 60.0
# torchrun waits this long for ranks that it has told to end.
SHUTDOWN = 30.0


# As `accelerate launch` sets it from zero1.yaml, but for the stage.
ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}


@dataclass(frozen=True)
class Way:
    """A way to launch."""

    name: str
    ranks: int
    is_real: bool = False
    """By `accelerate launch`; else forked here, and the launcher is a stand-in."""
    config: str = ""
    """Of the real launcher."""

    @property
    def is_single(self) -> bool:
        return self.name == "single"


class Broken(Exception):
    """What must never happen, in a sentence."""


class Forked:
    """A launcher and its ranks, forked: importing takes longer than all else that happens here."""

    def __init__(self, way: Way, module: str, arguments: Sequence[str], log: Path) -> None:
        self.log, self.begun = log, log.stat().st_size if log.exists() else 0
        self._numbers = log.with_suffix(".pids")
        self._numbers.unlink(missing_ok=True)
        self.launcher = os.fork()
        if not self.launcher:
            with contextlib.suppress(BaseException):
                os.setsid()
                _redirect(log)
                _launch(way, module, arguments, self._numbers)
            os._exit(99)
        self._code: int | None = None
        deadline = time.monotonic() + END_WITHIN
        while not self._numbers.exists():
            if time.monotonic() > deadline:
                raise Broken("the launcher did not start")
            time.sleep(0.005)
        self.ranks = [
            psutil.Process(int(pid)) for pid in self._numbers.read_text().split() if psutil.pid_exists(int(pid))
        ]

    @property
    def text(self) -> str:
        return self.log.read_bytes()[self.begun :].decode(errors="replace")

    def poll(self) -> int | None:
        """The launcher's exit code, when it has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.launcher, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, number: int, target: str) -> None:
        """To the launcher, to one rank, or to all."""
        ranks = [rank.pid for rank in self.ranks if is_alive(rank)]
        pids = {"launcher": [self.launcher], "all": [*ranks, self.launcher]}.get(target)
        if pids is None:
            pids = ranks[int(target) : int(target) + 1]
        if self.poll() is not None:
            pids = [pid for pid in pids if pid != self.launcher]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def alive(self) -> list[int]:
        return [rank.pid for rank in self.ranks if is_alive(rank)]

    def end(self) -> None:
        """What is left is ended by its number."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.poll() is None:
            os.kill(self.launcher, signal.SIGKILL)
            os.waitpid(self.launcher, 0)


class Real:
    """`accelerate launch`, as a user starts it."""

    def __init__(self, way: Way, run_file: Path, output: Path) -> None:
        self._launched = Launched(run_file, output, None, ranks=way.ranks, config=way.config)
        self.launcher = self._launched.process.pid

    @property
    def text(self) -> str:
        return self._launched.text

    def poll(self) -> int | None:
        return self._launched.process.poll()

    def send(self, number: int, target: str) -> None:
        ranks = sorted(pid for pid in self._launched.members() if pid != self.launcher)
        pids = {"launcher": [self.launcher], "all": [*ranks, self.launcher]}.get(target)
        for pid in ranks[int(target) : int(target) + 1] if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def alive(self) -> list[int]:
        return [pid for pid in self._launched.members() if pid != self.launcher]

    def end(self) -> None:
        for pid in [*self.alive(), self.launcher]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launched.process.wait()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _launch(way: Way, module: str, arguments: Sequence[str], numbers: Path) -> None:
    """The launcher's part: start the ranks, hand on what torchrun hands on, end them when one has failed."""
    store = None if way.is_single else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told: list[int] = []

    def take(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    ranks = [_fork_rank(way, rank, 0 if store is None else store.port, module, arguments) for rank in range(way.ranks)]
    if not way.is_single:  # the launcher of a single process has no handler
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, take)
    partial = numbers.with_suffix(".partial")
    partial.write_text(" ".join(map(str, ranks)))
    partial.rename(numbers)
    left, codes = set(ranks), []
    while left and not told and not any(codes):
        time.sleep(0.01)
        _reap(left, codes)
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + SHUTDOWN
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        _reap(left, codes)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(1 if told or left or any(codes) else 0)


def _reap(left: set[int], codes: list[int]) -> None:
    for pid in sorted(left):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            left.discard(pid)
            codes.append(os.waitstatus_to_exitcode(status))


def _fork_rank(way: Way, rank: int, port: int, module: str, arguments: Sequence[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {**LOCAL, "ACCELERATE_USE_CPU": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if way.is_single:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    else:
        os.setsid()
        world = {"WORLD_SIZE": way.ranks, "LOCAL_WORLD_SIZE": way.ranks, "RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in world.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        if way.name.startswith("fsdp"):
            os.environ |= FSDP
        if way.name.startswith("zero"):
            os.environ |= {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": way.name.removeprefix("zero")}
            del os.environ["ACCELERATE_USE_CPU"]  # it would drop DeepSpeed without a word
    name = f"gradiend-dist {module.rpartition('.')[2]}"
    code = 98
    try:
        sys.argv = [name, *arguments]
        code = run_process(name, main_of(module))
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


Launch = Forked | Real
Starts = Callable[[Way, Path], Any]
