"""Which seed converged and which is promoted: rank 0's decisions as pure functions of records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradiend_dist import TrainingArguments, UserError
from gradiend_dist.training import promotion, seeds
from gradiend_dist.training.seeds import SeedResult


def record(
    correlation: float | None, means: dict[Any, float], *, step: int | None = 5, loss: float | None = None
) -> Any:
    best = {"correlation": correlation, "global_step": step, "epoch": 0}
    if loss is not None:
        best["loss"] = loss
    return {"best_score_checkpoint": best, "training_stats": {"mean_by_class": {step: means}}, "losses": [1.0]}


def spectral(given: Any) -> Any:
    """The same run with weights that were solved for before its first step."""
    given["training_stats"]["spectral"] = {"items": 16}
    return given


def result(seed: int, correlation: float, args: TrainingArguments, **options: Any) -> SeedResult:
    made = record(correlation, {1.0: 0.9, -1.0: -0.9, 0.0: 0.1})
    return SeedResult(seed, Path(f"seed_{seed}"), made, True, seeds.judge(made, args, among_seeds=True), **options)


OPPOSITE = {1.0: 0.8, -1.0: -0.7, 0.0: 0.0}


@pytest.mark.parametrize(
    ("given", "options", "converged", "reason"),
    [
        (record(0.9, OPPOSITE), {}, True, "0.9"),
        (record(0.9, {"1.0": 0.8, "-1.0": -0.7}), {}, True, "0.9"),  # keys as read from a file
        (record(0.49, OPPOSITE), {}, False, "below 0.5"),
        (record(0.59, OPPOSITE), {"convergence_threshold": 0.6}, False, "below 0.6"),
        (record(0.9, {1.0: 0.8, -1.0: 0.7}), {}, False, "opposite signs"),
        (record(0.9, {1.0: 0.8}), {}, False, "opposite signs"),
        (record(0.9, {1.0: 0.8, -1.0: -0.4}), {}, False, "0.400, below 0.5"),
        (record(0.9, {1.0: 0.8, -1.0: -0.4}), {"convergent_mean_by_class_threshold": 0.3}, True, ""),
        (record(0.9, {1.0: 0.8, -1.0: -0.4}), {"convergent_mean_by_class_threshold": None}, True, ""),
        (
            record(0.9, {1.0: 0.8, -1.0: -0.4}),
            {"convergent_mean_by_class_threshold": None, "compat": "gradiend-0.2"},
            False,
            "below 0.5",
        ),
        (record(-0.9, {1.0: -0.8, -1.0: 0.7}), {"normalize_gradiend": False}, True, ""),
        (record(-0.9, {1.0: -0.8, -1.0: 0.7}), {"normalize_gradiend": False, "compat": "gradiend-0.2"}, False, "below"),
        (record(0.9, OPPOSITE, step=0), {}, False, "no trained step"),
        (record(None, {}, step=None), {}, False, "no trained step"),
        (spectral(record(0.9, OPPOSITE, step=0)), {}, True, "0.9"),
        (spectral(record(0.3, OPPOSITE, step=0)), {}, False, "below 0.5"),
        (spectral(record(None, {}, step=None)), {}, False, "no trained step"),
        (record(None, {}, loss=0.1), {"convergent_metric": "loss", "convergence_threshold": 0.2}, True, "0.1"),
        (record(None, {}, loss=0.3), {"convergent_metric": "loss", "convergence_threshold": 0.2}, False, "0.3"),
    ],
)
def test_judge__by_metric_means_and_signs(given: Any, options: dict[str, Any], converged: bool, reason: str) -> None:
    verdict = seeds.judge(given, TrainingArguments(**options), among_seeds=True)
    assert verdict.converged is converged
    assert reason in verdict.reason


SHARES = {"explained": 0.78, "explained_centred": 0.7, "explained_limit": 0.81, "explained_centred_limit": 0.75}


@pytest.mark.parametrize("key", [int, str])
def test_report__says_what_the_decoder_explains_at_the_best_step(key: Any) -> None:
    args = TrainingArguments()
    found = result(0, 0.9, args)
    assert found.record["best_score_checkpoint"]["global_step"] == 5
    stats = found.record["training_stats"]
    stats["explained"] = {key(0): -3.0, key(5): 0.78, key(10): 0.8}
    stats["explained_centred"] = {key(5): 0.7}
    stats |= {name: share for name, share in SHARES.items() if name.endswith("limit")}
    assert seeds.explained_at_best(found.record) == SHARES
    entry = seeds.seed_report([found], args)["runs"][0]
    assert {name: entry[name] for name in SHARES} == SHARES


def test_explained_at_best__is_none_where_it_was_not_measured() -> None:
    nothing = dict.fromkeys(SHARES)
    assert seeds.explained_at_best(record(0.9, OPPOSITE)) == nothing
    other_step = record(0.9, OPPOSITE)
    other_step["training_stats"] |= {"explained": {4: 0.5}, "explained_centred": None, "explained_limit": None}
    assert seeds.explained_at_best(other_step) == nothing
    unevaluated = record(None, {}, step=None)
    unevaluated["training_stats"] |= {"explained": {}, "explained_limit": math.nan}
    assert seeds.explained_at_best(unevaluated) == nothing


def test_select__converged_before_better_and_first_of_equals() -> None:
    args = TrainingArguments()
    weak = result(0, 0.7, args)
    tied = result(2, 0.7, args)
    failed = result(1, 0.99, args)
    failed.verdict = seeds.Verdict(False, 0.99, 0.1, "")
    assert seeds.select_best([weak, failed, tied], args)[0] is weak
    assert seeds.select_best([failed], args)[2] == "highest_correlation_fallback"


def test_select__evaluation_outranks_the_training_score() -> None:
    args = TrainingArguments()
    first, second = result(0, 0.9, args, eval_correlation=0.6), result(1, 0.8, args)
    assert seeds.select_best([first, second], args)[0].seed == 1


def test_selection_evaluation__is_skipped_where_it_cannot_matter() -> None:
    args = TrainingArguments()
    good, bad = result(0, 0.9, args), result(1, 0.3, args)
    assert seeds.wants_selection_evaluation(good, [], args)
    assert not seeds.wants_selection_evaluation(bad, [], args)
    assert seeds.wants_selection_evaluation(good, [bad], args)
    assert not seeds.wants_selection_evaluation(good, [good], args)


def test_enough__counts_converged_seeds() -> None:
    args = TrainingArguments(min_convergent_seeds=2)
    results = [result(seed, 0.9, args) for seed in (0, 1)]
    assert seeds.reason_to_stop(results[:1], args) is None
    assert "2 >= 2" in str(seeds.reason_to_stop(results, args))
    assert seeds.reason_to_stop(results, TrainingArguments(min_convergent_seeds=None)) is None


@pytest.mark.parametrize(("policy", "left"), [("all_tried", [0, 1]), ("all_convergent", [0]), ("best_only", [])])
def test_retention__keeps_records_of_all_and_models_of_some(tmp_path: Path, policy: str, left: list[int]) -> None:
    args = TrainingArguments(saved_seed_runs=policy)
    results = []
    for seed, correlation in ((0, 0.9), (1, 0.2)):
        made = result(seed, correlation, args)
        made.output = tmp_path / str(seed)
        made.output.mkdir()
        for name in ("model.safetensors", "config.json", "mapping_indices.safetensors", "training.json"):
            (made.output / name).touch()
        results.append(made)
    promotion.strip_models(results, args)
    assert [seed for seed in (0, 1) if (tmp_path / str(seed) / "model.safetensors").exists()] == left
    assert all((tmp_path / str(seed) / "training.json").exists() for seed in (0, 1))


def test_keep_seed_runs__is_the_documented_policy() -> None:
    assert TrainingArguments(keep_seed_runs=True).saved_seed_runs == "all_tried"
    assert TrainingArguments().saved_seed_runs == "best_only"
    assert TrainingArguments(compat="gradiend-0.2").saved_seed_runs == "all_convergent"


def test_overlap__of_known_sets() -> None:
    args = TrainingArguments(min_convergent_seeds=2)
    top = {0: frozenset({1, 2, 3, 4}), 1: frozenset({3, 4, 5, 6}), 2: frozenset({4, 7, 8, 9})}
    found = seeds._overlap(top, {0: "a", 1: "b", 2: "c"}, args)
    assert (found["union_size"], found["intersection_size"], found["parameters_seen_once"]) == (9, 1, 7)
    assert found["mean_pairwise_overlap_fraction"] == pytest.approx((2 / 4 + 1 / 4 + 1 / 4) / 3)
    assert found["pairwise_overlap_rows"][0]["jaccard"] == pytest.approx(2 / 6)


def test_fail_on_non_convergence__says_what_to_try() -> None:
    args = TrainingArguments(fail_on_non_convergence=True)
    with pytest.raises(UserError, match=r"0 of 1 seeds converged, 1 required .*below 0.5.*learning_rate"):
        seeds.check_convergence([result(0, 0.1, args)], args)


def test_selection__leaves_nothing_to_rounding() -> None:
    """Fails if a run that goes on with another number of ranks can promote another seed by a last digit."""
    args, compat = TrainingArguments(), TrainingArguments(compat="gradiend-0.2")
    first, second, clearly = (
        result(seed, score, args) for seed, score in ((0, 0.98765432), (1, 0.98765499), (2, 0.988))
    )
    assert seeds.select_best([first, second], args)[0] is first
    assert seeds.select_best([first, second], compat)[0] is second
    assert seeds.select_best([first, second, clearly], args)[0] is clearly
