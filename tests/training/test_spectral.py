"""The closed form: equal to a dense computation, exact where the theory is, and honest where it is not."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradiend_dist import PostPruneConfig, PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError
from gradiend_dist.data.schedule import make_schedule
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.gradients import sketch
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.items import Item
from gradiend_dist.gradients.sketch import Sketch
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.space import ParameterSpace, Slices
from gradiend_dist.training.checkpoints import is_better
from gradiend_dist.training.history import Best
from gradiend_dist.training.spectral import SpectralStart, draw_items, solve, warnings

N = 301
PRUNE = PrePruneConfig(n_samples=8, topk=0.05, source="diff")


class Given:
    """Gradients that are there already: what `SpectralStart` asks a GradientSource for."""

    def __init__(self, sources: Tensor, targets: Tensor, kinds: tuple[str, str] = ("alternative", "diff")) -> None:
        self.vectors = [dict(zip(kinds, pair, strict=True)) for pair in zip(sources, targets, strict=True)]
        n = sources.shape[1]
        space = SimpleNamespace(size=n)
        self.base = SimpleNamespace(comm=Comm(), slices=Slices.whole(n), device=torch.device("cpu"), space=space)

    def hand_out(self, items: list[Item], kinds: list[str], deliver: Any, **_: bool) -> None:
        for number, item in enumerate(items):
            for kind in kinds:
                for where in (slice(100, N), slice(0, 100)):  # as a backward pass does: the last weights first
                    deliver(number, [(kind, 1.0)], where, self.vectors[int(item.name)][kind][where])


def start(sources: Tensor, targets: Tensor, labels: Any, **args: Any) -> SpectralStart:
    arguments = TrainingArguments(initialization="spectral", **args)
    items = [Item((), str(number)) for number in range(len(sources))]
    return SpectralStart(arguments, Given(sources, targets), items, list(labels))  # type: ignore[arg-type]


def filled(begun: SpectralStart, model: GradiendModel) -> dict[str, Any]:
    form = begun.solve()
    begun.warn(form)
    return begun.fill(model, form)


def planted(labels: Tensor, noise: float = 0.0, components: int = 1) -> tuple[Tensor, Tensor]:
    """Sources and targets on a line (a plane, ...) that the label moves them along."""
    generator = torch.Generator().manual_seed(3)
    latents = torch.stack([labels.float(), *torch.randn(components - 1, len(labels), generator=generator)], dim=1)
    found = []
    for _ in ("x", "y"):
        axes = torch.randn(components, N, generator=generator) * torch.tensor([[1.0], *[[0.3]] * (components - 1)])
        shared, own = torch.randn(N, generator=generator), torch.randn(len(labels), N, generator=generator)
        found.append(latents @ axes + shared + noise * own)
    return found[0], found[1]


def dense(
    sources: Tensor, targets: Tensor, labels: Tensor, gain: float = 1.5, ridge: float = 0.1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """We, be, Wd, bd as the paper would write them."""
    x, y = sources.double(), targets.double()
    xc, yc = x - x.mean(0), y - y.mean(0)
    t = torch.linalg.svd(yc, full_matrices=False).U[:, 0]
    t = t / t[labels != 0].abs().mean() * torch.sign((t * labels).sum())
    sx = xc @ xc.T
    a = torch.linalg.solve(sx + ridge * sx.diagonal().mean() * torch.eye(len(x), dtype=torch.float64), t)
    we = gain * a @ xc
    be = -we @ x.mean(0)
    h = torch.tanh(x @ we + be)
    wd, bd = torch.linalg.lstsq(torch.stack([h, torch.ones_like(h)], 1), y).solution
    return we, be, wd, bd


def assert_same_model(model: GradiendModel, expected: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    assert model.decoder_bias_vector is not None
    ours = (model.encoder_weight[0], model.encoder_bias[0], model.decoder_weight[:, 0], model.decoder_bias_vector)
    for name, mine, theirs in zip(("We", "be", "Wd", "bd"), ours, expected, strict=True):
        assert float((mine.double() - theirs).abs().max()) <= tolerance * float(theirs.abs().max()), name


# --- the algebra


def test_fill__is_the_dense_computation() -> None:
    """Fails by a mean that is not taken out, another scale of the latent, or a weight of another item."""
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, -1.0])
    sources, targets = planted(labels, noise=0.4)
    model = GradiendModel(N)
    filled(start(sources, targets, labels), model)
    assert_same_model(model, dense(sources, targets, labels))


def test_fill__recovers_a_planted_line_exactly() -> None:
    """Also on items that it has not seen: encodings near +-tanh(1.5), targets to rounding."""
    labels = torch.tensor([1.0, -1.0] * 4)
    sources, targets = planted(labels)
    model = GradiendModel(N)
    facts = filled(start(sources[:6], targets[:6], labels[:6]), model)
    decoded, latent = model(sources[6:], return_encoded=True)
    expected = torch.tanh(torch.tensor(1.5 / (1 + 0.1 / 6)))  # the ridge, of six items
    torch.testing.assert_close(latent[:, 0].abs(), expected.expand(2))
    torch.testing.assert_close(decoded, targets[6:], rtol=1e-4, atol=1e-5)
    assert facts["gap"] > 1 - 1e-6 and facts["explained"] > 1 - 1e-6
    assert facts["label_correlation"] == pytest.approx(1.0)


def test_fill__takes_leading_components_for_several_latents() -> None:
    labels = torch.tensor([1.0, -1.0] * 6)
    sources, targets = planted(labels, components=3)
    for m, least, most in ((1, 0.3, 0.99), (3, 0.999, 1.0)):
        model = GradiendModel(N, m, activation_encoder="id")
        facts = filled(start(sources, targets, labels, latent_dim=m, activation_encoder="id"), model)
        assert least < facts["explained"] <= most + 1e-6
    error = (model(sources).detach() - targets).square().sum() / targets.square().sum()
    assert float(error) == pytest.approx(1 - facts["explained"], abs=1e-4)


@pytest.mark.parametrize("activation", ["tanh", "id", "smht", "sigmoid", "relu", "elu"])
def test_fill__says_what_the_model_then_explains(activation: str) -> None:
    """The k x k algebra knows the latents: fails if it uses another activation, offset or slope than the model."""
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels, noise=0.2)
    model = GradiendModel(N, activation_encoder=activation)
    facts = filled(start(sources, targets, labels, activation_encoder=activation), model)
    error = float((model(sources).detach() - targets).square().sum() / targets.square().sum())
    assert 1 - error == pytest.approx(facts["explained"], abs=1e-5)
    assert float((model(sources).detach() - targets).square().mean()) == pytest.approx(facts["loss"], rel=1e-4)


def test_fill__without_decoder_bias_or_with_another_activation() -> None:
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels)
    targets = (targets - targets.mean(0)) * 1e-4
    for activation in ("id", "tanh", "gelu", "silu", "elu"):
        model = GradiendModel(N, bias_decoder=False, activation_decoder=activation)
        filled(start(sources, targets, labels, bias_decoder=False, activation_decoder=activation), model)
        error = (model(sources).detach() - targets).square().sum() / targets.square().sum()
        assert float(error) < 1e-3, activation


def test_fill__supervised_takes_the_labels() -> None:
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels, noise=0.3)
    encoder, decoder = GradiendModel(N), GradiendModel(N)
    untouched = encoder.decoder_weight.clone()
    filled(start(sources, targets, labels, supervised_encoder=True), encoder)
    assert torch.equal(encoder.decoder_weight, untouched)
    assert (torch.sign(encoder.forward_encoder(sources)[:, 0]) == labels).all()
    filled(start(sources, targets, labels, supervised_decoder=True), decoder)
    means = torch.stack([targets[labels > 0].mean(0), targets[labels < 0].mean(0)])
    torch.testing.assert_close(decoder.forward_decoder(torch.tensor([[1.0], [-1.0]])), means, rtol=1e-4, atol=1e-5)


def test_sign__is_that_of_the_labels() -> None:
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels)
    for sign in (1.0, -1.0):
        model = GradiendModel(N)
        filled(start(sources, targets, sign * labels), model)
        assert (torch.sign(model.forward_encoder(sources)[:, 0]) == sign * labels).all()


# --- where it cannot work, or may not


def test_degenerate__two_items_work_and_say_that_nothing_can_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.tensor([1.0, -1.0])
    sources, targets = planted(labels)
    model = GradiendModel(N)
    with caplog.at_level(logging.WARNING):
        facts = filled(start(sources, targets, labels, spectral_items=2), model)
    assert facts["gap"] is None and "2 items are too few" in caplog.text
    torch.testing.assert_close(model(sources), targets, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.ones(4)}, "one direction alone"),
        ({"targets": torch.zeros(4, N)}, "target=diff is zero for all 4 spectral items"),
        ({"targets": torch.ones(4, N)}, "target=diff is the same for all 4 spectral items"),
        ({"sources": torch.zeros(4, N)}, "sources of all 4 spectral items are the same, or zero"),
        ({"latent_dim": 2}, "have 1 components and latent_dim=2"),
        ({"targets": torch.full((4, N), torch.nan)}, "diff gradient of 0 is not finite"),
    ],
)
def test_degenerate__is_told_in_one_sentence(change: dict[str, Any], says: str) -> None:
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels)
    given = {"sources": sources, "targets": targets, "labels": labels, **change}
    with pytest.raises(UserError, match=says):
        filled(start(**given), GradiendModel(N, given.get("latent_dim", 1)))


@pytest.mark.parametrize(
    ("facts", "args", "labels", "says"),
    [
        ({}, {}, [1, -1, 1, -1], []),
        ({"gap": 0.2}, {}, [1, -1, 1, -1], ["no clear gap"]),
        ({"gap": None}, {}, [1, -1], ["too few"]),
        ({"label_correlation": 0.1}, {}, [1, -1, 1, -1], ["correlation of 0.10"]),
        ({"label_correlation": None}, {}, [1, -1, 1, -1], ["correlation of none"]),
        ({}, {"target": "factual"}, [1, -1, 1, -1], ["target=factual does not change its sign"]),
        ({}, {}, [1, 1, 1, 1, -1], ["one direction has 1 items and the other 4"]),
        ({}, {"activation_decoder": "sigmoid"}, [1, -1, 1, -1], ["activation_decoder=sigmoid"]),
        ({"gap": None}, {"supervised_encoder": True}, [1, -1], []),
    ],
)
def test_warnings__name_what_is_wrong(facts: Any, args: Any, labels: list[float], says: list[str]) -> None:
    found = {"items": len(labels), "gap": 0.9, "label_correlation": 1.0, **facts}
    told = list(warnings(found, torch.tensor(labels, dtype=torch.float64), TrainingArguments(**args)))
    assert len(told) == len(says)
    assert all(word in text for word, text in zip(says, told, strict=True))


def test_solve__finds_no_feature_in_noise() -> None:
    """A spectrum without a gap is seen as such."""
    noise = torch.randn(12, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)
    facts = solve(noise @ noise.T, noise @ noise.T, labels, 500, TrainingArguments()).facts
    assert facts["gap"] < 0.5


# --- sketches


@pytest.mark.parametrize("total", [4096, 4097, 50_001])
def test_sketch__is_exact_up_to_its_size_and_near_beyond(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    monkeypatch.setattr(sketch, "SKETCH", 4096)
    vectors = torch.randn(5, total, generator=torch.Generator().manual_seed(0))
    vectors[1] += vectors[0]
    vectors[:, 100:120] *= 20.0  # as in gradients, a few entries have most of the size
    found = Sketch(5, Slices.whole(total), Comm(), torch.device("cpu"))
    for number, vector in enumerate(vectors):
        found.put(number, vector)
    exact = vectors.double() @ vectors.double().T
    norms = exact.diagonal().sqrt()
    apart = ((found.gram([*"abcde"], "diff") - exact) / (norms.unsqueeze(1) * norms)).abs().max()
    assert apart < (1e-6 if total == 4096 else 4 / 4096**0.5)
    assert (apart > 1e-6) == (total > 4096)


def test_sketch__does_not_depend_on_how_the_space_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that begin anywhere: fails if signs or places go with a rank's own positions."""
    monkeypatch.setattr(sketch, "SKETCH", 64)
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = Sketch(1, Slices.whole(1000), Comm(), torch.device("cpu"))
    whole.put(0, vector)
    total = torch.zeros(1, 64)
    for ranges in (((0, 70), (300, 301)), ((70, 300),), ((301, 1000),), ((0, 0),)):
        part = Slices(1000, ranges)
        piece = Sketch(1, part, Comm(), torch.device("cpu"))
        piece.put(0, part.take(vector))
        total += piece.values
    torch.testing.assert_close(total, whole.values, rtol=1e-5, atol=1e-5)


