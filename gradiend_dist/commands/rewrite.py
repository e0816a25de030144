"""The rewriting command: a changed copy of a run's base model, as a plain Hugging Face model.

gradiend-dist rewrite RUN_DIR --target_class F --output_dir rewritten
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradiend_dist.commands.evaluate import SelectionOptions, read_flags, run_on_finished
from gradiend_dist.commands.process import Process
from gradiend_dist.config.checks import require
from gradiend_dist.config.fields import documented
from gradiend_dist.rewriting.card import check_output, check_saving
from gradiend_dist.storage.layout import MODEL_CARD
from gradiend_dist.trainer.text_prediction import TextPredictionTrainer


@documented
@dataclass(kw_only=True)
class RewriteOptions(SelectionOptions):
    """Which change, and where to; without a learning_rate, selected as `gradiend-dist evaluate` does it."""

    target_class: str | None = None
    """The class to make more probable, or balance (required, but for a given factor)."""
    output_dir: str | None = None
    """Directory of the changed model (required)."""
    save_as: str = field(default="model", metadata={"aliases": ["--as"]})
    """model, or delta: the change alone, which `gradiend-dist apply` applies at any strength (short: --as)."""
    weaken: bool = False
    """Make the class less probable instead."""
    learning_rate: float | None = None
    """Strength. None: as `gradiend-dist evaluate` finds it, which is run if needed."""
    feature_factor: float | None = None
    """With learning_rate. None: the one that pushes the right way."""
    force: bool = False
    """Rewrite also where the evaluation says that it is of no use, or does too much harm."""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64. None: that of the base model's files."""
    max_shard_size: str = "5GB"
    """Weights are saved in files of at most this size."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; each process that was launched runs it."""
    process = Process(
        "gradiend-dist rewrite",
        memory_remedy="run it where the base model and its GRADIEND model fit in memory.",
        kept="stopped; nothing was written, but finished points are kept",
    )
    return run_on_finished(process, parse, run, sys.argv[1:] if argv is None else argv)


def parse(argv: Sequence[str]) -> tuple[Path, RewriteOptions]:
    run_dir, options = read_flags(
        argv,
        RewriteOptions,
        prog="gradiend-dist rewrite RUN_DIR",
        description="Save a changed copy of the base model of a finished run.",
    )
    require(options.output_dir is not None, "output_dir is missing: pass --output_dir DIRECTORY.")
    require(
        options.target_class is not None or options.feature_factor is not None,
        "target_class is missing: pass --target_class NAME, or --feature_factor and --learning_rate.",
    )
    require(
        options.learning_rate is not None or options.feature_factor is None,
        f"feature_factor={options.feature_factor} needs a learning_rate: pass both, or neither.",
    )
    options.check()
    check_saving(options.save_as, options.output_dir, options.dtype)
    check_output(str(options.output_dir), options.dtype, options.max_shard_size)
    return run_dir, options


def run(trainer: TextPredictionTrainer, options: RewriteOptions) -> int:
    """Find the step where it is not given, rewrite and print; all ranks call this, rank 0 prints."""
    results = None
    if options.learning_rate is None and options.target_class is not None:
        results = trainer.evaluate_decoder(
            target_class=options.target_class,
            increase_target_probabilities=not options.weaken,
            use_cache=True,
            **options.asked(),
        )
    trainer.rewrite_base_model(
        results,
        target_class=options.target_class,
        increase_target_probabilities=not options.weaken,
        output_dir=options.output_dir,
        learning_rate=options.learning_rate,
        feature_factor=options.feature_factor,
        part=None if results is not None else options.part,
        scaling=options.scaling,
        force=options.force,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        save_as=options.save_as,
    )
    if trainer.comm.is_first:
        print_card(str(options.output_dir), options.save_as)
    return 0


def print_card(directory: str, what: str) -> None:
    """What was written, in the words of its card."""
    card = (Path(directory) / MODEL_CARD).read_text(encoding="utf-8")
    print(card.split("---\n", 2)[2].strip())
    print(f"\n  {what:<12}  {directory}")


if __name__ == "__main__":
    sys.exit(main())
