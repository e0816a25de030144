"""Scaled rewriting directions against a dense computation by plain autograd; what they are measured on; wrong input."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
import tiny
import torch

from gradiend_dist import TextPredictionTrainer, TrainingArguments, UserError
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.evaluation.curvature import ByCurvature, curvature_items, curvature_of, scaling_in_place
from gradiend_dist.evaluation.selection import LMSThresholdPolicy
from gradiend_dist.evaluation.texts import curvature_texts
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting import move as rewriting
from gradiend_dist.rewriting.move import ByTensor, InPlace, VectorsInMemory, direction, rewrite, scaled_direction
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import ParameterSpace, Weight

WORDS = {"M": "he", "F": "she"}


def model_of(family: str, keep: int | None = None) -> ModelWithGradiend:
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    base = tiny.base_model(family, len(tokenizer))
    space = ParameterSpace.of_model(base)
    if keep is not None:
        chosen = torch.randperm(space.size, generator=torch.Generator().manual_seed(3))[:keep].sort().values
        space = space.select(chosen)
    gradiend = ParamMappedGradiendModel(space, generator=torch.Generator().manual_seed(1), activation_decoder="tanh")
    return ModelWithGradiend(base, gradiend, tokenizer)


def trainer_of(model: ModelWithGradiend, num_neutral: int | None = 40, **fields) -> TextPredictionTrainer:
    frames = {
        name: pd.DataFrame(
            [
                {"masked": f"{tiny.sentence(5, seed=i)} [MASK] {tiny.sentence(3, seed=50 + i)}", "label": word,
                 "split": "train" if i < 12 else "test"}
                for i in range(18)
            ]
        )
        for name, word in WORDS.items()
    }  # fmt: skip
    if num_neutral is not None:
        texts = [tiny.sentence(12, seed=200 + i) for i in range(num_neutral)]
        fields["eval_neutral_data"] = pd.DataFrame({"text": texts})
    return TextPredictionTrainer(model, data=frames, target_classes=["M", "F"], args=TrainingArguments(), **fields)


def selected(model: ModelWithGradiend, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[w.name].reshape(-1)[w.flat_indices()] for w in model.gradiend.space.active()]).double()


def dense_curvature(trainer: TextPredictionTrainer, model: ModelWithGradiend) -> torch.Tensor:
    """Each text by itself: the mean loss over what is asked for, one forward pass for each reading, autograd."""
    session, total = trainer.session, 0.0
    items = curvature_items(session, trainer.config)
    for item in items:
        model.base_model.zero_grad()
        losses = []
        for row in item.rows:
            logs = model.base_model(input_ids=torch.tensor([row.factual.input_ids])).logits[0].log_softmax(-1)
            losses += [-logs[p, label] for p, label in zip(row.factual.positions, row.factual.labels, strict=True)]
        with torch.enable_grad():
            torch.stack(losses).mean().backward()
        gradients = {name: p.grad for name, p in model.base_model.named_parameters() if p.grad is not None}
        total = total + selected(model, gradients) ** 2 / len(items)
    model.base_model.zero_grad()
    assert isinstance(total, torch.Tensor) and len(items) == 13  # a third of 40
    return total


def dense(trainer: TextPredictionTrainer, model: ModelWithGradiend, scaling: str, factor: float) -> torch.Tensor:
    v = direction(VectorsInMemory(model.gradiend), slice(0, len(model)), Step(1.0, factor)).double()
    if scaling == "curvature":
        f = dense_curvature(trainer, model)
        damping = torch.empty_like(f)
        for w in model.gradiend.space.active():
            own = slice(w.offset, w.stop)
            damping[own] = 0.1 * max(f[own].mean(), 1e-4 * f.mean())
        s = v / (f + damping)
        return s * ((f * v**2).sum() / (f * s**2).sum()).sqrt()
    theta, s = selected(model, dict(model.base_model.named_parameters())).detach(), torch.empty_like(v)
    for w in model.gradiend.space.active():
        own = slice(w.offset, w.stop)
        s[own] = v[own] * theta[own].square().mean().sqrt() / v[own].square().mean().sqrt()
    return s * v.norm() / s.norm()


@pytest.mark.parametrize("scaling", ["tensor", "curvature"])
@pytest.mark.parametrize("keep", [None, 501])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_scaled_direction__is_the_dense_one(family, keep, scaling, monkeypatch):
    """In place, for good and as a vector; pieces end within weights. Fails for factors of another v, such as another
    factor's, where the activation is no identity and there is a bias."""
    monkeypatch.setattr(rewriting, "CHUNK", 77)
    model = model_of(family, keep)
    trainer = trainer_of(model)
    space, vectors = model.gradiend.space, VectorsInMemory(model.gradiend)
    before = {name: p.detach().clone() for name, p in model.base_model.named_parameters()}
    expected = {factor: dense(trainer, model, scaling, factor) for factor in (1.0, -0.3)}
    by = scaling_in_place(scaling, trainer.session, trainer.config, space)
    with InPlace(model.base_model, space.active(), vectors, by) as moved:
        for rate, factor in ((0.5, 1.0), (2.0, -0.3), (0.1, 1.0)):
            moved.move(Step(rate, factor))
            found = selected(model, dict(model.base_model.named_parameters())) - selected(model, before)
            torch.testing.assert_close(found, rate * expected[factor], rtol=1e-4, atol=3e-6)
            now = {name: p.detach().clone() for name, p in model.base_model.named_parameters()}
            moved.restore()
            copy = trainer.rewrite_base_model(learning_rate=rate, feature_factor=factor, scaling=scaling)
            for name, parameter in copy.named_parameters():
                torch.testing.assert_close(parameter, now[name], rtol=0, atol=1e-7)
        moved.move(Step(3.0))
    for name, parameter in model.base_model.named_parameters():
        assert torch.equal(parameter, before[name]), "the base model is itself again"
    assert by is not None
    vector = scaled_direction(model.base_model, space.active(), vectors, Step(1.0), by)
    torch.testing.assert_close(vector.double(), expected[1.0], rtol=1e-4, atol=1e-8)
    assert torch.nn.functional.cosine_similarity(vector.double(), expected[-0.3], dim=0) < 0.9
    if scaling == "tensor":
        assert torch.equal(model.rewrite_vector(1.0, scaling="tensor"), vector)


