"""Found by every Python of a job through PYTHONPATH: steps of a training that take their time, so that a test can act.

STEP_SECONDS is how long each one takes at least. The real command is started; only this is put before it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from types import ModuleType
from typing import Any

LOOP = "gradiend_dist.training.loop"


class SlowLoop(importlib.abc.MetaPathFinder):
    """Slows the loop down when it is imported: importing it here would cost every process of the job its time."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            step = module.TrainingLoop._step

            def slow(*args: Any) -> None:
                time.sleep(float(os.environ["STEP_SECONDS"]))
                step(*args)

            module.TrainingLoop._step = slow  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if float(os.environ.get("STEP_SECONDS", "0")) > 0:
    sys.meta_path.insert(0, SlowLoop())
