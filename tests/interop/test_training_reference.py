"""compat="gradiend-0.2" reproduces `gradiend` 0.2.3: each test trains the same tiny run in both packages.

A wrong order of rows, draw, loss, optimizer step, evaluation, turn of the sign, choice of checkpoint or seed, or pruned
set makes the runs part ways. Tolerances and their reasons: see `side_by_side`.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

gradiend = pytest.importorskip("gradiend")

from gradiend.trainer.core.pruning import _resolve_topk  # noqa: E402
from side_by_side import (  # noqa: E402
    NOISE_ATOL,
    SCORE_ATOL,
    VOCABULARY,
    WEIGHT_ATOL,
    WORDS,
    Result,
    assert_same_run,
    compare_models,
    our_trainer,
    read,
    reference_trainer,
    rows,
    same_numbers,
    save_causal_model,
    save_masked_model,
)

import gradiend_dist  # noqa: E402
from gradiend_dist.config.compat import REFERENCE  # noqa: E402
from gradiend_dist.model.entries import count_to_keep  # noqa: E402

ARGUMENTS: dict[str, Any] = {
    "train_batch_size": 2,
    "learning_rate": 3e-3,
    "num_train_epochs": 2,
    "eval_steps": 12,
    "max_seeds": 1,
    "seed": 1,
}
PIECES = {"M": ["actor", "prince", "king"], "F": ["actress", "princess", "she"], "N": ["they", "princes", "it"]}
IDENTITY = {"add_identity_for_other_classes": True}


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """The reference collects garbage several times per seed, each time through all modules: half of its time here."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bases")
    return {"masked": save_masked_model(root / "masked"), "causal": save_causal_model(root / "causal")}


def train_both(
    base: str, root: Path, table: Any = None, fields: dict[str, Any] | None = None, **changes: Any
) -> tuple[Path, Path, Any, Any]:
    """Experiment directories and trainers of the reference and of ours."""
    table = rows() if table is None else table
    arguments = {**ARGUMENTS, **changes}
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    configs = {name: arguments.pop(name) for name in ("pre_prune_config", "post_prune_config") if name in arguments}
    kinds = {"pre_prune_config": "PrePruneConfig", "post_prune_config": "PostPruneConfig"}
    theirs, ours = (
        make(base, root / name, table, fields or {}, **arguments, **mode,
             **{key: getattr(package, kinds[key])(**value) for key, value in configs.items()})
        for make, name, package, mode in (
            (reference_trainer, "reference", gradiend, {}),
            (our_trainer, "ours", gradiend_dist, {"compat": "gradiend-0.2"}),
        )
    )  # fmt: skip
    theirs.train()
    ours.train()
    return root / "reference", root / "ours", theirs, ours


def assert_same_report(theirs: Path, ours: Path) -> dict[str, Any]:
    """Every value of seed_report.json but the directories."""
    one, two = (read(root / "seeds" / "seed_report.json") for root in (theirs, ours))
    same_numbers(one, two, ignored=("runs", "topk_stability"))
    assert len(one["runs"]) == len(two["runs"])
    for run, other in zip(one["runs"], two["runs"], strict=True):
        same_numbers(run, other, ignored=("output_dir",))
    return one


def seed_directories(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "seeds").iterdir() if path.is_dir())


# One seed


