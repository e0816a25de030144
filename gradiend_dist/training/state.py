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

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Interrupt, Preempted
from gradiend_dist.engines.base import Engine
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import explained, link_tree, new_directory, read_json, write_json
from gradiend_dist.storage.layout import SAVE_TRIGGER, STATE_COMPLETE, STATE_PROGRESS
from gradiend_dist.storage.visibility import everyone_sees, is_shared
from gradiend_dist.training.checkpoint_io import load_engines, start_saving, wait_for
from gradiend_dist.training.generators import generator_states, set_generators
from gradiend_dist.training.plain_values import read_plain, write_plain
from gradiend_dist.training.unfinished_run import UnfinishedRun

logger = logging.getLogger(__name__)

# Ranks ask each other whether anyone was told to stop about this often, not at every short step.
LOOK_SECONDS = 0.5


class Resumable(Protocol):
    """What a state is saved of and restored to: the training loop."""

    @property
    def engines(self) -> Mapping[int, Engine]:
        """By seed, in order."""

    @property
    def best_paths(self) -> Mapping[int, Path]:
        """Where the best checkpoints so far are, by seed."""

    def progress(self, step: int) -> dict[str, Any]:
        """All that the rest of the training depends on besides the engines: plain values."""

    def restore(self, progress: dict[str, Any]) -> None: ...


@dataclass
class Saving:
    """A state on its way to disk."""

    step: int
    partial: Path
    future: Future[Any] | None

    @property
    def is_running(self) -> bool:
        return self.future is not None and not self.future.done()


