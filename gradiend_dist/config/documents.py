"""YAML and JSON that others wrote -> plain values, in bounded time; whatever is wrong is one DocumentError.

A document is refused where its size, its depth or the number of its values is beyond any configuration's, where a key
stands twice in a mapping (the last one would win without a word) and where a text cannot be written as UTF-8.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

# PyYAML reads a MiB in about ten seconds; a configuration has a few KiB.
MOST_BYTES = 2**20

MOST_LEVELS = 50

# Counted with every alias written out: nine lines of aliases of aliases are a billion values.
MOST_VALUES = 100_000

# What the readers of single values raise for what they cannot read: huge integers, `!!int ""`, `!!timestamp x`, ...
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


class DocumentError(ValueError):
    """A document that is not read, and why; in one line."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file: a pipe would be waited for, and a device may have no end."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DocumentError("it is no regular file")
        if found.st_size > most_bytes:
            raise DocumentError(f"it has {found.st_size} bytes, and {most_bytes} at most are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(error.strerror or str(error)) from error
    except ValueError as error:  # no UTF-8, or a path with a NUL
        raise DocumentError(_one_line(error)) from error


def parse_json(text: str) -> Any:
    """JSON; NaN and infinity are read as well, which Python's and other writers leave behind."""
    try:
        value = json.loads(text, object_pairs_hook=_different_keys)
    except RecursionError as error:
        raise DocumentError(f"it is nested more than {MOST_LEVELS} levels deep") from error
    except ValueError as error:
        raise DocumentError(_one_line(error)) from error
    _check_texts(value)
    return value


def parse_yaml(text: str) -> Any:
    """YAML without tags of Python's; a date is the text that it is written as."""
    try:
        value = yaml.load(text, BoundedLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise DocumentError(_one_line(error)) from error
    _check_texts(value)
    return value


def is_writable(text: str) -> bool:
    """Can this text be saved, and be part of a path? Half of a surrogate pair and NUL cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DocumentError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _check_texts(value: Any, level: int = 0) -> None:
    """Every text in it can be written, and it is not too deep for those who walk through it after us."""
    if level > MOST_LEVELS:
        raise DocumentError(f"it is nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, str) and not is_writable(value):
        raise DocumentError(f"the text {value[:40]!r} has a character that cannot be written")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_texts(key, level + 1)
            _check_texts(item, level + 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _check_texts(item, level + 1)


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which a few lines can keep busy for hours, with bounds and without silent duplicates."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._level = 0
        self._sizes: dict[int, int] = {}
        """Of each complete node, how many values it is with every alias written out."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._level += 1
        if self._level > MOST_LEVELS:
            raise self._error(f"it is nested more than {MOST_LEVELS} levels deep", event.start_mark)
        node = super().compose_node(parent, index)
        assert node is not None, "there was an event"
        self._level -= 1
        if isinstance(event, yaml.AliasEvent) and id(node) not in self._sizes:
            raise self._error(f"the alias {event.anchor!r} stands inside of what it names", event.start_mark)
        self._sizes[id(node)] = self._size(node)
        if self._sizes[id(node)] > MOST_VALUES:
            raise self._error(f"with its aliases it has more than {MOST_VALUES} values", event.start_mark)
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.MappingNode):
            return 1 + sum(self._sizes[id(child)] for pair in node.value for child in pair)
        if isinstance(node, yaml.SequenceNode):
            return 1 + sum(self._sizes[id(child)] for child in node.value)
        return 1

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                raise self._error(f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(name)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except UNREADABLE as error:
            raise self._error(f"a value cannot be read ({_one_line(error)})", node.start_mark) from error

    @staticmethod
    def _error(words: str, mark: Any) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, words, mark)


# Dates stay texts: no argument is one, and some that look like one are none (2001-99-99).
BoundedLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
