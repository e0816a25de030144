"""gradiend-dist report RUN_DIR ...: one HTML page about each run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from gradiend_dist.commands.plain_parser import PlainParser
from gradiend_dist.commands.tables import table
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import check_path, require
from gradiend_dist.config.groups.output import PARTIAL_NAME
from gradiend_dist.errors import exit_code
from gradiend_dist.report.html import page
from gradiend_dist.report.records import Run, read_run
from gradiend_dist.storage.files import jsonable, write_text
from gradiend_dist.storage.layout import REPORT_PAGE

NAME = "gradiend-dist report"


def parse(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    parser = PlainParser(
        prog=NAME,
        description="Write one page on a run, finished or not, that opens from disk.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="*", type=Path, help="experiment_dir of a run")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"the page (default: RUN_DIR/{REPORT_PAGE})")
    options = parser.parse_args(argv)
    require(bool(options.run_dirs), "RUN_DIR is missing: pass the experiment_dir of a run.")
    for path in options.run_dirs:
        check_path("RUN_DIR", path)
    if options.output is not None:
        check_path("--output", options.output, spare=PARTIAL_NAME)
    several = len(options.run_dirs) > 1
    require(
        not several or options.output is None, f"--output={options.output} is one file for several runs: leave it out."
    )
    return options.run_dirs, options.output


COLUMNS = ("run", "best seed", "converged", "correlation", "explains", "pruned size")


def summary(run: Run) -> tuple[str, ...]:
    best = run.selected
    verdict = "not finished" if not run.finished else "yes" if best.converged else "no"
    correlation = "-" if best.correlation is None else f"{best.correlation:.4f}"
    explained = best.explained_words().replace("−", "-") or "-"
    kept = f"{run.kept:,}" if run.weights else "-"
    return str(run.directory), str(best.number), verdict, correlation, explained, kept


@cache
def defaults() -> dict[str, Any]:
    """Of all arguments of a training that have one, as run_config.yaml writes them."""
    from gradiend_dist.data.config import TextPredictionConfig  # imports pandas: half of the command's time

    data = {item.name: item.default for item in dataclasses.fields(TextPredictionConfig)}
    known = {name: value for name, value in data.items() if value is not dataclasses.MISSING}
    return jsonable({**known, **TrainingArguments().to_dict()})


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(NAME, lambda: run(*parse(sys.argv[1:] if argv is None else argv)))


def run(run_dirs: Sequence[Path], output: Path | None) -> int:
    """A page for each run, and a table where there are several; a run that failed must not hide those that did not."""
    rows: list[tuple[str, ...]] = []

    def write(directory: Path) -> int:
        run = read_run(directory)
        path = output or directory / REPORT_PAGE
        write_text(path, page(run, defaults()))
        print(path)
        rows.append(summary(run))
        return 0

    codes = [exit_code(NAME, partial(write, directory)) for directory in run_dirs]
    if len(run_dirs) > 1 and rows:
        print("", table(COLUMNS, rows), sep="\n")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
