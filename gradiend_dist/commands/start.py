"""How a process of ours begins: it hears signals and follows its launcher before it imports what takes long.

Imports nothing heavy itself, and loads a command's module when it is called.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gradiend_dist.distributed.interrupt import Interrupt, Preempted
from gradiend_dist.distributed.launcher import follow_the_launcher
from gradiend_dist.errors import note_outcome, print_line

Main = Callable[[Sequence[str] | None], int]


def main_of(module: str) -> Main:
    """The `main` of a module of the package, which is imported when it is called."""

    def main(argv: Sequence[str] | None = None) -> int:
        code: int = import_module(f"gradiend_dist.{module}").main(argv)
        return code

    return main


def run_process(name: str, main: Main) -> int:
    """All that this process does. A signal ends it at once and with one line until `main` takes the signals over."""

    def last_words(stop: Preempted) -> None:
        note_outcome(stop.exit_code, "stopped")
        if os.environ.get("RANK", "0") == "0":
            print_line(name, f"{signal.Signals(stop.signum).name}: stopped before there was anything to save")

    interrupt = Interrupt(last_words)
    interrupt.listen()
    if not follow_the_launcher():
        print_line(name, "the launcher is gone: start it again")
        return 1
    code = main(sys.argv[1:])
    interrupt.ignore()  # the result is there, and so is the exit code
    return code
