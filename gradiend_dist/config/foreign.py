"""Names that users of the reference package and of Hugging Face Trainer bring along.

A name of theirs with their default changes nothing; one that has a counterpart here is taken as that; any other value
is told in one line, with what to use instead. The same in Python, in files and on the command line.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from gradiend_dist.config.checks import require, shown
from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=type)


class Foreign(NamedTuple):
    """An argument of another package that is none here."""

    default: Any
    """With which it changes nothing."""
    remedy: str
    of: str = "the reference package"


_KEPT = "gradients are computed once and kept, see gradient_store_gib"
_TIMES = "step times are always written to training.json"
_HEAD = "the objective clm_mlm_head is not available"
_SPLITS = "splits are the same for every seed"
_PLACES = "use device_base_model, or launch on several processes"
_HUGGING_FACE = "Hugging Face Trainer"

OF_TRAINING = {
    "precompute_gradient_batches": Foreign(None, _KEPT),
    "precompute_gradient_buffer_size": Foreign(1, _KEPT),
    "gradient_timing_steps": Foreign(0, _TIMES),
    "runtime_monitor": Foreign(False, _TIMES),
    "runtime_monitor_interval": Foreign(5.0, _TIMES),
    "runtime_monitor_system_stats": Foreign(True, _TIMES),
    "lr_search_config": Foreign(None, "there is no learning-rate search; pass a number as learning_rate, or auto"),
    "criterion": Foreign(None, "the loss is the mean squared error"),
    "model_use_cache": Foreign(False, "the key/value cache is never used for gradients"),
    "base_model_device_map": Foreign(None, _PLACES),
    "base_model_max_memory": Foreign(None, _PLACES),
    "positive_class": Foreign(None, "the first of target_classes is the positive one"),
    "decoder_mlm_head_epochs": Foreign(5, _HEAD),
    "decoder_mlm_head_batch_size": Foreign(4, _HEAD),
    "decoder_mlm_head_lr": Foreign(1e-4, _HEAD),
    "decoder_mlm_head_max_size": Foreign(None, _HEAD),
    "decoder_sequence_cloze_rhs_window": Foreign(-1, "the objective clm_sequence_cloze is not available"),
    "split_resplit_per_seed": Foreign(False, _SPLITS),
    "split_resplit_strategy": Foreign("random", _SPLITS),
    "reuse_pre_prune": Foreign(False, "the pruned space is computed once for all seeds"),
    "highlight_non_convergence": Foreign(True, "seeds that did not converge are always marked"),
}

OF_PRE_PRUNING = {
    "batch_size": Foreign(8, "base_micro_batch_size says how many examples are in one pass"),
    "feature_class_key": Foreign("feature_class_id", "examples are drawn from both directions of target_classes"),
    "target_feature_class_ids": Foreign(None, "examples are drawn from both directions of target_classes"),
    "dataset": Foreign(None, "examples are drawn from the split train"),
    "use_cached_gradients": Foreign(False, "use_cached_gradients of the training arguments keeps gradients"),
    "use_streaming": Foreign(None, "gradients are streamed where they are not kept, with the same result"),
}

OF_POST_PRUNING = {
    "inplace": Foreign(True, "ParamMappedGradiendModel.prune() makes a copy"),
    "return_mask": Foreign(False, "ParamMappedGradiendModel.prune(return_mask=True) returns it"),
}

OF_FEATURE = {
    "correlation_mapping": Foreign(None, "labels follow from target_classes"),
    "evaluator_class": Foreign(None, "evaluate_fn of the training arguments scores a model in another way"),
    "n_features": Foreign(1, "latent_dim of the training arguments is the width of the bottleneck"),
}

# Arguments of ours that the reference leaves at None, for the same default.
NONE_IS_THE_DEFAULT = ("torch_dtype", "latent_dim", "activation_encoder", "activation_decoder", "bias_decoder")


def accepting(
    names: Mapping[str, Foreign],
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    translated: Iterable[str] = (),
) -> Any:
    """Class decorator: these names are taken as well, also those that `translate` turns into fields; any other that is
    no field is told in one line."""

    def decorate(kind: Kind) -> Kind:
        make = vars(kind)["__init__"]

        @functools.wraps(make)
        def init(self: Any, *args: Any, **values: Any) -> None:
            given = translate(values) if translate is not None else values
            make(self, *args, **without_foreign(given, names, kind))

        kind.__init__ = init  # type: ignore[misc]
        kind.taken_names = frozenset({*names, *translated})  # type: ignore[attr-defined]
        return kind

    return decorate


def without_foreign(values: Mapping[str, Any], names: Mapping[str, Foreign], kind: type) -> dict[str, Any]:
    """The values that are the kind's own; what else is there is at its default, or told."""
    own: set[str] = set(vars(kind)["__dataclass_fields__"])
    for name, value in values.items():
        if name in own:
            continue
        if name not in names:
            raise UserError(f"{kind.__name__}: {unknown_key(name, sorted(own))}")
        require_default(name, value, names[name])
    return {name: value for name, value in values.items() if name in own}