CASES: dict[str, dict[str, Any]] = {
    "masked, no threshold for the means": {"convergent_mean_by_class_threshold": None},
    "causal": {"base": "causal", "seed": 2},
    "causal with identity rows": {"base": "causal", **IDENTITY, "train_batch_size": 3, "num_train_epochs": 3},
    "words of several pieces": {"words": PIECES, "train_batch_size": 3, **IDENTITY},
    "two gradients per step, odd number of items": {
        "gradiend_batch_size": 2, "train_batch_size": 2, "num_train_epochs": 3, **IDENTITY,
    },
    "single rows, capped steps": {"train_batch_size": 1, "num_train_epochs": 3, "max_steps": 26},
    "steps beyond the epochs": {"num_train_epochs": 1, "max_steps": 50},
    "factual to diff": {"source": "factual"},
    "factual to factual, capped evaluation": {
        "source": "factual", "target": "factual", "encoder_eval_train_max_size": 3,
    },
    "alternative to alternative": {"source": "alternative", "target": "alternative"},
    "arguments without effect": {
        "latent_dim": 2, "activation_encoder": "relu", "activation_decoder": "tanh", "bias_decoder": False,
        "evaluate_fn": lambda *_, **__: {"correlation": 0.3}, "num_train_epochs": 1,
    },
    "capped rows": {"train_max_size": 8, "encoder_eval_max_size": 4, **IDENTITY},
    "capped unbalanced evaluation": {"encoder_eval_balance": False, "encoder_eval_max_size": 5},
    "evaluation with other classes": {"include_other_classes": True, "source": "factual"},
    "adam without normalisation": {
        "optim": "adam", "weight_decay": 0.1, "adam_epsilon": 1e-6, "normalize_gradiend": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_train__equals_the_reference(case: dict[str, Any], bases: dict[str, str], tmp_path: Path) -> None:
    changes = dict(case)
    base, words = changes.pop("base", "masked"), changes.pop("words", WORDS)
    theirs, ours, *_ = train_both(bases[base], tmp_path, rows(words), **changes)
    assert_same_run(theirs / "model", ours / "model")


def test_train__without_arguments_is_the_same_run(bases: dict[str, str], tmp_path: Path) -> None:
    """The same call in both: no seed is seed 0 there, and so it must be here. Two of the three seeds are enough."""
    table = pd.concat([rows(), rows().assign(masked=lambda t: t["masked"].str.replace("the", "then the"))])
    everything = dict.fromkeys(ARGUMENTS, ...)
    theirs, ours, *_ = train_both(
        bases["masked"], tmp_path, table, {}, **{**everything, "train_batch_size": 8, "max_seeds": 2}
    )
    assert_same_run(theirs / "model", ours / "model")
    assert assert_same_report(theirs, ours)["seeds_tried"] == [0, 1]


@pytest.mark.parametrize(("source", "do_eval"), [("alternative", False), ("diff", False), ("diff", True)])
def test_train__without_a_score_keeps_what_the_reference_keeps(
    source: str, do_eval: bool, bases: dict[str, str], tmp_path: Path
) -> None:
    """Not evaluated: the model of step 1. Differences, whose evaluation fails in the reference: the last model."""
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, source=source, do_eval=do_eval)
    assert_same_run(theirs / "model", ours / "model")
    assert Result(ours / "model").record["best_score_checkpoint"]["global_step"] == (0 if do_eval else 1)


def test_train__ignores_no_strategies_as_the_reference_does(bases: dict[str, str], tmp_path: Path) -> None:
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, eval_strategy="no", save_strategy="no")
    assert_same_run(theirs / "model", ours / "model")
    assert len(Result(ours / "model").record["training_stats"]["scores"]) > 1


def test_train__leaves_the_same_checkpoints(bases: dict[str, str], tmp_path: Path) -> None:
    """Of steps, epochs, the best and the last; the record beside the last one is lost in the reference."""
    changes = {"save_only_best": False, "save_strategy": "steps", "save_steps": 7, "max_steps": 15}
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    names, others = (sorted(path.name for path in root.glob("model*")) for root in (theirs, ours))
    assert names == others == ["model", "model_best", "model_epoch_1", "model_epoch_2", "model_step_14", "model_step_7"]
    for name in names:
        found = compare_models(Result(theirs / name), Result(ours / name))
        assert found["weights"] < WEIGHT_ATOL and found["noise weights"] < NOISE_ATOL, name


def test_train__convergence_by_loss_equals_the_reference(bases: dict[str, str], tmp_path: Path) -> None:
    """Only a supervised decoder is chosen by its loss there; otherwise no seed can converge by it."""
    by_loss = {"convergent_metric": "loss", "convergent_score_threshold": 1.0, "max_seeds": 2, "max_steps": 9}
    theirs, ours, *_ = train_both(bases["masked"], tmp_path / "plain", **by_loss)
    report = assert_same_report(theirs, ours)
    assert report["convergent_count"] == 0 and len(report["runs"]) == 2
    assert_same_run(theirs / "model", ours / "model")
    theirs, ours, *_ = train_both(bases["masked"], tmp_path / "supervised", supervised_decoder=True, **by_loss)
    assert_same_run(theirs / "model", ours / "model")
    assert assert_same_report(theirs, ours)["convergent_seeds"] == [1]


# Several seeds


def test_seeds__equal_the_reference_turned_converged_and_not(bases: dict[str, str], tmp_path: Path) -> None:
    """Seed 1 is turned in the last epoch and converges, seed 2 never beats its start; all are compared."""
    changes = {"seed": 0, "num_train_epochs": 3, "eval_steps": 12, "max_seeds": 3, "min_convergent_seeds": None,
               "saved_seed_runs": "all_tried", **IDENTITY}  # fmt: skip
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    assert seed_directories(theirs) == seed_directories(ours) == ["seed_0", "seed_1", "seed_2"]
    for name in seed_directories(ours):
        assert_same_run(theirs / "seeds" / name, ours / "seeds" / name)
    report = assert_same_report(theirs, ours)
    assert report["best_seed"] == 1 and report["convergent_seeds"] == [1]
    assert report["runs"][2]["best_checkpoint_global_step"] == 0
    scores = Result(ours / "seeds" / "seed_1").record["training_stats"]["scores"]
    assert scores["24"] < 0 and scores["36"] > 0.6, "no turn of the sign: choose another seed or learning rate"
    assert_same_run(theirs / "model", ours / "model")


