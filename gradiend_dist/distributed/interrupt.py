"""Requests from outside to stop: signals of a scheduler, of a user, of a launcher that is gone.

A signal is only noted, by a thread that nothing holds up, and sets a deadline: raised where it arrives, a request could
end inside a `__del__`, which swallows it, or wait for ever behind a collective. The training loop reads the note at its
next step, where the ranks agree, save their state and end; everything else that takes long calls `stop_if_told`. Where
nobody has looked when the deadline has passed, the process ends as it stands, as a killed one would.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

# torchrun kills a worker this long after it has told it to end, unless the variable says otherwise.
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

SHUTDOWN_SECONDS = 30

# The last words of a process that ends as it stands may meet a full pipe, or a store that does not answer.
LAST_WORDS_SECONDS = 3.0


class Preempted(BaseException):
    """The run was told to stop, and its state is saved (`step`), or there is none to save (None)."""

    def __init__(self, signum: int, step: int | None) -> None:
        super().__init__(signum, step)
        self.signum, self.step = signum, step

    @property
    def exit_code(self) -> int:
        """Where nothing was saved: as the shell has it."""
        return 128 + self.signum


class Interrupt:
    """Was this process told to stop? Signals are a process's, so one of these listens at a time."""

    current: Interrupt | None = None
    """The one that listens."""

    def __init__(self, last_words: Callable[[Preempted], None] = lambda _: None) -> None:
        self.last_words = last_words
        """What is left to say when the process ends as it stands."""
        self.grace = 0.0
        """How long a request may wait until somebody looks: not at all before there is anything to end in order."""
        self.signum = 0
        self._patient = self._ignoring = False
        self._deadline: float | None = None
        self._read, self._write = -1, -1
        self._watching = threading.Thread(target=self._watch, name="signals", daemon=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interrupt]:
        """Take signals in this block (in the main thread: elsewhere Python allows no handlers)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        outer = Interrupt.current
        handlers, descriptor = self.listen()
        try:
            yield self
        finally:
            Interrupt.current = outer
            signal.set_wakeup_fd(descriptor)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(self._write)
            self._watching.join()
            os.close(self._read)

    def listen(self) -> tuple[dict[int, Any], int]:
        """From now on, in the main thread; returns what was there before."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # A terminal that is closed is no request to stop where nohup says so.
        wanted = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        Interrupt.current = self
        descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        handlers: dict[int, Any] = {number: signal.signal(number, _note) for number in wanted}
        self._watching.start()
        return handlers, descriptor

    @contextlib.contextmanager
    def deferring_to_steps(self) -> Iterator[None]:
        """In this block a request is looked for at every step, and `look` leaves it to that."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def look(self) -> None:
        """Raise where there is a request, unless it may wait for the next step. Each rank for itself."""
        if self.signum and not self._patient and not self._ignoring:
            raise Preempted(self.signum, None)

    def served(self) -> None:
        """The ranks have agreed to stop and save: that may take longer than waiting for a step should."""
        self._deadline = None

    def ignore(self) -> None:
        """The process is ending already, and says why, or has its result: what comes now must not cut that short.

        For good: a handler of Python's would be gone before the process is.
        """
        self._ignoring, self._deadline = True, None
        if Interrupt.current is self and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _watch(self) -> None:
        """In a thread of its own, which reads what the system's handler has written at once: the main thread may be in
        a collective, where Python would call no handler until that ends."""
        while True:
            deadline = self._deadline
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            if select.select([self._read], [], [], patience)[0]:
                numbers = os.read(self._read, 64)
                if not numbers:
                    return  # nobody listens any more
                for number in numbers:
                    self._take(number)
            deadline = self._deadline
            if deadline is not None and time.monotonic() >= deadline:
                self._end_as_it_stands()

    def _take(self, number: int) -> None:
        if self._ignoring or number not in SIGNALS:
            return
        if not self.signum:
            self.signum, self._deadline = number, time.monotonic() + self.grace
        elif number == self.signum == signal.SIGINT:
            self._deadline = time.monotonic()  # the user does not want to wait

    def _end_as_it_stands(self) -> None:
        stop = Preempted(self.signum, None)
        speaking = threading.Thread(target=self.last_words, args=(stop,), daemon=True)
        speaking.start()
        speaking.join(LAST_WORDS_SECONDS)
        os._exit(stop.exit_code)


@contextlib.contextmanager
def listening_for_a_command(last_words: Callable[[Preempted], None]) -> Iterator[Interrupt]:
    """Signals while a command works: by who listens for the whole process, or else in this block.

    Until the command gives them time (`grace`), they end the process as it stands.
    """
    if Interrupt.current is None:
        with Interrupt(last_words).listening() as interrupt:
            yield interrupt
        return
    Interrupt.current.last_words = last_words
    yield Interrupt.current


def _note(_number: int, _frame: object) -> None:
    """The system's handler has written the number where `_watch` reads it; this is only that there is a handler."""


def _hold_back() -> None:
    """While a process forks: what comes for the child before it is on its own would be noted as the parent's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _forget_in_child() -> None:
    """A forked process (a data loader's, a user's) is ended by signals as any other, and not for its parent."""
    if Interrupt.current is not None:
        Interrupt.current = None
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _note:
                signal.signal(number, signal.SIG_DFL)
    _unblock_signals()


os.register_at_fork(before=_hold_back, after_in_parent=_unblock_signals, after_in_child=_forget_in_child)


def stop_if_told() -> None:
    """End what is being done, if this process was told to stop: for everything that takes long. Each rank for itself:
    the others hear that this one has left."""
    if Interrupt.current is not None:
        Interrupt.current.look()


def grace_seconds() -> int:
    """How long a request may wait for the next step: somewhat less than the launcher waits for this process."""
    allowed = os.environ.get(SHUTDOWN, "")
    return max(1, (int(allowed) if allowed.isdigit() else SHUTDOWN_SECONDS) - 5)
