"""The console command: gradiend-dist SUBCOMMAND ..."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from gradiend_dist.commands.start import run_process
from gradiend_dist.errors import print_line

# Subcommand -> its module, which has a `main` and is imported when it is asked for, and what it does.
SUBCOMMANDS = {
    "train": ("commands.train", "train GRADIEND models for a feature (see gradiend-dist train --help)"),
    "evaluate": (
        "commands.evaluate",
        "what a finished run has learnt: its encodings, and its base model rewritten as far as a harm allows",
    ),
    "rewrite": (
        "commands.rewrite",
        "save the base model of a finished run, changed to make a class more or less probable",
    ),
    "apply": ("commands.apply", "apply a change that rewrite --as delta has saved, at any strength"),
    "demo": ("demo", "write the embedded example: a small language model, its data and a configuration"),
    "submit": (
        "commands.submit",
        "run a training as a Slurm job, or as an array of them; --dry_run prints the command",
    ),
    "report": ("commands.report", "write one HTML page about a run, finished or not, that opens from disk"),
    "dashboard": ("commands.dashboard", "create or update the W&B workspace for trainings"),
    "plan": (
        "commands.plan",
        "memory per GPU, bytes sent and what fits, for every engine, from a model's configuration alone",
    ),
}


def usage() -> str:
    lines = [f"  {name:<9} {about}" for name, (_, about) in SUBCOMMANDS.items()]
    return "\n".join(["usage: gradiend-dist SUBCOMMAND ...", "", *lines, "", "  --version, --help", ""])


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:  # this is all that the process does
        return run_process(" ".join(["gradiend-dist", *(word for word in sys.argv[1:2] if word in SUBCOMMANDS)]), main)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from gradiend_dist import __version__

        print(f"gradiend-dist {__version__}")
        return 0
    if argv[0] not in SUBCOMMANDS:
        print_line("gradiend-dist", f"error: {argv[0]!r} is no subcommand: use one of {', '.join(SUBCOMMANDS)}.")
        return 2
    module, _ = SUBCOMMANDS[argv[0]]
    code: int = import_module(f"gradiend_dist.{module}").main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
