"""The documented arguments, grouped by concern, checked where they are created.

`TrainingArguments` is flat for its users, as in Hugging Face Trainer and the reference package, and built from small
groups for its readers. Nothing here is accepted and ignored: a value that cannot be honoured is an error that says so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradiend_dist.config.checks import check_seed, check_topk, check_types, require, require_choice, require_positive
from gradiend_dist.config.compat import CORRECTED, REFERENCE, Behaviour
from gradiend_dist.config.mapping import from_mapping

logger = logging.getLogger(__name__)

Gradient = Literal["factual", "alternative", "diff"]

Part = Literal["encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum"]

PARTS = ("encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum")

GRADIENTS = ("factual", "alternative", "diff")

ACTIVATIONS = ("tanh", "relu", "leakyrelu", "gelu", "silu", "elu", "sigmoid", "smht", "id")

OBJECTIVES = ("auto", "mlm_mask_token", "clm_next_token")

# What the reference accepts and loses on the way to the model.
IGNORED_BY_REFERENCE = (
    "latent_dim", "activation_encoder", "activation_decoder", "bias_decoder", "torch_dtype", "evaluate_fn",
)  # fmt: skip

INITIALIZATIONS = ("random", "spectral")

# One step of learning_rate=auto moves a latent by at most this, and a decoder entry by this share of the target's rms.
AUTO_RATE = 0.03

TRACKERS = ("wandb", "tensorboard")

SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)


def help_field(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with the one sentence that `--help` shows."""
    if callable(default):
        return field(default_factory=default, metadata={"help": text, **metadata})
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(kw_only=True)
class PrePruneConfig:
    """Pruning before training, by the mean gradient of a few examples."""

    n_samples: int = help_field(
        8,
        "Examples whose mean gradient ranks the weights, split evenly over both directions; initialization=spectral "
        "ranks by all rows of its items where these are more.",
    )
    topk: int | float | None = help_field(0.1, "Weights to keep: a share (0.01) or a count (1000).")
    threshold: float | None = help_field(None, "Keep weights whose absolute mean gradient is at least this.")
    source: str = help_field("alternative", "Which gradient ranks: factual, alternative or diff.")
    seed: int | None = help_field(None, "Seed of the sample. None: the seed of the run.")

    def __post_init__(self) -> None:
        check_topk("pre_prune_config.topk", self.topk)
        check_types(self, "pre_prune_config.")
        require_positive("pre_prune_config.n_samples", self.n_samples)
        require_positive("pre_prune_config.threshold", self.threshold, zero=True)
        require_choice("pre_prune_config.source", self.source, GRADIENTS)
        check_seed("pre_prune_config.seed", self.seed)
        require(
            self.topk is not None or self.threshold is not None,
            "pre_prune_config has neither topk nor threshold: pass one of them, or leave pre_prune_config out.",
        )


@dataclass(kw_only=True)
class PostPruneConfig:
    """Pruning after training, by the size of the trained weights."""

    topk: int | float | None = help_field(0.01, "Weights to keep: a share (0.01) or a count (1000).")
    threshold: float | None = help_field(None, "Keep weights whose importance is at least this.")
    mask: Any = help_field(None, "Boolean mask over the trained space; Python only.")
    part: str = help_field("decoder-weight", f"Importance is read from: {', '.join(PARTS)}.")

    def __post_init__(self) -> None:
        check_topk("post_prune_config.topk", self.topk)
        check_types(self, "post_prune_config.")
        require_positive("post_prune_config.threshold", self.threshold, zero=True)
        require_choice("post_prune_config.part", self.part, PARTS)
        if self.mask is not None:
            import torch  # a mask is a tensor: who passes one has paid for the import

            require(
                isinstance(self.mask, torch.Tensor) and self.mask.dtype == torch.bool and self.mask.ndim == 1,
                f"post_prune_config.mask={self.mask!r:.60} is no flat torch.bool tensor: pass one, in Python.",
            )
        require(
            self.topk is not None or self.threshold is not None or self.mask is not None,
            "post_prune_config has none of topk, threshold and mask: pass one, or leave post_prune_config out.",
        )