# --- items


def rows_with(counts: dict[tuple[int, float], int]) -> Any:
    import pandas as pd

    rows = [(direction, label) for (direction, label), count in counts.items() for _ in range(count)]
    return pd.DataFrame(rows, columns=["feature_class_id", "label"])


@pytest.mark.parametrize(
    ("counts", "wanted", "expected"),
    [
        ({(0, 1.0): 40, (1, -1.0): 40}, 16, {1.0: 8, -1.0: 8}),
        ({(0, 1.0): 40, (1, -1.0): 40}, 5, {1.0: 3, -1.0: 2}),
        ({(0, 1.0): 40, (1, -1.0): 40, (2, 0.0): 40, (3, 0.0): 40}, 16, {1.0: 6, -1.0: 5, 0.0: 5}),
        ({(0, 1.0): 40, (1, -1.0): 6}, 16, {1.0: 8, -1.0: 3}),
    ],
)
def test_draw_items__are_even_and_go_with_the_seed(counts: Any, wanted: int, expected: dict[float, int]) -> None:
    rows = rows_with(counts)
    schedule, labels = make_schedule(rows, 2, seed=0), rows["label"].tolist()
    drawn = draw_items(schedule, labels, wanted, 0)
    assert Counter(labels[int(schedule.batches[number][0])] for number in drawn) == expected
    assert len(set(drawn)) == len(drawn)
    assert drawn == draw_items(schedule, labels, wanted, 0) != draw_items(schedule, labels, wanted, 1)


