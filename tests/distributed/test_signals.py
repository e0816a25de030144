"""Signals and launchers that are gone: a request is never lost, ends in bounded time, with one line and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gradiend_dist.commands.process import Process
from gradiend_dist.distributed import interrupt as interrupts
from gradiend_dist.distributed.interrupt import Interrupt, Preempted, stop_if_told

ROOT = Path(__file__).parents[2]
# What nothing here comes near to, also on a busy machine.
LIMIT = 60.0


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE", "TORCHELASTIC"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python with a program text; what is left of it is ended."""
    processes: list[subprocess.Popen[str]] = []

    def start(text: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(text), *arguments]
        process = subprocess.Popen(
            command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_request__is_not_lost_where_exceptions_are():
    """Fails if a handler raises: in a `__del__` that is swallowed, and the request with it."""

    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            for _ in range(1000):  # bytecodes, between which Python would call a handler
                pass

    interrupt = Interrupt()
    interrupt.grace = LIMIT
    with interrupt.listening():
        Swallows()
        with pytest.raises(Preempted) as told:
            wait_until(lambda: bool(interrupt.signum))
            stop_if_told()
    assert told.value.signum == signal.SIGTERM and told.value.step is None


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_request__waits_for_the_step_where_it_may_and_is_ignored_once_there_is_a_result():
    interrupt = Interrupt()
    interrupt.grace = LIMIT
    with interrupt.listening():
        with interrupt.deferring_to_steps():
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda: interrupt.signum == signal.SIGUSR1)
            stop_if_told()
        interrupt.ignore()
        stop_if_told()
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN, "the block is over"
    assert Interrupt.current is None


def test_listening__gives_back_what_was_there_and_hears_again():
    mine = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        before = signal.getsignal(signal.SIGUSR2)
        for _ in range(3):
            interrupt = Interrupt()
            interrupt.grace = LIMIT
            with interrupt.listening():
                signal.raise_signal(signal.SIGUSR2)
                wait_until(lambda now=interrupt: now.signum == signal.SIGUSR2)
            assert signal.getsignal(signal.SIGUSR2) is before
    finally:
        signal.signal(signal.SIGUSR2, mine)


STUCK = """
import sys, time
from gradiend_dist.distributed.interrupt import Interrupt
interrupt = Interrupt(lambda stop: print("gone", stop.signum, flush=True))
interrupt.grace = float(sys.argv[1])
interrupt.listen()
print("ready", flush=True)
if sys.argv[2] == "lock":  # as in a collective: nothing of Python's runs in the main thread any more
    import ctypes
    ctypes.CDLL(None).sleep(300)
with interrupt.deferring_to_steps():
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize("where", ["lock", "loop"])
def test_deadline__ends_a_process_that_nobody_can_stop_in_order(started, where):
    """Fails if the end depends on the main thread, which may be in a collective that does not end."""
    process = started(STUCK, "0.2", where)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT)
    assert (out, process.returncode) == ("gone 15\n", 128 + signal.SIGTERM)


def test_second_ctrl_c__does_not_wait_for_the_deadline(started):
    process = started(STUCK, "1000", "loop")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130


def test_forked_child__is_ended_by_signals_that_are_not_for_its_parent():
    """Fails if a data loader's worker that is ended ends the training, or cannot be ended."""
    interrupt = Interrupt()
    interrupt.grace = LIMIT
    with interrupt.listening():
        child = os.fork()
        if not child:
            time.sleep(LIMIT)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.1)
        assert not interrupt.signum