@dataclass(kw_only=True)
class OutputArguments:
    """Where results go and what is kept."""

    experiment_dir: str | None = help_field(None, "Root of this experiment; results go to experiment_dir[/run_id].")
    output_dir: str | None = help_field(None, "Directory of the promoted model. None: experiment_dir[/run_id]/model.")
    use_cache: bool | str = help_field(
        False,
        "Reuse results of an earlier run with the same arguments, model and data: false, true, only_convergent, or "
        "always (reuse whatever is there).",
    )
    save_strategy: str = help_field(
        "best", "best: the best checkpoint; steps: also every save_steps; no: only the end."
    )
    save_steps: int = help_field(
        5000, "Save the training state every this many steps, and with save_strategy=steps model_step_N as well."
    )
    save_total_limit: int = help_field(2, "Training states to keep; older ones are deleted.")
    resume: bool = help_field(
        True, "Go on with an unfinished run in experiment_dir that had the same arguments. False: start anew."
    )
    save_only_best: bool = help_field(True, "Promote the best checkpoint. False: promote the last, keep all epochs.")
    delete_models: bool = help_field(False, "Delete every model file but the promoted one at the end.")
    logging_steps: int = help_field(50, "Log loss, norms, learning rate and speed every this many steps.")


@dataclass(kw_only=True)
class LoopArguments:
    """The training loop, in Hugging Face's words."""

    source: str = help_field("alternative", "Gradient that feeds the encoder: factual, alternative or diff.")
    target: str = help_field("diff", "Gradient that the decoder predicts: factual, alternative or diff.")
    train_batch_size: int = help_field(32, "Rows in one base-model gradient.")
    base_gradient_batch_size: int | None = help_field(None, "The same under the reference's other name.")
    base_micro_batch_size: int | None = help_field(None, "Rows per forward pass if train_batch_size does not fit.")
    gradiend_batch_size: int = help_field(1, "Gradient vectors in one GRADIEND batch.")
    gradient_accumulation_steps: int = help_field(1, "GRADIEND batches in one optimizer step.")
    train_max_size: int | None = help_field(None, "At most this many training rows per direction.")
    max_length: int = help_field(256, "Longest row in tokens; longer ones keep a window around the blank.")
    num_train_epochs: int = help_field(3, "Passes over the data. Ignored when max_steps > 0.")
    max_steps: int = help_field(
        -1, "Total optimizer steps; overrides num_train_epochs when > 0. 0: the spectral start alone."
    )
    initialization: str = help_field(
        "random", "random: the reference's start; spectral: encoder and decoder in closed form from a few gradients."
    )
    spectral_items: int = help_field(
        16, "Gradients that initialization=spectral and learning_rate=auto work with, as many of each direction."
    )
    learning_rate: float | str = help_field(
        1e-5, "Peak learning rate, or auto: steps in proportion to the gradients, for encoder and decoder each."
    )
    lr_scheduler_type: str = help_field("constant", f"One of {', '.join(SCHEDULERS)}.")
    warmup_steps: int = help_field(0, "Steps of linear warm-up.")
    warmup_ratio: float = help_field(0.0, "Share of all steps that warm up, when warmup_steps is 0.")
    weight_decay: float = help_field(1e-2, "Weight decay on all weights.")
    adam_beta1: float = help_field(0.9, "Adam's beta1.")
    adam_beta2: float = help_field(0.999, "Adam's beta2.")
    adam_epsilon: float = help_field(1e-8, "Adam's epsilon.")
    optim: str = help_field("adamw", "adamw, adam, or adamw_8bit (needs bitsandbytes; a killed seed starts anew).")
    max_grad_norm: float = help_field(0.0, "Clip the gradient's norm at this. 0: no clipping.")
    supervised_encoder: bool = help_field(False, "Train the encoder alone, on the class labels.")
    supervised_decoder: bool = help_field(False, "Train the decoder alone, from the class labels.")
    normalize_gradiend: bool = help_field(True, "Turn the encoding so that the first target class is positive.")