# --- rates


def test_rates__do_not_depend_on_the_scale_of_gradients() -> None:
    """Latents move alike, and targets in proportion, whatever the scale: fails by a fixed epsilon or rate."""
    labels = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    sources, targets = planted(labels, noise=0.3)
    found = []
    for source_scale, target_scale in ((1.0, 1.0), (1e3, 1e-5)):
        x, y = sources * source_scale + 0.0, targets * target_scale
        begun = start(x, y, labels, learning_rate="auto")
        space = ParameterSpace([("w", (N,), None)])
        model = ParamMappedGradiendModel(space)
        filled(begun, model)
        engine = SlicedEngine(model, StepOptions.of(begun.args, begun.measured().rates()))
        before = model.forward_encoder(x).detach().clone()
        for number in (0, 1, 2, 3, 4, 5) * 3:
            engine.step([GradiendBatch(x[[number]], y[[number]], labels[[number]].unsqueeze(1))], 0.03)
        found.append((before, model.forward_encoder(x).detach(), model(x).detach() / target_scale))
    (before, encoded, decoded), (_, encoded_too, decoded_too) = found
    assert float((encoded - before).abs().max()) > 1e-4, "something moved"
    torch.testing.assert_close(encoded_too, encoded, rtol=2e-3, atol=2e-3)  # the bias is one weight among |x|_1 + 1
    torch.testing.assert_close(decoded_too, decoded, rtol=2e-3, atol=2e-3)


