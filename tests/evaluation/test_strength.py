"""The strength of a rewriting, found by search: as a dense scan finds it, whatever the vector's scale, and said where
there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from gradiend_dist import TextPredictionTrainer, TrainingArguments, UserError, demo
from gradiend_dist.evaluation.decoder_evaluation import DecoderEvaluation
from gradiend_dist.evaluation.harm import Harm
from gradiend_dist.evaluation.held_out import scored_base, tell_exceeded
from gradiend_dist.evaluation.request import DecoderRequest
from gradiend_dist.evaluation.search import MAX_HARM, is_gain

MAX_ROWS = 30


def make(model, root, **fields) -> TextPredictionTrainer:
    args = TrainingArguments(
        experiment_dir=str(root),
        train_batch_size=8,
        max_steps=0,
        max_seeds=1,
        decoder_eval_max_size_training_like=MAX_ROWS,
    )
    frames = {name: frame for name, frame in demo.feature_data().items() if name != "N"}
    fields = {"eval_neutral_data": demo.neutral_data(), **fields}
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=args, **fields)


@pytest.fixture(scope="module", params=["masked", "causal"])
def trained(request, masked_lm, causal_lm, tmp_path_factory) -> TextPredictionTrainer:
    return make({"masked": masked_lm, "causal": causal_lm}[request.param], tmp_path_factory.mktemp("run")).train()


@pytest.fixture(scope="module")
def found(trained):
    return trained.evaluate_decoder(use_cache=False)


@contextmanager
def decoder_scaled(trainer: TextPredictionTrainer, factor: float) -> Iterator[None]:
    gradiend = trainer.get_model().gradiend
    kept = [tensor.clone() for tensor in (gradiend.decoder_weight, gradiend.decoder_bias_vector)]
    gradiend.decoder_weight.mul_(factor)
    gradiend.decoder_bias_vector.mul_(factor)
    try:
        yield
    finally:
        gradiend.decoder_weight.copy_(kept[0])
        gradiend.decoder_bias_vector.copy_(kept[1])


def test_search__is_as_good_as_a_dense_scan(trained, found):
    """60 steps of the weights up to half of their norm, each scored as the search scores them.

    Where the search ends above the scan's points, it has found a step between two of them: its own value then counts.
    """
    evaluation = DecoderEvaluation(trained, DecoderRequest(use_cache=False))
    scores, _ = evaluation.scores()
    with evaluation.points(scores) as points:
        _, losses = scored_base(points, scores, evaluation.name)
        for name, ways in evaluation.ways().items():
            extent = points.extent(ways[0].direction, "extent")
            steps = [ways[0].direction.of_rate(extent.rate(change)) for change in np.geomspace(1e-3, 0.5, 60)]
            scanned = list(points.each(steps, lambda: scores.measure(losses), name=evaluation.name).values())
            harmful = next(
                (i for i, e in enumerate(scanned) if e["harm"] is None or e["harm"] > MAX_HARM), len(scanned)
            )
            allowed = [entry["probs"][name] for entry in scanned[:harmful]]
            best, place = max(allowed), int(np.argmax(allowed))
            print(f"{name}: scan {best:.4f}, search {found[name]['value']:.4f} in {found[name]['evaluations']}")
            assert place > 0, "the scan begins below the peak"
            assert harmful < len(scanned) or allowed[-1] < best, "and goes on to what is too far"
            assert abs(found[name]["value"] - best) <= 0.015 * best
            assert found[name]["harm"] <= MAX_HARM and found[name]["evaluations"] <= 10


def test_search__changes_the_model_as_far_as_it_can_be(found):
    """From default arguments, no rate given: both classes reach the other one's blanks."""
    for name in ("M", "F"):
        chosen, base = found[name], found[name]["base_value"]
        assert "refusal" not in chosen and is_gain(base, chosen["value"])
        assert chosen["value"] > 0.9, "as far as it can be"
        assert [point["harm"] for point in chosen["curve"]] == sorted(point["harm"] for point in chosen["curve"])
        assert chosen["held_out"]["harm"] < 3 * MAX_HARM
        trials = {(trial["feature_factor"], trial["learning_rate"]) for trial in chosen["trials"]}
        assert (chosen["feature_factor"], chosen["learning_rate"]) in trials and trials >= {
            point for point in found["grid"] if point != "base" and point[0] == chosen["feature_factor"]
        }
    assert {len(texts) for texts in found["completions"].values()} == {3}