# A command whose import takes as long as the test wants, or whose work is what the test wants.
COMMAND = """
import sys, types
from gradiend_dist.commands.start import run_process

def main(argv):
    print("importing", flush=True)
    {body}
    return 0

sys.exit(run_process("gradiend-dist train", main))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_signal_while_importing__is_one_line(started, tmp_path, number):
    """Fails with a traceback (SIGINT), without a word (others), or if the job script does not learn of it."""
    outcome = tmp_path / "outcome"
    process = started(COMMAND.format(body="import time; time.sleep(300)"), GRADIEND_DIST_OUTCOME=str(outcome))
    process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert errors == f"gradiend-dist train: {number.name}: stopped before there was anything to save\n"
    assert outcome.read_text() == f"stopped {128 + number}\n"


def test_signal_at_the_end__keeps_result_and_exit_code(started):
    """Fails if a signal between the result and the end of the process ends it as if there were none."""
    body = "import atexit, os, signal, time; atexit.register(lambda: [os.kill(os.getpid(), n) for n in (15, 2, 10)])"
    process = started(COMMAND.format(body=body))
    assert (process.wait(LIMIT), process.stderr.read()) == (0, "")


def test_last_words__are_said_by_one_and_tell_the_job_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADIEND_DIST_OUTCOME", str(tmp_path / "outcome"))
    process = Process("gradiend-dist train", memory_remedy="-", kept="nothing is lost")
    process._last_words(Preempted(signal.SIGTERM, None))
    assert capsys.readouterr().err == "gradiend-dist train: SIGTERM: nothing is lost\n"
    assert (tmp_path / "outcome").read_text() == "stopped 143\n"


# Starts the command as a launcher does, tells its number, and waits; `late`: dies before the command begins.
LAUNCHER = """
import os, subprocess, sys
kind, late, program = sys.argv[1:]
command = [sys.executable, "-c", program]
if late == "late":
    command = ["sh", "-c", 'sleep 0.5; exec "$0" "$@"', *command]
worker = subprocess.Popen(command, start_new_session=kind == "torchrun", stdin=subprocess.DEVNULL)
print(worker.pid, flush=True)
if late == "late":
    os._exit(0)
worker.wait()
"""
WORKER = COMMAND.format(body="import time; time.sleep(300)")
MARKS = {"torchrun": {"TORCHELASTIC_RUN_ID": "none"}, "accelerate": {"ACCELERATE_MIXED_PRECISION": "no"}}


# Starts a program and becomes the parent of its orphans, in their session, as the first process of a container does.
ADOPTER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, which outlives exec
os.execvp("sh", ["sh", "-c", '"$@"; exec sleep 300 >&- 2>&-', "sh", sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.mark.parametrize("kind", MARKS)
def test_launcher_that_dies__takes_the_process_along(started, kind):
    """Fails if only torchrun is followed, or if it is followed late."""
    launcher = started(LAUNCHER, kind, "", WORKER, **MARKS[kind])
    worker = psutil.Process(int(launcher.stdout.readline()))
    assert launcher.stdout.readline() == "importing\n"
    launcher.kill()
    assert worker.wait(LIMIT) is None
    words = launcher.stderr.read()
    assert words.count("gradiend-dist train:") == 1 and "Traceback" not in words


@pytest.mark.parametrize("kind", MARKS)
def test_launcher_that_is_gone__is_noticed_by_a_process_that_begins(started, kind):
    """Fails if who adopts orphans is taken for the launcher, which in a container has the same session."""
    adopter = started(ADOPTER, LAUNCHER, kind, "late", WORKER, **MARKS[kind])
    assert adopter.stdout.readline().strip().isdigit()
    assert adopter.stderr.read() == "gradiend-dist train: the launcher is gone: start it again\n"


def test_process_of_a_shell__outlives_it(started):
    """Fails if any parent is taken for a launcher: with nohup a run is to live on."""
    launcher = started(LAUNCHER, "torchrun", "", WORKER)
    worker = psutil.Process(int(launcher.stdout.readline()))
    assert launcher.stdout.readline() == "importing\n"
    launcher.kill()
    launcher.wait()
    try:
        time.sleep(0.5)
        assert worker.is_running()
    finally:
        worker.kill()


def test_grace__ends_before_the_launcher_kills(monkeypatch):
    for allowed, grace in (("120", 115), ("", 25), ("nonsense", 25), ("3", 1)):
        monkeypatch.setenv(interrupts.SHUTDOWN, allowed)
        assert interrupts.grace_seconds() == grace