# --- whole runs


def make(model: Path, frames: Any, directory: Path, **changes: Any) -> TextPredictionTrainer:
    defaults: dict[str, Any] = {
        "experiment_dir": str(directory),
        "initialization": "spectral",
        "spectral_items": 10,
        "train_batch_size": 8,
        "train_max_size": 40,
        "encoder_eval_max_size": 6,
        "max_steps": 0,
        "eval_steps": 3,
        "max_seeds": 2,
        "min_convergent_seeds": None,
        "pre_prune_config": PRUNE,
    }
    args = TrainingArguments(**{**defaults, **changes})
    return TextPredictionTrainer(str(model), data=frames, target_classes=["M", "F"], args=args)


@pytest.mark.parametrize("base", ["masked_lm", "causal_lm"])
def test_run__without_a_step_converges_is_pruned_saved_and_promoted(
    base: str, feature_frames: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trainer = make(
        request.getfixturevalue(base), feature_frames, tmp_path, post_prune_config=PostPruneConfig(topk=500)
    ).train()
    report, record = trainer.get_seed_report(), trainer.get_training_stats()
    assert report["convergent_count"] == 2 and record["losses"] == []
    assert record["best_score_checkpoint"]["global_step"] == 0
    assert record["training_stats"]["spectral"]["items"] == 10
    for run in report["runs"]:
        assert run["explained"] > 0.6 and run["explained_limit"] > 0.6 and run["converged"]
    assert len(trainer.get_model()) == 500
    evaluated = trainer.evaluate_encoder("test", neutral=False)
    assert evaluated["correlation"] > 0.9
    saved = load_file(tmp_path / "model/model.safetensors")
    assert all(bool(tensor.any()) for tensor in saved.values())


def test_run__seeds_draw_other_items_and_are_deterministic(
    masked_lm: Path, feature_frames: Any, tmp_path: Path
) -> None:
    first, again = (make(masked_lm, feature_frames, tmp_path / name, keep_seed_runs=True).train() for name in "ab")
    paths = [
        [trainer.places.seed(seed, trainer.args) / "model.safetensors" for seed in (0, 1)] for trainer in (first, again)
    ]
    (zero, one), (zero_again, _) = ([path.read_bytes() for path in each] for each in paths)
    assert zero == zero_again != one


def dense_of(trainer: TextPredictionTrainer, space: ParameterSpace, entries: Any = slice(None)) -> tuple[Tensor, ...]:
    """From gradients of the whole space, of which `entries` are looked at."""
    session = trainer.session
    items, labels = trainer.inputs.spectral_items(0)
    base = session.base_gradients(space)
    vectors = [base.compute(item, trainer.args.trained_kinds) for item in items]
    sources, targets = (
        torch.stack([each[kind][entries] for each in vectors]) for kind in (trainer.args.source, trainer.args.target)
    )
    return dense(sources, targets, torch.tensor(labels, dtype=torch.float64))


@pytest.mark.parametrize("changes", [{}, {"source": "factual"}, {"source": "diff"}])
def test_run__is_the_dense_computation(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, changes: dict[str, str]
) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, max_seeds=1, pre_prune_config=None, params=["*.layer.0.*"],
        add_identity_for_other_classes=True, **changes,
    ).train()  # fmt: skip
    assert_same_model(trainer.get_model().gradiend, dense_of(trainer, trainer.session.space), tolerance=1e-4)