@dataclass(kw_only=True)
class EvaluationArguments:
    """When and on how many rows the encoder is evaluated."""

    do_eval: bool = help_field(True, "Evaluate the encoder during training.")
    eval_strategy: str = help_field("steps", "steps: at step 0, every eval_steps and at the end; no: never.")
    eval_steps: int = help_field(250, "Evaluate every this many steps.")
    eval_batch_size: int = help_field(32, "Rows encoded together where their gradients are not kept.")
    encoder_eval_train_max_size: int | None = help_field(None, "Rows per group of evaluations during training.")
    encoder_eval_max_size: int | None = help_field(None, "Rows per group of all other evaluations. None: all.")
    encoder_eval_balance: bool = help_field(True, "Give every feature class the same weight in an evaluation.")
    include_other_classes: bool = help_field(False, "Evaluate transitions of other classes as well, with label 0.")
    seed_selection_eval_max_size: int | None = help_field(None, "Rows per group when seeds are compared.")
    decoder_eval_lrs: list[float] | None = help_field(None, "Learning rates of the decoder grid. None: 100 to 0.001.")
    decoder_eval_feature_factors: list[float] | None = help_field(
        None, "Feature factors of the decoder grid. None: those that strengthen the target classes."
    )
    decoder_eval_max_size_training_like: int | None = help_field(None, "Rows per direction of the decoder grid.")
    decoder_eval_max_size_neutral: int | None = help_field(None, "Neutral texts of the decoder grid.")
    evaluate_fn: Any = help_field(None, "Your own evaluation, f(model) -> {'correlation': ...}; Python only.")


@dataclass(kw_only=True)
class SeedArguments:
    """Several seeds and how one is chosen."""

    seed: int | None = help_field(None, "First seed; run i uses seed + i. None: 0.")
    max_seeds: int = help_field(3, "At most this many seeds.")
    min_convergent_seeds: int | None = help_field(1, "Stop when this many have converged. None: run all.")
    convergent_metric: str | None = help_field(None, "correlation or loss (None: what the training mode has).")
    convergence_metric: str | None = help_field(None, "The same under its other documented name.")
    convergent_score_threshold: float | None = help_field(None, "Converged from here on. None: 0.5 for correlation.")
    convergence_threshold: float | None = help_field(None, "The same under its other documented name.")
    convergent_mean_by_class_threshold: float | None = help_field(
        0.5, "And every target class must have a mean encoding at least this far from 0. None: no such condition."
    )
    seeds_in_parallel: bool | None = help_field(
        None, "Train all seeds on one stream of gradients. None: when gradients cannot be kept and the heads fit."
    )
    seed_runs_dir: str | None = help_field(None, "Directory of the seeds' runs. None: experiment_dir[/run_id]/seeds.")
    keep_seed_runs: bool = help_field(False, "Keep the model files of every seed.")
    saved_seed_runs: str | None = help_field(
        None, "all_tried, all_convergent or best_only: whose model files stay. None: as keep_seed_runs says."
    )
    fail_on_non_convergence: bool = help_field(False, "End with an error when fewer seeds converge than required.")
    seed_stability_topk: int | None = help_field(1000, "Compare the top weights of converged seeds. None: do not.")
    seed_stability_part: str = help_field("decoder-weight", "Weights that are compared.")
    analyze_seed_stability: bool = help_field(False, "Require the comparison of seeds; too few is an error.")
    only_seed: int | None = help_field(
        None, "Train this one of the run's seeds and promote nothing: one task of a job array. select_only follows."
    )
    select_only: bool = help_field(False, "Train nothing: promote the best of the seeds that only_seed has trained.")


@dataclass(kw_only=True)
class TrackingArguments:
    """Who is told while a run goes on. metrics.jsonl in experiment_dir has every number in any case."""

    report_to: list[str] | None = help_field(None, f"{' and '.join(TRACKERS)}, or none.")
    run_name: str | None = help_field(None, "Name of the run in W&B. None: WANDB_NAME, or the experiment's directory.")
    wandb_project: str | None = help_field(None, "Project in W&B. None: WANDB_PROJECT, or gradiend_dist.")
    wandb_entity: str | None = help_field(None, "User or team in W&B. None: WANDB_ENTITY, or your default.")
    wandb_group: str | None = help_field(None, "Group of the run in W&B. None: WANDB_RUN_GROUP.")
    wandb_tags: list[str] | None = help_field(None, "Tags of the run in W&B. None: WANDB_TAGS.")
    wandb_notes: str | None = help_field(None, "Notes on the run in W&B. None: WANDB_NOTES.")
    wandb_seed_runs: str = help_field("one", "one: all seeds as series of one run; grouped: a run for each, grouped.")
    wandb_log_model: bool = help_field(False, "Upload the promoted model to W&B as an artifact.")


