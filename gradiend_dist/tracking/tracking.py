"""What leaves a training while it runs: rows of numbers, alerts, a summary; to a file always, to W&B or TensorBoard on
request, through Accelerate's trackers.

    metrics.jsonl    written at once; a run that goes on after a kill goes on with it
    other trackers   in a thread of their own behind a bounded queue: a service that is slow, down or angry costs rows
                     on its own page and never a step

Only rank 0 has them; on the other ranks every call does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from accelerate import PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Preempted
from gradiend_dist.distributed.peers import PeerError, PeerLost
from gradiend_dist.errors import NotFinite, UserError
from gradiend_dist.report.records import read_rows
from gradiend_dist.storage.files import explained, jsonable, write_text
from gradiend_dist.storage.layout import METRICS, SEED_METRICS
from gradiend_dist.storage.provenance import without_secrets

logger = logging.getLogger(__name__)

# Rows that wait for a slow service. When there is no room the new ones are left out: a page shows how a run began.
QUEUE_ROWS = 10_000

# How long the end of a run waits for the last rows to arrive, and for the promoted model where it is asked for.
LAST_SECONDS = 30.0

LAST_SECONDS_OF_MODEL = 1800.0

# Of a run that ends early: a scheduler wants its nodes back; a launcher kills rank 0, which has yet to say what was
# wrong, after half a minute; ranks that lost one wait three seconds for each other to tell which.
LAST_SECONDS_EARLY = {"preempted": 5.0, "failed": 8.0, "lost": 1.0}

ABANDON_SECONDS = 1.0


class Page(Protocol):
    """What a tracker of Accelerate's shows of a run."""

    def row(self, values: dict[str, Any]) -> None: ...

    def alert(self, kind: str, text: str) -> None: ...

    def summary(self, values: dict[str, Any]) -> None: ...

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...

    def images(self, paths: Mapping[str, Path]) -> None: ...

    def model(self, path: Path) -> None: ...

    def finish(self, outcome: str) -> None:
        """`outcome` is finished, preempted, lost or failed."""


class Journal(GeneralTracker):
    """metrics.jsonl: one JSON object a line."""

    name = "journal"
    requires_logging_directory = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """They are in run_config.yaml."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        where = {} if step is None else {"step": step}
        line = json.dumps(jsonable({"time": round(time.time(), 3), **where, **values}), allow_nan=False)
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def finish(self) -> None:
        """Every row is on disk already."""

    def go_back(self, known: Iterable[int], seeds: Sequence[int], done: int) -> None:
        """Keep the rows of `known` seeds, and of `seeds` those up to the step that they go on from.

        What starts anew evaluates its start again.
        """
        known = set(known)

        def stays(row: dict[str, Any]) -> bool:
            seed = row.get("seed")
            return seed in known or (done > 0 and seed in seeds and row.get("step", done + 1) <= done)

        if not self.path.exists():
            return
        rows = [row for row in read_rows(self.path) if stays(row)]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))

    def has_summary_of(self, seed: int) -> bool:
        return any(row.get("seed") == seed and "step" not in row for row in read_rows(self.path))

    def collect(self, others: Iterable[Path]) -> None:
        """Take over what the tasks of a job array have logged, each into a file of its own."""
        rows = [row for path in others for row in read_rows(path)]
        if rows:
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))


class TensorBoardPage:
    """TensorBoard's files, in experiment_dir/tensorboard."""

    def __init__(self, directory: Path, facts: dict[str, Any]) -> None:
        self.tracker = TensorBoardTracker("tensorboard", str(directory))
        self.tracker.start()
        self._last_step = 0
        flat = {name: v if isinstance(v, bool | int | float | str) else json.dumps(v) for name, v in facts.items()}
        self.tracker.log({"configuration": "\n".join(f"    {name}: {value}" for name, value in flat.items())}, step=0)

    def row(self, values: dict[str, Any]) -> None:
        self._last_step = values["step"]
        numbers = {name: value for name, value in values.items() if name != "step" and value is not None}
        self.tracker.log(numbers, step=values["step"])

    def alert(self, kind: str, text: str) -> None:
        self.tracker.log({f"alert/{kind}": text}, step=self._last_step)

    def summary(self, values: dict[str, Any]) -> None:
        numbers = {f"summary/{name}": float(v) for name, v in values.items() if isinstance(v, bool | int | float)}
        self.tracker.log(numbers, step=self._last_step)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
        self.tracker.log({name: text}, step=self._last_step)

    def images(self, paths: Mapping[str, Path]) -> None:
        from matplotlib.image import imread

        pictures = {name: imread(path)[None, ..., :3] for name, path in paths.items()}  # it takes no transparency
        self.tracker.log_images(pictures, step=self._last_step, dataformats="NHWC")

    def model(self, path: Path) -> None:
        """A directory beside it, which it cannot show."""

    def finish(self, outcome: str) -> None:
        self.tracker.log({"outcome": outcome}, step=self._last_step)
        self.tracker.finish()


