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
from gradiend_dist.config import arguments
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import check_path, check_types, require
from gradiend_dist.config.fields import FLAG, NO_FLAG
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import jsonable, write_text
from gradiend_dist.storage.layout import RUN_CONFIG
from gradiend_dist.storage.provenance import git_hash, without_secrets

if TYPE_CHECKING:
    from gradiend_dist.commands.plan import Forecast
    from gradiend_dist.trainer.text_prediction import TextPredictionTrainer

logger = logging.getLogger(__name__)


# Headings of --help and of docs/arguments.md, and the arguments below each.
GROUPS: dict[str, Any] = {"feature and data": TextPredictionConfig, **arguments.GROUPS}


def make_parser() -> CommandParser:
    parser = CommandParser(
        GROUPS,
        prog="gradiend-dist train",
        description="Train GRADIEND models for one feature of a language model and promote the best seed.",
    )
    parser.add_argument("--model", type=str, help="path or hub id of the base model (required)")
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
    check_path("model", model)
    if values["data"] is None and values["hf_dataset"] is None:
        raise UserError("data is missing: pass --data FILE_OR_DIRECTORY or --hf_dataset ID.")
    for name in ("pre_prune_config", "post_prune_config"):
        if values[name] is not None:
            require(
                isinstance(values[name], dict), f"{name}={values[name]!r} is no mapping: write e.g. '{{topk: 0.01}}'."
            )
            values[name] = with_numbers(values[name])
    training_names = {item.name for item in dataclasses.fields(TrainingArguments)}
    feature = {name: values[name] for name in feature_flags()}
    check_types(TextPredictionConfig, feature, as_flags=True)
    config = TextPredictionConfig(**feature)
    args = TrainingArguments(**{name: value for name, value in values.items() if name in training_names})
    return Command(model, config, args, bool(values["dry_run"]))


def feature_flags() -> list[str]:
    """The fields of the feature's configuration that a flag or a file can give."""
    return [item.name for item in dataclasses.fields(TextPredictionConfig) if item.metadata.get(FLAG) is not NO_FLAG]


def run(command: Command, interrupt: Interrupt) -> int:
    """Train, or say what would be trained, and show the table. All ranks call this."""
    from gradiend_dist.commands import summary as report
    from gradiend_dist.report.plots import check_format
    from gradiend_dist.trainer.text_prediction import TextPredictionTrainer

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
    if not command.args.reuses:  # else there may be nothing to train
        comm.together(lambda: report.require_room(command.args, needs))
    trainer.interrupt = interrupt
    keep = KeepConfig(trainer.experiment_dir, resolved(command), private=may_hold_secrets(command))
    trainer.train(callbacks=[keep])
    interrupt.ignore()  # there is a result, and what is left takes seconds
    if command.args.select_only and comm.is_first:
        keep.write()
    if command.args.only_seed is not None:
        if comm.is_first:
            print(report.one_seed(trainer))
        return 0
    plot = trainer.plot_path or (trainer.plot_training_convergence(show=False) if draws else None)
    if comm.is_first:
        if not draws:
            logger.info('no plot was drawn: pip install "gradiend_dist[plot]" for one')
        print(report.results(trainer, plot))
    return 0


def check(trainer: TextPredictionTrainer) -> Forecast:
    """All that can be wrong before a weight is loaded; nothing is written."""
    from gradiend_dist.commands.plan import check_output, forecast

    trainer.check()
    needs = forecast(trainer.base_model_name, trainer.args)
    if trainer.comm.is_first:
        for name, path in output_paths(trainer).items():
            check_is_no_input(name, path, trainer)
            check_output(name, path, needs.disk)
    return needs


def check_is_no_input(name: str, path: Path, trainer: TextPredictionTrainer) -> None:
    """What a run writes does not go among what it reads: the data's directory would have other tables the next time."""
    inputs = {"data": trainer.config.data, "base model": trainer.base_model_name}
    for what, given in inputs.items():
        taken = Path(given) if isinstance(given, str | Path) else None
        if taken is not None and path.exists() and taken.is_dir() and path.samefile(taken):
            raise UserError(f"{name}={path} is the directory of the {what}: pass another {name}.")


def output_paths(trainer: TextPredictionTrainer) -> dict[str, Path]:
    """Where a run will write, by the argument that says so."""
    given = {"output_dir": trainer.args.output_dir, "seed_runs_dir": trainer.args.seed_runs_dir}
    paths = {name: Path(value) for name, value in given.items() if value is not None}
    if trainer.experiment_dir is not None:
        paths["experiment_dir"] = trainer.experiment_dir
    return paths


class KeepConfig(TrainerCallback):
    """Writes the configuration when the first step begins: a run that is refused before that leaves nothing behind.

    A run without a step (max_steps=0) writes it at its end. Called on all ranks; rank 0 writes.
    """

    def __init__(self, directory: Path | None, text: str, *, private: bool) -> None:
        self.directory, self.text, self.private = directory, text, private

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._write_before_first_step(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._write_before_first_step(state)

    def _write_before_first_step(self, state: TrainerState) -> None:
        if state.global_step == 0 and state.is_world_process_zero:
            self.write()

    def write(self) -> None:
        """Rank 0 alone."""
        if self.directory is not None:
            write_text(self.directory / RUN_CONFIG, self.text, private=self.private)


def all_arguments(command: Command) -> dict[str, Any]:
    """As one run: this may be a task of an array, or the selection after it."""
    feature = {name: getattr(command.config, name) for name in feature_flags()}
    values = {"model": command.model, **feature, **command.args.to_dict(), "only_seed": None, "select_only": False}
    plain: dict[str, Any] = jsonable(values)
    return plain


def may_hold_secrets(command: Command) -> bool:
    """Where a user writes what he likes, or something looked like a secret, there may be one that does not."""
    values = all_arguments(command)
    return bool(command.args.metadata or command.args.wandb_notes) or without_secrets(values) != values


def resolved(command: Command) -> str:
    """The whole configuration, ready to be run again as it is; but for secrets, which are blotted out."""
    from gradiend_dist import __version__

    values = without_secrets(all_arguments(command))
    header = f"# gradiend_dist {__version__}, git {git_hash()}\n# again: gradiend-dist train --config {RUN_CONFIG}\n"
    return header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


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
