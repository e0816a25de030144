"""The documented arguments: defaults, the two names of one thing, and the way to a file and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradiend_dist import PostPruneConfig, PrePruneConfig, TrainingArguments, UserError
from gradiend_dist.config.checks import describe, fits
from gradiend_dist.config.compat import CORRECTED, REFERENCE
from gradiend_dist.config.foreign import OF_FEATURE, OF_POST_PRUNING, OF_PRE_PRUNING, OF_TRAINING, unknown_key
from gradiend_dist.config.mapping import from_mapping
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.storage.files import jsonable

# --- defaults


def test_defaults__are_those_of_the_documents() -> None:
    """Fails when a documented default moves: users leave these out and expect the reference's."""
    args = TrainingArguments()
    documented = {
        "source": "alternative", "target": "diff", "train_batch_size": 32, "gradiend_batch_size": 1, "max_steps": -1,
        "num_train_epochs": 3, "learning_rate": 1e-5, "weight_decay": 1e-2, "optim": "adamw", "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_epsilon": 1e-8, "lr_scheduler_type": "constant", "do_eval": True,
        "eval_strategy": "steps", "eval_steps": 250, "save_strategy": "best", "save_only_best": True, "max_seeds": 3,
        "min_convergent_seeds": 1, "convergent_metric": "correlation", "convergent_score_threshold": 0.5,
        "convergent_mean_by_class_threshold": 0.5, "normalize_gradiend": True, "latent_dim": 1, "seed": None,
        "activation_encoder": "tanh", "activation_decoder": "id", "torch_dtype": "float32", "use_cache": False,
        "pre_prune_config": None, "post_prune_config": None, "compat": None,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in documented} == documented
    pre, post = PrePruneConfig(), PostPruneConfig()
    assert (pre.n_samples, pre.topk, pre.threshold, pre.source, pre.seed) == (8, 0.1, None, "alternative", None)
    assert (post.topk, post.threshold, post.mask, post.part) == (0.01, None, None, "decoder-weight")


def test_help__is_there_for_every_field() -> None:
    for kind in (TrainingArguments, PrePruneConfig, PostPruneConfig):
        for item in dataclasses.fields(kind):
            assert item.metadata["help"].endswith("."), f"{kind.__name__}.{item.name}"


def test_fields__no_argument_is_both_known_and_not_supported() -> None:
    for kind, names in FOREIGN.items():
        assert not {item.name for item in dataclasses.fields(kind)} & names.keys()


# --- two names for one thing


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        ("train_batch_size", "base_gradient_batch_size", 7),
        ("convergent_metric", "convergence_metric", "loss"),
        ("convergent_score_threshold", "convergence_threshold", 0.25),
    ],
)
def test_twins__either_name_sets_both(first: str, second: str, value: Any) -> None:
    more = {"convergent_score_threshold": 0.25} if value == "loss" else {}
    for given in ({first: value}, {second: value}, {first: value, second: value}):
        args = TrainingArguments(**{**more, **given})
        assert getattr(args, first) == getattr(args, second) == value, given
    # Replacing another argument must not run into the pair that was made equal.
    again = dataclasses.replace(args, seed=5)
    assert getattr(again, first) == getattr(again, second) == value


def test_twins__with_different_values_are_refused() -> None:
    for given in (
        {"train_batch_size": 7, "base_gradient_batch_size": 8},
        {"convergent_metric": "correlation", "convergence_metric": "loss"},
        {"convergent_score_threshold": 0.25, "convergence_threshold": 0.5},
    ):
        with pytest.raises(UserError, match="same argument"):
            TrainingArguments(**given)


# --- values that follow from others