class Background:
    """A page that is written in a thread of its own, which nobody waits for."""

    def __init__(
        self,
        name: str,
        open_page: Callable[[], Page],
        errors: tuple[type[Exception], ...],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._open, self._errors, self._abandon = name, open_page, errors, abandon
        self._jobs: queue.Queue[Callable[[Page], None] | None] = queue.Queue(QUEUE_ROWS)
        self._warned = False
        self._thread = threading.Thread(target=self._work, name=f"tracking {name}", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[Page], None]) -> None:
        if not self._thread.is_alive():
            return  # it has failed, and said so
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._warn(f"{QUEUE_ROWS} rows wait to be sent, new ones are left out there")

    def finish(self, outcome: str, seconds: float) -> None:
        """Send what is left, for no longer than this."""
        deadline = time.monotonic() + seconds
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._jobs.put(lambda page: page.finish(outcome), timeout=seconds)
            self._jobs.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"the last rows were not taken within {seconds:.0f} s")
            self._abandon()
            self._thread.join(ABANDON_SECONDS)

    def _work(self) -> None:
        try:
            page = self._open()
            while (job := self._jobs.get()) is not None:
                job(page)
        except self._errors as error:
            self._warn(f"{type(error).__name__}: {without_secrets(' '.join(str(error).split()))[:300]}")

    def _warn(self, what: str) -> None:
        """Once: the training does not depend on it, and its own file has everything."""
        if not self._warned:
            self._warned = True
            logger.warning("%s: %s; training goes on, %s has every row", self.name, what, METRICS)


_OUTCOMES: dict[type[BaseException], str] = {Preempted: "preempted", PeerLost: "lost", PeerError: "lost"}


