"""Does a dataclass hold values of its annotated types? Python does not ask; users and YAML files get it wrong."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

from gradiend_dist.config.documents import is_writable
from gradiend_dist.config.fields import NO_FLAG, flag_type
from gradiend_dist.errors import UserError

# Of Linux file systems; a path needs room for the names of what is written below it.
LONGEST_NAME = 255

LONGEST_PATH = 3000

LONGEST_QUOTE = 200

_NAMES = {
    int: "a whole number", float: "a finite number", bool: "true or false", str: "a text", types.NoneType: "null",
}  # fmt: skip


def first_mismatch(found: Any, expected: Any, where: str) -> str | None:
    """Where a value that was read has another form than the one that would be written now; None: nowhere.

    A dict has at least the expected names, and any numbers are alike; None stands for what is not known yet.
    """
    if expected is None:
        return None
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return None if isinstance(found, int | float) and not isinstance(found, bool) else where
    if type(found) is not type(expected):
        return None if found is None and not isinstance(expected, dict | list | bool) else where
    if isinstance(expected, dict):
        for name, value in expected.items():
            wrong = f"{where}.{name}" if name not in found else first_mismatch(found[name], value, f"{where}.{name}")
            if wrong is not None:
                return wrong
    return None


def check_types(kind: type, values: Mapping[str, Any], prefix: str = "", *, as_flags: bool = False) -> None:
    """Every field has a value of its type, and numbers are finite; the field's help is the remedy.

    `as_flags`: of the type that its flag is read as, where that is another one.
    """
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint = flag_type(item, hints[item.name]) if as_flags else hints[item.name]
        if hint is NO_FLAG:
            continue
        value = values[item.name]
        if not fits(value, hint):
            choices = choices_of(hint)
            if choices and isinstance(value, str):
                require_choice(prefix + item.name, value, choices)
            raise UserError(f"{prefix}{item.name}={shown(value)} is not {describe(hint)}: {item.metadata['help']}")
        check_texts(prefix + item.name, value)


def fits(value: Any, hint: Any) -> bool:
    """Is `value` of the annotated type? An int is a float too, True is no number, and a tuple is a list."""
    parts = typing.get_args(hint)
    if hint is Any:
        return True
    if is_union(hint):
        return any(fits(value, part) for part in parts)
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in parts
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and _is_finite(value)
    if typing.get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    return isinstance(value, hint)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def shown(value: Any) -> str:
    """A value as a message quotes it: what is long is cut."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def check_texts(name: str, value: Any) -> None:
    """Every text in a value can be saved and be part of a path."""
    if isinstance(value, str) and not is_writable(value):
        raise UserError(f"{name}={shown(value)} has a character that cannot be written: pass plain UTF-8 text.")
    if isinstance(value, dict):
        for key, item in value.items():
            check_texts(name, key)
            check_texts(name, item)
    elif isinstance(value, list | tuple):
        for item in value:
            check_texts(name, item)


def check_path(name: str, path: object, *, spare: int = 0) -> None:
    """A path that the system can be asked for; `spare`: bytes that are left for what its last name is extended by.

    Without this it is the first file operation that fails, with an error of its own or after hours of work.
    """
    check_texts(name, str(path))
    text = str(path)
    require(bool(text.strip()), f"{name} is empty: pass a path, or leave it out.")
    longest = max(len(part.encode()) for part in text.split("/"))
    require(
        longest <= LONGEST_NAME - spare and len(text.encode()) <= LONGEST_PATH,
        f"{name}={shown(text)} is too long for a path ({len(text.encode())} bytes, {longest} in one name): pass a "
        "shorter one.",
    )


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def choices_of(hint: Any) -> tuple[str, ...]:
    """The words that a Literal type, or an optional one, allows; empty for any other type."""
    if is_union(hint):
        return tuple(choice for part in typing.get_args(hint) for choice in choices_of(part))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def describe(hint: Any) -> str:
    """The type in words: "a whole number or null"."""
    if is_union(hint):
        return " or ".join(describe(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return _NAMES[str]
    if typing.get_origin(hint) is not None:
        return f"a {str(hint).replace('typing.', '')}"
    return _NAMES.get(hint, f"a {hint.__name__}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    require(value in choices, f"{name}={shown(value)} is not known: choose one of {', '.join(choices)}.")


def require_positive(name: str, value: float | None, *, zero: bool = False) -> None:
    low = "at least 0" if zero else "positive"
    fine = value is None or (value >= 0 if zero else value > 0)
    require(fine, f"{name}={shown(value)} must be {low}: pass a larger number.")


def check_topk(name: str, topk: int | float | None) -> None:
    """A float is a share in (0, 1], an int a count of at least 1; None leaves the step out."""
    if topk is None:
        return
    require(
        not isinstance(topk, bool) and isinstance(topk, int | float),
        f"{name}={topk!r} is not a number: pass a share like 0.01 or a count like 1000.",
    )
    if isinstance(topk, float):
        require(0.0 < topk <= 1.0, f"{name}={topk} is not a share in (0, 1]: pass e.g. 0.01, or an int for a count.")
    else:
        require(topk >= 1, f"{name}={topk} keeps nothing: pass at least 1, or a share like 0.01.")


def check_seed(name: str, seed: int | None) -> None:
    require(seed is None or 0 <= seed < 2**32, f"{name}={seed} is not in [0, 2^32): pass another.")


def require_share(name: str, value: float) -> None:
    require(0 <= value <= 1, f"{name}={value} is not a share: pass 0 to 1.")
