"""The one exception that speaks to the user."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


class UserError(ValueError):
    """A wrong input: one sentence that names the argument, its value and the remedy.

    The command line prints it without a traceback and exits with 2. Anything else that is raised is a defect of ours.
    """


class NotFinite(UserError):
    """A loss or gradient that is no number: the run stops before a weight is changed by it."""

    def __init__(self, message: str, *, seed: int, step: int) -> None:
        super().__init__(message)
        self.seed, self.step = seed, step
