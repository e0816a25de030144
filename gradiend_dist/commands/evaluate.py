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
from gradiend_dist.config.checks import check_path, check_types, require, require_choice, require_positive
from gradiend_dist.config.fields import documented
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.distributed.launch import launched
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.balance import BALANCE, without_balance
from gradiend_dist.evaluation.search import MAX_HARM
from gradiend_dist.evaluation.selection import WEAKEN, LMSTimesMetricPolicy, SelectionPolicy, default_policy
from gradiend_dist.rewriting.step import SCALINGS
from gradiend_dist.storage.layout import RUN_CONFIG
from gradiend_dist.storage.model_dir import is_model_directory
from gradiend_dist.trainer.text_prediction import TextPredictionTrainer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound="DataclassInstance")

SELECTORS = ("lms_threshold", "lms_times_metric")


@documented
@dataclass(kw_only=True)
class SelectionOptions:
    """How a strength is found, and on how much."""

    split: str = "test"
    """Split of the rows."""
    max_size: int | None = None
    """Rows per direction, and neutral texts, at most."""
    max_harm: float = MAX_HARM
    """Perplexity on neutral text may grow by this share of it."""
    second_neutral_data: str | None = None
    """File of texts of another kind, on which the harm of what was chosen is measured as well."""
    neutral_blanks: str | None = None
    """File of sentences with a blank for either class, which target_class=balance is about."""
    lrs: list[float] | None = None
    """Learning rates of the reference's grid, in place of the search."""
    part: str = "decoder"
    """The rewriting vector: decoder, or decoder-weight, decoder-bias, ..."""
    scaling: str | None = None
    """How the vector's entries are weighed: plain, tensor or curvature. None: curvature, in a grid plain."""
    selector: str | None = None
    """How a point of a grid is selected: lms_threshold or lms_times_metric. None: by search."""
    lms_ratio: float = 0.99
    """Of the base model's language-model score, lms_threshold keeps this share."""
    eval_batch_size: int | None = None
    """Rows read together. None: as in training."""

    def check(self) -> None:
        require_choice("scaling", self.scaling or "plain", SCALINGS)
        require_choice("selector", self.selector or SELECTORS[0], SELECTORS)
        require(0.0 <= self.lms_ratio <= 1.0, f"lms_ratio={self.lms_ratio} is not in [0, 1]: pass e.g. 0.99.")
        require_positive("max_size", self.max_size)
        require_positive("eval_batch_size", self.eval_batch_size)
        require(self.max_harm > 0.0, f"max_harm={self.max_harm} must be positive: pass e.g. 0.01 for 1 %.")

    def asked(self) -> dict[str, Any]:
        """The arguments of `evaluate_decoder`."""
        selector: SelectionPolicy | None = None
        if self.selector == "lms_times_metric":
            selector = LMSTimesMetricPolicy()
        elif self.selector is not None or self.lrs is not None:
            selector = default_policy(self.scaling or "plain", self.lms_ratio)
        taken = (
            "max_harm", "second_neutral_data", "neutral_blanks", "lrs", "split", "max_size", "eval_batch_size", "part",
            "scaling",
        )  # fmt: skip
        return {**{name: vars(self)[name] for name in taken}, "selector": selector}


@documented
@dataclass(kw_only=True)
class EvaluateOptions(SelectionOptions):
    """What is evaluated."""

    parts: list[str] = field(default_factory=lambda: ["encoder", "decoder"])
    """encoder, decoder, or both."""
    target_class: list[str] | None = None
    """Classes to find a strength for, and balance for a model between them. None: both classes."""
    feature_factors: list[float] | None = None
    """What the decoder is asked for. None: +1 and -1 as needed."""
    use_cache: bool = True
    """Use what an earlier evaluation has left, where it is still right."""
    plot: bool = True
    """Draw the encodings and the probabilities."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; each process that was launched runs it."""
    process = Process(
        "gradiend-dist evaluate",
        memory_remedy="lower eval_batch_size, or launch on more GPUs.",
        kept="stopped; finished points are kept, and the same command goes on with the others",
    )
    return run_on_finished(process, parse, run, sys.argv[1:] if argv is None else argv)


