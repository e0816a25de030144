"""Training state: what a run that was killed goes on from, also on another number of ranks.

    state/run.json         all that the run depends on, by name; what is done
    state/*space*          the pruned space, once it is known
    state/step_000120/     the state after a step: tensors by torch.distributed.checkpoint (DeepSpeed's own under ZeRO),
                           the history of each seed, the random generators; complete.json is written last

Besides the tensors, everything is JSON or safetensors: reading a state runs no code.

The directory exists while a run is unfinished. Tensors of size n are saved as ranges of the whole vector, so that any
number of ranks can read them. A step's directory is renamed into place when everything in it is complete, and older
ones are deleted after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import random
import secrets
import shutil
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Interrupt, Preempted
from gradiend_dist.engines.base import Engine
from gradiend_dist.errors import UserError
from gradiend_dist.space import ParameterSpace, Slices
from gradiend_dist.storage.files import explained, jsonable, new_directory, read_json, write_json
from gradiend_dist.storage.layout import SAVE_TRIGGER, STATE_COMPLETE, STATE_PROGRESS, STATE_RUN, STATE_SPACE
from gradiend_dist.storage.visibility import everyone_sees, is_shared

if TYPE_CHECKING:
    from gradiend_dist.training.loop import TrainingLoop

logger = logging.getLogger(__name__)

FORMAT = 2

PAIRS = "pairs of key and value"

# Ranks ask each other whether anyone was told to stop about this often, not at every short step.
LOOK_SECONDS = 0.5


class CutTensor(torch.Tensor):
    """This rank's part of a vector (or matrix, along its first dimension), as torch.distributed.checkpoint reads it."""

    slices: Slices

    @staticmethod
    def of(own: Tensor, slices: Slices) -> CutTensor:
        cut = own.detach().as_subclass(CutTensor)
        cut.slices = slices
        return cut

    def plain(self) -> Tensor:
        return self.as_subclass(torch.Tensor)

    def size(self, *dimensions: int) -> Any:  # type: ignore[override]
        """Of the whole."""
        whole = torch.Size([self.slices.total, *self.plain().shape[1:]])
        return whole[dimensions[0]] if dimensions else whole

    def _chunks(self) -> list[tuple[slice, ChunkStorageMetadata]]:
        shape = self.plain().shape[1:]
        return [
            (
                own,
                ChunkStorageMetadata(
                    offsets=torch.Size([there.start, *(0 for _ in shape)]),
                    sizes=torch.Size([there.stop - there.start, *shape]),
                ),
            )
            for own, there in self.slices.range_pairs()
            if there.start < there.stop
        ]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for _, chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for _, chunk in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for own, chunk in self._chunks():
            if chunk.offsets == index.offset:
                return self.plain()[own]
        raise AssertionError(f"{index} is not of this rank")


