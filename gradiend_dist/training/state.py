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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from gradiend_dist.config.checks import first_mismatch
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Interrupt, Preempted
from gradiend_dist.engines.base import Engine
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import explained, link_tree, new_directory, read_json, remove, write_json
from gradiend_dist.storage.layout import SAVE_TRIGGER, STATE_COMPLETE, STATE_PROGRESS
from gradiend_dist.storage.sums import damage, directory_sums
from gradiend_dist.storage.visibility import everyone_sees, is_shared
from gradiend_dist.training.checkpoint_io import fault_of_tensors, load_engines, start_saving, wait_for
from gradiend_dist.training.generators import generator_states, try_generators
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
        if not self.run.open(depends_on, engine=engine, store_bytes=store_bytes) and self.directory is not None:
            self.comm.first("clearing states of an unknown run", self._clear)

    def finish_seeds(self, outputs: Mapping[int, Path]) -> None:
        """They are trained and their models are written there: their states are not needed any more."""
        if self.directory is not None:
            self._finish_saving()
            self.run.finish_seeds(outputs)
            self.comm.first("clearing the state of finished seeds", self._clear)

    def _clear(self) -> None:
        """Rank 0 alone."""
        assert self.directory is not None, "only a run with a directory saves states"
        for path in [*self._steps(), *self.directory.glob(".step_*")]:
            remove(path)

    def close(self) -> None:
        """The run is finished, or is not to be gone on with."""
        if self.directory is not None:
            self._finish_saving()
            directory = self.directory
            self.comm.first("removing the state", lambda: remove(directory))

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
            facts = {"world_size": self.comm.world_size, "files": directory_sums(saving.partial)}
            write_json(saving.partial / STATE_COMPLETE, facts)
            remove(final)
            saving.partial.rename(final)
        for old in self._steps()[: -self.keep]:
            remove(old)

    def _steps(self) -> list[Path]:
        """The saved states, oldest first. No communication."""
        assert self.directory is not None, "only a run with a directory saves states"
        return sorted(self.directory.glob("step_*"))

    def load(self, loop: Resumable) -> int:
        """Bring the loop to the newest sound state of its seeds; returns its step, 0 where there is none."""
        self._next_look, self._last_look = 0, (0, time.monotonic())  # steps are counted anew for these seeds
        if self.directory is None:
            return 0
        for path in self.comm.first("looking for a state", lambda: _sound_states(self._steps())):
            step = self._try_to_load(loop, path)
            if step is not None:
                self._last_look = (step, time.monotonic())
                logger.info("going on after step %d", step)
                return step
        return 0

    def _try_to_load(self, loop: Resumable, path: Path) -> int | None:
        """The step of this state, or None where it is not of the loop's seeds, not visible to all ranks, or damaged.

        Nothing of the loop is touched before all of the state is known to be sound.
        """
        progress: Any = None
        if everyone_sees(path / STATE_PROGRESS, self.comm):
            progress = read_plain(path / STATE_PROGRESS)
        if progress is None or (isinstance(progress, dict) and progress.get("seeds") != list(loop.engines)):
            return None
        wrong = _fault_of_progress(progress, loop.progress(0), path) or fault_of_tensors(path, self.comm)
        generators = path / f"generators_{self.comm.rank}.json"
        if wrong is None and generators.is_file() and not try_generators(read_plain(generators)):
            wrong = f"{generators.name} holds no states of generators"  # of this rank: it may not have been there then
        faults = [fault for fault in self.comm.gather(wrong) if fault is not None]
        if faults:
            if self.comm.is_first:
                _pass_over(path, faults[0])
            return None
        load_engines(loop.engines, path, self.comm)
        loop.restore(progress)
        self.comm.first("restoring the best checkpoints", lambda: _restore_best(loop.best_paths, path))
        return int(progress["step"])


def _make_empty(path: Path) -> None:
    with explained(path):
        remove(path)
        path.mkdir(parents=True)


def _sound_states(paths: Sequence[Path]) -> list[Path]:
    """Newest first, as far as rank 0 can tell alone: files that are as they were written."""
    sound = []
    for path in reversed(paths):
        reason = _damage(path)
        if reason is None:
            sound.append(path)
        else:
            _pass_over(path, reason)
    return sound


def _pass_over(path: Path, reason: str) -> None:
    logger.warning("the state %s is passed over: %s", path, reason)


def _damage(path: Path) -> str | None:
    """What is wrong with the files of a state; None: nothing."""
    if not (path / STATE_COMPLETE).is_file():
        return "it is incomplete"
    try:
        return damage(path, read_json(path / STATE_COMPLETE)["files"])
    except (UserError, KeyError, TypeError):
        return f"{STATE_COMPLETE} cannot be read"


def _fault_of_progress(progress: Any, form: dict[str, Any], path: Path) -> str | None:
    """What in a progress is not as a loop would have written it after this step; None: nothing."""
    wrong = first_mismatch(progress, form, STATE_PROGRESS)
    if wrong is None and f"step_{progress['step']:08d}" != path.name:
        wrong = f"{STATE_PROGRESS}.step"
    of_others: dict[str, Any] = {
        "stats": {},
        "state": {},
        "control": {},
    }  # what is in these depends on callbacks as well
    for run, expected in zip([] if wrong else progress["runs"], form["runs"], strict=False):
        wrong = wrong or first_mismatch(run, {**expected, **of_others}, f"{STATE_PROGRESS}.runs")
    if wrong is None and len(progress["runs"]) != len(form["runs"]):
        wrong = f"{STATE_PROGRESS}.runs"
    return None if wrong is None else f"{wrong} is not what it should be"


def _restore_best(best_paths: Mapping[int, Path], path: Path) -> None:
    """The best checkpoints as of this state: a later one may have been saved before the run was killed."""
    for seed, best in best_paths.items():
        with new_directory(best) as directory:
            directory.rmdir()
            link_tree(path / f"best_{seed}", directory)
