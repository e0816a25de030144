"""state/run.json and the pruned spaces beside it: what an unfinished run depends on, and how far it has come."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import explained, jsonable, read_json, remove, write_json
from gradiend_dist.storage.layout import STATE_RUN, STATE_SPACE
from gradiend_dist.storage.sums import damage, directory_sums, file_sum

logger = logging.getLogger(__name__)

FORMAT = 3

SUM = "sum"
"""Under this name in run.json: a checksum of all else."""


class UnfinishedRun:
    """The run as a whole. Without a directory nothing is kept. All ranks call every method that is no property."""

    def __init__(self, directory: Path | None, comm: Comm) -> None:
        self.directory, self.comm = directory, comm
        self._values: dict[str, Any] = {}
        self.spaces = PrunedSpaces(directory, comm)

    def open(self, depends_on: dict[str, Any], *, engine: str, store_bytes: int) -> bool:
        """Begin, or go on with what is there: True.

        What a run depends on must be as it was; a difference is told by its name. `store_bytes` depends on what else
        the machine does, and decides which gradients are kept: the run goes on with what it had.
        """
        if self.directory is None:
            self._values = {"store_bytes": store_bytes}
            return False
        path = self.directory / STATE_RUN
        before = self.comm.first("looking for an unfinished run", lambda: _read(path))
        # Engines of one family read each other's state.
        family = "zero" if engine == "zero" else "slices"
        wanted = {"format": FORMAT, "engine": family, "depends_on": jsonable(depends_on)}
        if before is not None:
            self._require_same(before, wanted)
            if before["world_size"] != self.comm.world_size:
                before.update(world_size=self.comm.world_size, store_bytes=store_bytes)
            self._values = before
            self.spaces.sums = before["spaces"]
            logger.info("going on with the unfinished run in %s", self.directory)
            return True
        name = _tracker_run_id(self.directory, wanted["depends_on"])
        own = {"world_size": self.comm.world_size, "store_bytes": store_bytes, "tracker_run_id": name}
        begun: dict[str, Any] = {"seeds_done": [], "promoted": None, "selection": {}, "finished": {}, "spaces": {}}
        self._values = self.comm.decide({**wanted, **own, **begun})
        return False

    def _require_same(self, before: dict[str, Any], wanted: dict[str, Any]) -> None:
        where = f"{self.directory} holds an unfinished run"
        remedy = "pass the same, another experiment_dir, or --resume false to start anew"
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

        def write() -> dict[str, int]:
            directory.mkdir(parents=True, exist_ok=True)
            self._values["spaces"] = self.spaces.write(directory)
            write_json(directory / STATE_RUN, {**self._values, SUM: _sum_of(self._values)})
            return self.spaces.sums

        with explained(directory):
            self.spaces.sums = self.comm.first("writing the state of the run", write)
        self.spaces.unwritten.clear()

    def write_if_needed(self) -> None:
        """Before the first state of steps, and where a space was pruned since."""
        assert self.directory is not None, "a run without a directory is not written"
        if self.spaces.unwritten or not self.comm.decide((self.directory / STATE_RUN).is_file()):
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
    def promoted(self) -> int | None:
        """Where the best seed is promoted: the checksum of the report on the seeds."""
        found: int | None = self._values.get("promoted")
        return found

    def finish_seeds(self, outputs: Mapping[int, Path]) -> None:
        """These seeds are done; a run that goes on wants to find there what is there now. All ranks call this."""
        found = self.comm.first(
            "looking at finished seeds", lambda: {s: directory_sums(path) for s, path in outputs.items()}
        )
        finished = {**self._values.get("finished", {}), **{str(seed): held for seed, held in found.items()}}
        self.update(seeds_done=[*self.seeds_done, *outputs], finished=finished)

    def forget_damaged(self, path_of: Callable[[int], Path]) -> None:
        """Finished seeds whose files are not as they were are not finished. All ranks call this."""

        def look() -> list[int]:
            damaged = []
            for seed in self.seeds_done:
                path = path_of(seed)
                reason = damage(path, self._values["finished"].get(str(seed)))
                if reason is None:
                    continue
                if path.exists():  # else it was not needed, and dropped
                    logger.warning("seed %d is trained again: in %s, %s", seed, path, reason)
                    remove(path)
                damaged.append(seed)
            return damaged

        damaged = self.comm.first("looking at finished seeds", look)
        self._values["seeds_done"] = [seed for seed in self.seeds_done if seed not in damaged]

    def selection_score(self, seed: int) -> float | None:
        """By which this run, before it was interrupted, has compared the seed with others."""
        score: float | None = self._values.get("selection", {}).get(str(seed))
        return score

    def keep_selection_score(self, seed: int, score: float) -> None:
        self.update(selection={**self._values.get("selection", {}), str(seed): score})

    def update(self, **values: Any) -> None:
        """Note how far the run has come: `seeds_done` or `promoted`. All ranks call this."""
        if self.directory is not None:
            self._values.update(values)
            self.write()


class PrunedSpaces:
    """The spaces that seeds are trained in, for those who go on: on other ranks rounding may choose another entry."""

    def __init__(self, directory: Path | None, comm: Comm) -> None:
        self.directory, self.comm = directory, comm
        self.unwritten: dict[str, ParameterSpace] = {}
        self.sums: dict[str, int] = {}
        """Checksums of those that are written, by name."""

    def keep(self, name: str, space: ParameterSpace) -> None:
        """It is written when there is a state that needs it. No communication."""
        self.unwritten[name] = space

    def write(self, directory: Path) -> dict[str, int]:
        """Rank 0 alone: the checksums of all that are written, by name."""
        for name, space in self.unwritten.items():
            _write_space(directory, name, space)
            self.sums[name] = file_sum(directory / f"{name}_{STATE_SPACE}")
        return self.sums

    def find(self, name: str) -> ParameterSpace | None:
        """The space that this run has pruned before it was interrupted. All ranks call this."""
        expected = self.sums.get(name)
        if self.directory is None or expected is None:
            return None
        path, weights = self.directory / f"{name}_{STATE_SPACE}", None
        if self.comm.is_first or path.is_file():
            with contextlib.suppress(SafetensorError, OSError, ValueError):
                weights = _read_space(path) if file_sum(path) == expected else None
        if self.comm.is_first and weights is None:
            logger.warning("%s is damaged: pruning again", path)
        if not self.comm.all_agree(weights is not None):
            weights = self.comm.decide(weights)
        return None if weights is None else ParameterSpace(weights)


def _read(path: Path) -> dict[str, Any] | None:
    """The content of run.json, as it was written; None: there is none."""
    if not path.exists():
        return None
    values = read_json(path)
    if isinstance(values, dict) and values.get("format", FORMAT) != FORMAT:
        where = f"{path.parent} holds an unfinished run of another version"
        raise UserError(f"{where}: pass another experiment_dir, or --resume false.")
    if not isinstance(values, dict) or values.pop(SUM, None) != _sum_of(values):
        raise UserError(f"{path} is damaged: pass --resume false to start anew, or another experiment_dir.")
    return values


def _sum_of(values: dict[str, Any]) -> int:
    as_read = json.loads(json.dumps(jsonable(values)))
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


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
