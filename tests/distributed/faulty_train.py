"""gradiend_dist.train with a fault at a chosen point: what a test starts in place of the real module.

The environment variable FAULT holds JSON: `rank`, `at` (module:Class.function), `call` (which call of it on that rank,
from 1), `when` (before or after the call) and `do`:

    kill    the process is gone at once, as by the kernel's memory killer
    raise   an exception that nobody expects
    stop    the process stops answering
    nan     the call's tensors become NaN (an engine's step: its batch)
    full    no space is left on the device

PAUSE holds seconds to wait before every step, for tests that must act, or see a state saved, between two of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import time
from typing import Any


def do(what: str) -> None:
    if what in ("kill", "stop"):
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    elif what == "raise":
        raise RuntimeError("something that nobody expects")
    elif what == "full":
        raise OSError(28, "No space left on device")


def poison(batches: Any) -> None:
    for batch in batches:
        batch.target.fill_(float("nan"))


def inject(fault: dict[str, Any]) -> None:
    module_name, path = fault["at"].split(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    plain, calls = getattr(owner, name), []

    @functools.wraps(plain)
    def faulty(*args: Any, **options: Any) -> Any:
        calls.append(None)
        now = len(calls) == fault["call"]
        if now and fault["do"] == "nan":
            poison(args[1])
        elif now and fault["when"] == "before":
            do(fault["do"])
        found = plain(*args, **options)
        if now and fault["when"] == "after":
            do(fault["do"])
        return found

    setattr(owner, name, faulty)


def slow_down(seconds: float) -> None:
    from gradiend_dist.training.loop import TrainingLoop

    step = TrainingLoop._step

    def slow(*args: Any) -> None:
        time.sleep(seconds)
        step(*args)

    TrainingLoop._step = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    from gradiend_dist.commands import train

    slow_down(float(os.environ["PAUSE"]))
    fault = json.loads(os.environ["FAULT"])
    if fault is not None and int(os.environ.get("RANK", "0")) == fault["rank"]:
        inject(fault)
    sys.exit(train.main())
