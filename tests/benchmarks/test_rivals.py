"""What `benchmarks/effect.py` compares: rivals leave the model as it was, and one ruler measures all contestants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from gradiend_dist import demo

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rivals
from effect_cases import GENDERED, Case, neutral_beginnings, with_alternative
from rivals import Rivals, Ruler, Steering, WeightChange, copied, difference, layers_of

MAX_HARM = 0.02


@pytest.fixture(params=["masked_lm", "causal_lm"])
def case(request: pytest.FixtureRequest) -> Case:
    frames = demo.feature_data(rows_per_class=40)
    rows = pd.concat([with_alternative(frames[name], name) for name in ("M", "F")], ignore_index=True)
    texts = demo.neutral_data()["text"].tolist()
    return Case("small", request.getfixturevalue(request.param), rows, tuple(texts[:40]), tuple(texts[40:80]), ())


def a_weight_change(model: Any) -> WeightChange:
    torch.manual_seed(0)
    return WeightChange(model, {name: torch.randn_like(weight) for name, weight in model.named_parameters()})


def a_steering(model: Any) -> Steering:
    layer = layers_of(model)[-1]
    return Steering(layer, torch.linspace(-1.0, 1.0, model.config.hidden_size), typical_norm=1.0)


@pytest.mark.parametrize("make", [a_weight_change, a_steering])
def test_change__of_strength_0_is_the_base_model(case: Case, tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """A change that moves the model although its strength is 0, or that stays in it, gives every rival a false base."""
    trainer = case.trainer(tmp_path)
    ruler = Ruler(trainer, "validation", case.search)
    change = make(trainer.session.base_model)
    with change.at(0.0):
        still = ruler.trial("M", 0.0)
    assert (still.harm, still.error, still.value) == (0.0, 0.0, ruler.base["M"])
    with change.at(0.1 * change.unit):
        assert ruler.trial("M", 0.1).harm != 0.0
    after = ruler.trial("M", 0.0)
    assert (after.harm, after.value) == (0.0, ruler.base["M"])


def test_rivals__keep_to_the_allowed_harm_and_leave_the_model_alone(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuning that is not taken back would be in the next one's base; a strength beyond the allowed harm, or a
    value that was not measured at it, would make a rival look better than it is."""
    monkeypatch.setattr(rivals, "LEARNING_RATES", (1e-3,))
    trainer = case.trainer(tmp_path)
    model = trainer.session.base_model
    before = copied(dict(model.named_parameters()))
    ruler = Ruler(trainer, "validation", case.search)
    contest = Rivals(trainer, ruler, max_harm=MAX_HARM, steps=6, seed=0)
    gains = []
    for chosen_by_class in (contest.steering(), contest.contrastive(), contest.swapped()):
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert not any(weight.requires_grad and weight.grad is not None for weight in model.parameters())
        for name, chosen in chosen_by_class.items():
            with chosen.change.at(chosen.strength):
                trial = ruler.trial(name, 1.0)
            assert trial.harm <= MAX_HARM
            assert trial.value == pytest.approx(chosen.value, rel=1e-5)
            with chosen.change.at(0.0):
                assert ruler.trial(name, 0.0).value == ruler.base[name]
            gains.append(chosen.value / ruler.base[name])
    assert min(gains) >= 1.0 and max(gains) > 1.5  # and at least one of them does something


def test_ruler__measures_harm_as_the_search_of_this_package_does(case: Case, tmp_path: Path) -> None:
    """Rivals and this package are compared at equal harm: two measures of it would make the table worthless."""
    trainer = case.trainer(tmp_path, max_steps=0, train_batch_size=8)
    trainer.train()
    texts = pd.DataFrame({"text": case.held_out})
    found = trainer.evaluate_decoder(split="validation", neutral_df=texts)["M"]
    ruler = Ruler(trainer, "validation", case.held_out[::2])  # the half that a search is given
    assert ruler.base["M"] == pytest.approx(found["base_value"], rel=1e-6)
    model = trainer.session.base_model
    rewritten = trainer.rewrite_base_model(
        target_class="M", **{name: found[name] for name in ("learning_rate", "feature_factor", "scaling")}
    )
    change = WeightChange(model, difference(rewritten, copied(dict(model.named_parameters()))))
    with change.at(1.0):
        trial = ruler.trial("M", 1.0)
    assert trial.harm == pytest.approx(found["harm"], abs=1e-5)
    assert trial.error == pytest.approx(found["harm_error"], abs=1e-5)
    assert trial.value == pytest.approx(found["value"], rel=1e-4)


def test_neutral_beginnings__end_before_the_first_gendered_sentence() -> None:
    """A neutral text with "she" in it would call the very change that is asked for a harm."""
    told = ["The tree was very big and old. The sun was warm. Lily saw it. She was happy. And", "The cat ran. He"]
    assert list(neutral_beginnings(told)) == ["The tree was very big and old. The sun was warm."]
    assert GENDERED.search("The Queen sat.") and not GENDERED.search("The shelf, the theme and a human.")
