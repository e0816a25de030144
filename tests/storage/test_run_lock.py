"""One run owns its directory; who is gone owns nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradiend_dist.errors import UserError
from gradiend_dist.storage import run_lock
from gradiend_dist.storage.run_lock import Owner, RunLock


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "LOOK_SECONDS", 0.02)


def leave(path: Path, **changes: object) -> Owner:
    """A lock as another process would have left it."""
    owner = dataclasses.replace(Owner.this_process(), **changes)
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_second_run__is_told_who_the_first_one_is(tmp_path):
    """Fails if two runs write to one directory."""
    first = RunLock(tmp_path)
    first.take()
    with pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()} on .*, since 20.*\): wait"):
        RunLock(tmp_path).take()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
    first.release()
    second = RunLock(tmp_path)
    second.take()
    second.release()
    assert not list(tmp_path.iterdir())


def test_release__takes_the_directories_along_that_stayed_empty(tmp_path):
    """Fails if a run that is refused leaves something behind."""
    for kept in (False, True):
        lock = RunLock(tmp_path / "runs" / "one")
        lock.take()
        if kept:
            (tmp_path / "runs" / "result").touch()
        lock.release()
        lock.release()
        assert (tmp_path / "runs").exists() == kept and not (tmp_path / "runs" / "one").exists()


@pytest.mark.parametrize("how", ["ended", "number used again", "rebooted", "garbage", "empty", "wrong types"])
def test_lock_of_the_dead__is_taken_over(tmp_path, how):
    """Fails if a crash locks a directory for ever."""
    path = tmp_path / "run.lock"
    if how == "ended":
        leave(path, pid=ended_process())
    elif how == "number used again":
        leave(path, start="1")
    elif how == "rebooted":
        leave(path, place="another boot", token="x")
    else:
        path.write_text({"garbage": "\0\0", "empty": "", "wrong types": '{"token": [1], "pid": "no"}'}[how])
    lock = RunLock(tmp_path)
    lock.take()
    assert Owner.read(path) == lock.owner
    lock.release()
    assert not list(tmp_path.iterdir())


def test_owner_on_another_host__is_known_by_its_signs_of_life(tmp_path):
    """Fails if only processes of this machine count, or if the owner gives no sign."""
    elsewhere = RunLock(tmp_path)
    elsewhere.owner = dataclasses.replace(elsewhere.owner, place="another host", host="n2", pid=1)
    elsewhere.take()
    with pytest.raises(UserError, match="process 1 on n2"):
        RunLock(tmp_path).take()
    elsewhere._released.set()  # it is killed
    elsewhere._beating.join()
    lock = RunLock(tmp_path)
    lock.take()
    elsewhere.release()
    assert Owner.read(lock.path) == lock.owner, "who was taken over removes nothing"
    lock.release()


def test_job_that_was_queued_again__takes_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_is_heartbeat_fresh", lambda *_: pytest.fail("nobody has to wait"))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    leave(tmp_path / "run.lock", place="another host", restarts=0)
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()
    leave(tmp_path / "run.lock", restarts=1)  # another step of this very job
    with pytest.raises(UserError, match="job 77"):
        RunLock(tmp_path).take()


def test_array__shares_a_directory_and_the_whole_run_does_not(tmp_path):
    seeds = [RunLock(tmp_path, seed) for seed in (0, 1)]
    for lock in seeds:
        lock.take()
    with pytest.raises(UserError, match="in use"):
        RunLock(tmp_path, 1).take()
    with pytest.raises(UserError, match="in use"):
        RunLock(tmp_path).take()
    for lock in seeds:
        lock.release()
    whole = RunLock(tmp_path)
    whole.take()
    with pytest.raises(UserError, match="in use"):
        RunLock(tmp_path, 1).take()
    whole.release()
    assert not list(tmp_path.iterdir())


def test_many_at_once__one_owns_it(tmp_path):
    """Fails if two that find a dead owner remove each other's locks."""
    for _ in range(10):
        leave(tmp_path / "run.lock", pid=ended_process())
        locks, taken = [RunLock(tmp_path) for _ in range(8)], []

        def take(lock: RunLock, taken: list[RunLock] = taken) -> None:
            try:
                lock.take()
            except UserError:
                return
            taken.append(lock)

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (owner,) = taken
        assert Owner.read(tmp_path / "run.lock") == owner.owner
        owner.release()
        assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_made__is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        RunLock(tmp_path / "file" / "run").take()