class Tracking:
    """One training job, as the rest of the code tells it. It is a context: how it ends is how the tracked runs end."""

    def __init__(
        self, args: TrainingArguments, comm: Comm, directory: Path, run_id: str | None, facts: dict[str, Any]
    ) -> None:
        self.args, self.directory = args, directory
        self.is_first = comm.is_first
        self.run_id = run_id or secrets.token_hex(8)
        self.facts: dict[str, Any] = without_secrets(jsonable(facts))
        """The configuration that trackers show: all that the run was made with."""
        only = args.only_seed
        self._journal = Journal(directory / (METRICS if only is None else SEED_METRICS.format(seed=only)))
        self._pages: dict[tuple[str, int | None], Background] = {}
        """By tracker and, where each seed has a page of its own, by seed."""
        self._known: list[int] = []

    # --- beginning and end

    def reuse(self, seeds: Iterable[int]) -> None:
        """These seeds were trained before; what was logged of them stays."""
        self._known += seeds

    def begin(self, seeds: Sequence[int], done: int) -> None:
        """These seeds train now, the first `done` steps in an earlier process."""
        if not self.is_first:
            return
        self._journal.go_back(self._known, seeds, done)
        self._known += seeds
        self._open_pages(seeds)

    def _open_pages(self, seeds: Sequence[int]) -> None:
        if self.args.trackers:
            PartialState()  # a single process has none yet, and Accelerate's trackers ask it who they are
        by_seed = self.args.wandb_seed_runs == "grouped" or self.args.only_seed is not None
        for name in self.args.trackers:
            owners = seeds if name == "wandb" and by_seed and seeds else [None]
            for key in ((name, owner) for owner in owners):
                if key not in self._pages:
                    self._pages[key] = self._open(*key)

    def _open(self, name: str, seed: int | None) -> Background:
        if name == "tensorboard":
            return Background("TensorBoard", lambda: TensorBoardPage(self.directory, self.facts), (OSError, ValueError))
        from gradiend_dist.tracking import wandb_page

        identity = self.run_id if seed is None else f"{self.run_id}-{seed}"
        return Background(
            "W&B",
            lambda: wandb_page.WandBPage.open(self.args, self.directory, identity, seed, self.facts),
            wandb_page.errors(),
            wandb_page.abandon,
        )

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        outcome = "finished" if kind is None else _OUTCOMES.get(kind, "failed")
        if isinstance(error, NotFinite):
            with contextlib.suppress(UserError):  # a full disk is not what this run ended of
                self.alert(error.seed, error.step, "not_finite", str(error))
        patience = LAST_SECONDS_OF_MODEL if self.args.wandb_log_model else LAST_SECONDS
        deadline = time.monotonic() + LAST_SECONDS_EARLY.get(outcome, patience)
        for page in self._pages.values():
            page.finish(outcome, max(0.5, deadline - time.monotonic()))
        if any(name == "wandb" for name, _ in self._pages):
            from gradiend_dist.tracking import wandb_page

            wandb_page.close()
        self._pages.clear()

    # --- what happens in between

    def row(self, seed: int, step: int, values: dict[str, Any]) -> None:
        if not self.is_first:
            return
        self._journal.log({"seed": seed, **values}, step=step)
        for background, prefix in self._pages_of(seed):
            numbers = {"step": step, **{f"{prefix}{name}": value for name, value in values.items()}}
            background.do(lambda page, numbers=numbers: page.row(numbers))  # type: ignore[misc]

    def alert(self, seed: int, step: int, kind: str, text: str, count: int = 1) -> None:
        """`count`: how many there were of this seed."""
        if not self.is_first:
            return
        self._journal.log({"seed": seed, "alert": kind, "text": text}, step=step)
        for background, prefix in self._pages_of(seed):
            numbers = {"step": step, f"{prefix}alerts": count}
            background.do(lambda page, numbers=numbers: page.row(numbers))  # type: ignore[misc]
            background.do(lambda page: page.alert(kind, f"seed {seed}, step {step}: {text}"))

    def seed_summary(self, seed: int, values: dict[str, Any]) -> None:
        """Once: of a seed that an earlier process has trained it may be told already."""
        if not self.is_first or self._journal.has_summary_of(seed):
            return
        self._journal.log({"seed": seed, **values})
        for background, prefix in self._pages_of(seed):
            named = {f"{prefix}{name}": value for name, value in values.items()}
            background.do(lambda page, named=named: page.summary(named))  # type: ignore[misc]

    def summary(
        self, values: dict[str, Any], seeds: list[dict[str, Any]], images: Mapping[str, Path], model: Path
    ) -> None:
        """The run as a whole: its numbers, the table of its seeds, plots, and on request the promoted model."""
        if not self.is_first:
            return
        if self.args.select_only:
            self._journal.collect(sorted(self.directory.glob(SEED_METRICS.format(seed="*"))))
        self._journal.log(values)
        # Nothing may have been trained now, or not all seeds: their pages are told as well.
        self._open_pages([] if self.args.select_only else [entry["seed"] for entry in seeds])
        seeds_by_number = {entry["seed"]: entry for entry in seeds}
        columns = list(seeds[0])
        rows = [[entry[name] for name in columns] for entry in seeds]
        for (_, seed), background in self._pages.items():
            shown = values
            if seed is not None:  # the page of a seed keeps that seed's own score and best step
                own = seeds_by_number.get(seed, {"selected": False})  # not there: it was trained, and not needed
                shown = {name: value for name, value in values.items() if name not in own}
                shown["selected"] = own["selected"]
            background.do(lambda page, shown=shown: page.summary(shown))  # type: ignore[misc]
            background.do(lambda page: page.table("seeds", columns, rows))
            if images:
                background.do(lambda page: page.images(images))
            if self.args.wandb_log_model and seed in (None, values["best_seed"]):
                background.do(lambda page: page.model(model))

    def _pages_of(self, seed: int) -> list[tuple[Background, str]]:
        """Where this seed's numbers go, and what is put before their names there."""
        return [
            (background, "" if owner is not None else f"seed_{seed}/")
            for (_, owner), background in self._pages.items()
            if owner in (None, seed)
        ]