@pytest.mark.parametrize("factor", [1e-6, 1e6], ids="{:g}".format)
def test_scale_of_the_decoder__does_not_change_the_model(factor, trained, found):
    with decoder_scaled(trained, factor):
        other = trained.evaluate_decoder(use_cache=False)
    for name in ("M", "F"):
        assert other[name]["relative_change"] == found[name]["relative_change"]
        assert other[name]["learning_rate"] == pytest.approx(found[name]["learning_rate"] / factor, rel=1e-4)
        assert other[name]["value"] == pytest.approx(found[name]["value"], rel=1e-3)
    with decoder_scaled(trained, factor):
        changed = trained.rewrite_base_model(other, target_class="F").state_dict()
    for name, weight in trained.rewrite_base_model(found, target_class="F").state_dict().items():
        torch.testing.assert_close(changed[name], weight, rtol=1e-4, atol=1e-6)


def test_useless_direction__is_a_sentence_and_not_a_model(trained, tmp_path):
    """A step within the harm that changes nothing is not handed over; who wants it all the same says so."""
    gradiend = trained.get_model().gradiend
    kept = gradiend.decoder_weight.clone(), gradiend.decoder_bias_vector.clone()
    noise = torch.randn(len(gradiend), generator=torch.Generator().manual_seed(0))
    gradiend.decoder_weight.copy_(noise.unsqueeze(1))
    gradiend.decoder_bias_vector.zero_()
    try:
        results = trained.evaluate_decoder(target_class="F", max_harm=1e-4, use_cache=False)
        assert "changes F by a tenth" in results["F"]["refusal"] or "more harm" in results["F"]["refusal"]
        with pytest.raises(UserError, match="Nothing is rewritten: "):
            trained.rewrite_base_model(results, target_class="F", output_dir=tmp_path / "f")
        assert not (tmp_path / "f").exists()
        if results["F"]["learning_rate"] != 0.0:
            assert trained.rewrite_base_model(results, target_class="F", force=True) is not None
        gradiend.decoder_weight.zero_()
        with pytest.raises(UserError, match="vector of this model is zero"):
            trained.evaluate_decoder(target_class="F", use_cache=False)
    finally:
        gradiend.decoder_weight.copy_(kept[0])
        gradiend.decoder_bias_vector.copy_(kept[1])


def test_texts_unlike_the_models_own__are_told(trained, caplog):
    """Those of the search, and those of a second corpus, which is measured beside them."""
    texts = pd.DataFrame({"text": [f"zq xv {place} jj kw pp {place * 7} vv qq" for place in range(12)]})
    trained.evaluate_decoder(target_class="F", neutral_df=texts, use_cache=False)
    assert "hardly better than by chance" in caplog.text and "as eval_neutral_data" in caplog.text
    caplog.clear()
    second = trained.evaluate_decoder(target_class="F", second_neutral_data=texts, use_cache=False)["F"]["second"]
    assert second["harm_error"] > 0.0 and "as second_neutral_data" in caplog.text


def test_one_neutral_text__has_no_error_and_is_told(trained, caplog):
    """Fails if the error of a single text is given as zero: nothing tells how much texts differ."""
    texts = demo.neutral_data()[:1]
    found = trained.evaluate_decoder(target_class="F", neutral_df=texts, scaling="tensor", use_cache=False)["F"]
    assert found["harm_error"] == float("inf") and "held_out" not in found
    assert "one neutral text is left" in caplog.text and "harm is known no better" in caplog.text


def test_harm_on_other_texts_that_is_larger_than_allowed__is_told(caplog):
    tell_exceeded("F", "held_out", Harm(0.012, 0.005), 0.01)
    assert not caplog.text, "within its error"
    tell_exceeded("F", "second", Harm(0.05, 0.005), 0.01)
    assert "F: on texts of the second corpus, which had no part in the choice, the harm is 5.00" in caplog.text


def test_rows_as_texts__are_not_those_of_the_curvature(trained):
    """Without neutral texts the rows stand in; fails if what the curvature has seen is scored."""
    evaluation = DecoderEvaluation(trained, DecoderRequest(neutral_df=pd.DataFrame({"text": []}), use_cache=False))
    scores, others = evaluation.scores()
    assert evaluation.left_out is not None and evaluation.left_out.texts
    assert not set(evaluation.left_out.texts) & {*scores.texts.texts, *others.texts}