def test_seeds__stop_where_the_reference_stops(bases: dict[str, str], tmp_path: Path) -> None:
    """Also a cap for the evaluation that selects, and what is kept of the seeds."""
    changes = {"seed": 0, "num_train_epochs": 3, "eval_steps": 36, "max_seeds": 3, "seed_selection_eval_max_size": 3,
               **IDENTITY}  # fmt: skip
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    report = assert_same_report(theirs, ours)
    assert report["seeds_tried"] == [0, 1] and report["runs"][1]["eval_correlation"] is not None
    kept = [[path.parent.name for path in (root / "seeds").rglob("model.safetensors")] for root in (theirs, ours)]
    assert kept[0] == kept[1] == ["seed_1"]
    assert_same_run(theirs / "model", ours / "model")


def test_seeds__too_few_converged_and_their_stability_equal_the_reference(
    bases: dict[str, str], tmp_path: Path
) -> None:
    """Two of three required seeds converge by low thresholds; training.json calls that converged there."""
    changes = {"seed": 3, "max_seeds": 3, "min_convergent_seeds": 3, "max_steps": 12, "eval_steps": 12,
               "convergent_score_threshold": 0.1, "convergent_mean_by_class_threshold": 0.02,
               "seed_stability_topk": 50}  # fmt: skip
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    report = assert_same_report(theirs, ours)
    assert len(report["convergent_seeds"]) == 2
    stability, other = (read(root / "seeds" / "seed_report.json")["topk_stability"] for root in (theirs, ours))
    same_numbers(stability, other, ignored=("pairwise_overlap_rows",))
    for row, same in zip(stability["pairwise_overlap_rows"], other["pairwise_overlap_rows"], strict=True):
        same_numbers(row, same, ignored=("output_dir_a", "output_dir_b"))
    info = Result(ours / "model").record["convergence_info"]
    assert info["converged"] and info["convergent_count"] == 2
    same_numbers(Result(theirs / "model").record["convergence_info"], info, ignored=("topk_stability",))


@pytest.mark.parametrize("normalize_gradiend", [True, False])
def test_seeds__sign_of_the_correlation_counts_as_in_the_reference(
    normalize_gradiend: bool, bases: dict[str, str], tmp_path: Path
) -> None:
    """Upside down, a seed has converged by its own record and has not by the report."""
    changes = {"max_seeds": 2, "min_convergent_seeds": 2, "normalize_gradiend": normalize_gradiend,
               "convergent_mean_by_class_threshold": 0.1, "eval_steps": 24}  # fmt: skip
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    report = assert_same_report(theirs, ours)
    for run in report["runs"]:
        one, two = (read(root / "seeds" / f"seed_{run['seed']}" / "training.json") for root in (theirs, ours))
        same_numbers(one["convergence_info"], two["convergence_info"])
        if run["seed"] == 1:
            assert two["convergence_info"]["converged"]
            assert run["converged"] == normalize_gradiend


# Pruning


@pytest.mark.parametrize(
    ("config", "many"),
    [
        ({"n_samples": 6, "topk": 0.1}, True),
        ({"n_samples": 5, "topk": 0.3, "seed": 11, "source": "diff"}, True),
        ({"n_samples": 40, "topk": 700, "source": "factual"}, False),
        ({"n_samples": 6, "topk": None, "threshold": 0.02, "seed": 3}, False),
        ({"n_samples": 6, "topk": 300, "threshold": 0.02}, False),
    ],
    ids=["share", "share, seed set", "count, more examples than rows", "threshold", "threshold and count"],
)
def test_pre_prune__keeps_the_weights_of_the_reference(
    config: dict[str, Any], many: bool, bases: dict[str, str], tmp_path: Path
) -> None:
    """For two seeds where `many`: without a seed of its own the sample is drawn anew for each."""
    changes = {"max_steps": 7, "pre_prune_config": config, **IDENTITY}
    if many:
        changes |= {"max_seeds": 2, "min_convergent_seeds": None, "saved_seed_runs": "all_tried"}
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    assert_same_run(theirs / "model", ours / "model")
    if many:
        for name in seed_directories(ours):
            assert_same_run(theirs / "seeds" / name, ours / "seeds" / name)
        assert_same_report(theirs, ours)
        first, second = (Result(ours / "seeds" / f"seed_{seed}").selected() for seed in (1, 2))
        equal = all(np.array_equal(first[name], second.get(name)) for name in first)
        assert equal == ("seed" in config)


