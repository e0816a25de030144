"""Class probabilities and language-model scores against plain loops; who is asked for; which point is selected."""

from __future__ import annotations

import math
import random

import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError, demo
from gradiend_dist.evaluation.decoder import Words, spellings
from gradiend_dist.evaluation.harm import causal_score, masked_score
from gradiend_dist.evaluation.selection import (
    BaseContext,
    Candidate,
    LMSThresholdPolicy,
    LMSTimesMetricPolicy,
    default_policy,
    strengthening_factor,
    summarize,
    tell_edges,
)
from gradiend_dist.gradients.cloze import CausalObjective, MaskedObjective, causal_text_questions, masked_text_questions

RATES = [0.5, 0.05]


def make(model, root, frames=None, *, neutral=True, args=None, **fields):
    frames = {name: frame for name, frame in (frames or demo.feature_data()).items() if name != "N"}
    arguments = {"max_steps": 20, "eval_steps": 10, "train_batch_size": 8, "learning_rate": 1e-3, "max_seeds": 1}
    arguments["encoder_eval_max_size"] = 10  # half of a training was the evaluation of its encoder
    arguments |= {"pre_prune_config": PrePruneConfig(n_samples=4, topk=0.1, source="diff"), **(args or {})}
    if neutral:
        fields["eval_neutral_data"] = demo.neutral_data()[:40]
    arguments["experiment_dir"] = str(root)
    return TextPredictionTrainer(
        str(model), data=frames, target_classes=["M", "F"], args=TrainingArguments(**arguments), **fields
    )


@pytest.fixture(scope="module", params=["masked", "causal"])
def trained(request, masked_lm, causal_lm, tmp_path_factory):
    model = masked_lm if request.param == "masked" else causal_lm
    return make(model, tmp_path_factory.mktemp(request.param)).train()


# --- probabilities


def naive_probability(model, objective, template: str, word: str) -> float:
    """The tokens of this spelling, one row, one forward pass; pieces multiplied."""
    cloze = objective.whole_word(template, word)
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([cloze.input_ids])).logits[0].double().log_softmax(-1)
    return math.exp(sum(logs[p, label].item() for p, label in zip(cloze.positions, cloze.labels, strict=True)))


def naive_means(trained, model) -> dict[str, dict[str, float]]:
    """Mean probabilities of a model by class of the rows and of the words, in a loop over rows and spellings."""
    session, rows = trained.session, trained.data.rows("test")
    words = {"M": {"he", "He", "HE"}, "F": {"she", "She", "SHE"}}
    expected = {name: {"M": [], "F": []} for name in ("M", "F")}
    for row in rows.itertuples():
        for name, variants in words.items():
            seen = {}
            for word in sorted(variants):
                cloze = session.objective.whole_word(row.masked, word)
                if len(cloze.labels) == 1:
                    seen[cloze] = naive_probability(model, session.objective, row.masked, word)
            expected[row.factual_class][name].append(sum(seen.values()))
    return {dataset: {c: float(np.mean(v)) for c, v in by_class.items()} for dataset, by_class in expected.items()}


def test_probabilities__equal_a_loop_over_rows_and_spellings(trained):
    base = trained.evaluate_decoder(lrs=RATES, use_cache=False)["grid"]["base"]
    for dataset, by_class in naive_means(trained, trained.session.base_model).items():
        assert base["probs_by_dataset"][dataset] == pytest.approx(by_class, rel=1e-5)
    assert base["probs"] == {"M": base["probs_by_dataset"]["F"]["M"], "F": base["probs_by_dataset"]["M"]["F"]}
    assert base["probs_factual"] == {name: base["probs_by_dataset"][name][name] for name in ("M", "F")}


def test_points__are_scores_of_the_rewritten_copies(trained):
    """What is scored in place is the model that rewrite_base_model returns, and no longer the base model."""
    found = trained.evaluate_decoder(lrs=RATES, use_cache=False)["grid"]
    for point in ((-1.0, 0.5), (1.0, 0.05)):
        expected = naive_means(trained, trained.get_model().rewrite_base_model(point[1], point[0]))
        for dataset, by_class in expected.items():
            assert found[point]["probs_by_dataset"][dataset] == pytest.approx(by_class, rel=1e-4, abs=1e-7)
            assert found["base"]["probs_by_dataset"][dataset] != pytest.approx(by_class, rel=1e-3)


