"""gradiend-dist report RUN_DIR ...: one HTML page about each run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gradiend_dist.config.checks import require
from gradiend_dist.errors import UserError
from gradiend_dist.report.html import explained_words, page
from gradiend_dist.report.records import Run, read_run
from gradiend_dist.storage.files import write_text
from gradiend_dist.storage.layout import REPORT_PAGE

# --- the command


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see --help.")


def parse(argv: Sequence[str]) -> tuple[list[Path], Path | None]:
    parser = Parser(
        prog="gradiend-dist report",
        description="Write one page on a run, finished or not, that opens from disk.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="*", type=Path, help="experiment_dir of a run")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"the page (default: RUN_DIR/{REPORT_PAGE})")
    options = parser.parse_args(argv)
    require(bool(options.run_dirs), "RUN_DIR is missing: pass the experiment_dir of a run.")
    several = len(options.run_dirs) > 1
    require(
        not several or options.output is None, f"--output={options.output} is one file for several runs: leave it out."
    )
    return options.run_dirs, options.output


def summary(run: Run) -> tuple[str, ...]:
    best = run.selected
    verdict = "not finished" if not run.finished else "yes" if best.converged else "no"
    correlation = "-" if best.correlation is None else f"{best.correlation:.4f}"
    explained = explained_words(best).replace("−", "-") or "-"
    kept = f"{run.kept:,}" if run.weights else "-"
    return str(run.directory), str(best.number), verdict, correlation, explained, kept


def main(argv: Sequence[str] | None = None) -> int:
    rows: list[tuple[str, ...]] = [("run", "best seed", "converged", "correlation", "explains", "pruned size")]
    code = 0
    try:
        run_dirs, output = parse(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return _refuse(error)
    for directory in run_dirs:  # a run that failed must not hide those that did not
        try:
            run = read_run(directory)
            path = output or directory / REPORT_PAGE
            write_text(path, page(run))
        except UserError as error:
            code = _refuse(error)
            continue
        print(path)
        rows.append(summary(run))
    if len(run_dirs) > 1 and len(rows) > 1:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        print("", *lines, sep="\n")
    return code


def _refuse(error: UserError) -> int:
    print(f"gradiend-dist report: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
