"""Requests from outside to stop: signals of a scheduler, of a user, of a launcher that is gone.

A handler only takes note. While the training loop runs, the note is read at the next step, where the ranks agree, save
their state and end; if no step ends in time, or nothing is running that could be saved, the process ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

# torchrun kills a worker this long after it has told it to end, unless the variable says otherwise.
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

SHUTDOWN_SECONDS = 30

PR_SET_PDEATHSIG = 1


class Preempted(BaseException):
    """The run was told to stop, and its state is saved (`step`), or there is none to save (None)."""

    def __init__(self, signum: int, step: int | None) -> None:
        super().__init__(signum, step)
        self.signum, self.step = signum, step


class Interrupt:
    """Was this process told to stop?"""

    def __init__(self) -> None:
        self.signum = 0
        self._patient = self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interrupt]:
        """Take signals in this block (in the main thread: elsewhere Python allows no handlers)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # A terminal that is closed is no request to stop where nohup says so.
        wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._take) for number in (*wanted, signal.SIGALRM)}
        _follow_the_launcher()
        self._listening = True
        try:
            yield self
        finally:
            self._listening = False
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """In this block a request is looked for at every step: it may wait until then."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def served(self) -> None:
        """The ranks have agreed to stop and save: that may take longer than waiting for a step should."""
        if self._listening:
            signal.alarm(0)

    def ignore(self) -> None:
        """The process is ending already, and says why: what comes now must not cut it short."""
        if self._listening:
            for number in (*SIGNALS, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGALRM or (number == signal.SIGINT and self.signum == signal.SIGINT):
            raise Preempted(self.signum, None)
        if self.signum:
            return  # a scheduler says it again until the job has ended
        self.signum = number
        if not self._patient:
            raise Preempted(number, None)
        signal.alarm(grace_seconds())


def grace_seconds() -> int:
    """How long a request may wait for the next step: somewhat less than the launcher waits for this process."""
    allowed = os.environ.get(SHUTDOWN, "")
    return max(1, (int(allowed) if allowed.isdigit() else SHUTDOWN_SECONDS) - 5)


def _follow_the_launcher() -> None:
    """If the launcher is killed by something it does not handle, its workers must not live on."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
