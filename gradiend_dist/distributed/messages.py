"""Messages between ranks: plain values as bytes and back. Nothing that comes from a socket is unpickled.

A pickle runs what its sender wants, and on a network the sender need not be a rank. A message is JSON, in which what
JSON has no form for stands as {"$kind": ...}, and after it the bytes of tensors and arrays. Of classes only those that
say so themselves (`sendable`) are made from a message, and only with their fields.

    8 bytes    length of the JSON
    ...        the JSON
    ...        buffers, one after the other; the JSON says where each begins
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gradiend_dist.space import ParameterSpace

Kind = TypeVar("Kind", bound=type)

# A length that somebody invents must not fill the memory; the largest message is the selected entries of a space.
MOST_BYTES = 2**33

LENGTH = 8

TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip

NUMPY_KINDS = "biuf"

COLUMN_DTYPES = ("object", "str", "string", "bool", "int64", "float64")

_SENDABLE: dict[str, type] = {}


class MessageError(RuntimeError):
    """Bytes that no rank of this version has sent."""


def sendable(kind: Kind) -> Kind:
    """Class decorator: a dataclass whose fields are plain values may be part of a message."""
    assert dataclasses.is_dataclass(kind), f"{kind.__name__} has no fields that could be sent"
    _SENDABLE[kind.__qualname__] = kind
    return kind


def encode(value: Any) -> bytes:
    """A value as a message; what has no plain form is a defect of ours, found by the rank that sends it."""
    buffers: list[bytes] = []
    header = json.dumps(_Writer(buffers).plain(value)).encode()
    message = b"".join([len(header).to_bytes(LENGTH, "little"), header, *buffers])
    assert len(message) <= MOST_BYTES, f"a message of {len(message)} bytes is no message any more"
    return message


def decode(message: bytes) -> Any:
    """The value of a message."""
    try:
        stop = LENGTH + int.from_bytes(message[:LENGTH], "little")
        return _Reader(memoryview(message)[stop:]).value(json.loads(bytes(message[LENGTH:stop])))
    except (ValueError, LookupError, TypeError, RecursionError, RuntimeError) as error:
        raise MessageError(f"a message that cannot be read: {error}") from error


def check_length(length: int) -> int:
    """Before memory is taken for a message."""
    if not 0 <= length <= MOST_BYTES:
        raise MessageError(f"a message of {length} bytes: {MOST_BYTES} at most are taken")
    return length


class _Writer:
    def __init__(self, buffers: list[bytes]) -> None:
        self.buffers, self.size = buffers, 0

    def plain(self, value: Any) -> Any:
        """What JSON can hold: numbers and texts as they are, the rest by its kind."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.plain(item) for key, item in value.items()}
            return {"$dict": [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        kind, content = self._special(value)
        return {f"${kind}": content}

    def _special(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return "tuple", [self.plain(item) for item in value]
        if isinstance(value, set | frozenset):
            return type(value).__name__, [self.plain(item) for item in value]
        if isinstance(value, Path):
            return "path", str(value)
        if isinstance(value, Tensor):
            there = value.detach().cpu().contiguous()
            raw = there.reshape(-1).view(torch.uint8).numpy().tobytes() if there.numel() else b""
            return "tensor", [str(there.dtype).removeprefix("torch."), list(there.shape), self._put(raw)]
        if isinstance(value, np.ndarray):
            assert value.dtype.kind in NUMPY_KINDS, f"arrays of {value.dtype} are not sent"
            return "array", [value.dtype.str, list(value.shape), self._put(np.ascontiguousarray(value).tobytes())]
        if isinstance(value, pd.DataFrame):
            return "frame", [[str(name), str(column.dtype), column.tolist()] for name, column in value.items()]
        if isinstance(value, ParameterSpace):
            return "space", [self.plain((each.name, each.shape, each.selected)) for each in value.weights]
        name = type(value).__qualname__
        assert dataclasses.is_dataclass(value) and _SENDABLE.get(name) is type(value), (
            f"{name} has no form in a message: make it plain, or sendable"
        )
        return "object", [name, {item.name: self.plain(vars(value)[item.name]) for item in dataclasses.fields(value)}]

    def _put(self, raw: bytes) -> int:
        start, self.size = self.size, self.size + len(raw)
        self.buffers.append(raw)
        return start


class _Reader:
    def __init__(self, buffers: memoryview) -> None:
        self.buffers = buffers
        self.kinds: dict[str, Callable[[Any], Any]] = {
            "$dict": lambda pairs: {self.value(key): self.value(item) for key, item in pairs},
            "$tuple": lambda items: tuple(self.value(item) for item in items),
            "$set": lambda items: {self.value(item) for item in items},
            "$frozenset": lambda items: frozenset(self.value(item) for item in items),
            "$path": Path,
            "$tensor": self._tensor,
            "$array": self._array,
            "$frame": self._frame,
            "$space": lambda weights: ParameterSpace([self.value(weight) for weight in weights]),
            "$object": self._object,
        }

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        kind = next(iter(plain), "")
        if len(plain) == 1 and kind.startswith("$"):
            return self.kinds[kind](plain[kind])
        return {key: self.value(item) for key, item in plain.items()}

    def _take(self, start: int, size: int) -> bytes:
        raw = bytes(self.buffers[start : start + size])
        if start < 0 or len(raw) != size:
            raise ValueError(f"{size} bytes at {start} are not there")
        return raw

    def _tensor(self, content: list[Any]) -> Tensor:
        name, shape, start = content
        dtype = TORCH_DTYPES[name]
        raw = self._take(start, math.prod(shape) * dtype.itemsize)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)

    def _array(self, content: list[Any]) -> np.ndarray[Any, Any]:
        name, shape, start = content
        dtype = np.dtype(name)
        if dtype.kind not in NUMPY_KINDS:
            raise ValueError(f"arrays of {dtype} are not sent")
        raw = self._take(start, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape).copy()

    @staticmethod
    def _frame(columns: list[Any]) -> pd.DataFrame:
        strange = [dtype for _, dtype, _ in columns if dtype not in COLUMN_DTYPES]
        if strange:
            raise ValueError(f"columns of {strange[0]} are not sent")
        return pd.DataFrame({name: pd.Series(items, dtype=dtype) for name, dtype, items in columns})

    def _object(self, content: list[Any]) -> Any:
        name, fields = content
        return _SENDABLE[name](**{field: self.value(item) for field, item in fields.items()})
