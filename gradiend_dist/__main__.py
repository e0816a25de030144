"""The console command: gradiend-dist SUBCOMMAND ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

USAGE = """usage: gradiend-dist SUBCOMMAND ...

  train     train GRADIEND models for a feature (see gradiend-dist train --help)
  evaluate  what a finished run has learnt: its encodings, and its base model rewritten over a grid of strengths
  rewrite   save the base model of a finished run, changed to make a class more or less probable
  demo      write the embedded example: a small language model, its data and a configuration
  submit    run a training as a Slurm job, or as an array of them; --dry_run prints the command
  report    write one HTML page about a run, finished or not, that opens from disk
  dashboard create or update the W&B workspace for trainings
  plan      memory per GPU, bytes sent and what fits, for every engine, from a model's configuration alone

  --version, --help
"""


def _train(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.train import main

    return main(argv)


def _evaluate(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.evaluate import main

    return main(argv)


def _rewrite(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.rewrite import main

    return main(argv)


def _demo(argv: Sequence[str]) -> int:
    from gradiend_dist.demo import main

    return main(argv)


def _plan(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.plan import answer
    from gradiend_dist.errors import UserError

    try:
        print(answer(argv))
    except UserError as error:
        print(f"gradiend-dist plan: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _submit(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.submit import main

    return main(argv)


def _report(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.report import main

    return main(argv)


def _dashboard(argv: Sequence[str]) -> int:
    from gradiend_dist.commands.dashboard import main

    return main(argv)


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "evaluate": _evaluate,
    "rewrite": _rewrite,
    "demo": _demo,
    "submit": _submit,
    "report": _report,
    "dashboard": _dashboard,
    "plan": _plan,
}


def main(argv: Sequence[str] | None = None) -> int:
    from gradiend_dist import __version__

    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"gradiend-dist {__version__}")
        return 0
    if argv[0] not in SUBCOMMANDS:
        known = ", ".join(SUBCOMMANDS)
        print(f"gradiend-dist: error: {argv[0]!r} is no subcommand: use one of {known}.", file=sys.stderr)
        return 2
    return SUBCOMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main())