def test_supervised_decoder__is_judged_by_its_loss() -> None:
    """Its encoder is not trained, so a correlation would judge the random start."""
    args = TrainingArguments(supervised_decoder=True)
    assert (args.convergent_metric, args.convergent_score_threshold, args.greater_is_better) == ("loss", None, False)
    assert TrainingArguments(supervised_encoder=True).convergent_metric == "correlation"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "best_only"),
        ({"keep_seed_runs": True}, "all_tried"),
        ({"compat": "gradiend-0.2"}, "all_convergent"),
        ({"compat": "gradiend-0.2", "keep_seed_runs": True}, "all_tried"),
        ({"saved_seed_runs": "all_convergent"}, "all_convergent"),
        ({"keep_seed_runs": True, "saved_seed_runs": "best_only"}, "best_only"),
    ],
)
def test_saved_seed_runs__follows_keep_seed_runs_unless_given(given: dict[str, Any], kept: str) -> None:
    assert TrainingArguments(**given).saved_seed_runs == kept


def test_compat__chooses_every_behaviour_of_the_reference() -> None:
    assert TrainingArguments().behaviour is CORRECTED
    assert TrainingArguments(compat="gradiend-0.2").behaviour is REFERENCE


@pytest.mark.parametrize("compat", [None, "gradiend-0.2"])
def test_seed__that_is_given_is_the_first_and_that_of_the_data(compat: str | None) -> None:
    args = TrainingArguments(seed=11, compat=compat)
    assert (args.first_seed, args.data_seed) == (11, 11)


def test_evaluates__only_if_both_switches_say_so() -> None:
    assert TrainingArguments().evaluates
    assert not TrainingArguments(do_eval=False).evaluates
    assert not TrainingArguments(eval_strategy="no").evaluates


# --- to a dictionary, a file and back


def full() -> TrainingArguments:
    """Arguments away from all defaults, where a forgotten field would show."""
    return TrainingArguments(
        experiment_dir="runs/a", use_cache="only_convergent", save_strategy="steps", train_batch_size=3, seed=2**32 - 1,
        lr_scheduler_type="linear", warmup_ratio=0.25, min_convergent_seeds=None, convergent_metric="loss",
        convergent_score_threshold=1e-7, convergent_mean_by_class_threshold=None, seeds_in_parallel=False,
        params=["bert.encoder.*"], class_merge_map={"A": ["x", "y"]}, class_merge_transition_groups=[["x", "z"]],
        pre_prune_config=PrePruneConfig(topk=None, threshold=1e-6, seed=4), metadata={"note": "déjà vu", "n": [1, 2]},
        post_prune_config=PostPruneConfig(topk=17, part="decoder-sum"), torch_dtype="bfloat16", optim="adam",
        gradient_store_gib=0.5, compat="gradiend-0.2", mask_placeholder="<blank>",
    )  # fmt: skip


@pytest.mark.parametrize("args", [TrainingArguments(), full()], ids=["defaults", "full"])
def test_to_dict__and_from_dict_are_inverse_also_through_json(args: TrainingArguments) -> None:
    """Fails for a field that is left out, or that JSON turns into something else."""
    assert TrainingArguments.from_dict(args.to_dict()) == args
    text = json.dumps(jsonable(args.to_dict()), allow_nan=False)
    assert TrainingArguments.from_dict(json.loads(text)) == args


def test_to_dict__has_every_field_but_those_of_python() -> None:
    names = {item.name for item in dataclasses.fields(TrainingArguments)}
    args = TrainingArguments(evaluate_fn=len, post_prune_config=PostPruneConfig(topk=None, mask=torch.ones(3).bool()))
    found = args.to_dict()
    assert names - found.keys() == {"evaluate_fn"}
    assert found["post_prune_config"].keys() == {"topk", "threshold", "part"}
    json.dumps(found)


def test_from_dict__names_the_nearest_key() -> None:
    with pytest.raises(UserError, match=r"training_args: learning_rat is .* did you mean learning_rate\?"):
        TrainingArguments.from_dict({"learning_rat": 1})