def require_default(name: str, value: Any, foreign: Foreign) -> None:
    default = foreign.default
    is_same = value is default or (type(value) in (int, float, bool, str) and value == default)
    require(
        is_same, f"{name}={shown(value)} is an argument of {foreign.of} that is not supported here: {foreign.remedy}."
    )


def unknown_key(key: str, names: list[str]) -> str:
    """The sentence for a key that no dataclass has."""
    known = _sentence_of(key)
    if known is not None:
        return known
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]}?" if near else "see --help for the known arguments."
    return f"{key} is not a known argument: {remedy}"


def _sentence_of(name: str) -> str | None:
    """What to use instead of a name that another package has; None: nobody is known to have it."""
    for names in (OF_TRAINING, OF_FEATURE, OF_PRE_PRUNING, OF_POST_PRUNING):
        if name in names:
            return f"{name} is an argument of {names[name].of} that is not supported here: {names[name].remedy}."
    if name in OF_HUGGING_FACE:
        return f"{name} is an argument of {_HUGGING_FACE} that is not taken here: {OF_HUGGING_FACE[name]}."
    return None


# --- Hugging Face Trainer

OF_HUGGING_FACE = {
    "auto_find_batch_size": "base_micro_batch_size says how many rows are in one pass",
    "ddp_find_unused_parameters": "the base model is not trained, so that nothing needs to be found",
    "eval_dataset": "name the splits in the column split of data",
    "evaluation_strategy": "it is eval_strategy",
    "max_seq_length": "it is max_length",
    "no_cuda": "pass device=cpu",
    "use_cpu": "pass device=cpu",
    "push_to_hub": "rewrite --output_dir and get_model().save_pretrained() write what can be uploaded",
    "resume_from_checkpoint": "a run goes on by itself from the state in its experiment_dir, see resume",
    "train_dataset": "name the splits in the column split of data",
    "dataloader_num_workers": "rows are tokenized once, and gradients computed once",
}

_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}

# Flags and keys that mean the same under another name.
RENAMED = {
    "per_device_eval_batch_size": "eval_batch_size",
    "load_best_model_at_end": "save_only_best",
    "per_device_train_batch_size": "train_batch_size",
}

TRANSLATED = (*RENAMED, "metric_for_best_model")


def from_hugging_face(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments under the names and with the values that Hugging Face users know, as ours."""
    values = {name: value for name, value in values.items() if not (name in NONE_IS_THE_DEFAULT and value is None)}
    if "per_device_train_batch_size" in values:
        require_one_process()
    for theirs, ours in RENAMED.items():
        _rename(values, theirs, ours)
    if "metric_for_best_model" in values:
        metric = str(values["metric_for_best_model"]).removeprefix("eval_")
        require(
            metric in ("correlation", "loss"),
            f"metric_for_best_model={metric} is none that a run measures: choose correlation or loss.",
        )
        values["metric_for_best_model"] = metric
        _rename(values, "metric_for_best_model", "convergent_metric")
    if isinstance(values.get("report_to"), str):
        values["report_to"] = [values["report_to"]]
    if values.get("optim") == "sgd":
        raise UserError("optim='sgd' is not available: choose adamw, adam or adamw_8bit.")
    values.update({"optim": _OPTIMIZERS[name]} if (name := values.get("optim")) in _OPTIMIZERS else {})
    if values.get("save_strategy") == "epoch":
        raise UserError(
            "save_strategy='epoch' is none of best, steps, no: save_only_best=False keeps each epoch's model, and "
            "promotes the last one."
        )
    if values.get("learning_rate") == "tune":
        logger.warning("learning_rate=tune is taken as auto, which needs no search")
        values["learning_rate"] = "auto"
    return values


def require_one_process() -> None:
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "per_device_train_batch_size would give another result on another number of processes: pass train_batch_size, "
        "the rows of one gradient over all of them.",
    )


def _rename(values: dict[str, Any], theirs: str, ours: str) -> None:
    if theirs not in values:
        return
    value = values.pop(theirs)
    require(
        values.get(ours, value) == value,
        f"{theirs}={value} and {ours}={values.get(ours)} are the same argument: pass only one.",
    )
    values[ours] = value
