"""Dataclass fields whose docstrings are their documentation: for `--help`, error messages and docs/arguments.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
from functools import cache
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)

# Key of a field's metadata: the type that its flag is read as, where Python takes more; NO_FLAG: Python only.
FLAG = "flag"

NO_FLAG = "python only"


def documented(kind: Kind) -> Kind:
    """Class decorator above @dataclass: the docstring under each field becomes `metadata["help"]` of the field.

    Python drops these docstrings, so that the source is read: once for each module, a few milliseconds.
    """
    texts = _docstrings(kind.__module__)[kind.__name__]
    for item in dataclasses.fields(kind):
        if "help" not in item.metadata:  # those of base classes have theirs
            assert item.name in texts, f"{kind.__name__}.{item.name} has no docstring under it"
            item.metadata = types.MappingProxyType({**item.metadata, "help": texts[item.name]})
    return kind


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring, of a module that is being imported."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _docstrings_of(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings_of(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[statement.target.id] = " ".join(text.value.split())
    return found


def flag_type(item: dataclasses.Field[Any], hint: Any) -> Any:
    """The type that a flag is read as, given the type of the field; NO_FLAG where there is no flag."""
    return item.metadata.get(FLAG, hint)
