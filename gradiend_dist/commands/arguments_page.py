"""docs/arguments.md, from the dataclasses: python -m gradiend_dist.commands.arguments_page > docs/arguments.md"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gradiend_dist.commands.train import GROUPS
from gradiend_dist.config.fields import FLAG, NO_FLAG
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig

HEAD = """# Arguments

Every argument of a training, as a flag (`--max_seeds 5`), as a line of a configuration (`max_seeds: 5`) and in Python:
those of the feature and its data are fields of `TextPredictionConfig`, all others of `TrainingArguments`.
Flags win over the configuration. `null` is Python's `None`.

This page is made from the code by `python -m gradiend_dist.commands.arguments_page > docs/arguments.md`.
"""

PRUNING = {
    "pre_prune_config: PrePruneConfig": PrePruneConfig,
    "post_prune_config: PostPruneConfig": PostPruneConfig,
}


def page() -> str:
    """The whole page; the same on every machine."""
    sections = [section(title, kind) for title, kind in {**GROUPS, **PRUNING}.items()]
    return "\n".join([HEAD, *sections])


def section(title: str, kind: type) -> str:
    lines = [f"## {title[0].upper()}{title[1:]}", "", str(kind.__doc__), "", "| argument | default | meaning |"]
    lines.append("| --- | --- | --- |")
    for item in dataclasses.fields(kind):
        only = " *(Python)*" if item.metadata.get(FLAG) is NO_FLAG else ""
        meaning = item.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{item.name}`{only} | `{default_of(item)}` | {meaning} |")
    return "\n".join([*lines, ""])


def default_of(item: dataclasses.Field[Any]) -> str:
    """As a configuration file writes it."""
    value = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