@dataclass(kw_only=True)
class ModelArguments:
    """The base model, the GRADIEND model over it, and where they live."""

    params: list[str] | None = help_field(None, "Names or wildcards of the base weights to use. None: the backbone.")
    prediction_objective: str = help_field("auto", f"One of {', '.join(OBJECTIVES)}.")
    latent_dim: int = help_field(1, "Width of the bottleneck.")
    activation_encoder: str = help_field("tanh", f"One of {', '.join(ACTIVATIONS)}.")
    activation_decoder: str = help_field("id", f"One of {', '.join(ACTIVATIONS)}.")
    bias_decoder: bool = help_field(True, "Give the decoder a bias.")
    torch_dtype: str = help_field("float32", "Dtype of the base model; GRADIEND itself stays in float32.")
    bf16: bool = help_field(False, "Run the base model under bfloat16 autocast.")
    fp16: bool = help_field(False, "Run the base model under float16 autocast with loss scaling.")
    trust_remote_code: bool = help_field(False, "Run model code from the hub. Only for models you trust.")
    device: str | None = help_field(None, "Put everything on this device.")
    device_encoder: str | None = help_field(None, "Device of the encoder.")
    device_decoder: str | None = help_field(None, "Device of the decoder.")
    device_base_model: str | None = help_field(None, "Device of the base model.")
    encoder_decoder_same_device: bool = help_field(False, "On 2+ GPUs: encoder and decoder on 0, base on 1.")
    ddp_timeout: int = help_field(1800, "Seconds after which a rank that does not answer ends the run.")
    use_cached_gradients: bool = help_field(False, "Keep gradients on disk and use them in later runs.")
    gradient_store_gib: float | None = help_field(
        None, "Memory for gradients that are used again, in GiB. None: a quarter of what is free."
    )


@dataclass(kw_only=True)
class FeatureArguments:
    """What of the data is trained on."""

    add_identity_for_other_classes: bool = help_field(False, "Add rows of other classes that must stay as they are.")
    class_merge_map: dict[str, list[str]] | None = help_field(None, "Merged class -> its base classes.")
    class_merge_transition_groups: list[list[str]] | None = help_field(None, "Base classes that may turn into another.")
    mask_placeholder: str = help_field("[MASK]", "The blank in the texts.")