@pytest.mark.parametrize("keep", [None, 501])
def test_constants__keep_the_length_or_the_damage(keep):
    model = model_of("bert", keep)
    trainer = trainer_of(model)
    v = model.rewrite_vector(-1.0)
    assert model.rewrite_vector(-1.0, scaling="tensor").norm() == pytest.approx(float(v.norm()), rel=1e-5)
    curvature, (part,) = curvature_of(trainer.session, trainer.config, model.gradiend.space)
    assert part.is_whole
    torch.testing.assert_close(curvature.double(), dense_curvature(trainer, model), rtol=1e-3, atol=1e-9)
    weights, vectors = model.gradiend.space.active(), VectorsInMemory(model.gradiend)
    s = scaled_direction(model.base_model, weights, vectors, Step(1.0, -1.0), ByCurvature(curvature, weights))
    assert float((curvature * s * s).sum()) == pytest.approx(float((curvature * v * v).sum()), rel=1e-4)
    assert float(s.norm()) > 1.5 * float(v.norm()), "the same damage buys a longer step"


def test_tensor__what_does_not_move_stays_and_the_others_keep_the_length():
    model = model_of("bert")
    first = model.gradiend.space.active()[0]
    assert model.gradiend.decoder_bias_vector is not None
    with torch.no_grad():
        model.gradiend.decoder_weight[first.offset : first.stop] = 0.0
        model.gradiend.decoder_bias_vector[first.offset : first.stop] = 0.0
    v, s = model.rewrite_vector(1.0), model.rewrite_vector(1.0, scaling="tensor")
    assert not s[first.offset : first.stop].any() and s.isfinite().all()
    assert s.norm() == pytest.approx(float(v.norm()), rel=1e-5)


