"""The exceptions that speak to the user, and how a command ends with them: in one line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

# Where launch/train.sbatch wants to read how a command ended.
OUTCOME_FILE = "GRADIEND_DIST_OUTCOME"


class UserError(ValueError):
    """A wrong input: one sentence that names the argument, its value and the remedy.

    The command line prints it without a traceback and exits with 2. Anything else that is raised is a defect of ours.
    """


class MissingFile(UserError, FileNotFoundError):
    """A file or directory that is not there: users of the reference catch it as a FileNotFoundError."""


class NotFinite(UserError):
    """A loss or gradient that is no number: the run stops before a weight is changed by it."""

    def __init__(self, message: str, *, seed: int, step: int) -> None:
        super().__init__(message)
        self.seed, self.step = seed, step


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


def print_line(command: str, words: str) -> None:
    """The last line of a command, on stderr."""
    sys.stderr.write(f"{command}: {' '.join(words.split())}\n")
    sys.stderr.flush()


def exit_code(command: str, work: Callable[[], int]) -> int:
    """What a command in one process returns: what `work` does, or 2 after one line on what the user did wrong."""
    try:
        return work()
    except UserError as error:
        print_line(command, f"error: {error}")
        return 2


def note_outcome(code: int, outcome: str) -> None:
    """Tell the job script how it ended (finished, stopped, refused, lost, failed): launchers keep no exit code.

    What cannot be written is told in the log as well.
    """
    path = os.environ.get(OUTCOME_FILE)
    if path:
        partial = Path(f"{path}.partial-{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(f"{outcome} {code}\n")
            partial.replace(path)
