"""The documented arguments, checked where they are created.

`TrainingArguments` is flat for its users, as in Hugging Face Trainer and the reference package, and built from small
groups for its readers (config/groups). Nothing here is accepted and ignored: a value that cannot be honoured is an
error that says so.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gradiend_dist.config.checks import check_types, require
from gradiend_dist.config.compat import Behaviour, behaviour_of
from gradiend_dist.config.fields import FLAG, documented
from gradiend_dist.config.foreign import OF_TRAINING, TRANSLATED, accepting, from_hugging_face
from gradiend_dist.config.groups.evaluation import EvaluationArguments
from gradiend_dist.config.groups.feature import ClassArguments
from gradiend_dist.config.groups.loop import LoopArguments
from gradiend_dist.config.groups.model import DeviceArguments, ModelArguments
from gradiend_dist.config.groups.optimizer import OptimizerArguments
from gradiend_dist.config.groups.output import OutputArguments
from gradiend_dist.config.groups.seeds import SeedArguments
from gradiend_dist.config.groups.tracking import TrackingArguments
from gradiend_dist.config.mapping import from_mapping
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@documented
@dataclass(kw_only=True)
class RunArguments:
    """Pruning and fidelity."""

    pre_prune_config: PrePruneConfig | None = field(default=None, metadata={FLAG: dict[str, Any] | None})
    """Prune before training, as YAML: '{n_samples: 16, topk: 0.01, source: diff}'."""
    post_prune_config: PostPruneConfig | None = field(default=None, metadata={FLAG: dict[str, Any] | None})
    """Prune after training, as YAML: '{topk: 0.05, part: decoder-weight}'."""
    compat: str | None = None
    """gradiend-0.2: reproduce the reference package, defects included."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free facts to keep in training.json, as YAML."""

    def check(self) -> None:
        behaviour_of(self.compat)


# Headings of --help and of docs/arguments.md, and the arguments below each.
GROUPS: dict[str, Any] = {
    "base model and GRADIEND model": ModelArguments,
    "devices and memory": DeviceArguments,
    "training loop": LoopArguments,
    "start and optimizer": OptimizerArguments,
    "evaluation": EvaluationArguments,
    "seeds": SeedArguments,
    "tracking": TrackingArguments,
    "pruning and fidelity": RunArguments,
    "output": OutputArguments,
}