def run_on_finished(
    process: Process,
    parse: Callable[[Sequence[str]], tuple[Path, Options]],
    run: Callable[[TextPredictionTrainer, Options], int],
    argv: Sequence[str],
) -> int:
    """A command on the directory of a finished run. All ranks call this."""
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
        description="Describe the encodings of a finished run, and find how far to rewrite its base model.",
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
    check_path("RUN_DIR", argv[0])
    values = vars(parser.parse(argv[1:]))
    check_types(kind, values)
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
    """Evaluate and print; all ranks call this, rank 0 prints."""
    trainer.classes_asked_for(without_balance(options.target_class)[1])  # before a weight is loaded
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
        lines += [f"  figure        {found['plot_path']}"] if draws else []
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
    """One line for the base model and one for each selected step; then what a search has found besides."""
    grid = found["grid"]
    chosen = {name: entry for name, entry in found.items() if isinstance(entry, dict) and "learning_rate" in entry}
    searched = any("evaluations" in entry for entry in chosen.values())
    second = any("second" in entry for entry in chosen.values())

    def row(name: str, step: Sequence[str], harm: Sequence[str], entry: dict[str, Any]) -> tuple[str, ...]:
        cells = [
            f"{entry['probs_by_dataset'][dataset][word]:.4f}" for dataset in target_classes for word in target_classes
        ]
        return name, *step, *cells, *harm, f"{entry['lms']['lms']:.4f}"

    def harm(entry: dict[str, Any]) -> list[str]:
        if not searched:
            return []
        kinds = [entry, entry.get("held_out"), *([entry.get("second")] if second else [])]
        return [percent(kind) for kind in kinds]

    steps = [*(["weights move"] if searched else []), "factor", "rate"]
    rows = [row("base model", [""] * len(steps), [""] * (searched * (2 + second)), grid["base"])]
    for metric, entry in chosen.items():
        point = grid.get((entry["feature_factor"], entry["learning_rate"]))
        if point is not None:
            rows.append(row(what_is_done(metric, entry), step_taken(entry), harm(entry), point))
    header = [f"P({word}) | {dataset}" for dataset in target_classes for word in target_classes]
    harms = ["harm", "held out", *(["second"] if second else [])] if searched else []
    title = "decoder: probability of the words of a class at the blanks of a class, and what the language model loses"
    lines = [title, "", table(("model", *steps, *header, *harms, "lms"), rows)]
    lines += [f"  {entry['refusal']}" for entry in chosen.values() if "refusal" in entry]
    return "\n".join([*lines, *search_lines(found, chosen)] if searched else lines)


def search_lines(found: dict[str, Any], chosen: dict[str, dict[str, Any]]) -> list[str]:
    """The curve over harm, the indices of a balance, and completed sentences."""
    lines: list[str] = []
    curves = {what_is_done(metric, entry): entry["curve"] for metric, entry in chosen.items() if entry.get("curve")}
    levels = sorted({point["harm"] for curve in curves.values() for point in curve})
    if levels:
        rows = []
        for name, curve in curves.items():
            known = {point["harm"]: f"{point['value']:.4f}" for point in curve}
            rows.append((name, *(known.get(level, "") for level in levels)))
        evaluations = sum(entry["evaluations"] for entry in chosen.values())
        lines += ["", f"reached within a harm of ({evaluations} rewritten models were scored)", ""]
        lines += [table(("model", *(f"{100 * level:g} %" for level in levels)), rows)]
    for entry in chosen.values():
        if "indices" in entry:
            lines += ["", balance_table(entry)]
    for number in range(len(found["completions"]["base"])):
        lines += [""] + [
            f"  {'base model' if name == 'base' else what_is_done(name, chosen[name]):<16}  {texts[number]}"
            for name, texts in found["completions"].items()
        ]
    return lines


def step_taken(entry: dict[str, Any]) -> list[str]:
    """By how much the weights move, where a search has found that, and the grid's point that this is equal to."""
    moved = [f"{100 * entry['relative_change']:.3g} %"] if "relative_change" in entry else []
    return [*moved, f"{entry['feature_factor']:+g}", f"{entry['learning_rate']:.6g}"]


def balance_table(entry: dict[str, Any]) -> str:
    """The indices of a balanced model at each kind of blanks, before and after."""
    before, after = (entry[name]["by_blanks"] for name in ("base_indices", "indices"))
    names = list(next(iter(after.values())))
    rows = [
        (blanks, *(f"{before[blanks][name]:.4f} -> {value:.4f}" for name, value in indices.items()))
        for blanks, indices in after.items()
    ]
    return table(("blanks of", *names), rows)


def what_is_done(metric: str, entry: dict[str, Any]) -> str:
    if metric == BALANCE:
        return "balanced"
    return f"{metric.removesuffix(WEAKEN)} {'strengthened' if entry['strengthen'] else 'weakened'}"


def percent(harm: dict[str, Any] | None) -> str:
    return "" if harm is None or "harm" not in harm else f"{100 * harm['harm']:+.2f} ± {100 * harm['harm_error']:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