FOREIGN: dict[type, Any] = {
    TrainingArguments: OF_TRAINING,
    PrePruneConfig: OF_PRE_PRUNING,
    PostPruneConfig: OF_POST_PRUNING,
    TextPredictionConfig: OF_FEATURE,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_arguments_of_the_reference__are_taken_at_their_defaults_and_else_told(kind: type) -> None:
    """Fails if a default is refused, if another value is dropped in silence, or if it is a bare TypeError."""
    kind(**{name: foreign.default for name, foreign in FOREIGN[kind].items()})
    for name, foreign in FOREIGN[kind].items():
        assert name in unknown_key(name, []) and foreign.remedy in unknown_key(name, [])
        with pytest.raises(UserError, match=f"{name}=.*not supported here") as error:
            kind(**{name: "other"})
        assert foreign.remedy in str(error.value)
    with pytest.raises(UserError, match="not a known argument"):
        kind(no_such_name=1)


def test_none__is_the_default_where_it_is_the_references() -> None:
    names = ("torch_dtype", "latent_dim", "activation_encoder", "activation_decoder", "bias_decoder")
    assert TrainingArguments(**dict.fromkeys(names)) == TrainingArguments()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"per_device_train_batch_size": 7}, {"train_batch_size": 7}),
        ({"per_device_eval_batch_size": 7}, {"eval_batch_size": 7}),
        ({"load_best_model_at_end": False}, {"save_only_best": False}),
        ({"metric_for_best_model": "eval_correlation"}, {"convergent_metric": "correlation"}),
        ({"report_to": "none"}, {"report_to": ["none"]}),
        ({"report_to": "wandb"}, {"report_to": ["wandb"]}),
        ({"optim": "adamw_torch"}, {"optim": "adamw"}),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_8bit"}),
        ({"learning_rate": "tune"}, {"learning_rate": "auto"}),
    ],
    ids=str,
)
def test_hugging_face_names__mean_what_they_mean_there(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert TrainingArguments(**theirs) == TrainingArguments(**ours) == TrainingArguments.from_dict(theirs)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optim": "sgd"}, "choose adamw"),
        ({"save_strategy": "epoch"}, "save_only_best=False"),
        ({"metric_for_best_model": "accuracy"}, "choose correlation or loss"),
        ({"per_device_train_batch_size": 7, "train_batch_size": 8}, "same argument"),
        ({"resume_from_checkpoint": True}, "resume"),
        ({"push_to_hub": True}, "Hugging Face"),
    ],
    ids=str,
)
def test_hugging_face_names__without_a_counterpart_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        TrainingArguments(**given)


def test_rows_of_a_process__do_not_become_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the number of processes changes a result in silence."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="another number of processes.*train_batch_size"):
        TrainingArguments(per_device_train_batch_size=4)


def test_prune_config__may_be_a_mapping_in_python_too() -> None:
    args = TrainingArguments(pre_prune_config={"topk": 5}, post_prune_config={"topk": 0.5})  # type: ignore[arg-type]
    assert args.pre_prune_config == PrePruneConfig(topk=5)
    assert args.post_prune_config == PostPruneConfig(topk=0.5)
    with pytest.raises(UserError, match=r"pre_prune_config: n_sample is .* did you mean n_samples\?"):
        TrainingArguments(pre_prune_config={"n_sample": 5})  # type: ignore[arg-type]


# --- what Python users write


def test_paths_and_dtypes__are_taken_as_text(tmp_path: Path) -> None:
    args = TrainingArguments(experiment_dir=tmp_path, torch_dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert (args.experiment_dir, args.torch_dtype) == (str(tmp_path), "bfloat16")
    assert TrainingArguments(torch_dtype="torch.float16").torch_dtype == "float16"


def test_numbers__of_numpy_and_whole_ones_for_fractions_are_taken() -> None:
    args = TrainingArguments(
        learning_rate=np.float32(0.5), max_seeds=np.int64(2), weight_decay=0, params=("a", "b")  # type: ignore[arg-type]
    )  # fmt: skip
    assert (args.learning_rate, args.max_seeds, args.weight_decay) == (0.5, 2, 0)
    json.dumps(jsonable(args.to_dict()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rate": "fast"}, "learning_rate='fast' is neither a positive number nor auto"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is not a finite number"),
        ({"max_seeds": True}, "max_seeds=True is not a whole number"),
        ({"max_seeds": 2.0}, "max_seeds=2.0 is not a whole number"),
        ({"do_eval": 1}, "do_eval=1 is not true or false"),
        ({"device": 0}, "device=0 is not a text or null"),
        ({"params": "bert.*"}, r"params='bert\.\*' is not a list\[str\] or null"),
        ({"params": [3]}, r"params=\[3\] is not a list\[str\] or null"),
        ({"class_merge_map": {"A": "x"}}, r"class_merge_map={'A': 'x'} is not a dict\[str, list\[str\]\] or null"),
        ({"pre_prune_config": 0.1}, "pre_prune_config=0.1 is not a PrePruneConfig or null"),
        ({"evaluate_fn": "f"}, "evaluate_fn is not callable"),
    ],
)
def test_types__are_checked_with_the_name_and_the_value(given: dict[str, Any], says: str) -> None:
    """Without it, a wrong type is a TypeError somewhere in the middle of training, or goes unnoticed."""
    with pytest.raises(UserError, match=says):
        TrainingArguments(**given)