def test_run__pruned_is_masked(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """The closed form of a pruned space is that of gradients of which all other entries are struck out."""
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1).train()
    gradiend = trainer.get_model().gradiend
    kept = gradiend.space.base_global(torch.arange(len(gradiend)))
    assert len(kept) < trainer.session.space.size
    assert_same_model(gradiend, dense_of(trainer, trainer.session.space, kept), tolerance=1e-4)


@pytest.mark.parametrize("kinds", [("alternative", "diff"), ("factual", "diff")])
def test_run__each_gradient_is_computed_once(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, str]
) -> None:
    """Pre-pruning, closed form and training share one pass; where there is no memory for it the result is the same."""
    computed: Counter[tuple[str, str]] = Counter()
    run_passes = BaseGradients._run_passes

    def counting(self: BaseGradients, rows: Any, item: Item, wanted: Any, destination: Any) -> Any:
        if len(item.rows) > 1:  # evaluations are of single rows
            computed.update((item.key, kind) for kind in wanted)
        return run_passes(self, rows, item, wanted, destination)

    monkeypatch.setattr(BaseGradients, "_run_passes", counting)
    options = {"source": kinds[0], "max_seeds": 1, "max_steps": 10, "learning_rate": "auto"}
    trainer = make(masked_lm, feature_frames, tmp_path / "a", **options).train()
    measured = trainer.inputs.held_out(trainer.session.space)
    assert measured is not None
    assert max(computed.values()) == 1
    assert len(computed) == 2 * (10 + len(measured.items))  # all items of training are those of the closed form
    again = make(masked_lm, feature_frames, tmp_path / "b", **options, gradient_store_gib=0.0).train()
    assert max(computed.values()) > 2
    ours, theirs = (load_file(each.model_path / "model.safetensors") for each in (trainer, again))
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-5 * float(tensor.abs().max()), msg=name)