class SafeUnpickler(pickle.Unpickler):
    """Reads what torch.distributed.checkpoint notes about its tensors, and nothing that could run code."""

    # Exactly these: a module's other names reach as far as its imports. Without the class for bytes, which torch would
    # unpickle in their turn.
    NAMES = {
        "torch.distributed.checkpoint.metadata": (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "_MEM_FORMAT_ENCODING"),
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict",),
        "pathlib": ("PosixPath", "PurePosixPath", "Path"),
        "torch": ("Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self.NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a training state")


class SafeReader(FileSystemReader):
    """torch's reader loads tensors with weights_only; its own notes it would unpickle as they are."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            SafeUnpickler(stream).load()  # raises for what must not be there; then the reader's own way is safe
        return super().read_metadata(*args, **kwargs)


class AlreadyStaged(AsyncStager):
    """Tensors were copied to the host before: nothing is left to stage."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


@dataclass
class Saving:
    """A state on its way to disk."""

    step: int
    partial: Path
    future: Future[Any] | None


class StateKeeper:
    """Saves and finds the state of one unfinished run. Without a directory it keeps nothing."""

    def __init__(
        self,
        directory: Path | None,
        comm: Comm,
        *,
        keep: int,
        save_steps: int | None,
        interrupt: Interrupt,
        saves_steps: bool = True,
    ) -> None:
        self.directory, self.comm, self.keep, self.save_steps = directory, comm, keep, save_steps
        self.saves_steps = saves_steps
        """False: the engines' state cannot be saved; finished seeds are remembered nevertheless."""
        self.interrupt = interrupt
        self.run: dict[str, Any] = {}
        self._spaces: dict[str, ParameterSpace] = {}
        self._saving: Saving | None = None
        self._group: Any = None
        self._next_look, self._last_look = 0, (0, time.monotonic())

    # --- the run as a whole

    def open(self, depends_on: dict[str, Any], *, engine: str, store_bytes: int, resume: bool) -> None:
        """Begin, or go on with what is there.

        What a run depends on must be as it was; a difference is told by its name. `store_bytes` depends on what else
        the machine does, and decides which gradients are kept: the run goes on with what it had.
        """
        if self.directory is None:
            self.run = {"store_bytes": store_bytes}
            return
        if not self.comm.is_alone:
            # For the thread that saves: its messages must not mix with those of the training. Made now, while the
            # launcher is there: a state may have to be saved when it is gone.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.comm.timeout))
        if not resume:
            self.close()
        path = self.directory / STATE_RUN
        found = self.comm.first("looking for an unfinished run", lambda: read_json(path) if path.is_file() else None)
        wanted = {"format": FORMAT, "engine": _family(engine), "depends_on": jsonable(depends_on)}
        if found is not None:
            self._require_same(found, wanted)
            if found["world_size"] != self.comm.world_size:
                found.update(world_size=self.comm.world_size, store_bytes=store_bytes)
            self.run = found
            logger.info("going on with the unfinished run in %s", self.directory)
            return
        name = _tracker_run_id(self.directory, wanted["depends_on"])
        own = {"world_size": self.comm.world_size, "store_bytes": store_bytes, "tracker_run_id": name}
        self.run = self.comm.decide({**wanted, **own, "seeds_done": [], "promoted": False})

    def _require_same(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        where = f"{self.directory} holds an unfinished run"
        remedy = "pass the same, another experiment_dir, or --resume false to start anew"
        if found.get("format") != FORMAT:
            raise UserError(f"{where} of another version: pass another experiment_dir, or --resume false.")
        before, now = found["depends_on"], wanted["depends_on"]
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                raise UserError(f"{where} with {name}={before.get(name)}, now it is {now.get(name)}: {remedy}.")
        if found["engine"] != wanted["engine"]:
            raise UserError(f"{where} of engine {found['engine']}, now it is {wanted['engine']}: {remedy}.")

    def _write_run(self) -> None:
        """Not before there is something to go on from: a run that is refused early leaves nothing behind."""

        def write() -> None:
            assert self.directory is not None
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, space in self._spaces.items():
                self._write_space(name, space)
            write_json(self.directory / STATE_RUN, self.run)

        with explained(self.directory or Path()):
            self.comm.first("writing the state of the run", write)
        self._spaces.clear()

    @property
    def seeds_done(self) -> list[int]:
        return list(self.run.get("seeds_done", []))

    @property
    def tracker_run_id(self) -> str | None:
        """One id for all parts of an interrupted run, for whatever tracks it."""
        return self.run.get("tracker_run_id")

    @property
    def store_bytes(self) -> int:
        return int(self.run["store_bytes"])

    @property
    def promoted(self) -> bool:
        return bool(self.run.get("promoted"))

    def seed_is_done(self, seeds: Sequence[int]) -> None:
        if self.directory is not None:
            self._finish_saving()
            self.run["seeds_done"] = [*self.seeds_done, *seeds]
            self._write_run()
            self.comm.first("clearing the state of finished seeds", self._delete_steps)

    def is_promoted(self) -> None:
        if self.directory is not None:
            self.run["promoted"] = True
            self._write_run()

    def close(self) -> None:
        """The run is finished, or is not to be gone on with."""
        if self.directory is not None:
            self._finish_saving()
            directory = self.directory
            self.comm.first("removing the state", lambda: shutil.rmtree(directory, ignore_errors=True))

    # --- the pruned space

    def keep_space(self, name: str, space: ParameterSpace) -> None:
        """It is written when there is a state that needs it."""
        self._spaces[name] = space

    def _write_space(self, name: str, space: ParameterSpace) -> None:
        assert self.directory is not None
        selected = {str(i): w.selected.cpu() for i, w in enumerate(space.weights) if w.selected is not None}
        weights = json.dumps([(weight.name, weight.shape) for weight in space.weights])
        partial = self.directory / f".{name}_{STATE_SPACE}"
        save_file(selected, partial, metadata={"weights": weights})
        partial.replace(self.directory / f"{name}_{STATE_SPACE}")

    def find_space(self, name: str) -> ParameterSpace | None:
        if self.directory is None:
            return None
        path = self.directory / f"{name}_{STATE_SPACE}"
        if not self.comm.decide(path.is_file()):
            return None
        selected = None
        if self.comm.is_first or path.is_file():
            with contextlib.suppress(SafetensorError, OSError, ValueError):
                selected = _read_space(path)
        if not self.comm.all_agree(selected is not None):
            selected = self.comm.decide(selected)
        return None if selected is None else ParameterSpace(selected)

    # --- the state after a step

    def after_step(self, loop: TrainingLoop, step: int) -> None:
        """Save where it is time to, where someone asked, and before a stop."""
        stop, asked = self._look(step)
        due = self.save_steps is not None and step % self.save_steps == 0
        if self.directory is None or not self.saves_steps:
            if stop:
                raise Preempted(stop, None)
            return
        if stop:
            self.interrupt.served()
        if stop or asked or due:
            self.save(loop, step, wait=bool(stop))
        if asked:
            self.comm.first("removing the request", lambda: self._trigger().unlink(missing_ok=True))
        if stop:
            raise Preempted(stop, step if self.saves_steps else None)

    def _look(self, step: int) -> tuple[int, bool]:
        """Was any rank told to stop, or is there a file that asks for a save? Asked often enough, not at every step."""
        if step < self._next_look:
            return 0, False
        last_step, last_time = self._last_look
        asked = self.comm.is_first and self.directory is not None and self._trigger().exists()
        saves = self._saving is not None and self._saving.future is not None and not self._saving.future.done()
        stop, asked_for, running, seconds = self.comm.largest(
            float(self.interrupt.signum), float(asked), float(saves), time.monotonic() - last_time
        )
        per_step = seconds / max(1, step - last_step)
        self._last_look, self._next_look = (step, time.monotonic()), step + max(1, int(LOOK_SECONDS / per_step))
        if self._saving is not None and not running:
            self._finish_saving()
        return int(stop), bool(asked_for)

    def _trigger(self) -> Path:
        assert self.directory is not None
        return self.directory.parent / SAVE_TRIGGER

    def save(self, loop: TrainingLoop, step: int, *, wait: bool) -> None:
        """Save the state after `step`; the copy to disk goes on in the background unless `wait`."""
        assert self.directory is not None
        self._finish_saving()
        if self._spaces or not self.comm.decide((self.directory / STATE_RUN).is_file()):
            self._write_run()
        partial = self.directory / f".step_{step:08d}.partial"
        self.comm.first("preparing a state", lambda: _make(partial))
        if not is_shared(partial, self.comm):
            self._warn_unshared()
            return
        with explained(partial):
            _write_plain(partial / f"generators_{self.comm.rank}.json", _generators())
            progress = loop.progress(step)
            if self.comm.is_first:
                _write_plain(partial / STATE_PROGRESS, progress)
                for seed, best in loop.best_paths().items():
                    link_tree(best, partial / f"best_{seed}")
            future = self._save_engines([(run.seed, run.engine) for run in loop.runs], partial)
        self._saving = Saving(step, partial, future)
        if wait or future is None:
            self._finish_saving()

    def _warn_unshared(self) -> None:
        logger.warning("%s is not shared by all ranks: no training state is saved", self.directory)
        self.saves_steps = False

    def _save_engines(self, engines: list[tuple[int, Engine]], partial: Path) -> Future[Any] | None:
        states = {seed: engine.state() for seed, engine in engines}
        tensors: dict[str, Tensor] = {}
        for seed, engine in engines:
            state = states[seed]
            if state is None:
                engine.save_own(partial / f"seed_{seed}")
                continue
            for name, tensor in state.cut.items():
                copied = tensor.detach().to("cpu", copy=True)
                whole = engine.slices.is_whole
                tensors[f"{seed}.{name}"] = copied if whole else CutTensor.of(copied, engine.slices)
            tensors.update({f"{seed}.{name}": t.detach().to("cpu", copy=True) for name, t in state.same.items()})
        if not tensors:
            return None
        if self.comm.is_alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is what we ask for
        found = async_save(
            tensors,
            storage_writer=FileSystemWriter(partial / "tensors", single_file_per_rank=True),
            async_stager=AlreadyStaged(),
            process_group=self._group,
            no_dist=self.comm.is_alone,
        )
        assert isinstance(found, Future), "staged already"
        return found

    def _finish_saving(self) -> None:
        """Wait for the state that is being written, put it into its place and delete the oldest."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        assert self.directory is not None
        final = self.directory / f"step_{saving.step:08d}"
        with explained(final):
            if saving.future is not None:
                _result(saving.future)
        self.comm.meet("saving the state")
        self.comm.first("completing a state", lambda: self._complete(saving, final))
        logger.info("state saved after step %d in %s", saving.step, final)

    def _complete(self, saving: Saving, final: Path) -> None:
        with explained(final):
            sizes = {str(p.relative_to(saving.partial)): p.stat().st_size for p in _files(saving.partial)}
            write_json(saving.partial / STATE_COMPLETE, {"world_size": self.comm.world_size, "sizes": sizes})
            shutil.rmtree(final, ignore_errors=True)
            saving.partial.rename(final)
        for old in self._steps()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _steps(self) -> list[Path]:
        assert self.directory is not None
        return sorted(self.directory.glob("step_*"))

    def _delete_steps(self) -> None:
        assert self.directory is not None
        for path in [*self._steps(), *self.directory.glob(".step_*")]:
            shutil.rmtree(path, ignore_errors=True)

    def load(self, loop: TrainingLoop) -> int:
        """Bring the loop to the newest complete state of its seeds; returns its step, 0 where there is none."""
        self._next_look, self._last_look = 0, (0, time.monotonic())  # steps are counted anew for these seeds
        if self.directory is None:
            return 0
        candidates = self.comm.first("looking for a state", self._complete_steps)
        for path in candidates:
            step = self._try_to_load(loop, path)
            if step is not None:
                self._last_look = (step, time.monotonic())
                logger.info("going on after step %d", step)
                return step
        return 0

    def _complete_steps(self) -> list[Path]:
        """Newest first. An incomplete or truncated one is told and passed over."""
        found = []
        for path in reversed(self._steps()):
            reason = _what_is_wrong(path)
            if reason is None:
                found.append(path)
            else:
                logger.warning("the state %s is passed over: %s", path, reason)
        return found

    def _bring_back(self, loop: TrainingLoop, path: Path) -> None:
        """The best checkpoints of then: a later one may have been saved before the run was killed."""
        for seed, best in loop.best_paths().items():
            with new_directory(best) as directory:
                directory.rmdir()
                link_tree(path / f"best_{seed}", directory)

    def _try_to_load(self, loop: TrainingLoop, path: Path) -> int | None:
        progress = None
        if everyone_sees(path / STATE_PROGRESS, self.comm):
            progress = _read_plain(path / STATE_PROGRESS)
        if progress is None or progress["seeds"] != [run.seed for run in loop.runs]:
            return None
        tensors: dict[str, Any] = {}
        for run in loop.runs:
            state = run.engine.state()
            if state is None:
                run.engine.load_own(path / f"seed_{run.seed}")
                continue
            whole = run.engine.slices.is_whole
            for name, tensor in state.cut.items():
                tensors[f"{run.seed}.{name}"] = tensor if whole else CutTensor.of(tensor, run.engine.slices)
            tensors.update({f"{run.seed}.{name}": tensor for name, tensor in state.same.items()})
        if tensors:
            self._load_tensors(tensors, path / "tensors")
        loop.restore(progress)
        self.comm.first("bringing back the best checkpoints", lambda: self._bring_back(loop, path))
        own = path / f"generators_{self.comm.rank}.json"
        if own.is_file():
            _set_generators(_read_plain(own))
        return int(progress["step"])

    def _load_tensors(self, tensors: dict[str, Any], path: Path) -> None:
        """Into the tensors in place, from whatever ranges they were saved as."""
        try:
            load(
                tensors,
                storage_reader=SafeReader(path),
                process_group=self.comm.control,
                no_dist=self.comm.is_alone,
            )
        except (CheckpointException, pickle.UnpicklingError) as error:
            raise UserError(f"The state {path} is damaged: pass --resume false to start anew.") from error


def _tracker_run_id(directory: Path, depends_on: dict[str, Any]) -> str:
    """A new one; in a Slurm job the same after each restart, also before there is a state that could hold it."""
    if "SLURM_JOB_ID" not in os.environ:
        return secrets.token_hex(8)
    job = [os.environ.get("SLURM_CLUSTER_NAME"), os.environ["SLURM_JOB_ID"], str(directory.resolve()), depends_on]
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares its files with the source, which are never changed in place; a real one where it must be."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def _family(engine: str) -> str:
    """Engines that read each other's state."""
    return "zero" if engine == "zero" else "slices"


def _make(path: Path) -> None:
    with explained(path):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)


def _files(path: Path) -> list[Path]:
    return sorted(item for item in path.rglob("*") if item.is_file())


def _result(future: Future[Any]) -> None:
    try:
        future.result()
    except CheckpointException as error:
        # One rank's failure, told on all of them: the first is as good as any.
        cause = next(iter(error.failures.values()))[0]
        raise (cause if isinstance(cause, OSError) else OSError(str(cause))) from error


def _what_is_wrong(path: Path) -> str | None:
    if not (path / STATE_COMPLETE).is_file():
        return "it is incomplete"
    try:
        sizes = read_json(path / STATE_COMPLETE)["sizes"]
    except (UserError, KeyError, TypeError):
        return f"{STATE_COMPLETE} cannot be read"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or has another size"
    return None


def _generators() -> dict[str, Any]:
    """The random generators of this process: the loop draws nothing, a user's callback may."""
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": [version, list(numbers), gauss],
    }


def _set_generators(found: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(found["torch"], dtype=torch.uint8))
    if found["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(found["cuda"], dtype=torch.uint8))
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers), gauss))


def _read_space(path: Path) -> list[tuple[str, tuple[int, ...], Tensor | None]]:
    with safe_open(str(path), framework="pt") as file:
        weights = json.loads((file.metadata() or {})["weights"])
        kept = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
    return [(name, tuple(shape), kept.get(str(i))) for i, (name, shape) in enumerate(weights)]


def _write_plain(path: Path, value: Any) -> None:
    """Plain values to the last bit: numbers as Python writes them, and dicts by pairs where keys are numbers."""
    path.write_text(json.dumps(_paired(value)), encoding="utf-8")


def _read_plain(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), object_hook=_unpaired)


def _paired(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _paired(item) for key, item in value.items()}
        return {PAIRS: [[key, _paired(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_paired(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _unpaired(value: dict[str, Any]) -> dict[Any, Any]:
    return dict(value[PAIRS]) if value.keys() == {PAIRS} else value


def plain_fields(value: Any) -> dict[str, Any]:
    """The attributes of an object that are numbers, texts, or lists and dicts of these."""
    return {name: item for name, item in vars(value).items() if _is_plain(item)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
