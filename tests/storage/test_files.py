"""Files are complete or not there; what goes wrong on a disk is told in one sentence."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import jsonable, new_directory, read_json, write_json, write_text


def content(path: Path) -> dict[str, str]:
    """All files below a directory, hidden and partial ones included."""
    return {str(file.relative_to(path)): file.read_text() for file in sorted(path.rglob("*")) if file.is_file()}


def test_new_directory__takes_the_place_of_the_old_one_whole(tmp_path):
    """Fails if an old file survives in the new directory, or if anything is left beside it."""
    target = tmp_path / "deep" / "model"
    for number in range(2):
        with new_directory(target) as directory:
            (directory / f"file_{number}").write_text(str(number))
            (directory / "sub").mkdir()
            (directory / "sub" / "inner").write_text("x")
            assert not (target / f"file_{number}").exists(), "nothing shows before it is complete"
        assert content(tmp_path) == {f"deep/model/file_{number}": str(number), "deep/model/sub/inner": "x"}
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("existed", [True, False])
def test_new_directory__leaves_the_old_one_and_no_part_of_the_new_on_failure(tmp_path, error, existed):
    target = tmp_path / "model"
    if existed:
        target.mkdir()
        (target / "old").write_text("complete")
    with pytest.raises(error), new_directory(target) as directory:
        (directory / "new").write_text("half")
        raise error("in the middle")
    assert content(tmp_path) == ({"model/old": "complete"} if existed else {})
    assert list(tmp_path.iterdir()) == ([target] if existed else [])


@pytest.mark.parametrize("failing", [1, 2])
def test_new_directory__a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch, failing):
    """Fails if the old directory stays under its name of standing aside, where nobody looks for it."""
    target = tmp_path / "model"
    with new_directory(target) as directory:
        (directory / "old").write_text("complete")
    plain_rename, calls = Path.rename, []

    def rename(self: Path, other: Path) -> Path:
        calls.append(other)
        if len(calls) == failing:
            raise OSError(errno.EIO, "the disk says no")
        return plain_rename(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    with (
        pytest.raises(UserError, match=r"model cannot be written \(the disk says no\)"),
        new_directory(target) as directory,
    ):
        (directory / "new").write_text("complete too")
    assert content(tmp_path) == {"model/old": "complete"}
    assert list(tmp_path.iterdir()) == [target]


def test_new_directory__clears_what_a_killed_process_of_the_same_number_left(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError), new_directory(target) as directory:
        partial = directory
        raise RuntimeError
    partial.mkdir()
    (partial / "stale").write_text("x")
    with new_directory(target) as directory:
        (directory / "new").write_text("y")
    assert content(tmp_path) == {"model/new": "y"}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left on device")]
)
def test_new_directory__a_full_disk_is_told_in_one_sentence(tmp_path, error):
    message = r"/model cannot be written \(No space left on device\): free space"
    with pytest.raises(UserError, match=message), new_directory(tmp_path / "model"):
        raise error
    assert not list(tmp_path.iterdir())


def test_new_directory__a_file_in_the_way_is_told_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"), new_directory(tmp_path / "file" / "model"):
        pass


def test_write_text__replaces_whole_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "note.txt"
    write_text(path, "first\n")
    write_text(path, "zweite Zeile: ä →\n")
    assert path.read_text(encoding="utf-8") == "zweite Zeile: ä →\n"

    def replace(*_: object) -> None:
        raise OSError(errno.EIO, "the disk says no")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(UserError, match=r"note.txt cannot be written \(the disk says no\)"):
        write_text(path, "third\n")
    assert content(tmp_path) == {"deep/note.txt": "zweite Zeile: ä →\n"}


def test_json__round_trip_in_plain_values(tmp_path):
    value = {
        "text": "ä",
        "none": None,
        "flag": True,
        "integer": np.int64(3),
        "number": np.float32(0.5),
        "boolean": np.bool_(True),
        "tuple": (1, 2.5, np.int32(4)),
        np.int64(7): {1: "one", -1.0: "minus one"},
        "path": Path("a/b"),
    }
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == {
        "text": "ä",
        "none": None,
        "flag": True,
        "integer": 3,
        "number": 0.5,
        "boolean": True,
        "tuple": [1, 2.5, 4],
        "7": {"1": "one", "-1.0": "minus one"},
        "path": "a/b",
    }


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_json__a_number_that_is_not_finite_is_null(tmp_path, number):
    """NaN is no JSON: other readers stop at it."""
    write_json(tmp_path / "value.json", {"a": [number, {"b": number}]})
    text = (tmp_path / "value.json").read_text()
    assert json.loads(text, parse_constant=lambda _: pytest.fail("not JSON")) == {"a": [None, {"b": None}]}
    assert jsonable(number) is None


def test_json__is_written_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write_json(tmp_path / name, {"z": 1, "a": [2, {"y": 3}]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert list(read_json(tmp_path / "a")) == ["z", "a"]


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1', b"\xff\xfe{}", b"null and void"])
def test_read_json__a_damaged_file_is_named(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"config.json is no valid JSON .* damaged"):
        read_json(path)


def test_read_json__a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.json cannot be read \(No such file or directory\)"):
        read_json(tmp_path / "nowhere.json")


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
def test_write_text__leaves_alone_what_is_no_regular_file(tmp_path, kind):
    """Fails if `report --output /dev/null` replaces the device."""
    path = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    before = path.lstat()
    with pytest.raises(UserError, match="target is no regular file: pass"):
        write_text(path, "x")
    assert path.lstat() == before and list(tmp_path.iterdir()) == [path]
