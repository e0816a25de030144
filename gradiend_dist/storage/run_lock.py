"""One run owns its experiment_dir: a second one would mix its files with those of the first.

The lock is a file that says who owns it. It survives crashes: an owner that is not alive is replaced. On the owner's
own machine its process tells. Of another host, or of another container, nobody can ask: there the owner touches the
file every few seconds, and one that has not for a while is gone. No clocks are compared; no file system has to lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import explained
from gradiend_dist.storage.layout import RUN_LOCK, RUN_LOCKS, SEED_LOCK

logger = logging.getLogger(__name__)

# How often the owner touches its file, and after how long without that it is taken for dead.
BEAT_SECONDS = 10.0

SILENT_SECONDS = 60.0

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Owner:
    """Who has a lock. What could not be read is empty."""

    token: str = ""
    host: str = ""
    place: str = ""
    """The boot and the namespace that the process has its number in."""
    pid: int = 0
    start: str = ""
    """Of the process, in the system's own count: numbers are used again."""
    since: str = ""
    job: str = ""
    restarts: int = 0
    """How often Slurm has queued that job again."""

    @classmethod
    def this_process(cls) -> Owner:
        return cls(
            secrets.token_hex(8),
            platform.node(),
            _place(),
            os.getpid(),
            _start_of(os.getpid()),
            time.strftime("%Y-%m-%d %H:%M:%S"),
            os.environ.get("SLURM_JOB_ID", ""),
            int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """None: there is no such lock. One that is being written, or was damaged, names nobody."""
        try:
            owner = cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return cls()
        fits = all(type(value) is type(asdict(cls())[name]) for name, value in asdict(owner).items())
        return owner if fits else cls()

    def __str__(self) -> str:
        if not self.token:
            return "a run that left no name"
        return f"process {self.pid} on {self.host}{f', job {self.job}' if self.job else ''}, since {self.since}"


class RunLock:
    """The right to write to a directory. Only one process calls this: rank 0."""

    def __init__(self, directory: Path, only_seed: int | None = None) -> None:
        self.directory = directory
        self.path = directory / (RUN_LOCK if only_seed is None else SEED_LOCK.format(seed=only_seed))
        self.is_whole = only_seed is None
        """The tasks of an array share a directory, each with a seed of its own; the whole run shares it with none."""
        self.owner = Owner.this_process()
        self._made: list[Path] = []
        self._released = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Own the directory, or raise with who does; a directory that is not there is made."""
        with explained(self.directory):
            missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
            self._made = missing
        try:
            with explained(self.path):
                while not self._create():
                    self._require_dead(self.path)
                self._beating = threading.Thread(target=self._heartbeat, name="run lock", daemon=True)
                self._beating.start()
                others = self.directory.glob(RUN_LOCKS) if self.is_whole else [self.directory / RUN_LOCK]
                for path in others:
                    if path != self.path and path.exists():
                        self._require_dead(path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Nothing where nothing was taken. Directories that nothing was written to are gone as well."""
        self._released.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None
            if Owner.read(self.path) == self.owner:
                self.path.unlink(missing_ok=True)
        for path in self._made:
            with contextlib.suppress(OSError):  # it holds something, or is gone
                path.rmdir()
        self._made = []

    def _create(self) -> bool:
        try:
            with self.path.open("x", encoding="utf-8") as file:
                json.dump(asdict(self.owner), file)
        except FileExistsError:
            return False
        return True

    def _heartbeat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                if Owner.read(self.path) == self.owner:  # not of one that took over, when this machine was asleep
                    os.utime(self.path)

    def _require_dead(self, path: Path) -> None:
        """Clear a lock away whose owner is gone; raise where it is not."""
        owner = Owner.read(path)
        if owner is None:
            return
        alive = _is_alive(owner, self.owner)
        if alive is None:
            alive = _is_heartbeat_fresh(path, owner)
        if alive:
            raise UserError(
                f"experiment_dir={str(self.directory)!r} is in use by another run ({owner}): wait until it has ended, "
                "or pass another experiment_dir."
            )
        logger.info("%s is taken over from a run that is gone (%s)", self.directory, owner)
        self._remove(path, owner)

    def _remove(self, path: Path, owner: Owner) -> None:
        """One of those that find it dead may remove a lock; a second one would remove the first one's new lock."""
        claim = path.with_name(f".{path.name}.{owner.token or 'nobody'}")
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            if not _changes(claim, 10 * LOOK_SECONDS):
                claim.unlink(missing_ok=True)  # of one that was killed just here
            return
        try:
            if Owner.read(path) == owner:
                path.unlink(missing_ok=True)
        finally:
            claim.unlink(missing_ok=True)


def _is_alive(owner: Owner, mine: Owner) -> bool | None:
    """None: nobody here can tell."""
    if owner.job and owner.job == mine.job and owner.restarts < mine.restarts:
        return False  # Slurm starts a job again when it has ended
    if not owner.token or owner.place != mine.place:
        return None
    return _start_of(owner.pid) == owner.start


def _is_heartbeat_fresh(path: Path, owner: Owner) -> bool:
    logger.info("%s is there (%s): looking for up to %.0f s whether its run is alive", path, owner, SILENT_SECONDS)
    return _changes(path, SILENT_SECONDS)


def _changes(path: Path, seconds: float) -> bool:
    """Is the file touched, written or removed within this time?"""

    def seen() -> int | None:
        with contextlib.suppress(FileNotFoundError):
            os.listdir(path.parent)  # makes the host ask the server again
            return path.stat().st_mtime_ns
        return None

    first, deadline = seen(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        if seen() != first:
            return True
    return False


def _place() -> str:
    """Where a process number means the same process."""
    if sys.platform != "linux":
        return platform.node()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> str:
    """When a process started, as the system counts it; empty where there is none, or only its remains."""
    try:
        if sys.platform != "linux":
            return str(psutil.Process(pid).create_time())
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    except (OSError, psutil.Error):
        return ""
