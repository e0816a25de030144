"""What all tests share: one thread, no network, and the small language models of the embedded example."""

from __future__ import annotations

import fcntl
import os

# Before the first import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on CPU tensors; read when triton is imported, by whatever library

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from gradiend_dist import demo

# The models are so small that a second thread costs more than it brings; and bytes are comparable at one number only.
torch.set_num_threads(1)


LAUNCHES = Path(__file__).parent / "distributed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Launches of ranks take longest and go first."""
    items.sort(key=lambda item: LAUNCHES not in item.path.parents)


class ByFile(LoadScopeScheduling):
    """For pytest-xdist: a file stays on one worker, which makes its fixtures once. All files that launch ranks stay on
    one, too: two launches at a time could run into their time limits. (Marks of groups do nothing with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "launches" if "distributed/" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that all workers of a test run share: the first one fills it, the others wait."""
    own = factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"shared_{name}"
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            make(shared.with_suffix(".partial"))
            shared.with_suffix(".partial").rename(shared)
    return shared


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a BERT that knows he, she and they; shared by all tests, so never write to it."""
    return made_once(tmp_path_factory, "masked_lm", demo.build_masked_lm)


@pytest.fixture(scope="session")
def causal_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a GPT-2 that knows he, she and they; shared by all tests, so never write to it."""
    return made_once(tmp_path_factory, "causal_lm", demo.build_causal_lm)


@pytest.fixture
def feature_frames() -> dict[str, pd.DataFrame]:
    """Fresh frames of the classes M, F and N with columns masked, label and split; a test may change them."""
    return demo.feature_data()
