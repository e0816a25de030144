"""The evaluation command: what has a run learnt, and at which strength does it change the base model?

gradiend-dist evaluate RUN_DIR
accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m gradiend_dist.evaluate RUN_DIR
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradiend_dist.commands import train
from gradiend_dist.commands.flags import CommandParser
from gradiend_dist.commands.process import Process
from gradiend_dist.commands.tables import table
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.config.fields import documented
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.distributed.launch import launched
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.selection import WEAKEN, LMSTimesMetricPolicy, default_policy
from gradiend_dist.rewriting.move import SCALINGS
from gradiend_dist.storage.layout import RUN_CONFIG
from gradiend_dist.storage.model_dir import is_model_directory
from gradiend_dist.trainer import TextPredictionTrainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound="DataclassInstance")

SELECTORS = ("lms_threshold", "lms_times_metric")


@documented
@dataclass(kw_only=True)
class SelectionOptions:
    """Which points of the decoder grid are scored, on how much, and how one is selected."""

    split: str = "test"
    """Split of the rows."""
    max_size: int | None = None
    """Rows per direction, and neutral texts, at most."""
    lrs: list[float] | None = None
    """Learning rates of the grid. None: 100 to 0.001, 16 of them (scaled: 26)."""
    part: str = "decoder"
    """The rewriting vector: decoder, or decoder-weight, decoder-bias, ..."""
    scaling: str = "plain"
    """How the vector's entries are weighed: plain, tensor or curvature."""
    selector: str = "lms_threshold"
    """How a point is selected: lms_threshold or lms_times_metric."""
    lms_ratio: float = 0.99
    """Of the base model's language-model score, lms_threshold keeps this share."""
    eval_batch_size: int | None = None
    """Rows read together. None: as in training."""

    def check(self) -> None:
        require_choice("scaling", self.scaling, SCALINGS)
        require_choice("selector", self.selector, SELECTORS)
        require(0.0 <= self.lms_ratio <= 1.0, f"lms_ratio={self.lms_ratio} is not in [0, 1]: pass e.g. 0.99.")

    def asked(self) -> dict[str, Any]:
        """The arguments of `evaluate_decoder`."""
        times = self.selector == "lms_times_metric"
        return {
            "lrs": self.lrs,
            "split": self.split,
            "max_size": self.max_size,
            "eval_batch_size": self.eval_batch_size,
            "part": self.part,
            "scaling": self.scaling,
            "selector": LMSTimesMetricPolicy() if times else default_policy(self.scaling, self.lms_ratio),
        }


@documented
@dataclass(kw_only=True)
class EvaluateOptions(SelectionOptions):
    """What is evaluated."""

    parts: list[str] = field(default_factory=lambda: ["encoder", "decoder"])
    """encoder, decoder, or both."""
    target_class: list[str] | None = None
    """Classes to select a point for. None: both."""
    feature_factors: list[float] | None = None
    """Feature factors of the grid. None: +1 and -1 as needed."""
    use_cache: bool = True
    """Use what an earlier evaluation has left, where it is still right."""
    plot: bool = True
    """Draw the encodings and the grid."""


def main(argv: Sequence[str] | None = None) -> int:
    process = Process(
        "gradiend-dist evaluate",
        memory_remedy="lower eval_batch_size, or launch on more GPUs.",
        kept="stopped; finished points of the grid are kept, and the same command goes on with the others",
    )
    return run_on_finished(process, parse, run, sys.argv[1:] if argv is None else argv)


def run_on_finished(
    process: Process,
    parse: Callable[[Sequence[str]], tuple[Path, Options]],
    run: Callable[[TextPredictionTrainer, Options], int],
    argv: Sequence[str],
) -> int:
    """A command on the directory of a finished run."""
    process.set_up_logging()
    try:
        run_dir, options = parse(argv)
    except UserError as error:
        return process.refuse(error)
    timeout = TrainingArguments().ddp_timeout

    def work(_: Interrupt) -> int:
        trainer = launched(timeout).comm.together(lambda: trainer_of(run_dir))
        return run(trainer, options)

    return process.run(work, timeout)


def parse(argv: Sequence[str]) -> tuple[Path, EvaluateOptions]:
    run_dir, options = read_flags(
        argv,
        EvaluateOptions,
        prog="gradiend-dist evaluate RUN_DIR",
        description="Describe the encodings of a finished run, and rewrite its base model at every point of a grid.",
    )
    options.check()
    for name in options.parts:
        require_choice("parts", name, ("encoder", "decoder"))
    return run_dir, options