def test_given_frames__are_those_that_are_taken_by_default(trained):
    found = trained.evaluate_decoder(lrs=RATES, use_cache=False)
    asked = {"training_like_df": trained.data.rows("test"), "neutral_df": trained.data.neutral}
    assert trained.evaluate_decoder(lrs=RATES, use_cache=False, **asked) == found
    with pytest.raises(UserError, match="training_like_df has no column 'masked'"):
        trained.evaluate_decoder(training_like_df=trained.data.rows("test").drop(columns="masked"))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tokens", ["byte_level", "metaspace"])
def test_spellings__of_a_word_start_in_causal_models(tokens, side):
    """After a space the word's token carries the mark; both cases count where both are one token."""
    tokenizer = (tiny.byte_level_tokenizer if tokens == "byte_level" else tiny.metaspace_tokenizer)(padding_side=side)
    objective = CausalObjective(tokenizer, 40, "[MASK]", as_reference=False)
    (cloze,) = spellings(objective, "The man said [MASK] was old", ["he"])
    assert tokenizer.convert_ids_to_tokens(list(cloze.labels)) in (["Ġhe"], ["▁he"])


def test_spellings__of_a_word_start_in_masked_models():
    tokenizer = tiny.byte_level_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    objective = MaskedObjective(tokenizer, 40, "[MASK]")
    assert [
        tokenizer.convert_ids_to_tokens(list(c.labels)) for c in spellings(objective, "said [MASK] was", ["he"])
    ] == [["Ġhe"]]
    assert [tokenizer.convert_ids_to_tokens(list(c.labels)) for c in spellings(objective, "[MASK] was", ["he"])] == [
        ["he"]
    ]


@pytest.mark.parametrize("as_reference", [False, True])
def test_spellings__a_case_that_the_tokenizer_does_not_know_is_no_spelling(as_reference):
    """[UNK] is one token, and the probability of anything unknown is not that of the word."""
    tokenizer = tiny.wordpiece_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None  # it knows lower case alone
    objective = MaskedObjective(tokenizer, 40, "[MASK]", as_reference=as_reference)
    (cloze,) = spellings(objective, "the man said [MASK] .", ["he"])
    assert tokenizer.convert_ids_to_tokens(list(cloze.labels)) == ["he"]


def test_spellings__a_word_of_several_tokens_is_taken_as_written():
    objective = MaskedObjective(tiny.wordpiece_tokenizer(), 40, "[MASK]")
    (cloze,) = spellings(objective, "the man said [MASK] .", ["Themselves"])
    assert len(cloze.labels) == len(cloze.positions) == 3


def test_row_wise__asks_each_row_for_its_own_words(masked_lm, tmp_path):
    trainer = make(masked_lm, tmp_path, decoder_eval_targets="label", decoder_eval_export_row_wise_csv=True).train()
    base = trainer.evaluate_decoder(lrs=RATES)["grid"]["base"]
    table = pd.read_csv(tmp_path / "decoder_row_wise_scores.csv")
    for name, other in (("M", "F"), ("F", "M")):
        mine = table[table["dataset_class"] == name]
        assert base["probs_by_dataset"][name][name] == pytest.approx(mine["P_factual"].mean(), rel=1e-6)
        assert base["probs_by_dataset"][name][other] == pytest.approx(mine["P_alternative"].mean(), rel=1e-6)
        assert base["probs"][other] == base["probs_by_dataset"][name][other], "strengthening counts on the other's rows"