@pytest.mark.parametrize(
    "mask", [[True, False], np.ones(3, dtype=bool), torch.ones(3), torch.ones(3, 2).bool()],
    ids=["list", "numpy", "float", "matrix"],
)  # fmt: skip
def test_mask__must_be_a_flat_bool_tensor(mask: Any) -> None:
    """It would be found out only after training."""
    with pytest.raises(UserError, match="post_prune_config.mask"):
        PostPruneConfig(mask=mask)


@pytest.mark.parametrize("topk", [1, 1000, 1e-9, 0.5, 1.0, None])
def test_topk__shares_and_counts_are_taken(topk: float | None) -> None:
    assert PrePruneConfig(topk=topk, threshold=0.1).topk == topk
    assert PostPruneConfig(topk=topk, threshold=0.1).topk == topk


@pytest.mark.parametrize("topk", [0, -1, 0.0, -0.5, 1.0001, float("nan"), float("inf"), True, "0.1", [1]])
@pytest.mark.parametrize("kind", [PrePruneConfig, PostPruneConfig])
def test_topk__anything_else_is_refused(kind: type, topk: Any) -> None:
    with pytest.raises(UserError, match=r"prune_config\.topk="):
        kind(topk=topk)


@pytest.mark.parametrize("kind", [PrePruneConfig, PostPruneConfig])
def test_prune_config__that_prunes_by_nothing_is_refused(kind: type) -> None:
    with pytest.raises(UserError, match="topk"):
        kind(topk=None)


# --- the check of types itself


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (1, int, True),
        (1.0, int, False),
        (True, int, False),
        (True, float, False),
        (True, bool, True),
        (1, bool, False),
        (float("inf"), float, False),
        (None, int | None, True),
        (None, int, False),
        ("a", str, True),
        (["a"], list[str], True),
        (("a",), list[str], True),
        ([], list[str], True),
        ("ab", list[str], False),
        ([["a"], ["b"]], list[list[str]], True),
        (["ab"], list[list[str]], False),
        ({"a": object()}, dict[str, Any], True),
        ({1: 2}, dict[str, Any], False),
        (object(), Any, True),
    ],
)
def test_fits__says_what_python_does_not_ask(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) is expected


def test_describe__is_in_words() -> None:
    assert describe(int | None) == "a whole number or null"
    assert describe(bool | str) == "true or false or a text"
    assert describe(dict[str, Any]) == "a dict[str, Any]"


def test_from_mapping__leaves_the_mapping_alone() -> None:
    values = {"topk": 3}
    assert from_mapping(PrePruneConfig, values, "pre_prune_config").topk == 3
    assert values == {"topk": 3}


@pytest.mark.parametrize("use_cache", [False, True, "always", "only_convergent"])
def test_selection__takes_seeds_that_did_not_converge_as_well(use_cache: bool | str) -> None:
    args = TrainingArguments(experiment_dir="e", use_cache=use_cache, select_only=True)
    assert args.reuses is True and TrainingArguments(use_cache=use_cache).reuses == use_cache
