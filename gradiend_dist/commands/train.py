"""The training command: accelerate launch -m gradiend_dist.train --config run.yaml [--FLAG VALUE ...]"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from transformers import TrainerCallback, TrainerState

from gradiend_dist.commands.flags import CommandParser, with_numbers
from gradiend_dist.commands.process import Process
from gradiend_dist.config.arguments import (
    EvaluationArguments,
    FeatureArguments,
    LoopArguments,
    ModelArguments,
    OutputArguments,
    PostPruneConfig,
    PrePruneConfig,
    SeedArguments,
    TrackingArguments,
    TrainingArguments,
    help_field,
)
from gradiend_dist.config.checks import check_types
from gradiend_dist.config.mapping import from_mapping
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import jsonable, write_text
from gradiend_dist.storage.layout import RUN_CONFIG

if TYPE_CHECKING:
    from gradiend_dist.commands.plan import Forecast
    from gradiend_dist.trainer import TextPredictionTrainer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class FeatureOptions:
    """What to learn, and from which rows."""

    model: str | None = help_field(None, "Path or hub id of the base model (required).")
    data: str | None = help_field(None, "CSV, Parquet or JSONL file, directory, or hub id with a subset per class.")
    hf_dataset: str | None = help_field(None, "Hub id of a dataset that is one table.")
    hf_subset: list[str] | None = help_field(None, "Subsets of hf_dataset.")
    hf_splits: list[str] | None = help_field(None, "Splits of the hub dataset.")
    dataset_trust_remote_code: bool | None = help_field(None, "Passed on to datasets.load_dataset.")
    run_id: str | None = help_field(None, "Results go to experiment_dir/run_id.")
    target_classes: list[str] | None = help_field(None, "The two classes; the first is encoded towards +1.")
    all_classes: list[str] | None = help_field(None, "All classes that matter. None: all in the data.")
    masked_col: str = help_field("masked", "Column of the sentence with the blank.")
    label_col: str = help_field("label", "Column of the word at the blank.")
    label_class_col: str = help_field("label_class", "Column of that word's class.")
    alternative_col: str = help_field("alternative", "Column of the alternative word.")
    alternative_class_col: str = help_field("alternative_class", "Column of the alternative word's class.")
    use_class_names_as_columns: bool = help_field(True, "Take columns named like classes as their words.")
    split_col: str | None = help_field("split", "Column of the split; null: split rows at random; heldout: by word.")
    split_group_col: str | None = help_field(None, "With heldout: the column that is not shared between splits.")
    split_train_ratio: float = help_field(0.8, "Share of the train split.")
    split_val_ratio: float = help_field(0.1, "Share of the validation split.")
    split_test_ratio: float = help_field(0.1, "Share of the test split.")
    max_counterfactuals_per_sentence: int = help_field(1, "Alternatives drawn for each sentence.")
    random_state: int | None = help_field(None, "Seed of drawn alternatives. None: seed.")
    eval_neutral_data: str | None = help_field(None, "File of sentences without the feature.")
    eval_neutral_additional_excluded_words: list[str] | None = help_field(None, "Words never hidden in them.")
    eval_neutral_max_rows: int | None = help_field(None, "At most this many neutral sentences.")
    decoder_eval_targets: dict[str, Any] | str | None = help_field(
        None, "Words of each class for the decoder grid, as YAML: '{M: [he], F: [she]}', or label: each row's own."
    )
    decoder_eval_restrict_to_target_classes: bool = help_field(True, "Of these, measure the target classes alone.")
    decoder_eval_prob_on_other_class: bool = help_field(True, "Strengthening counts on the other class's rows.")
    decoder_eval_export_row_wise_csv: bool = help_field(False, "Also write each row's probabilities.")
    decoder_eval_ignore_tokens: list[str] | None = help_field(None, "Words left out of the language-model score.")
    decoder_eval_lms_max_samples: int | None = help_field(None, "Rows and texts of the decoder grid, at most.")
    img_format: str = help_field("png", "Format of plots.")
    img_dpi: int | None = help_field(None, "Resolution of plots.")


@dataclass(kw_only=True)
class RunOptions:
    """Pruning and fidelity."""

    pre_prune_config: dict[str, Any] | None = help_field(
        None, "Prune before training, as YAML: '{n_samples: 16, topk: 0.01, source: diff}'."
    )
    post_prune_config: dict[str, Any] | None = help_field(
        None, "Prune after training, as YAML: '{topk: 0.05, part: decoder-weight}'."
    )
    compat: str | None = help_field(None, "gradiend-0.2: reproduce the reference package, defects included.")
    metadata: dict[str, Any] = help_field(dict, "Free facts to keep in training.json, as YAML.")


def make_parser() -> CommandParser:
    parser = CommandParser(
        {
            "feature and data": FeatureOptions,
            "which rows are trained on": FeatureArguments,
            "base model, GRADIEND model and devices": ModelArguments,
            "training loop": LoopArguments,
            "evaluation": EvaluationArguments,
            "seeds": SeedArguments,
            "tracking": TrackingArguments,
            "pruning and fidelity": RunOptions,
            "output": OutputArguments,
        },
        prog="gradiend-dist train",
        description="Train GRADIEND models for one feature of a language model and promote the best seed.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file with the flags' names as keys; flags win")
    parser.add_argument("--dry_run", action="store_true", default=False, help="check everything, print the plan, stop")
    return parser


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    model: str
    config: TextPredictionConfig
    args: TrainingArguments
    dry_run: bool


def parse(argv: Sequence[str]) -> Command:
    values = vars(make_parser().parse(argv))
    model = values.pop("model")
    if not model:
        raise UserError("model is missing: pass --model PATH_OR_HUB_ID, or write model: ... in the configuration.")
    if values["data"] is None and values["hf_dataset"] is None:
        raise UserError("data is missing: pass --data FILE_OR_DIRECTORY or --hf_dataset ID.")
    for name, kind in (("pre_prune_config", PrePruneConfig), ("post_prune_config", PostPruneConfig)):
        if values[name] is not None:
            if not isinstance(values[name], dict):
                raise UserError(f"{name}={values[name]!r} is no mapping: write e.g. '{{topk: 0.01}}'.")
            values[name] = from_mapping(kind, with_numbers(values[name]), name)
    feature_names = {item.name for item in dataclasses.fields(FeatureOptions)}
    training_names = {item.name for item in dataclasses.fields(TrainingArguments)}
    feature = {name: value for name, value in values.items() if name in feature_names}
    check_types(FeatureOptions(**feature))
    config = TextPredictionConfig(**feature)
    args = TrainingArguments(**{name: value for name, value in values.items() if name in training_names})
    return Command(model, config, args, bool(values["dry_run"]))


def run(command: Command, interrupt: Interrupt) -> int:
    from gradiend_dist.commands import summary as report
    from gradiend_dist.report.plots import check_format
    from gradiend_dist.trainer import TextPredictionTrainer

    trainer = TextPredictionTrainer(command.model, config=command.config, args=command.args)
    comm = trainer.comm
    draws = importlib.util.find_spec("matplotlib") is not None
    if draws:
        check_format(trainer.config.img_format)
    needs = comm.together(lambda: check(trainer))
    if command.dry_run:
        if comm.is_first:
            print(report.plan(trainer, needs))
        return 0
    trainer.interrupt = interrupt
    trainer.train(callbacks=[KeepConfig(trainer.experiment_dir, resolved(command))])
    if command.args.select_only and comm.is_first and trainer.experiment_dir is not None:
        write_text(trainer.experiment_dir / RUN_CONFIG, resolved(command))
    if command.args.only_seed is not None:
        if comm.is_first:
            print(report.one_seed(trainer))
        return 0
    plot = trainer.plot_training_convergence(show=False) if draws else None
    if comm.is_first:
        if not draws:
            logger.info('no plot was drawn: pip install "gradiend_dist[plot]" for one')
        print(report.results(trainer, plot))
    return 0


def check(trainer: TextPredictionTrainer) -> Forecast:
    """All that can be wrong before a weight is loaded; nothing is written."""
    from gradiend_dist.commands.plan import check_output, forecast, space_of

    trainer.check()
    space, num_weights = space_of(trainer.base_model_name, trainer.args)
    needs = forecast(trainer.args, space, num_weights)
    if trainer.comm.is_first:
        for name, path in output_paths(trainer).items():
            check_output(name, path, needs.disk)
    return needs


def output_paths(trainer: TextPredictionTrainer) -> dict[str, Path]:
    """Where a run will write, by the argument that says so."""
    given = {"output_dir": trainer.args.output_dir, "seed_runs_dir": trainer.args.seed_runs_dir}
    paths = {name: Path(value) for name, value in given.items() if value is not None}
    if trainer.experiment_dir is not None:
        paths["experiment_dir"] = trainer.experiment_dir
    return paths


class KeepConfig(TrainerCallback):
    """Writes the configuration when the first step begins: a run that is refused before that leaves nothing behind."""

    def __init__(self, directory: Path | None, text: str) -> None:
        self.directory, self.text = directory, text

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self.directory is not None and state.global_step == 0 and state.is_world_process_zero:
            write_text(self.directory / RUN_CONFIG, self.text)


def resolved(command: Command) -> str:
    """The whole configuration, ready to be run again as it is."""
    from gradiend_dist import __version__
    from gradiend_dist.storage.provenance import git_hash

    values: dict[str, Any] = {"model": command.model}
    for name in (item.name for item in dataclasses.fields(FeatureOptions) if item.name != "model"):
        values[name] = getattr(command.config, name)
    # As one run: this may be a task of an array, or the selection after it.
    values.update({**command.args.to_dict(), "only_seed": None, "select_only": False})
    header = f"# gradiend_dist {__version__}, git {git_hash()}\n# again: gradiend-dist train --config {RUN_CONFIG}\n"
    return header + yaml.safe_dump(jsonable(values), sort_keys=False, allow_unicode=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run."""
    process = Process(
        "gradiend-dist train",
        memory_remedy="prune with pre_prune_config, lower base_micro_batch_size or gradient_store_gib, pass "
        "seeds_in_parallel=false, or launch on more GPUs.",
        kept="stopped before anything could be saved; the same command goes on from the last saved state",
    )
    process.set_up_logging()
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return process.refuse(error)
    return process.run(lambda interrupt: run(command, interrupt), float(command.args.ddp_timeout))


if __name__ == "__main__":
    sys.exit(main())
