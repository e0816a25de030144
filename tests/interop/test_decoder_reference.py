"""The decoder evaluation of both packages on the same model, where the reference is right: probabilities, language
model score, selected points and rewritten weights. `compat.py` lists where it is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gradiend
import pandas as pd
import pytest
import torch
from gradiend.evaluator.decoder import LMSThresholdPolicy, LMSTimesMetricPolicy
from gradiend.trainer.text.prediction.model_with_gradiend import TextPredictionModelWithGradiend
from side_by_side import our_trainer, reference_trainer, rows, save_causal_model, save_masked_model

import gradiend_dist

ARGS: dict[str, Any] = {
    "train_batch_size": 4, "max_steps": 12, "eval_steps": 6, "learning_rate": 0.01, "max_seeds": 1, "seed": 0,
}  # fmt: skip
RATES = [5.0, 1.0, 0.2, 0.05, 0.01]
NEUTRAL = pd.DataFrame(
    {
        "text": [
            "the dog ran home and then the old nurse would sing .",
            "a dog would walk away to town",
            "run home now .",
        ]
    }
)
# Both compute softmax in float32, in batches of other shapes.
TOLERANCE = 2e-6


@pytest.fixture(scope="module", params=["masked", "causal"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One trained model in the hands of both; under compat, so that the same special tokens are asked for."""
    root = tmp_path_factory.mktemp(request.param)
    base = (save_masked_model if request.param == "masked" else save_causal_model)(root / "base")
    table = rows()
    if request.param == "causal":
        table = table[table["label_class"] != "N"]
    ours = our_trainer(
        base, root / "ours", table, {"eval_neutral_data": NEUTRAL}, **ARGS, compat="gradiend-0.2"
    ).train()
    shutil.copytree(root / "ours", root / "theirs")
    theirs = reference_trainer(base, root / "theirs", table, {"eval_neutral_data": NEUTRAL}, **ARGS, use_cache=True)
    theirs.train()  # finds the model
    assert theirs.get_model().gradiend.input_dim == len(ours.get_model())
    return request.param, ours, theirs


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    found = {f"{d}|{c}": p for d, by_class in entry["probs_by_dataset"].items() for c, p in by_class.items()}
    found |= {f"strengthen {c}": p for c, p in entry["probs"].items()}
    found |= {f"own {c}": p for c, p in entry["probs_factual"].items()}
    return found | {name: value for name, value in entry["lms"].items() if value is not None}


@pytest.mark.parametrize("policy", [LMSThresholdPolicy(0.9), LMSTimesMetricPolicy()], ids=["threshold", "product"])
@pytest.mark.parametrize("strengthen", [True, False])
def test_evaluate_decoder__every_point_and_the_selected_ones_agree(pair, policy, strengthen):
    """A wrong spelling, place, row, hidden token, sign of the factor or rule of selection fails."""
    _, ours, theirs = pair
    asked = {"lrs": RATES, "use_cache": False, "selector": policy, "increase_target_probabilities": strengthen}
    expected, found = theirs.evaluate_decoder(**asked), ours.evaluate_decoder(**asked)
    assert expected["grid"].keys() == found["grid"].keys()
    largest = 0.0
    for point, entry in expected["grid"].items():
        one, two = numbers(entry), numbers(found["grid"][point])
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-5, abs=TOLERANCE), (point, name)
            largest = max(largest, abs(two[name] - value) / max(1.0, abs(value)))
    print(f"largest difference of {len(found['grid'])} points: {largest:.1e}")
    for name in ("M", "F") if strengthen else ("M_weaken", "F_weaken"):
        one, two = expected[name], found[name]
        assert (one["feature_factor"], one["learning_rate"]) == (two["feature_factor"], two["learning_rate"])
        assert one["value"] == pytest.approx(two["value"], rel=1e-5) and one["strengthen"] == two["strengthen"]
        assert (one["lms"], one["base_lms"]) == pytest.approx((two["lms"], two["base_lms"]), rel=1e-5)


@pytest.mark.parametrize("part", ["decoder", "decoder-weight", "decoder-bias", "encoder-weight"])
def test_rewrite__weights_agree(pair, part):
    _, ours, theirs = pair
    changed = theirs.get_model().rewrite_base_model(learning_rate=0.3, feature_factor=-1.0, part=part)
    mine = ours.get_model().rewrite_base_model(0.3, -1.0, part)
    expected = dict(changed.named_parameters())
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)


def test_kept_points__are_read_by_the_reference(pair):
    """The files that we leave are those that it looks for: it scores nothing itself."""
    _, ours, theirs = pair
    found = ours.evaluate_decoder(lrs=RATES, use_cache=False)
    for name in ("decoder_grid_cache.json", "decoder"):
        target = Path(theirs.experiment_dir) / name
        shutil.rmtree(target, ignore_errors=True) if target.is_dir() else target.unlink(missing_ok=True)
    shutil.copytree(Path(ours.experiment_dir) / "decoder", Path(theirs.experiment_dir) / "decoder")
    theirs.evaluate_base_model, scores = None, theirs.evaluate_base_model
    try:
        shutil.copy(Path(ours.experiment_dir) / "decoder_grid_cache.json", theirs.experiment_dir)
        expected = theirs.evaluate_decoder(lrs=RATES, use_cache=True)
    finally:
        theirs.evaluate_base_model = scores
    for name in ("M", "F"):
        assert expected[name]["learning_rate"] == found[name]["learning_rate"]


def test_analysis_between_models__works_in_the_reference(tmp_path):
    """Two promoted models of ours, opened there: overlap of their most important weights, and similarity."""
    base = save_masked_model(tmp_path / "base")
    models = {}
    for name, seed in (("one", 0), ("two", 5)):
        our_trainer(base, tmp_path / name, rows(), {}, **{**ARGS, "seed": seed}).train()
        models[name] = TextPredictionModelWithGradiend.from_pretrained(str(tmp_path / name / "model"))
    overlap = tmp_path / "overlap.png"
    gradiend.plot_topk_overlap_heatmap(models, topk=50, part="decoder-weight", show=False, output_path=str(overlap))
    assert overlap.stat().st_size > 5_000
    similarity = gradiend.compute_similarity_matrix(models, part="decoder-weight")
    heatmap = tmp_path / "similarity.png"
    gradiend.plot_similarity_heatmap(models, part="decoder-weight", show=False, output_path=str(heatmap))
    assert heatmap.stat().st_size > 5_000 and similarity is not None
    own = [gradiend_dist.ModelWithGradiend.from_pretrained(tmp_path / name / "model") for name in models]
    expected = [model.get_topk_weights(part="decoder-weight", topk=50) for model in models.values()]
    assert [set(model.get_topk_weights("decoder-weight", 50)) for model in own] == [set(top) for top in expected]
