"""Plain values: numbers, texts, and lists and dicts of these, which JSON can hold without losing a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gradiend_dist.errors import UserError

# Marks a dict whose keys are not all strings, which JSON has no form for.
PAIRS = "pairs of key and value"


def plain_fields(value: Any) -> dict[str, Any]:
    """The attributes of an object that are plain values."""
    return {name: item for name, item in vars(value).items() if _is_plain(item)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def as_plain(value: Any) -> Any:
    """What a user's evaluation returns, as plain values: numbers of numpy and torch become Python's."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"evaluate_fn returned a {type(value).__name__}: return numbers, texts, and lists or dicts of them."
    )


def write_plain(path: Path, value: Any) -> None:
    """Numbers as Python writes them, to the last bit, and dicts as pairs where keys are numbers."""
    path.write_text(json.dumps(_with_pairs(value)), encoding="utf-8")


def read_plain(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), object_hook=_without_pairs)


def _with_pairs(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _with_pairs(item) for key, item in value.items()}
        return {PAIRS: [[key, _with_pairs(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_with_pairs(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _without_pairs(value: dict[str, Any]) -> dict[Any, Any]:
    return dict(value[PAIRS]) if value.keys() == {PAIRS} else value