def test_shared_words__are_asked_for_row_by_row(masked_lm, tmp_path):
    frames = demo.feature_data()
    frames["F"].loc[frames["F"].index[:3], "label"] = "they"
    frames["M"].loc[frames["M"].index[:3], "label"] = "they"
    trainer = make(masked_lm, tmp_path, frames).train()
    assert Words.of(trainer.data, trainer.config).row_wise
    shared = trainer.evaluate_decoder(lrs=RATES)
    assert shared == make(masked_lm, tmp_path, frames, decoder_eval_targets="label").evaluate_decoder(lrs=RATES)


def test_targets__a_class_without_words_or_unknown_is_refused(masked_lm, tmp_path):
    for targets, words in (({"M": ["he"]}, "no words for 'F'"), ({"X": ["he"]}, "class 'X', the data has")):
        trainer = make(masked_lm, tmp_path, decoder_eval_targets=targets)
        trainer.train(use_cache=True)
        with pytest.raises(UserError, match=words):
            trainer.evaluate_decoder()


# --- language-model score


def test_masked_texts__hide_a_share_of_the_words_and_no_special_token():
    tokenizer = tiny.wordpiece_tokenizer()
    texts = [tiny.sentence(n, seed=n) for n in range(1, 30)]
    clozes = [cloze for _, cloze in masked_text_questions(tokenizer, texts, 40, set(), hide_special=False)]
    special = set(tokenizer.all_special_ids)
    assert len(clozes) == len(texts)
    for text, cloze in zip(texts, clozes, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert not special & set(cloze.labels)
        assert len(cloze.labels) == max(1, int(0.15 * (len(ids) - 2)))
        hidden = [i for i, (a, b) in enumerate(zip(ids, cloze.input_ids, strict=True)) if a != b]
        assert sorted(cloze.positions) == hidden
        assert [ids[place] for place in cloze.positions] == list(cloze.labels)
    again = [cloze for _, cloze in masked_text_questions(tokenizer, texts, 40, set(), hide_special=False)]
    random.seed(99)
    assert clozes == again, "the same tokens for every model"


def test_ignored_words__are_not_counted():
    tokenizer = tiny.wordpiece_tokenizer()
    texts = [tiny.sentence(20, seed=n) for n in range(20)]
    ignored = set(tokenizer("he she they", add_special_tokens=False)["input_ids"])
    for make_questions in (masked_text_questions, causal_text_questions):
        clozes = [cloze for _, cloze in make_questions(tokenizer, texts, 40, ignored, hide_special=False)]
        assert clozes and not ignored & {label for cloze in clozes for label in cloze.labels}


def test_masked_score__is_sklearns():
    """Against the definitions, class by class."""
    tokenizer = tiny.wordpiece_tokenizer()
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(5, 12, 200), rng.integers(5, 14, 200)
    found = masked_score(tokenizer, labels, predicted)
    weighted = {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    for token in set(labels.tolist()):
        hit = ((labels == token) & (predicted == token)).sum()
        support, chosen = (labels == token).sum(), (predicted == token).sum()
        precision, recall = (hit / chosen if chosen else 0.0), hit / support
        f1 = 2 * precision * recall / (precision + recall) if hit else 0.0
        for name, value in (("precision", precision), ("recall", recall), ("f1", f1)):
            weighted[name] += value * support / len(labels)
    assert found["accuracy"] == found["lms"] == (labels == predicted).mean()
    assert {name: found[name] for name in weighted} == pytest.approx(weighted)


@pytest.mark.parametrize("trained", ["causal"], indirect=True)
def test_causal_score__is_the_mean_likelihood_of_a_token(trained):
    session = trained.session
    special, total, count = set(session.tokenizer.all_special_ids), 0.0, 0
    for text in trained.data.neutral["text"]:
        ids = torch.tensor([session.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            logs = session.base_model(input_ids=ids).logits[0].double().log_softmax(-1)
        for place, token in enumerate(ids[0, 1:].tolist()):
            if token not in special:
                total, count = total + logs[place, token].item(), count + 1
    found = trained.evaluate_decoder(lrs=RATES, use_cache=False)["grid"]["base"]["lms"]
    assert found["total_tokens"] == count
    assert found["lms"] == pytest.approx(1 / (1 - total / count), rel=1e-5)


def test_causal_score__of_a_broken_model_is_zero():
    assert causal_score(np.array([-1e6, -1e6]))["lms"] == 0.0
    assert causal_score(np.array([float("nan"), -1.0]))["lms"] == 0.0


# --- selection


def candidate(rate: float, lms: float, gain: float, factor: float = 1.0) -> Candidate:
    return Candidate({"feature_factor": factor, "learning_rate": rate}, lms, {"M": gain})


def test_policies__take_what_they_say():
    candidates = [candidate(0.1, 0.995, 0.2), candidate(1.0, 0.991, 0.5), candidate(10.0, 0.5, 0.9)]
    base = BaseContext(1.0)
    assert LMSThresholdPolicy().select("M", candidates, base) is candidates[1]
    assert LMSThresholdPolicy(0.4).select("M", candidates, base) is candidates[2]
    assert LMSThresholdPolicy(1.0).select("M", candidates, base) is candidates[0], "none keeps it: the smallest step"
    assert LMSTimesMetricPolicy().select("M", candidates, base) is candidates[1]
    assert LMSThresholdPolicy().select("M", [candidate(0.0, 0.1, 1.0)], base) is None


def test_saturation__takes_the_smallest_step_that_is_as_good():
    """Beyond it nothing is won and something else is lost; a metric of the user's own may be negative."""
    base, gains = BaseContext(1.0), {0.1: 0.5, 0.2: 0.985, 0.5: 0.992, 1.0: 0.997, 5.0: 1.0}
    candidates = [candidate(rate, 0.1 if rate == 5.0 else 1.0, gain) for rate, gain in gains.items()]
    for saturation, rate in ((1.0, 1.0), (0.999, 1.0), (0.99, 0.5), (0.98, 0.2), (0.5, 0.1)):
        for order in (candidates, candidates[::-1]):
            chosen = LMSThresholdPolicy(saturation=saturation).select("M", order, base)
            assert chosen is not None and chosen.learning_rate == rate, saturation
    losses = [candidate(-0.1, 1.0, -8.0), candidate(-1.0, 1.0, -4.01), candidate(-2.0, 1.0, -4.0)]
    assert LMSThresholdPolicy(saturation=0.99).select("M", losses, base) is losses[1]
    assert default_policy("plain", 0.9) == LMSThresholdPolicy(0.9)
    assert default_policy("tensor") == default_policy("curvature") == LMSThresholdPolicy(0.99, saturation=0.99)
    with pytest.raises(UserError, match=r"saturation=0 is not in \(0, 1\]"):
        LMSThresholdPolicy(saturation=0)


def test_factor__changes_its_sign_with_class_and_source():
    directions = {"M": 1, "F": -1}
    assert [strengthening_factor(directions, "alternative", name) for name in "MF"] == [1.0, -1.0]
    assert [strengthening_factor(directions, "factual", name) for name in "MF"] == [-1.0, 1.0]


def entry(factor, rate, m_on_f, f_on_m, lms=1.0):
    own = {"M": 1 - f_on_m, "F": 1 - m_on_f}
    point = "base" if factor is None else {"feature_factor": factor, "learning_rate": rate}
    return {"id": point, "lms": {"lms": lms}, "probs": {"M": m_on_f, "F": f_on_m}, "probs_factual": own}


def test_summary__only_points_that_push_the_right_way_compete():
    """The largest value for M stands at the factor that is there to strengthen F."""
    grid = {"base": entry(None, None, 0.1, 0.1)}
    for factor, rate, m_on_f, f_on_m in ((1.0, 1.0, 0.6, 0.1), (1.0, 2.0, 0.7, 0.0), (-1.0, 1.0, 0.9, 0.3)):
        grid[factor, rate] = entry(factor, rate, m_on_f, f_on_m)
    factors = {"M": 1.0, "F": -1.0}
    found = summarize(grid, ["M", "F", "M_weaken", "F_weaken"], LMSThresholdPolicy(), factors)
    assert found["M"]["id"] == {"feature_factor": 1.0, "learning_rate": 2.0} and found["M"]["value"] == 0.7
    assert found["F"]["id"] == {"feature_factor": -1.0, "learning_rate": 1.0}
    assert found["M_weaken"]["feature_factor"] == -1.0 and not found["M_weaken"]["strengthen"]
    assert found["F_weaken"]["learning_rate"] == 2.0
    with pytest.raises(UserError, match="summary_metrics has 'X'"):
        summarize(grid, ["X"], LMSThresholdPolicy(), factors)


# --- the call


@pytest.mark.parametrize(("rate", "told"), [(1e-3, "smallest"), (1e-2, None), (1e-1, "largest")])
def test_best_point_at_the_edge_of_a_grid__is_told(rate, told, caplog):
    tell_edges({"M": {"learning_rate": rate}}, [1e-1, 1e-2, 1e-3])
    assert ("lie beyond it" in caplog.text) == (told is not None)
    assert told is None or f"at the {told} learning rate of the grid" in caplog.text


def test_wrong_arguments__are_refused_before_anything_is_scored(trained, monkeypatch):
    monkeypatch.setattr("gradiend_dist.evaluation.decoder_evaluation.ModelScores", None)
    for asked, words in (
        ({"target_class": "X"}, "target_class='X' is not a target class: choose M or F"),
        ({"feature_factors": [1.0]}, r"feature_factors=\[1.0\] has none that pushes towards 'F': include -1"),
        ({"feature_factors": []}, "feature_factors"),
        ({"part": "nothing"}, "part='nothing' is not known"),
        ({"scaling": "nothing"}, "scaling='nothing' is not known: choose one of plain, tensor, curvature"),
        ({"max_size_neutral": -1}, "max_size_neutral=-1 must be at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            trained.evaluate_decoder(**asked)


def test_one_class__needs_one_factor(trained):
    found = trained.evaluate_decoder(lrs=RATES, target_class="F", use_cache=False)
    assert "M" not in found and {point[0] for point in found["grid"] if point != "base"} == {-1.0}
    weakened = trained.evaluate_decoder(lrs=RATES, target_class="F", increase_target_probabilities=False)
    assert weakened.keys() == {"F_weaken", "grid"} and weakened["F_weaken"]["feature_factor"] == 1.0


def test_base_model__is_untouched_by_the_grid(trained):
    before = {name: p.detach().clone() for name, p in trained.session.base_model.named_parameters()}
    trained.evaluate_decoder(lrs=[100.0, 0.001], use_cache=False)
    for name, parameter in trained.session.base_model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def count_measured(monkeypatch) -> list[None]:
    from gradiend_dist.evaluation.decoder import ModelScores

    calls: list[None] = []
    plain = ModelScores._entry
    monkeypatch.setattr(ModelScores, "_entry", lambda self, texts: calls.append(None) or plain(self, texts))
    return calls


def test_kept_points__are_used_while_nothing_has_changed(masked_lm, tmp_path, monkeypatch):
    trainer = make(masked_lm, tmp_path).train()
    first = trainer.evaluate_decoder(lrs=RATES)
    calls = count_measured(monkeypatch)
    again = make(masked_lm, tmp_path).evaluate_decoder(lrs=RATES, use_cache=True)
    assert not calls and again == first
    make(masked_lm, tmp_path).evaluate_decoder(lrs=[*RATES, 0.01], use_cache=True)
    assert len(calls) == 2, "only the new points"
    make(masked_lm, tmp_path).evaluate_decoder(lrs=RATES, use_cache=True, increase_target_probabilities=False)
    assert len(calls) == 2, "weakening is read from the same points"
    for changed in (
        {"decoder_eval_targets": {"M": ["he", "him"], "F": ["she"]}},
        {"decoder_eval_ignore_tokens": ["the"]},
        {"neutral": False},
    ):
        calls.clear()
        make(masked_lm, tmp_path, **changed).evaluate_decoder(lrs=RATES, use_cache=True)
        assert len(calls) == 5, changed
    calls.clear()
    trainer.evaluate_decoder(lrs=RATES, use_cache=True, part="decoder-weight")
    assert len(calls) == 3, "another vector, which has no factor"
    calls.clear()
    other = make(masked_lm, tmp_path, args={"seed": 7})
    other.train()
    other.evaluate_decoder(lrs=RATES, use_cache=True)
    assert len(calls) == 5, "another model in the same directory"


def test_stopped_grid__goes_on_with_the_next_point(masked_lm, tmp_path, monkeypatch):
    from gradiend_dist.evaluation.decoder import ModelScores

    trainer = make(masked_lm, tmp_path).train()
    expected = trainer.evaluate_decoder(lrs=RATES, use_cache=False)
    for file in (tmp_path / "decoder").iterdir():
        file.unlink()
    before = {name: p.detach().clone() for name, p in trainer.session.base_model.named_parameters()}
    plain, calls = ModelScores._entry, []

    def stopped(self, texts):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, texts)

    monkeypatch.setattr(ModelScores, "_entry", stopped)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate_decoder(lrs=RATES, use_cache=True)
    for name, parameter in trainer.session.base_model.named_parameters():
        assert torch.equal(parameter, before[name]), "the base model is itself again"
    found = trainer.evaluate_decoder(lrs=RATES, use_cache=True)
    assert len(calls) == 3 + 3 and found == expected


def test_scalings__do_not_share_points(masked_lm, tmp_path, monkeypatch):
    """Fails for a file name, or a list of what a point depends on, that leaves the scaling out."""
    trainer = make(masked_lm, tmp_path).train()
    calls, found, files = count_measured(monkeypatch), {}, {}
    for scaling in ("plain", "tensor", "curvature"):
        seen = set((tmp_path / "decoder").iterdir()) if found else set()
        found[scaling] = trainer.evaluate_decoder(lrs=RATES, use_cache=True, scaling=scaling)
        files[scaling] = {path.name for path in set((tmp_path / "decoder").iterdir()) - seen}
        assert len(files[scaling]) == 5 and len(calls) == 5, "the base model and four points of its own"
        calls.clear()
        for name in "MF":
            assert found[scaling][name].get("scaling", "plain") == scaling
            assert ("scaling" in found[scaling][name]) == (scaling != "plain"), "plain results are the reference's"
    assert all(name.startswith(("base_split_", "split_")) for name in files["plain"])
    entries = [found[scaling]["grid"][1.0, 0.05]["probs_by_dataset"] for scaling in found]
    assert entries[0] != entries[1] != entries[2] != entries[0]
    for scaling, before in found.items():
        assert trainer.evaluate_decoder(lrs=RATES, use_cache=True, scaling=scaling) == before and not calls
    for path in (tmp_path / "decoder").glob("tensor_*"):  # as if the names were the same
        (tmp_path / "decoder" / path.name.removeprefix("tensor_")).write_bytes(path.read_bytes())
        (tmp_path / "decoder" / path.name.replace("tensor_", "curvature_")).write_bytes(path.read_bytes())
    again = make(masked_lm, tmp_path).evaluate_decoder(lrs=RATES, use_cache=True, scaling="curvature")
    assert again == found["curvature"] and calls


@pytest.mark.parametrize("scaling", ["tensor", "curvature"])
def test_scaled_points__are_scores_of_the_rewritten_copies(trained, scaling, tmp_path):
    """In memory, as saved, and at the same point without the results."""
    found = trained.evaluate_decoder(lrs=RATES, scaling=scaling, use_cache=True)
    chosen = found["F"]
    with pytest.raises(UserError, match=f"scaling=plain is not what decoder_results are about, which is {scaling}"):
        trained.rewrite_base_model(found, "F", scaling="plain")
    asked = {"target_class": "F", "learning_rate": chosen["learning_rate"]}
    models = [
        trained.rewrite_base_model(found, "F", force=True),
        trained.rewrite_base_model(found, "F", output_dir=tmp_path / "f", force=True),
        trained.rewrite_base_model(**asked, scaling=scaling),
        trained.rewrite_base_model(**asked),
    ]
    first, *same, plain = [torch.cat([p.detach().view(-1) for p in model.parameters()]) for model in models]
    for other in same:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-6)
    assert (plain - first).abs().max() > 1e-3
    point = chosen["feature_factor"], chosen["learning_rate"]
    for dataset, by_class in naive_means(trained, models[0]).items():
        assert found["grid"][point]["probs_by_dataset"][dataset] == pytest.approx(by_class, rel=1e-4, abs=1e-7)
    assert f"| scaled by | {scaling}" in (tmp_path / "f" / "README.md").read_text()


# --- what it depends on


class Ranks:
    """Stands in for the sum over ranks: adds up what every part contributes."""

    def __init__(self) -> None:
        self.total = 0

    def total_on_host(self, counts: torch.Tensor) -> torch.Tensor:
        self.total = self.total + counts
        return counts.copy_(self.total)


@pytest.mark.parametrize("latent_dim", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 11])
def test_content_hash__does_not_depend_on_how_the_model_is_cut(world_size, latent_dim):
    """And does on every entry and its place."""
    from gradiend_dist.distributed.comm import Comm
    from gradiend_dist.model.gradiend import GradiendModel
    from gradiend_dist.space import Slices
    from gradiend_dist.storage import fingerprint as cache

    def model(slices=None):
        return GradiendModel(
            10,
            latent_dim,
            slices=slices,
            device="cpu",
            generator=torch.Generator().manual_seed(4),
            activation_decoder="id",
        )

    expected = cache.content_hash(model(), Comm())
    ranks = Ranks()
    found = [cache.content_hash(model(Slices.even(10, r, world_size)), ranks) for r in range(world_size)]
    assert found[-1] == expected, "the last one has the sum of all"
    seen = {expected}
    for name, tensor in model().state_dict().items():
        for i in range(tensor.numel()):
            changed = model()
            changed.state_dict()[name].view(-1)[i] += 1e-6
            seen.add(cache.content_hash(changed, Comm()))
    assert len(seen) == 1 + sum(tensor.numel() for tensor in model().state_dict().values())
    swapped = model()
    swapped.encoder_weight[0, :2] = swapped.encoder_weight[0, :2].flip(0)
    assert cache.content_hash(swapped, Comm()) not in seen


def test_saved_model__says_itself_what_it_was_trained_on(masked_lm, tmp_path):
    """Opened with another order of classes: the factor that strengthens F is the trained one's."""
    make(masked_lm, tmp_path).train()
    frames = {name: frame for name, frame in demo.feature_data().items() if name != "N"}
    args = TrainingArguments(experiment_dir=str(tmp_path), source="factual")
    other = TextPredictionTrainer(str(masked_lm), data=frames, target_classes=["F", "M"], args=args)
    assert other.strengthening_factors() == {"F": -1.0, "M": 1.0}
    assert other.get_model().source == "alternative"
    assert other.strengthening_factors() == {"F": -1.0, "M": 1.0}, "the same from the model in memory"


def test_other_vectors__are_scored_once_for_each_rate_and_claim_no_class(masked_lm, tmp_path):
    trainer = make(masked_lm, tmp_path).train()
    found = trainer.evaluate_decoder(lrs=[-0.5, 0.5], part="decoder-weight", selector=LMSThresholdPolicy(0.0))
    assert list(found["grid"]) == ["base", (1.0, -0.5), (1.0, 0.5)]
    assert found["M"]["learning_rate"] * found["F"]["learning_rate"] < 0, "one rate pushes towards each class"
    with pytest.raises(UserError, match="part=decoder is not what decoder_results are about"):
        trainer.rewrite_base_model(found, "F", part="decoder")
    changed = trainer.rewrite_base_model(found, "F")
    expected = trainer.get_model().rewrite_base_model(found["F"]["learning_rate"], part="decoder-weight")
    for one, two in zip(changed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(UserError, match="feature_factors has no effect on part=decoder-weight"):
        trainer.evaluate_decoder(part="decoder-weight", feature_factors=[1.0])
    with pytest.raises(UserError, match="part='decoder_weight' is not known"):
        trainer.rewrite_base_model(target_class="F", learning_rate=0.1, part="decoder_weight")