@dataclass(kw_only=True)
class TrainingArguments(
    FeatureArguments,
    ModelArguments,
    TrackingArguments,
    SeedArguments,
    EvaluationArguments,
    LoopArguments,
    OutputArguments,
):
    """Every argument of a training run; see `gradiend-dist train --help` for what each one does."""

    pre_prune_config: PrePruneConfig | None = help_field(None, "Prune before training.")
    post_prune_config: PostPruneConfig | None = help_field(None, "Prune after training.")
    compat: str | None = help_field(None, "gradiend-0.2: reproduce the reference package, defects included.")
    metadata: dict[str, Any] = help_field(dict, "Free facts to keep in training.json.")

    def __post_init__(self) -> None:
        self._take_plain_values()
        check_types(self)
        self._join_names()
        self._check_output()
        self._check_loop()
        self._check_evaluation()
        self._check_seeds()
        self._check_tracking()
        self._check_model()
        if self.behaviour.model_arguments_ignored:
            self._forget_what_the_reference_ignores()

    def _forget_what_the_reference_ignores(self) -> None:
        """With a warning: they have no effect on the results that `compat` asks for."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in IGNORED_BY_REFERENCE and value != item.default:
                logger.warning("%s=%s has no effect in the reference, so it has none under compat", item.name, value)
                setattr(self, item.name, item.default)

    def _take_plain_values(self) -> None:
        """Paths and dtypes as text, mappings as configurations: what Python users and files write for the same."""
        self.torch_dtype = str(self.torch_dtype).removeprefix("torch.")
        for item in dataclasses.fields(self):
            if isinstance(getattr(self, item.name), Path):
                setattr(self, item.name, str(getattr(self, item.name)))
        for name, kind in (("pre_prune_config", PrePruneConfig), ("post_prune_config", PostPruneConfig)):
            value = getattr(self, name)
            if isinstance(value, dict):
                setattr(self, name, from_mapping(kind, value, name))

    def _join_names(self) -> None:
        """Two documented names for one thing become one value; two different values are an error."""
        self.train_batch_size = self._one_of("train_batch_size", "base_gradient_batch_size", default=32)
        self.base_gradient_batch_size = self.train_batch_size
        metric = self._one_of("convergent_metric", "convergence_metric")
        metric = metric or ("loss" if self.supervised_decoder else "correlation")
        self.convergent_metric = self.convergence_metric = metric
        threshold = self._one_of("convergent_score_threshold", "convergence_threshold")
        if threshold is None and metric == "correlation":
            threshold = 0.5
        self.convergent_score_threshold = self.convergence_threshold = threshold
        if self.convergent_mean_by_class_threshold is None and self.behaviour.mean_threshold_always:
            self.convergent_mean_by_class_threshold = 0.5
        if self.saved_seed_runs is None:
            # The reference's default keeps the models of converged seeds; the guide's keep_seed_runs=False keeps none.
            default = "all_convergent" if self.compat else "best_only"
            self.saved_seed_runs = "all_tried" if self.keep_seed_runs else default

    def _one_of(self, first: str, second: str, default: Any = None) -> Any:
        a, b = getattr(self, first), getattr(self, second)
        if b is None or a == b:
            return a
        require(a is None or a == default, f"{first}={a} and {second}={b} are the same argument: pass only one.")
        return b

    def _check_output(self) -> None:
        require_choice("save_strategy", self.save_strategy, ("best", "steps", "no"))
        require(
            self.use_cache in (True, False, "always", "only_convergent"),
            f"use_cache={self.use_cache!r} is not known: choose true, false, always or only_convergent.",
        )
        require_positive("save_steps", self.save_steps)
        require_positive("save_total_limit", self.save_total_limit)
        require_positive("ddp_timeout", self.ddp_timeout)
        require_positive("logging_steps", self.logging_steps)

    def _check_loop(self) -> None:
        require_choice("source", self.source, GRADIENTS)
        require_choice("target", self.target, GRADIENTS)
        require_choice("optim", self.optim, ("adamw", "adam", "adamw_8bit"))
        require_choice("lr_scheduler_type", self.lr_scheduler_type, SCHEDULERS)
        for name in ("train_batch_size", "base_micro_batch_size", "gradiend_batch_size", "train_max_size"):
            require_positive(name, getattr(self, name))
        for name in ("gradient_accumulation_steps", "num_train_epochs", "adam_epsilon", "max_length"):
            require_positive(name, getattr(self, name))
        self._check_start()
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            require_positive(name, getattr(self, name), zero=True)
        require(0 <= self.warmup_ratio <= 1, f"warmup_ratio={self.warmup_ratio} is not a share: pass 0 to 1.")
        require(
            not (self.warmup_steps and self.warmup_ratio), "warmup_steps and warmup_ratio are both set: pass only one."
        )
        require(
            self.lr_scheduler_type != "constant" or not (self.warmup_steps or self.warmup_ratio),
            "lr_scheduler_type=constant has no warm-up: pass constant_with_warmup, or leave the warm-up out.",
        )
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name}={value} is not in [0, 1): pass e.g. 0.9.")
        require(
            not (self.supervised_encoder and self.supervised_decoder),
            "supervised_encoder and supervised_decoder are both set: pass only one.",
        )

    def _check_start(self) -> None:
        """Where training starts, and how large its steps are."""
        require_choice("initialization", self.initialization, INITIALIZATIONS)
        rate = self.learning_rate
        require(
            rate == "auto" or (not isinstance(rate, str) and rate > 0),
            f"learning_rate={rate!r} is neither a positive number nor auto: pass e.g. 1e-5.",
        )
        for name in ("weight_decay", "adam_epsilon"):
            given, default = getattr(self, name), LoopArguments.__dataclass_fields__[name].default
            require(
                not self.refines or given in (0.0, default),
                f"{name}={given} has no effect with learning_rate=auto, which decays nothing and chooses epsilon: "
                f"leave {name} out, or pass a number as learning_rate.",
            )
        steps = self.max_steps
        require(
            steps > 0 or steps == -1 or (steps == 0 and self.starts_trained),
            f"max_steps={steps} trains nothing: pass a positive number, or -1 to use num_train_epochs; 0 is for "
            "initialization=spectral.",
        )
        require(
            not self.looks_at_items or self.spectral_items > self.latent_dim,
            f"spectral_items={self.spectral_items} is too few for latent_dim={self.latent_dim}: pass at least "
            f"{self.latent_dim + 1}.",
        )

    def _check_evaluation(self) -> None:
        require_choice("eval_strategy", self.eval_strategy, ("steps", "no"))
        require_positive("eval_steps", self.eval_steps)
        require_positive("eval_batch_size", self.eval_batch_size)
        for name in ("encoder_eval_train_max_size", "encoder_eval_max_size", "seed_selection_eval_max_size"):
            require_positive(name, getattr(self, name))
        require(self.evaluate_fn is None or callable(self.evaluate_fn), "evaluate_fn is not callable: pass a function.")

    def _check_seeds(self) -> None:
        require_positive("max_seeds", self.max_seeds)
        require_positive("min_convergent_seeds", self.min_convergent_seeds)
        require_choice("convergent_metric", self.convergent_metric, ("correlation", "loss"))
        require_choice("saved_seed_runs", self.saved_seed_runs, ("all_tried", "all_convergent", "best_only"))
        require_choice("seed_stability_part", self.seed_stability_part, PARTS)
        require_positive("seed_stability_topk", self.seed_stability_topk)
        check_seed("seed", self.seed)
        require(
            self.min_convergent_seeds is None or self.min_convergent_seeds <= self.max_seeds,
            f"min_convergent_seeds={self.min_convergent_seeds} is more than max_seeds={self.max_seeds}: "
            "lower the first or raise the second.",
        )
        require(
            self.convergent_metric != "loss" or self.convergent_score_threshold is not None or self.supervised_decoder,
            "convergent_metric=loss needs convergent_score_threshold: pass the loss that counts as converged.",
        )
        require(
            not (self.seeds_in_parallel and self.prunes_each_seed),
            "seeds_in_parallel needs one pruned space for all seeds, but compat draws another for each: "
            "pass pre_prune_config.seed.",
        )
        require(
            not self.analyze_seed_stability or self.seed_stability_topk is not None,
            "analyze_seed_stability is set but seed_stability_topk is None: pass a number of weights.",
        )
        require(
            not self.analyze_seed_stability or (self.min_convergent_seeds or 0) >= 2,
            f"analyze_seed_stability compares converged seeds but min_convergent_seeds={self.min_convergent_seeds}: "
            "pass at least 2.",
        )

        self._check_array()

    def _check_array(self) -> None:
        """A run whose seeds are tasks of a job array."""
        last = self.first_seed + self.max_seeds - 1
        require(
            self.only_seed is None or self.first_seed <= self.only_seed <= last,
            f"only_seed={self.only_seed} is none of the seeds {self.first_seed} to {last} of this run: pass one of "
            "them, or raise max_seeds.",
        )
        splits = self.only_seed is not None or self.select_only
        require(
            not splits or self.max_seeds > 1,
            f"only_seed and select_only share out several seeds and max_seeds={self.max_seeds}: raise max_seeds.",
        )
        require(
            not splits or self.experiment_dir is not None,
            "only_seed and select_only meet in experiment_dir, which is not set: pass it.",
        )
        require(
            not (self.only_seed is not None and self.select_only),
            "only_seed trains and select_only does not: pass only one of them.",
        )

    def _check_tracking(self) -> None:
        for name in self.report_to or ():
            require_choice("report_to", name, (*TRACKERS, "none"))
        require_choice("wandb_seed_runs", self.wandb_seed_runs, ("one", "grouped"))
        require(
            not self.wandb_log_model or "wandb" in self.trackers,
            "wandb_log_model uploads to W&B, which report_to does not name: pass report_to wandb.",
        )
        require(
            "tensorboard" not in self.trackers or importlib.util.find_spec("tensorboard") is not None,
            'report_to=tensorboard needs a package that is not installed: pip install "gradiend_dist[tensorboard]".',
        )

    def _check_model(self) -> None:
        require_choice("prediction_objective", self.prediction_objective, OBJECTIVES)
        require_choice("activation_encoder", self.activation_encoder, ACTIVATIONS)
        require_choice("activation_decoder", self.activation_decoder, ACTIVATIONS)
        require_choice("torch_dtype", self.torch_dtype, ("float32", "bfloat16", "float16"))
        require_positive("latent_dim", self.latent_dim)
        require_positive("gradient_store_gib", self.gradient_store_gib, zero=True)
        require(not (self.bf16 and self.fp16), "bf16 and fp16 are both set: pass only one.")
        require(
            not (self.supervised_encoder or self.supervised_decoder) or self.latent_dim == 1,
            f"supervised training has one label per item but latent_dim={self.latent_dim}: pass latent_dim=1.",
        )
        require(
            self.compat in (None, "gradiend-0.2"),
            f"compat={self.compat!r} is not known: pass gradiend-0.2, or leave it out.",
        )
        require(bool(self.mask_placeholder.strip()), "mask_placeholder is empty: pass e.g. [MASK].")
        require(self.params != [], "params is empty: name at least one weight, or leave it out for the whole backbone.")
        self._check_decoder_bias()

    def _check_decoder_bias(self) -> None:
        """Known before training, told before training."""
        parts = {"seed_stability_part": self.seed_stability_part}
        if self.post_prune_config is not None:
            parts["post_prune_config.part"] = self.post_prune_config.part
        for name, part in parts.items():
            require(
                self.bias_decoder or part not in ("decoder-bias", "decoder-sum"),
                f"{name}={part} reads the decoder's bias and bias_decoder is false: choose decoder-weight.",
            )

    @property
    def behaviour(self) -> Behaviour:
        """Every decision in which we differ from the reference, as this run takes it."""
        return REFERENCE if self.compat else CORRECTED

    @property
    def first_seed(self) -> int:
        return 0 if self.seed is None else self.seed

    @property
    def data_seed(self) -> int:
        """Seed of row order and samples: the first seed, so that all seeds see the same items."""
        return self.first_seed

    @property
    def starts_trained(self) -> bool:
        """Is the start a result already, which competes with the steps that follow?"""
        return self.initialization == "spectral"

    @property
    def refines(self) -> bool:
        """Are step sizes those that the gradients allow?"""
        return self.learning_rate == "auto"

    @property
    def looks_at_items(self) -> bool:
        """Are `spectral_items` gradients looked at before training?"""
        return self.starts_trained or self.refines

    @property
    def peak_rate(self) -> float:
        """What the scheduler scales: a learning rate, or, with auto, a share of what the gradients allow."""
        return AUTO_RATE if isinstance(self.learning_rate, str) else self.learning_rate

    @property
    def trained_kinds(self) -> list[str]:
        """The gradients that a step needs: source and target, each once."""
        wanted = [self.source] * (not self.supervised_decoder) + [self.target] * (not self.supervised_encoder)
        return list(dict.fromkeys(wanted))

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
    def trackers(self) -> list[str]:
        """What report_to names, each once."""
        return [name for name in dict.fromkeys(self.report_to or ()) if name != "none"]

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

    # What Hugging Face callbacks, EarlyStoppingCallback above all, ask the arguments for.
    @property
    def metric_for_best_model(self) -> str:
        assert self.convergent_metric is not None, "set by _join_names"
        return self.convergent_metric

    @property
    def greater_is_better(self) -> bool:
        return self.convergent_metric == "correlation"

    @property
    def load_best_model_at_end(self) -> bool:
        return self.save_only_best

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values of all fields but the Python-only ones."""
        out: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "evaluate_fn":
                continue
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = {k: v for k, v in vars(value).items() if k != "mask"}
            out[item.name] = value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingArguments:
        """The inverse of `to_dict`; an unknown key is an error with a suggestion."""
        return from_mapping(cls, values, "training_args")


# Held-out items of each direction, and of identities where they are trained.
ITEMS_OF_A_SIDE = 4