class StateKeeper:
    """Saves and loads the states of one unfinished run. All ranks call every method.

    Without a directory it keeps nothing.
    """

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
        self.run = UnfinishedRun(directory, comm)
        self._saving: Saving | None = None
        self._group: Any = None
        self._next_look, self._last_look = 0, (0, time.monotonic())

    def open(self, depends_on: dict[str, Any], *, engine: str, store_bytes: int, resume: bool) -> None:
        """Begin a run, or go on with the unfinished one (see `UnfinishedRun.open`)."""
        if self.directory is not None:
            if not self.comm.is_alone:
                # For the thread that saves: its messages must not mix with those of the training. Made now, while the
                # launcher is there: a state may have to be saved when it is gone.
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.comm.timeout))
            if not resume:
                self.close()
        self.run.open(depends_on, engine=engine, store_bytes=store_bytes)

    def finish_seeds(self, seeds: Sequence[int]) -> None:
        """They are trained and their models are written: their states are not needed any more."""
        if self.directory is not None:
            self._finish_saving()
            self.run.mark_seeds_done(seeds)
            self.comm.first("clearing the state of finished seeds", self._delete_steps)

    def close(self) -> None:
        """The run is finished, or is not to be gone on with."""
        if self.directory is not None:
            self._finish_saving()
            directory = self.directory
            self.comm.first("removing the state", lambda: shutil.rmtree(directory, ignore_errors=True))

    def after_step(self, loop: Resumable, step: int) -> None:
        """Save where it is time to, where someone asked, and before a stop."""
        stop, asked = self._poll(step)
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
            trigger = self.directory.parent / SAVE_TRIGGER
            self.comm.first("removing the request", lambda: trigger.unlink(missing_ok=True))
        if stop:
            raise Preempted(stop, step if self.saves_steps else None)

    def _poll(self, step: int) -> tuple[int, bool]:
        """Was any rank told to stop, or is there a file that asks for a save? Asked often enough, not at every step."""
        if step < self._next_look:
            return 0, False
        last_step, last_time = self._last_look
        asked = self.comm.is_first and self.directory is not None and (self.directory.parent / SAVE_TRIGGER).exists()
        saves = self._saving is not None and self._saving.is_running
        stop, asked_for, running, seconds = self.comm.largest(
            float(self.interrupt.signum), float(asked), float(saves), time.monotonic() - last_time
        )
        per_step = seconds / max(1, step - last_step)
        self._last_look, self._next_look = (step, time.monotonic()), step + max(1, int(LOOK_SECONDS / per_step))
        if self._saving is not None and not running:
            self._finish_saving()
        return int(stop), bool(asked_for)

    def save(self, loop: Resumable, step: int, *, wait: bool) -> None:
        """Save the state after `step`; the copy to disk goes on in the background unless `wait`."""
        assert self.directory is not None, "a run without a directory saves no state"
        self._finish_saving()
        self.run.write_if_needed()
        partial = self.directory / f".step_{step:08d}.partial"
        self.comm.first("preparing a state", lambda: _make_empty(partial))
        if not is_shared(partial, self.comm):
            logger.warning("%s is not shared by all ranks: no training state is saved", self.directory)
            self.saves_steps = False
            return
        with explained(partial):
            write_plain(partial / f"generators_{self.comm.rank}.json", generator_states())
            progress = loop.progress(step)
            if self.comm.is_first:
                write_plain(partial / STATE_PROGRESS, progress)
                for seed, best in loop.best_paths.items():
                    link_tree(best, partial / f"best_{seed}")
            future = start_saving(loop.engines, partial, self.comm, self._group)
        self._saving = Saving(step, partial, future)
        if wait or future is None:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the state that is being written, put it into its place and delete the oldest."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        assert self.directory is not None, "only a run with a directory saves states"
        final = self.directory / f"step_{saving.step:08d}"
        with explained(final):
            if saving.future is not None:
                wait_for(saving.future)
        self.comm.meet("saving the state")
        self.comm.first("completing a state", lambda: self._complete(saving, final))
        logger.info("state saved after step %d in %s", saving.step, final)

    def _complete(self, saving: Saving, final: Path) -> None:
        """Rank 0 alone."""
        with explained(final):
            files = sorted(item for item in saving.partial.rglob("*") if item.is_file())
            sizes = {str(path.relative_to(saving.partial)): path.stat().st_size for path in files}
            write_json(saving.partial / STATE_COMPLETE, {"world_size": self.comm.world_size, "sizes": sizes})
            shutil.rmtree(final, ignore_errors=True)
            saving.partial.rename(final)
        for old in self._steps()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _steps(self) -> list[Path]:
        """The saved states, oldest first. No communication."""
        assert self.directory is not None, "only a run with a directory saves states"
        return sorted(self.directory.glob("step_*"))

    def _delete_steps(self) -> None:
        """Rank 0 alone."""
        assert self.directory is not None, "only a run with a directory saves states"
        for path in [*self._steps(), *self.directory.glob(".step_*")]:
            shutil.rmtree(path, ignore_errors=True)

    def load(self, loop: Resumable) -> int:
        """Bring the loop to the newest complete state of its seeds; returns its step, 0 where there is none."""
        self._next_look, self._last_look = 0, (0, time.monotonic())  # steps are counted anew for these seeds
        if self.directory is None:
            return 0
        for path in self.comm.first("looking for a state", lambda: _complete_states(self._steps())):
            step = self._try_to_load(loop, path)
            if step is not None:
                self._last_look = (step, time.monotonic())
                logger.info("going on after step %d", step)
                return step
        return 0

    def _try_to_load(self, loop: Resumable, path: Path) -> int | None:
        """The step of this state, or None where it is not of the loop's seeds or not visible to all ranks."""
        progress = None
        if everyone_sees(path / STATE_PROGRESS, self.comm):
            progress = read_plain(path / STATE_PROGRESS)
        if progress is None or progress["seeds"] != list(loop.engines):
            return None
        load_engines(loop.engines, path, self.comm)
        loop.restore(progress)
        self.comm.first("restoring the best checkpoints", lambda: _restore_best(loop.best_paths, path))
        generators = path / f"generators_{self.comm.rank}.json"
        if generators.is_file():  # not of a rank that there was not then
            set_generators(read_plain(generators))
        return int(progress["step"])


def _make_empty(path: Path) -> None:
    with explained(path):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)


def _complete_states(paths: Sequence[Path]) -> list[Path]:
    """Newest first. An incomplete or truncated one is reported and passed over."""
    complete = []
    for path in reversed(paths):
        reason = _damage(path)
        if reason is None:
            complete.append(path)
        else:
            logger.warning("the state %s is passed over: %s", path, reason)
    return complete


def _damage(path: Path) -> str | None:
    """What is wrong with a state; None: it is complete."""
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


def _restore_best(best_paths: Mapping[int, Path], path: Path) -> None:
    """The best checkpoints as of this state: a later one may have been saved before the run was killed."""
    for seed, best in best_paths.items():
        with new_directory(best) as directory:
            directory.rmdir()
            link_tree(path / f"best_{seed}", directory)