def test_pruning__by_a_seed_of_its_own_or_by_more_examples_is_as_before(masked_lm: Path, feature_frames: Any) -> None:
    inputs = make(masked_lm, feature_frames, Path()).inputs
    rows = 10 * 8
    for config, shared in (
        (PRUNE, True),
        (PrePruneConfig(n_samples=8, topk=0.05, seed=3), False),
        (PrePruneConfig(n_samples=rows + 1, topk=0.05), False),
    ):
        assert inputs.prunes_by_items(config) == shared


def test_refinement__keeps_what_was_found(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    """The promoted model has no larger held-out loss than the start."""
    for steps in (30, 90):
        trainer = make(
            masked_lm, feature_frames, tmp_path / str(steps), max_seeds=1, max_steps=steps, learning_rate="auto",
            eval_steps=10, train_max_size=None,
        ).train()  # fmt: skip
        record = trainer.get_training_stats()
        losses, best = record["training_stats"]["held_out_loss"], record["best_score_checkpoint"]["global_step"]
        assert losses[str(best)] <= losses["0"]
        assert best > 0, "refinement was worth something"
        assert record["training_stats"]["rates"]["encoder"] > 0


def test_refinement__a_worse_step_does_not_replace_the_closed_form(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps a thousand times as large ruin decoder and encoder; the closed form is what is promoted."""
    monkeypatch.setattr("gradiend_dist.config.groups.optimizer.AUTO_RATE", 30.0)
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1, max_steps=9, learning_rate="auto").train()
    record = trainer.get_training_stats()
    assert record["best_score_checkpoint"]["global_step"] == 0
    assert record["training_stats"]["held_out_loss"]["9"] > record["training_stats"]["held_out_loss"]["0"]
    alone = make(masked_lm, feature_frames, tmp_path / "alone", max_seeds=1).train()
    ours, theirs = (load_file(each.model_path / "model.safetensors") for each in (trainer, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_refinement__cannot_creep_down() -> None:
    """Many correlations, each almost that of the last best, must not add up to a bad one."""
    run = SimpleNamespace(best=Best(), stats={"scores": {}, "held_out_loss": {}}, starts_trained=True)
    for step in range(20):
        score = 0.99 - 0.009 * step
        run.stats["scores"][step], run.stats["held_out_loss"][step] = score, 1.0 - 0.01 * step
        if is_better(run, step, score):  # type: ignore[arg-type]
            run.best = Best(score, step=step)
    assert run.best.step == 1, "the second one is almost the first and has the smaller loss"


@pytest.mark.parametrize("scheduler", ["polynomial", "cosine", "inverse_sqrt"])
def test_run__without_a_step_has_a_schedule_of_none(
    masked_lm: Path, feature_frames: Any, tmp_path: Path, scheduler: str
) -> None:
    trainer = make(masked_lm, feature_frames, tmp_path, max_seeds=1, lr_scheduler_type=scheduler, do_eval=False).train()
    assert trainer.get_training_stats()["losses"] == []


def test_rates__of_zero_targets_are_told() -> None:
    labels = torch.tensor([1.0, -1.0])
    with pytest.raises(UserError, match="learning_rate=auto goes with the size of the targets"):
        start(torch.ones(2, N), torch.zeros(2, N), labels, learning_rate="auto").measured().rates()


def test_random_start__with_rates_of_the_gradients(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(
        masked_lm, feature_frames, tmp_path, initialization="random", learning_rate="auto", max_steps=40, max_seeds=1,
        eval_steps=20,
    ).train()  # fmt: skip
    stats = trainer.get_training_stats()["training_stats"]
    assert "spectral" not in stats
    assert stats["explained"]["40"] > stats["explained"]["0"] + 0.03


def test_loss__decides_a_supervised_closed_form(masked_lm: Path, feature_frames: Any, tmp_path: Path) -> None:
    trainer = make(masked_lm, feature_frames, tmp_path, supervised_decoder=True, max_seeds=1).train()
    record = json.loads((trainer.model_path / "training.json").read_text())
    assert record["best_score_checkpoint"]["loss"] > 0
    assert record["convergence_info"]["converged"]
    assert record["training_stats"]["explained"]["0"] > 0.6
