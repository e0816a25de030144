"""Files that are complete or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors import SafetensorError

from gradiend_dist.errors import MissingFile, UserError


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """A full disk or a forbidden directory is told in one sentence, whichever library met it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if isinstance(error, shutil.Error):  # a list of what happened to each file of a copy
            reason = str(error.args[0][0][2])
        raise UserError(f"{path} cannot be written ({reason}): free space or pass another directory.") from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill; it takes the place of `path` when the block ends well, and leaves nothing behind if not."""
    with explained(path):
        partial = make_partial(path)
        try:
            yield partial
            replace_directory(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def make_partial(path: Path) -> Path:
    """An empty directory beside `path`, to be filled and then put in its place."""
    recover(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def replace_directory(new: Path, path: Path) -> None:
    """Put `new` in the place of `path`. Between the two renames the old one stands aside under a name of its own."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def recover(path: Path) -> None:
    """Clean up after a process that was killed while it replaced `path`: what was complete is there again."""
    for old in sorted(path.parent.glob(f".{path.name}.old-*")):
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    for partial in path.parent.glob(f".{path.name}.partial-*"):
        if not _is_running(partial.name.rpartition("-")[2]):
            shutil.rmtree(partial, ignore_errors=True)


def _is_running(process: str) -> bool:
    """Another process of this machine may be at work on the same path."""
    return process.isdigit() and psutil.pid_exists(int(process)) and int(process) != os.getpid()


def remove(path: Path) -> None:
    """Whatever stands there, as far as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares its files with the source, which are never changed in place; a real one where it must be."""
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def require_regular(path: Path) -> None:
    """What is renamed over a path takes its place, also that of a device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file: pass the name of one, or of a new one.")


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """In the place of a regular file or of nothing: a renamed file would take the place of a device as well.

    `private`: for nobody but its owner to read, from its first byte on.
    """
    require_regular(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.touch(mode=0o600 if private else 0o666)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, indent: int | None = 2, private: bool = False) -> None:
    write_text(path, json.dumps(jsonable(value), indent=indent, allow_nan=False) + "\n", private=private)


def read_json(path: Path) -> Any:
    """The content of a JSON file that we or the reference wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFile(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits, 1,000 levels
        raise UserError(f"{path} is no valid JSON ({error}): it is damaged or no file of ours.") from error


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object: it is damaged or no file of ours.")
    return found


def jsonable(value: Any) -> Any:
    """Plain Python values for JSON; a number that is not finite becomes null, which every reader understands."""
    if isinstance(value, dict):
        return {_key(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _key(key: Any) -> Any:
    return key.item() if isinstance(key, np.generic) else key
