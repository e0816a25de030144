"""From the keys that a user writes, in Python or in a file, to dataclasses; a misspelt key is told with its nearest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gradiend_dist.config.checks import check_path
from gradiend_dist.config.documents import DocumentError, parse_json, parse_yaml, read_text
from gradiend_dist.config.foreign import unknown_key
from gradiend_dist.errors import UserError


def from_mapping(kind: type, values: dict[str, Any], where: str) -> Any:
    """Build a dataclass from user-written keys; a misspelt key is an error that names the nearest one."""
    names = [item.name for item in dataclasses.fields(kind)]
    taken = vars(kind).get("taken_names", ())
    for key in values:
        if key not in names and key not in taken:
            raise UserError(f"{where}: {unknown_key(str(key), names)}")
    return kind(**values)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON configuration; the file is data, never code."""
    check_path("--config", path)
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--config {path} does not exist as a file: pass the path of a YAML or JSON file.")
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except DocumentError as error:
        raise UserError(f"--config {path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds no mapping: write one `name: value` per line.")
    return values
