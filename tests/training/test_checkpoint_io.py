"""Saving tensors in a thread: on no GPU that is not asked for, and with errors that say what they are."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import EngineState
from gradiend_dist.space import Slices
from gradiend_dist.training import checkpoint_io


def test_start_saving__copies_nothing_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if torch's writer copies ahead: it does so on the thread's current GPU, which is 0 on every rank."""
    asked: list[dict[str, Any]] = []

    class Writer(FileSystemWriter):
        def __init__(self, path: Any, **options: Any) -> None:
            asked.append(options)
            super().__init__(path, **options)

    monkeypatch.setattr(checkpoint_io, "FileSystemWriter", Writer)
    engine: Any = SimpleNamespace(state=lambda: EngineState({"a": torch.arange(7.0)}, {}), slices=Slices.whole(7))
    future = checkpoint_io.start_saving({0: engine}, tmp_path, Comm(), None)
    assert future is not None
    checkpoint_io.wait_for(future)
    assert [options["per_thread_copy_ahead"] for options in asked] == [0]
    assert checkpoint_io.fault_of_tensors(tmp_path, Comm()) is None


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed"), OSError),
        (OSError(28, "No space left on device"), OSError),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wait_for__tells_a_full_disk_and_nothing_else_as_one(cause: Exception, kind: type[Exception]) -> None:
    future: Future[Any] = Future()
    future.set_exception(CheckpointException("failed", {0: (cause, None)}))  # type: ignore[dict-item]
    with pytest.raises(kind, match=str(cause)[-20:]) as error:
        checkpoint_io.wait_for(future)
    assert isinstance(error.value, OSError) == (kind is OSError)
