"""The one exception that speaks to the user."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong input: one sentence that names the argument, its value and the remedy.

    The command line prints it without a traceback and exits with 2. Anything else that is raised is a defect of ours.
    """
