"""state/run.json and the pruned spaces beside it: what an unfinished run depends on, and how far it has come."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import explained, jsonable, read_json, write_json
from gradiend_dist.storage.layout import STATE_RUN, STATE_SPACE

logger = logging.getLogger(__name__)

FORMAT = 2


class UnfinishedRun:
    """The run as a whole. Without a directory nothing is kept. All ranks call every method that is no property."""

    def __init__(self, directory: Path | None, comm: Comm) -> None:
        self.directory, self.comm = directory, comm
        self._values: dict[str, Any] = {}
        self._spaces: dict[str, ParameterSpace] = {}
        """Not written yet."""

    def open(self, depends_on: dict[str, Any], *, engine: str, store_bytes: int) -> None:
        """Begin, or go on with what is there.

        What a run depends on must be as it was; a difference is told by its name. `store_bytes` depends on what else
        the machine does, and decides which gradients are kept: the run goes on with what it had.
        """
        if self.directory is None:
            self._values = {"store_bytes": store_bytes}
            return
        path = self.directory / STATE_RUN
        before = self.comm.first("looking for an unfinished run", lambda: read_json(path) if path.is_file() else None)
        # Engines of one family read each other's state.
        family = "zero" if engine == "zero" else "slices"
        wanted = {"format": FORMAT, "engine": family, "depends_on": jsonable(depends_on)}
        if before is not None:
            self._require_same(before, wanted)
            if before["world_size"] != self.comm.world_size:
                before.update(world_size=self.comm.world_size, store_bytes=store_bytes)
            self._values = before
            logger.info("going on with the unfinished run in %s", self.directory)
            return
        name = _tracker_run_id(self.directory, wanted["depends_on"])
        own = {"world_size": self.comm.world_size, "store_bytes": store_bytes, "tracker_run_id": name}
        self._values = self.comm.decide({**wanted, **own, "seeds_done": [], "promoted": False})

    def _require_same(self, before: dict[str, Any], wanted: dict[str, Any]) -> None:
        where = f"{self.directory} holds an unfinished run"
        remedy = "pass the same, another experiment_dir, or --resume false to start anew"
        if before.get("format") != FORMAT:
            raise UserError(f"{where} of another version: pass another experiment_dir, or --resume false.")
        then, now = before["depends_on"], wanted["depends_on"]
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) != now.get(name):
                raise UserError(f"{where} with {name}={then.get(name)}, now it is {now.get(name)}: {remedy}.")
        if before["engine"] != wanted["engine"]:
            raise UserError(f"{where} of engine {before['engine']}, now it is {wanted['engine']}: {remedy}.")

    def write(self) -> None:
        """Not before there is something to go on from: a run that is refused early leaves nothing behind."""
        directory = self.directory
        assert directory is not None, "a run without a directory is not written"

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            for name, space in self._spaces.items():
                _write_space(directory, name, space)
            write_json(directory / STATE_RUN, self._values)

        with explained(directory):
            self.comm.first("writing the state of the run", write)
        self._spaces.clear()

    def write_if_needed(self) -> None:
        """Before the first state of steps, and where a space was pruned since."""
        assert self.directory is not None, "a run without a directory is not written"
        if self._spaces or not self.comm.decide((self.directory / STATE_RUN).is_file()):
            self.write()

    @property
    def seeds_done(self) -> list[int]:
        return list(self._values.get("seeds_done", []))

    @property
    def tracker_run_id(self) -> str | None:
        """One id for all parts of an interrupted run, for whatever tracks it."""
        return self._values.get("tracker_run_id")

    @property
    def store_bytes(self) -> int:
        return int(self._values["store_bytes"])

    @property
    def promoted(self) -> bool:
        return bool(self._values.get("promoted"))

    def mark_seeds_done(self, seeds: Sequence[int]) -> None:
        if self.directory is not None:
            self._values["seeds_done"] = [*self.seeds_done, *seeds]
            self.write()

    def mark_promoted(self) -> None:
        if self.directory is not None:
            self._values["promoted"] = True
            self.write()

    def keep_space(self, name: str, space: ParameterSpace) -> None:
        """It is written when there is a state that needs it. No communication."""
        self._spaces[name] = space

    def find_space(self, name: str) -> ParameterSpace | None:
        """The space that an earlier part of this run has pruned."""
        if self.directory is None:
            return None
        path = self.directory / f"{name}_{STATE_SPACE}"
        if not self.comm.decide(path.is_file()):
            return None
        weights = None
        if self.comm.is_first or path.is_file():
            with contextlib.suppress(SafetensorError, OSError, ValueError):
                weights = _read_space(path)
        if not self.comm.all_agree(weights is not None):
            weights = self.comm.decide(weights)
        return None if weights is None else ParameterSpace(weights)


def _tracker_run_id(directory: Path, depends_on: dict[str, Any]) -> str:
    """A new one; in a Slurm job the same after each restart, also before there is a state that could hold it."""
    if "SLURM_JOB_ID" not in os.environ:
        return secrets.token_hex(8)
    job = [os.environ.get("SLURM_CLUSTER_NAME"), os.environ["SLURM_JOB_ID"], str(directory.resolve()), depends_on]
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]


def _write_space(directory: Path, name: str, space: ParameterSpace) -> None:
    selected = {str(i): w.selected.cpu() for i, w in enumerate(space.weights) if w.selected is not None}
    weights = json.dumps([(weight.name, weight.shape) for weight in space.weights])
    partial = directory / f".{name}_{STATE_SPACE}"
    save_file(selected, partial, metadata={"weights": weights})
    partial.replace(directory / f"{name}_{STATE_SPACE}")


def _read_space(path: Path) -> list[tuple[str, tuple[int, ...], Tensor | None]]:
    with safe_open(str(path), framework="pt") as file:
        weights = json.loads((file.metadata() or {})["weights"])
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
    return [(name, tuple(shape), kept.get(str(i))) for i, (name, shape) in enumerate(weights)]