@accepting(OF_TRAINING, from_hugging_face, TRANSLATED)
@dataclass(kw_only=True)
class TrainingArguments(
    RunArguments,
    ClassArguments,
    DeviceArguments,
    ModelArguments,
    TrackingArguments,
    SeedArguments,
    EvaluationArguments,
    OptimizerArguments,
    LoopArguments,
    OutputArguments,
):
    """Every argument of a training run; see `gradiend-dist train --help` for what each one does."""

    def __post_init__(self) -> None:
        _take_plain_values(self)
        check_types(type(self), vars(self))
        _join_names(self)
        _take_precision_of_launch(self)
        for group in (*GROUPS.values(), ClassArguments):
            group.check(self)
        self._check_together()
        _reset_ignored(self)

    def _check_together(self) -> None:
        """What no group can see alone."""
        steps, metric = self.max_steps, self.convergent_metric
        require(
            steps > 0 or steps == -1 or (steps == 0 and self.starts_trained),
            f"max_steps={steps} trains nothing: pass a positive number, or -1 to use num_train_epochs; 0 is for "
            "initialization=spectral.",
        )
        require(
            not self.looks_at_items or self.spectral_items > self.latent_dim or self.initialization == "auto",
            f"spectral_items={self.spectral_items} is too few for latent_dim={self.latent_dim}: pass at least "
            f"{self.latent_dim + 1}.",
        )
        require(
            metric != "loss" or self.convergent_score_threshold is not None or self.supervised_decoder,
            "convergent_metric=loss needs convergent_score_threshold: pass the loss that counts as converged.",
        )
        require(
            not (self.seeds_in_parallel and self.prunes_each_seed),
            "seeds_in_parallel needs one pruned space for all seeds, but compat draws another for each: "
            "pass pre_prune_config.seed.",
        )
        require(
            not self.is_of_array or self.experiment_dir is not None,
            "only_seed and select_only meet in experiment_dir, which is not set: pass it.",
        )
        require(
            not (self.supervised_encoder or self.supervised_decoder) or self.latent_dim == 1,
            f"supervised training has one label per item but latent_dim={self.latent_dim}: pass latent_dim=1.",
        )
        parts: dict[str, str] = {"seed_stability_part": self.seed_stability_part}
        if self.post_prune_config is not None:
            parts["post_prune_config.part"] = self.post_prune_config.part
        for name, part in parts.items():
            require(
                self.bias_decoder or part not in ("decoder-bias", "decoder-sum"),
                f"{name}={part} reads the decoder's bias and bias_decoder is false: choose decoder-weight.",
            )

    @property
    def starts_trained(self) -> bool:
        """Is the start a result already, which competes with the steps that follow?

        Where the choice is left to the run: as theory has it, which wants a target that changes its sign with the class
        and more items than latents.
        """
        if self.initialization == "auto":
            holds = self.target == "diff" and self.spectral_items > self.latent_dim
            return holds and not self.behaviour.starts_at_random
        return self.initialization == "spectral"

    @property
    def looks_at_items(self) -> bool:
        """Are `spectral_items` gradients looked at before training?"""
        return self.starts_trained or self.refines

    @property
    def behaviour(self) -> Behaviour:
        """Every decision in which we differ from the reference, as this run takes it."""
        return behaviour_of(self.compat)

    def seen_label(self, label: float) -> float:
        """The class of the token that the encoder sees, as +1, -1 or 0, of a row with this label."""
        factual = self.supervised_decoder and self.behaviour.supervised_decoder_factual
        return -label if self.source == "alternative" and not factual else label

    @property
    def prunes_each_seed(self) -> bool:
        """Does every seed have a pruned space of its own? Only as the reference has it."""
        config = self.pre_prune_config
        return self.behaviour.pre_prune_by_row_number and config is not None and config.seed is None

    @property
    def reuses(self) -> bool | str:
        """May earlier results stand for those of this run? A selection has no others."""
        return True if self.select_only else self.use_cache

    @property
    def evaluates(self) -> bool:
        """Is the encoder evaluated in training? Not where it is not trained."""
        fails = self.behaviour.differences_unevaluated and self.source == "diff"
        return self._wants_evaluation and not fails and not self.supervised_decoder

    @property
    def _wants_evaluation(self) -> bool:
        return self.do_eval and (self.eval_strategy != "no" or self.behaviour.no_strategy_is_ignored)

    @property
    def measures_decoder(self) -> bool:
        """Is the decoder's share of the target measured? Not where it is not trained."""
        wanted = self.evaluates or (self.supervised_decoder and self._wants_evaluation)
        return wanted and not self.supervised_encoder

    @property
    def keeps_best(self) -> bool:
        """Is the best checkpoint saved in training?"""
        return self.save_strategy != "no" or self.behaviour.no_strategy_is_ignored

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values of all fields but the Python-only ones."""
        out = dict(vars(self))
        del out["evaluate_fn"]
        for name in ("pre_prune_config", "post_prune_config"):
            if out[name] is not None:
                out[name] = {key: value for key, value in vars(out[name]).items() if key != "mask"}
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingArguments:
        """The inverse of `to_dict`; an unknown key is an error with a suggestion."""
        return from_mapping(cls, values, "training_args")


def _take_plain_values(args: TrainingArguments) -> None:
    """Paths and dtypes as text, mappings as configurations: what Python users and files write for the same."""
    args.torch_dtype = str(args.torch_dtype).removeprefix("torch.")  # type: ignore[assignment]
    for name, value in vars(args).items():
        if isinstance(value, Path):
            setattr(args, name, str(value))
    for name, kind in (("pre_prune_config", PrePruneConfig), ("post_prune_config", PostPruneConfig)):
        value = vars(args)[name]
        if isinstance(value, dict):
            setattr(args, name, from_mapping(kind, value, name))


def _join_names(args: TrainingArguments) -> None:
    """Two documented names for one thing become one value, and what is left out gets the value that others imply."""
    given = args.base_gradient_batch_size
    rows = _same("train_batch_size", args.train_batch_size, "base_gradient_batch_size", given, default=32)
    assert rows is not None, "the first of the two has a default"
    args.train_batch_size = args.base_gradient_batch_size = rows
    metric = _same("convergent_metric", args.convergent_metric, "convergence_metric", args.convergence_metric)
    args.convergent_metric = args.convergence_metric = metric or ("loss" if args.supervised_decoder else "correlation")
    threshold = _same(
        "convergent_score_threshold",
        args.convergent_score_threshold,
        "convergence_threshold",
        args.convergence_threshold,
    )
    if threshold is None and args.convergent_metric == "correlation":
        threshold = 0.5
    args.convergent_score_threshold = args.convergence_threshold = threshold
    if args.convergent_mean_by_class_threshold is None and args.behaviour.mean_threshold_always:
        args.convergent_mean_by_class_threshold = 0.5
    if args.saved_seed_runs is None:
        converged = "all_convergent" if args.behaviour.keeps_convergent_seeds else "best_only"
        args.saved_seed_runs = "all_tried" if args.keep_seed_runs else converged  # type: ignore[assignment]


def _take_precision_of_launch(args: TrainingArguments) -> None:
    """`mixed_precision` of an Accelerate configuration is the same as the argument of that name."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    require(
        asked in ("no", "bf16", "fp16"),
        f"mixed_precision={asked} of the launch is not supported: pass bf16, fp16 or no.",
    )
    other = {"bf16": "fp16", "fp16": "bf16"}.get(asked)
    if other is not None:
        require(
            not vars(args)[other], f"{other} is set and the launch has mixed_precision={asked}: leave one of them out."
        )
        setattr(args, asked, True)


def _same(name: str, value: Value, other: str, other_value: Value, default: Value | None = None) -> Value:
    """The value that was given under one of two names; two different ones are an error."""
    if other_value is None or value == other_value:
        return value
    require(
        value is None or value == default,
        f"{name}={value} and {other}={other_value} are the same argument: pass only one.",
    )
    return other_value


def _reset_ignored(args: TrainingArguments) -> None:
    """Arguments that the reference ignores go back to their defaults, with a warning, where `compat` asks for it."""
    for item in dataclasses.fields(args):
        value = vars(args)[item.name]
        if item.name in args.behaviour.ignored_arguments and value != item.default:
            logger.warning("%s=%s has no effect in the reference, so it has none under compat", item.name, value)
            setattr(args, item.name, item.default)
