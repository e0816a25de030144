"""What a directory holds, written down when it is complete, and whether it still does.

Every file by its size, small ones and all JSON by a checksum as well. Large ones may take minutes to read: of these,
safetensors files are looked at for what they say of themselves.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

# Files up to this size are summed: they are read in no time.
SMALL = 2**20

# By the path below the directory: the size, and the checksum or None.
Holdings = dict[str, list[int | None]]


def directory_sums(directory: Path) -> Holdings:
    files = sorted(item for item in directory.rglob("*") if item.is_file())
    return {str(path.relative_to(directory)): _entry_of_file(path) for path in files}


def _entry_of_file(path: Path) -> list[int | None]:
    size = path.stat().st_size
    return [size, file_sum(path) if size <= SMALL or path.suffix == ".json" else None]


def damage(directory: Path, expected: Any) -> str | None:
    """What is not as it was; None: nothing. `expected` may come from a damaged file."""
    if not isinstance(expected, dict) or not expected:
        return "what it holds is not known"
    for name, holding in expected.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if _entry_of_file(path) != holding:
            return f"{name} is not as it was written"
        if path.suffix == ".safetensors" and not _is_whole(path):
            return f"{name} is no file of tensors any more"
    return None


def _is_whole(path: Path) -> bool:
    try:
        with safe_open(str(path), framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError):
        return False
    return True


def file_sum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            total = zlib.crc32(block, total)
    return total