def read_flags(argv: Sequence[str], kind: type[Options], **about: str) -> tuple[Path, Options]:
    """The run's directory, which comes first, and the flags."""
    parser = CommandParser({"what to do": kind}, **about)
    parser.print_help_if_asked(argv)
    require(
        len(argv) > 0 and not argv[0].startswith("-"),
        "RUN_DIR is missing: pass the experiment_dir of a finished run first.",
    )
    values = vars(parser.parse(argv[1:]))
    return Path(argv[0]), kind(**{item.name: values[item.name] for item in dataclasses.fields(kind)})


def trainer_of(run_dir: Path) -> TextPredictionTrainer:
    """The trainer of a finished run, from the configuration that it left; the directory may have been moved."""
    config = run_dir / RUN_CONFIG
    require(run_dir.is_dir(), f"RUN_DIR={run_dir} is no directory: pass the experiment_dir of a finished run.")
    require(config.is_file(), f"{run_dir} has no {RUN_CONFIG}: pass the experiment_dir of a finished run.")
    command = train.parse(["--config", str(config)])
    elsewhere = command.args.output_dir
    output_dir = elsewhere if elsewhere is not None and is_model_directory(elsewhere) else None
    args = dataclasses.replace(command.args, experiment_dir=str(run_dir), use_cache=False, output_dir=output_dir)
    feature = dataclasses.replace(command.config, run_id=None)
    trainer = TextPredictionTrainer(command.model, config=feature, args=args)
    require(is_model_directory(trainer.model_path), f"{trainer.model_path} holds no model: the run is not finished.")
    return trainer


def run(trainer: TextPredictionTrainer, options: EvaluateOptions) -> int:
    trainer.classes_asked_for(options.target_class)  # before a weight is loaded
    draws = options.plot and importlib.util.find_spec("matplotlib") is not None
    if options.plot and not draws:
        logger.info('nothing is drawn: pip install "gradiend_dist[plot]"')
    lines: list[str] = []
    shared: dict[str, Any] = {"split": options.split, "use_cache": options.use_cache, "plot": draws}
    if "encoder" in options.parts:
        found = trainer.evaluate_encoder(max_size=options.max_size, **shared)
        lines += [encoder_table(found), ""]
        lines += [f"  encodings     {found['plot_path']}", ""] if draws else []
    if "decoder" in options.parts:
        found = trainer.evaluate_decoder(
            feature_factors=options.feature_factors,
            target_class=options.target_class,
            **{**options.asked(), **shared},
        )
        lines += [decoder_table(found, trainer.target_classes), ""]
        lines += [f"  grid          {found['plot_path']}"] if draws else []
    if trainer.comm.is_first:
        print("\n".join(lines).rstrip())
    return 0


def encoder_table(found: dict[str, Any]) -> str:
    """One line for each class and kind of neutral text."""
    names = found["label_value_to_class_name"]
    rows = [
        (
            str(names.get(label, label)),
            str(found["n_by_class"][label]),
            f"{mean:+.3f}",
            f"{found['std_by_class'][label]:.3f}",
            f"{found['min_by_class'][label]:+.3f} .. {found['max_by_class'][label]:+.3f}",
        )
        for label, mean in sorted(found["mean_by_class"].items(), key=lambda pair: -pair[0])
    ]
    counts = found["sample_counts"]["by_type"]
    for kind, mean in found["neutral_mean_by_type"].items():
        rows.append((kind, str(counts.get(kind, "")), f"{mean:+.3f}", "", ""))
    head = f"encoder: correlation {found['correlation']:.4f}, accuracy {found['training_only']['accuracy']:.4f}"
    return head + "\n\n" + table(("rows of", "count", "mean encoding", "deviation", "range"), rows)


def decoder_table(found: dict[str, Any], target_classes: Sequence[str]) -> str:
    """One line for the base model and one for each selected point."""
    grid = found["grid"]

    def row(name: str, where: str, entry: dict[str, Any]) -> tuple[str, ...]:
        cells = [
            f"{entry['probs_by_dataset'][dataset][word]:.4f}" for dataset in target_classes for word in target_classes
        ]
        return name, where, *cells, f"{entry['lms']['lms']:.4f}"

    rows = [row("base model", "", grid["base"])]
    for metric, entry in found.items():
        if isinstance(entry, dict) and "learning_rate" in entry:
            where = f"factor {entry['feature_factor']:+g}, rate {entry['learning_rate']:g}"
            name = metric.removesuffix(WEAKEN)
            what = f"{name} {'strengthened' if entry['strengthen'] else 'weakened'}"
            rows.append(row(what, where, grid[entry["feature_factor"], entry["learning_rate"]]))
    header = [f"P({word}) | {dataset}" for dataset in target_classes for word in target_classes]
    title = "decoder: probability of the words of a class at the blanks of a class, and language-model score"
    return title + "\n\n" + table(("model", "selected at", *header, "lms"), rows)


if __name__ == "__main__":
    sys.exit(main())