def test_classes_and_balance__are_searched_together(trained):
    found = trained.evaluate_decoder(target_class=["F", "balance"], use_cache=False)
    assert {"F", "balance"} <= found.keys() and "M" not in found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"learning_rate": 1e-3, "max_harm": 0.02}, "max_harm has no effect where learning_rate is given"),
        ({"decoder_results": {}, "split": "test"}, "split has no effect where decoder_results is given"),
        ({"maximum": 1}, "maximum is not a known argument"),
    ],
)
def test_rewriting__refuses_what_has_no_effect(trained, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        trained.rewrite_base_model(target_class="F", **arguments)


def test_rewriting__searches_as_it_is_told(trained, monkeypatch):
    """Fails if the arguments of the search do not reach it."""
    asked: list[DecoderRequest] = []
    known = DecoderEvaluation.__init__
    monkeypatch.setattr(
        DecoderEvaluation, "__init__", lambda self, run, asks: (asked.append(asks), known(self, run, asks))[1]
    )
    trained.rewrite_base_model(target_class="F", max_harm=0.02, max_size=5, split="validation", force=True)
    assert [(each.max_harm, each.max_size, each.split) for each in asked] == [(0.02, 5, "validation")]


def test_clearly_harmful_step__is_dropped_after_a_fifth_of_the_texts(trained):
    """Fails if a step a thousand times too large is asked all questions, or scored as if it were usable."""
    evaluation = DecoderEvaluation(trained, DecoderRequest(use_cache=False))
    scores, _ = evaluation.scores()
    with evaluation.points(scores) as points:
        _, losses = scored_base(points, scores, evaluation.name)
        direction = evaluation.ways()["F"][0].direction
        far = direction.of_rate(points.extent(direction, "extent").rate(0.3))
        found = points.each([far], lambda: scores.measure(losses, 0.05), name=evaluation.name)[far]
        whole = points.each([far], lambda: scores.measure(losses), name=lambda place: f"whole_{place}")[far]
    assert set(found) == {"harm", "harm_error"} and found["harm"] > 0.05
    assert whole["harm"] > 0.05 and "probs" in whole


def test_balance__makes_both_classes_equally_probable(trained, tmp_path):
    """At blanks where the base model is sure of one class: fails if the index does not ask for both."""
    rows = demo.feature_data()["M"]["masked"][:12]
    results = trained.evaluate_decoder(
        target_class="balance", neutral_blanks=list(rows), max_harm=0.05, use_cache=False
    )
    found, before = results["balance"]["indices"], results["balance"]["base_indices"]
    assert set(found) == {"bpi", "pi_M", "pi_F", "by_blanks"} and set(found["by_blanks"]) == {"M", "F", "neutral"}
    assert found["bpi"] == found["by_blanks"]["neutral"]["bpi"] > 5.0 * before["bpi"]
    assert "refusal" not in results["balance"]
    words = results["grid"][results["balance"]["feature_factor"], results["balance"]["learning_rate"]]
    after, base = (grid["probs_by_dataset"]["neutral"] for grid in (words, results["grid"]["base"]))
    assert abs(after["M"] - after["F"]) < 0.1 < 0.9 < base["M"] - base["F"]
    assert sum(after.values()) > 0.9 * sum(base.values())
    trained.rewrite_base_model(results, target_class="balance", output_dir=tmp_path / "balanced")
    assert load_file(tmp_path / "balanced" / "model.safetensors")


def test_balance__without_neutral_blanks__is_of_the_means_over_both_classes_rows(trained):
    """This base model has no preference, however sure it is at each blank: it is told so, and nothing is chosen."""
    found = trained.evaluate_decoder(target_class="balance", use_cache=False)["balance"]
    assert found["base_indices"]["bpi"] > 5.0 * max(each["bpi"] for each in found["base_indices"]["by_blanks"].values())
    assert "neutral_blanks" in found["refusal"] and set(found["indices"]["by_blanks"]) == {"M", "F"}


def test_search__goes_on_with_the_steps_that_are_kept(trained, found, monkeypatch):
    """Nothing is scored twice, and the results are the same."""
    first = trained.evaluate_decoder(use_cache=True)
    calls: list[object] = []
    monkeypatch.setattr("gradiend_dist.evaluation.decoder.ModelScores.measure", lambda *a: calls.append(a))
    again = trained.evaluate_decoder(use_cache=True)
    assert not calls and json.dumps(again["F"]) == json.dumps(first["F"])
    for name in ("M", "F"):
        assert first[name]["value"] == found[name]["value"]
