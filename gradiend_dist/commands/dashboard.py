"""gradiend-dist dashboard: create or update the W&B workspace of a project."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from gradiend_dist.commands.flags import CommandParser
from gradiend_dist.config.checks import require
from gradiend_dist.errors import exit_code, print_line
from gradiend_dist.tracking.workspace import (
    DashboardOptions,
    ServerError,
    as_json,
    check_library,
    check_name,
    new_workspace,
    save,
    view_of,
)

NAME = "gradiend-dist dashboard"


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> int:
        try:
            print(answer(sys.argv[1:] if argv is None else argv))
        except ServerError as error:
            print_line(NAME, f"error: {error}")
            return 1
        return 0

    return exit_code(NAME, work)


def answer(argv: Sequence[str]) -> str:
    """What the command prints: the workspace, or the address where it is now."""
    options = parse(argv)
    view = view_of(options)
    check_library()
    check_name(options.name)
    if options.dry_run:
        return as_json(new_workspace(view, options))
    return save(view, options)


def parse(argv: Sequence[str]) -> DashboardOptions:
    about = "Create or update a W&B workspace for training runs."
    parser = CommandParser({"which workspace": DashboardOptions}, prog=NAME, description=about)
    values = vars(parser.parse(argv))
    options = DashboardOptions(**{item.name: values[item.name] for item in dataclasses.fields(DashboardOptions)})
    names = options.class_names or []
    require(len(set(names)) == len(names), f"class_names={' '.join(names)} names a class twice: pass each once.")
    return options


if __name__ == "__main__":
    sys.exit(main())