@pytest.mark.parametrize("size", [7, 8912, 10**7 + 1, 2 * 10**7 + 1, 109_482_243])
def test_pre_prune__keeps_as_many_weights_as_the_reference(size: int) -> None:
    """It rounds through float32: off by a few for large models, which no tiny one shows."""
    for topk in (1e-9, 0.1, 0.123456, 0.999999, 1, size + 5):
        assert count_to_keep(topk, size, in_float32=REFERENCE.topk_in_float32) == _resolve_topk(topk, size)


def test_pre_prune__of_a_causal_model_keeps_the_weights_of_the_reference(bases: dict[str, str], tmp_path: Path) -> None:
    config = {"n_samples": 7, "topk": 0.25, "source": "diff"}
    theirs, ours, *_ = train_both(bases["causal"], tmp_path, max_steps=8, pre_prune_config=config)
    assert_same_run(theirs / "model", ours / "model")


@pytest.mark.parametrize(
    ("config", "max_seeds"),
    [
        ({"topk": 0.25, "part": "decoder-weight"}, 2),
        ({"topk": 100, "part": "encoder-weight"}, 1),
        ({"topk": None, "threshold": 0.02, "part": "decoder-sum"}, 1),
    ],
)
def test_post_prune__keeps_the_weights_of_the_reference(
    config: dict[str, Any], max_seeds: int, bases: dict[str, str], tmp_path: Path
) -> None:
    """After pre-pruning; a seed is chosen by an evaluation of its pruned model."""
    changes = {"max_steps": 7, "pre_prune_config": {"n_samples": 8, "topk": 0.4, "seed": 2}, "max_seeds": max_seeds,
               "post_prune_config": config, "convergent_score_threshold": 0.0}  # fmt: skip
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, **changes)
    assert_same_run(theirs / "model", ours / "model")
    if max_seeds > 1:
        assert assert_same_report(theirs, ours)["runs"][0]["eval_correlation"] is not None


# Data drawn at random, and evaluation after training


def class_frames() -> dict[str, pd.DataFrame]:
    table = rows()
    return {
        name: table.loc[table["label_class"] == name, ["masked", "label", "split"]].reset_index(drop=True)
        for name in ("F", "N", "M")
    }


def test_train__on_drawn_alternatives_equals_the_reference(bases: dict[str, str], tmp_path: Path) -> None:
    """The reference draws from the operating system unless random_state is set, so it is."""
    theirs, ours, *_ = train_both(bases["masked"], tmp_path, class_frames(), {"random_state": 5}, **IDENTITY)
    assert_same_run(theirs / "model", ours / "model")


def neutral_texts() -> list[str]:
    rng = random.Random(0)
    words = [word for word in VOCABULARY if not word.startswith(("[", "#"))]
    return [" ".join(rng.choices([*words, "princess", "actors"], k=9)) for _ in range(11)]


@pytest.mark.parametrize(
    ("base", "split", "max_size", "changes"),
    [
        ("masked", "test", None, IDENTITY),
        ("masked", "test", 4, {**IDENTITY, "source": "factual"}),
        ("masked", "validation", 4, {}),
        ("masked", "test", 3, {"include_other_classes": True, "encoder_eval_balance": False}),
        ("causal", "test", 4, IDENTITY),
    ],
)
def test_evaluate_encoder__equals_the_reference(
    base: str, split: str, max_size: int | None, changes: dict[str, Any], bases: dict[str, str], tmp_path: Path
) -> None:
    """All rows, neutral ones included, character by character and in order; encodings up to rounding."""
    fields = {"eval_neutral_data": pd.DataFrame({"text": neutral_texts()}),
              "eval_neutral_additional_excluded_words": ["dog", "town"]}  # fmt: skip
    *_, theirs, ours = train_both(bases[base], tmp_path, rows(PIECES), fields, max_steps=3, **changes)
    one, two = (trainer.evaluate_encoder(split=split, max_size=max_size, return_df=True) for trainer in (theirs, ours))
    table, other = one.pop("encoder_df"), two.pop("encoder_df")
    same = [name for name in table.columns if name != "encoded"]
    pd.testing.assert_frame_equal(table[same], other[same], check_dtype=False)
    difference = float((table["encoded"] - other["encoded"]).abs().max())
    print(f"largest difference: encodings {difference:.1e} of {len(table)}")
    assert difference < SCORE_ATOL
    kinds = set(table["type"])
    assert kinds == {"training", "neutral_dataset"} | ({"neutral_training_masked"} if split == "test" else set())
    assert one.keys() == two.keys()
    for name, group in itertools.product(("mean", "std", "n"), ("class", "feature_class")):
        same_numbers(one[f"{name}_by_{group}"], two[f"{name}_by_{group}"])
    same_numbers(one["neutral_mean_by_type"], two["neutral_mean_by_type"])
    assert abs(one["correlation"] - two["correlation"]) < SCORE_ATOL
