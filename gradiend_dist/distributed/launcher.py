"""The launcher that started this process: when it is gone, also killed, the process must not live on.

Imports nothing heavy: a process follows its launcher before it does anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1

# torchrun sets the one for its ranks, `accelerate launch` the other for its single process.
OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


def follow_the_launcher() -> bool:
    """Have this process told to stop when its launcher dies; False: it is dead already.

    A process that a shell or a scheduler started itself outlives these, as it should. Elsewhere than on Linux nothing
    tells of a parent's death.
    """
    if sys.platform != "linux" or not any(name in os.environ for name in OF_A_LAUNCHER):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return _is_launcher(os.getppid())


def _is_launcher(parent: int) -> bool:
    """Is this the parent that we were started by, and not who adopts orphans? When in doubt it is.

    Launchers are Python. That of a single process shares its session with it; one of ranks gives each a session of its
    own. In a container whoever adopts may share the session as well: its first process, most often a shell.
    """
    try:
        alone = os.getsid(0) != os.getpid()
        if alone and os.getsid(parent) != os.getsid(0):
            return False
        return "python" in Path(f"/proc/{parent}/exe").readlink().name
    except PermissionError:
        return False  # somebody else's process
    except OSError:
        return True