def test_curvature__a_direction_that_does_no_damage_is_left_as_it_is():
    """0 / 0 would be a model of NaN."""
    model = model_of("gpt2", 40)
    curvature = torch.zeros(40)
    curvature[7] = 2.0
    assert model.gradiend.decoder_bias_vector is not None
    with torch.no_grad():
        model.gradiend.decoder_weight[7] = model.gradiend.decoder_bias_vector[7] = 0.0
    weights, vectors = model.gradiend.space.active(), VectorsInMemory(model.gradiend)
    s = scaled_direction(model.base_model, weights, vectors, Step(1.0), ByCurvature(curvature, weights))
    torch.testing.assert_close(s, model.rewrite_vector(1.0))
    for value, words in ((0.0, "are zero"), (float("nan"), "are not finite")):
        with pytest.raises(UserError, match=f"{words}: pass other eval_neutral_data, or scaling=tensor"):
            ByCurvature(torch.full((40,), value), weights)


class Ranks(Comm):
    """Two ranks, one after the other: each sum is what the other one has said of it, and this one's own."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.others, self.said = others, []

    def total_on_host(self, counts: torch.Tensor) -> torch.Tensor:
        self.said.append(counts.clone())
        return counts.add_(self.others[len(self.said) - 1]) if self.others else counts


@pytest.mark.parametrize("scaling", ["tensor", "curvature"])
def test_parts_of_ranks__are_scaled_as_the_whole(scaling):
    """A rank that takes the mean or a length of its own part alone has another constant."""
    model = model_of("bert", 301)
    space, vectors = model.gradiend.space, VectorsInMemory(model.gradiend)
    curvature = torch.rand(301, generator=torch.Generator().manual_seed(2)) ** 4
    theta = selected(model, {name: p.detach() for name, p in model.base_model.named_parameters()})
    pieces = [
        rewriting.Piece(number, slice(a, b), direction(vectors, slice(a, b), Step(1.0)), theta[a:b], None)
        for number, w in enumerate(space.active())
        for a, b in ((w.offset, (w.offset + w.stop) // 2), ((w.offset + w.stop) // 2, w.stop))
    ]
    halves = pieces[::2], pieces[1::2]

    def make(comm: Comm | None, own: list[rewriting.Piece]) -> rewriting.Factors:
        if scaling == "tensor":
            return ByTensor(comm).fit(own)
        mine = torch.cat([torch.arange(piece.where.start, piece.where.stop) for piece in own])
        weights, offset = [], 0
        for w in space.active():
            count = int(((mine >= w.offset) & (mine < w.stop)).sum())
            weights.append(Weight(w.name, (count,), 0, offset, None))
            offset += count
        by = ByCurvature(curvature[mine], weights, comm)
        by.curvature = curvature  # places stay those of the whole
        return by.fit(own)

    whole = make(None, pieces)
    said: list[torch.Tensor] = []
    for _ in range(3):  # what the second rank says depends on sums of before
        second = Ranks(said)
        make(second, halves[1])
        first = Ranks(second.said)
        found = make(first, halves[0])
        said = first.said
    for piece in pieces[::2]:
        one, two = (torch.as_tensor(factors.at(piece.weight, piece.where)) for factors in (found, whole))
        torch.testing.assert_close(one, two, rtol=1e-5, atol=0)


def test_texts__are_drawn_from_the_neutral_ones_and_never_scored(monkeypatch):
    from gradiend_dist.evaluation.decoder import ModelScores

    model = model_of("bert", 60)
    trainer = trainer_of(model, 20)
    drawn = curvature_texts(trainer.session, trainer.config)
    neutral = set(trainer.data.neutral["text"])
    assert len(drawn.texts) == 6 and set(drawn.texts) < neutral
    assert drawn == curvature_texts(trainer.session, trainer.config), "the same at every call"
    scored: list[tuple[str, ...]] = []
    plain = ModelScores._entry
    monkeypatch.setattr(
        ModelScores, "_entry", lambda self, found: scored.append(self.texts.texts) or plain(self, found)
    )
    trainer.evaluate_decoder(lrs=[0.1], scaling="curvature")
    assert set(scored[0]) == neutral - set(drawn.texts)
    trainer.evaluate_decoder(lrs=[0.1], scaling="curvature", neutral_df=trainer.data.neutral[:15])
    assert set(scored[-1]) == set(trainer.data.neutral["text"][:15]) - set(drawn.texts)
    trainer.evaluate_decoder(lrs=[0.1], scaling="tensor")
    assert set(scored[-1]) == neutral


def test_texts__without_neutral_ones_are_rows_of_training_with_their_words():
    trainer = trainer_of(model_of("bert", 60), None)
    drawn = curvature_texts(trainer.session, trainer.config)
    rows = trainer.data.rows("train")
    filled = {text.replace("[MASK]", word) for text, word in zip(rows["masked"], rows["factual"], strict=True)}
    assert len(drawn.texts) == len(set(drawn.texts)) == 24 and set(drawn.texts) <= filled
    assert drawn.ignored == ("he", "she"), "they are about the feature"
    asked = {
        label
        for item in curvature_items(trainer.session, trainer.config)
        for row in item.rows
        for label in row.factual.labels
    }
    tokenizer = trainer.session.tokenizer
    assert not asked & set(tokenizer("he she", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("neutral", "count"), [(3, 1), (4, 2), (7, 2), (30, 10), (200, 32)])
def test_texts__are_a_third_and_at_least_two(neutral, count):
    trainer = trainer_of(model_of("bert", 60), neutral)
    if count >= 2:
        assert len(curvature_texts(trainer.session, trainer.config).texts) == count
        return
    with pytest.raises(UserError, match=r"finds 1 neutral texts .* eval_neutral_data, or scaling=tensor"):
        trainer.evaluate_decoder(lrs=[0.1], scaling="curvature")


def test_wrong_scaling__is_told_with_the_remedy():
    model = model_of("bert", 60)
    trainer = trainer_of(model)
    unknown = "scaling='fisher' is not known: choose one of plain, tensor, curvature"
    for call in (
        lambda: trainer.evaluate_decoder(scaling="fisher"),
        lambda: trainer.rewrite_base_model(target_class="F", learning_rate=0.1, scaling="fisher"),
        lambda: model.rewrite_base_model(0.1, scaling="fisher"),
        lambda: model.rewrite_vector(1.0, scaling="fisher"),
    ):
        with pytest.raises(UserError, match=unknown):
            call()
    with pytest.raises(UserError, match="a model has none: use the rewrite_base_model of a TextPredictionTrainer"):
        model.rewrite_base_model(0.1, scaling="curvature")


def test_default_rates__are_finer_over_the_same_range():
    trainer = trainer_of(model_of("bert", 60))
    for scaling, count in (("plain", 16), ("tensor", 26), ("curvature", 26)):
        found = trainer.evaluate_decoder(target_class="F", scaling=scaling, selector=LMSThresholdPolicy())
        rates = sorted(point[1] for point in found["grid"] if point != "base")
        assert len(rates) == count and (rates[0], rates[-1]) == (0.001, 100)
        if scaling != "plain":
            assert max(b / a for a, b in itertools.pairwise(rates)) < 1.6, "five per decade"


def test_plain__is_added_as_it_is():
    """Bit for bit: a factor of one would do no harm, a sum in another precision would."""
    model = model_of("bert", 501)
    weights, vectors = model.gradiend.space.active(), VectorsInMemory(model.gradiend)
    before = {name: p.detach().clone() for name, p in model.base_model.named_parameters()}
    v = model.rewrite_vector(0.7)
    rewrite(model.base_model, weights, vectors, Step(0.3, 0.7))
    for weight in weights:
        flat = before[weight.name].view(-1)
        flat[weight.flat_indices()] += v[weight.offset : weight.stop] * 0.3
    for name, parameter in model.base_model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_card__names_the_scaling(tmp_path):
    model = model_of("bert", 60)
    for scaling in ("plain", "tensor"):
        model.rewrite_base_model(0.1, scaling=scaling, output_dir=tmp_path / scaling)
        assert ("| scaled by | tensor" in (tmp_path / scaling / "README.md").read_text()) == (scaling == "tensor")


def test_damping__is_a_tenth_of_each_weights_mean():
    """A weight that no text is sensitive to, but for rounding errors, has that of the model: they are no scale."""
    weights = [Weight(name, (2,), 0, 2 * number, None) for number, name in enumerate("abc")]
    found = ByCurvature(torch.tensor([1.0, 3.0, 0.1, 0.3, 1e-14, 0.0]), weights).damping
    assert found == pytest.approx([0.2, 0.02, 0.1 * 1e-4 * 4.4 / 6])
