"""The hand-written step against autograd and torch's optimizers, in every mode; and on several pretend GPUs."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pretend_gpu import pretend_gpus, waits
from torch import Tensor, nn

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines import chunks
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Slices

N = 103
ACTIVATIONS = ["tanh", "relu", "leakyrelu", "gelu", "silu", "elu", "sigmoid", "smht", "id"]


def options(**changes: Any) -> StepOptions:
    defaults = {
        "optim": "adamw",
        "weight_decay": 0.01,
        "betas": (0.9, 0.999),
        "epsilon": 1e-8,
        "max_grad_norm": 0.0,
        "supervised": None,
    }
    return StepOptions(**{**defaults, **changes})


def make_model(latent_dim: int = 1, **changes: Any) -> GradiendModel:
    return GradiendModel(N, latent_dim, generator=torch.Generator().manual_seed(2), **changes)


def make_batches(sizes: Sequence[int], seed: int = 0) -> list[GradiendBatch]:
    """Gradients whose label shows in them, so that training has something to find."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.randn(N, generator=torch.Generator().manual_seed(99))
    batches = []
    for size in sizes:
        label = torch.randint(0, 2, (size, 1), generator=generator).float() * 2 - 1
        source = label * axis + 0.5 * torch.randn(size, N, generator=generator)
        target = 2 * label * axis + 0.3 * torch.randn(size, N, generator=generator)
        batches.append(GradiendBatch(source, target, label))
    return batches


class Plain:
    """The same model, trained by autograd on the plain loss with torch's optimizer: what the step must equal."""

    def __init__(self, model: GradiendModel, chosen: StepOptions) -> None:
        self.model = copy.deepcopy(model)
        self.options = chosen
        trained = {None: self.model, "encoder": self.model.encoder, "decoder": self.model.decoder}[chosen.supervised]
        self.parameters = list(trained.parameters())
        kind = torch.optim.AdamW if chosen.optim == "adamw" else torch.optim.Adam
        self.optimizer = kind(
            self.parameters, lr=1.0, betas=chosen.betas, eps=chosen.epsilon, weight_decay=chosen.weight_decay
        )

    def loss(self, batch: GradiendBatch) -> Tensor:
        if self.options.supervised == "encoder":
            return nn.functional.mse_loss(self.model.forward_encoder(batch.source), batch.label)
        if self.options.supervised == "decoder":
            return nn.functional.mse_loss(self.model.forward_decoder(batch.label), batch.target)
        return nn.functional.mse_loss(self.model(batch.source), batch.target)

    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = sum(self.loss(batch) for batch in batches) / len(batches)
        loss.backward()
        limit = self.options.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        self.optimizer.step()
        weights = (self.model.encoder_weight, self.model.decoder_weight)
        return torch.stack([loss.detach(), norm, *(weight.norm() for weight in weights)])


def assert_same_training(
    model: GradiendModel, chosen: StepOptions, sizes: Sequence[int], num_steps: int = 12, learning_rate: float = 3e-3
) -> None:
    plain, engine = Plain(model, chosen), SlicedEngine(model, chosen)
    start = copy.deepcopy(model.state_dict())
    for step in range(num_steps):
        batches = make_batches(sizes, seed=step)
        rate = learning_rate * (1 + step % 3)
        expected, actual = plain.step(batches, rate), engine.step(batches, rate)
        torch.testing.assert_close(
            actual, expected, rtol=2e-5, atol=1e-6, msg=lambda text, step=step: f"{step}: {text}"
        )
    for (name, weight), expected in zip(model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(
            weight, expected, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        trained = chosen.supervised is None or name.startswith(chosen.supervised)
        assert torch.equal(weight, start[name]) != trained, f"{name} is trained exactly if its half is"


# --- equal to autograd


# A share of a batch shows in its sizes, a transposed product in the latents: all pairs of the two. The optimizer is the
# last thing in a step and knows neither.
@pytest.mark.parametrize(
    ("sizes", "latent_dim", "optim"),
    [
        ([1], 1, "adamw"), ([3], 1, "adam"), ([1, 1], 1, "adamw"), ([3, 3, 3], 1, "adam"), ([3, 2], 1, "adamw"),
        ([1], 2, "adam"), ([3], 2, "adamw"), ([1, 1], 2, "adam"), ([3, 3, 3], 2, "adamw"), ([3, 2], 2, "adam"),
        ([1, 4], 3, "adamw"), ([3], 3, "adam"),
    ],
    ids=str,
)  # fmt: skip
def test_step__equals_autograd_and_torchs_optimizer(optim, latent_dim, sizes):
    """Fails by a wrong factor, a missing term, a transposed outer product or a batch that counts too much."""
    assert_same_training(make_model(latent_dim), options(optim=optim), sizes)


# A wrong derivative shows with any decoder and size. That an item alone, a mixture, and a decoder without activation go
# ways of their own shows in the nine pairs of the two, one for each encoder.
@pytest.mark.parametrize(
    ("encoder", "decoder", "sizes"),
    [
        (encoder, decoder, sizes)
        for encoder, (decoder, sizes) in zip(
            ACTIVATIONS, itertools.product(["id", "tanh", "gelu"], [[1], [3], [2, 1]]), strict=True
        )
    ],
    ids=str,
)
def test_step__holds_for_every_encoder_activation(encoder, decoder, sizes):
    model = make_model(2, activation_encoder=encoder, activation_decoder=decoder)
    assert_same_training(model, options(), sizes, num_steps=5)


# One item with one latent and a mixture with two, in turn: a derivative of the decoder knows nothing of either.
@pytest.mark.parametrize(
    ("decoder", "latent_dim", "sizes"),
    [(decoder, 1 + place % 2, [[1], [3]][place % 2]) for place, decoder in enumerate(ACTIVATIONS)],
    ids=str,
)
def test_step__holds_for_every_decoder_activation(decoder, latent_dim, sizes):
    model = make_model(latent_dim, activation_decoder=decoder)
    assert_same_training(model, options(max_grad_norm=0.02), sizes, num_steps=5)


# The bias is a column of gradients of its own, which the norm of clipping must leave out as well.
@pytest.mark.parametrize(
    ("latent_dim", "limit", "sizes"),
    [(1, 0.0, [1]), (2, 0.0, [3]), (1, 0.0, [2, 1]), (2, 0.01, [1]), (1, 0.01, [3]), (2, 0.01, [2, 1])],
    ids=str,
)
def test_step__holds_without_a_decoder_bias(latent_dim, limit, sizes):
    assert_same_training(make_model(latent_dim, bias_decoder=False), options(max_grad_norm=limit), sizes)


# The norm comes from the step: every way that a step goes, where it matters most; always and never clipped, once each.
@pytest.mark.parametrize(
    ("limit", "latent_dim", "sizes"),
    [
        *((0.05, latent_dim, sizes) for latent_dim in (1, 2) for sizes in ([1], [3], [1, 1], [3, 2])),
        (1e-3, 1, [1]), (1e-3, 2, [3, 2]), (100.0, 2, [1]), (100.0, 1, [3]),
    ],
    ids=str,
)  # fmt: skip
def test_step__clips_as_torch_does(latent_dim, limit, sizes):
    """At 0.05 some steps are clipped and some are not. The norm that is returned is that before clipping."""
    assert_same_training(make_model(latent_dim), options(max_grad_norm=limit, epsilon=1e-3), sizes)


# Each setting alone; weight decay for both optimizers, which apply it in another place; all at once.
@pytest.mark.parametrize(
    ("optim", "weight_decay", "betas", "epsilon"),
    [
        ("adamw", 0.0, (0.9, 0.999), 1e-8),
        ("adamw", 0.3, (0.9, 0.999), 1e-8),
        ("adam", 0.3, (0.9, 0.999), 1e-8),
        ("adamw", 0.0, (0.5, 0.7), 1e-8),
        ("adamw", 0.0, (0.9, 0.999), 1e-2),
        ("adam", 0.3, (0.5, 0.7), 1e-2),
    ],
)
def test_step__passes_every_setting_on(optim, weight_decay, betas, epsilon):
    chosen = options(optim=optim, weight_decay=weight_decay, betas=betas, epsilon=epsilon)
    assert_same_training(make_model(), chosen, [2], num_steps=6)


# Either half in every way that a step goes; with clipping the norm must leave the other half out, bias or not.
@pytest.mark.parametrize("supervised", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("sizes", "bias", "limit"),
    [
        ([1], True, 0.01),
        ([1], False, 0.0),
        ([3], False, 0.01),
        ([3], True, 0.0),
        ([1, 1], True, 0.0),
        ([3, 2], False, 0.01),
    ],
    ids=str,
)
def test_step__trains_one_half_on_labels(supervised, sizes, bias, limit):
    """The other half must not move, not even by weight decay."""
    assert_same_training(make_model(1, bias_decoder=bias), options(supervised=supervised, max_grad_norm=limit), sizes)


@pytest.mark.parametrize("supervised", ["encoder", "decoder"])
def test_step__needs_only_what_it_reads_to_train_one_half(supervised):
    full = make_batches([3])[0]
    bare = GradiendBatch(
        full.source if supervised == "encoder" else None, full.target if supervised == "decoder" else None, full.label
    )
    results = [SlicedEngine(make_model(), options(supervised=supervised)).step([b], 1e-3) for b in (full, bare)]
    assert torch.equal(*results)


@pytest.mark.parametrize("latent_dim", [1, 2])
@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [2, 2], [4]], ids=str)
def test_step__accumulation_is_one_big_batch(parts, latent_dim):
    """Batches of one size: the mean of their means is the mean over all. Fails if a batch's share is wrong."""
    (big,) = make_batches([4])
    cut = [
        GradiendBatch(s, t, b)
        for s, t, b in zip(big.source.split(parts), big.target.split(parts), big.label.split(parts), strict=True)
    ]
    models = make_model(latent_dim), make_model(latent_dim)
    engines = [SlicedEngine(model, options(max_grad_norm=0.05)) for model in models]
    for _ in range(10):
        together, in_parts = engines[0].step([big], 1e-2), engines[1].step(cut, 1e-2)
        torch.testing.assert_close(in_parts, together, rtol=1e-5, atol=1e-7)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# A tail of 3, 23 and 1 entries, none, and a chunk that is too long; each way that a step goes has a tail of 1.
@pytest.mark.parametrize(
    ("chunk", "sizes", "decoder"),
    [
        (5, [1], "id"), (5, [2, 1], "tanh"), (40, [3], "tanh"), (40, [1], "tanh"), (102, [1], "id"), (102, [3], "id"),
        (102, [2, 1], "tanh"), (103, [3], "tanh"), (104, [2, 1], "id"),
    ],
    ids=str,
)  # fmt: skip
def test_step__chunks_of_any_size_are_one_chunk(chunk, sizes, decoder, monkeypatch):
    """103 entries, a prime: no chunk size but 103 divides. Fails if a tail is lost or a chunk is added twice."""
    models = [make_model(2, activation_decoder=decoder) for _ in range(2)]
    engines = [SlicedEngine(model, options(max_grad_norm=0.05)) for model in models]
    for step in range(6):
        batches = make_batches(sizes, seed=step)
        whole = engines[0].step(batches, 1e-2)
        with monkeypatch.context() as patch:
            patch.setattr(chunks, "CHUNK", chunk)
            cut = engines[1].step(batches, 1e-2)
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-7)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_step__returns_loss_and_gradient_norm_of_before_and_weight_norms_of_after():
    model, (batch,) = make_model(2), make_batches([3])
    before = copy.deepcopy(model)
    loss = nn.functional.mse_loss(before(batch.source), batch.target)
    loss.backward()
    norm = torch.cat([p.grad.reshape(-1) for p in before.parameters()]).norm()
    found = SlicedEngine(model, options(max_grad_norm=1e-3)).step([batch], 0.1)
    expected = torch.stack([loss.detach(), norm, model.encoder_weight.norm(), model.decoder_weight.norm()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert not torch.allclose(found[2], before.encoder_weight.norm(), rtol=1e-3, atol=0)


def test_step__small_gradients_do_not_vanish():
    """Targets of 1e-15, as 2/n times the gradients of a large model: the first step is still lr times the sign."""
    model, (batch,) = make_model(), make_batches([1])
    model.decoder_weight.mul_(1e-15)
    model.decoder_bias_vector.mul_(1e-15)
    tiny_batch = GradiendBatch(batch.source, batch.target * 1e-15, batch.label)
    chosen = options(epsilon=1e-30, weight_decay=0.0)
    before = model.decoder_bias_vector.clone()
    SlicedEngine(model, chosen).step([tiny_batch], 1e-3)
    step = (model.decoder_bias_vector - before).abs()
    torch.testing.assert_close(step, torch.full_like(step, 1e-3), rtol=1e-3, atol=0)


# --- numbers that are not finite


def state(engine: SlicedEngine) -> list[Tensor]:
    optimizers = (engine.encoder_optimizer, engine.decoder_optimizer)
    moments = [m for o in optimizers for m in (*o.moments, *o.second_moments, o.num_steps)]
    return [tensor.clone() for tensor in (*engine.model.state_dict().values(), *moments)]


# Both values in all three places; each place in the first step, which has no moments yet, and with clipping, which
# could hide an infinity.
@pytest.mark.parametrize(
    ("value", "where", "sizes", "first", "limit"),
    [
        (float("nan"), "source", [1], True, 0.0), (float("nan"), "source", [1, 2], False, 1.0),
        (-float("inf"), "source", [1], False, 1.0), (-float("inf"), "source", [1, 2], True, 0.0),
        (float("nan"), "target", [1, 2], True, 1.0), (float("nan"), "target", [1], False, 0.0),
        (-float("inf"), "target", [1, 2], False, 0.0), (-float("inf"), "target", [1], True, 1.0),
        (float("nan"), "label", [1], True, 1.0), (float("nan"), "label", [1, 2], False, 0.0),
        (-float("inf"), "label", [1], False, 0.0), (-float("inf"), "label", [1, 2], True, 1.0),
    ],
    ids=str,
)  # fmt: skip
def test_step__a_number_that_is_not_finite_changes_nothing_and_shows(value, where, sizes, first, limit):
    """Also the step count stays: training goes on afterwards as if the item had not been there."""
    supervised = "encoder" if where == "label" else None
    engine = SlicedEngine(make_model(), options(supervised=supervised, max_grad_norm=limit))
    if not first:
        engine.step(make_batches(sizes, seed=1), 1e-2)
    before = state(engine)
    batches = make_batches(sizes, seed=2)
    getattr(batches[-1], where)[-1, -1] = value
    result = engine.step(batches, 1e-2)
    assert not bool(result[:2].isfinite().all()), "loss or gradient norm shows it"
    assert bool(result[2:].isfinite().all())
    assert all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True))
    engine.step(make_batches(sizes, seed=3), 1e-2)
    assert not all(torch.equal(a, b) for a, b in zip(before, state(engine), strict=True)), "the engine still works"


def test_step__after_a_skipped_step_goes_on_as_if_it_had_not_been():
    skipping, plain = (SlicedEngine(make_model(), options()) for _ in range(2))
    for step in range(6):
        batches = make_batches([2], seed=step)
        if step == 3:
            batches[0].target[0, 0] = float("nan")
            skipping.step(batches, 1e-2)
            continue
        assert torch.equal(skipping.step(batches, 1e-2), plain.step(batches, 1e-2))


# --- turning the latent axis


def train(engine: SlicedEngine, steps: range, sizes: Sequence[int] = (2,)) -> list[Tensor]:
    return [engine.step(make_batches(sizes, seed=step), 1e-2) for step in steps]


# Moments of each optimizer with and without a bias; every odd activation, one latent and two.
@pytest.mark.parametrize(
    ("latent_dim", "bias", "optim", "activation"),
    [
        (1, True, "adamw", "tanh"), (2, True, "adam", "tanh"), (2, False, "adamw", "smht"), (1, True, "adam", "smht"),
        (1, False, "adam", "id"), (2, True, "adamw", "id"),
    ],
)  # fmt: skip
def test_flip__is_exact_and_training_goes_on_mirrored(latent_dim, bias, optim, activation):
    """Fails if the bias turns too, or if a moment is forgotten: losses would differ from the next step on."""
    chosen = options(optim=optim, max_grad_norm=0.05)
    one, other = (
        SlicedEngine(make_model(latent_dim, bias_decoder=bias, activation_encoder=activation), chosen) for _ in range(2)
    )
    train(one, range(5))
    train(other, range(5))
    (probe,) = make_batches([3], seed=77)
    decoded, encoded = one.model(probe.source, return_encoded=True)
    other.flip(with_decoder_bias=False)
    turned, turned_encoding = other.model(probe.source, return_encoded=True)
    assert torch.equal(turned, decoded) and torch.equal(turned_encoding, -encoded)
    for a, b in zip(train(one, range(5, 25)), train(other, range(5, 25)), strict=True):
        assert torch.equal(a, b)
    other.flip(with_decoder_bias=False)
    assert all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


def test_flip__with_the_bias_is_the_references():
    """Encoder and decoder change sign whole, the bias too, and no moment does."""
    engine = SlicedEngine(make_model(), options())
    train(engine, range(5))
    before = state(engine)
    engine.flip(with_decoder_bias=True)
    after = state(engine)
    assert all(torch.equal(a, -b) for a, b in zip(after[:4], before[:4], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after[4:], before[4:], strict=True))


# --- several devices


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 40)
    monkeypatch.setattr(chunks, "CHUNK_ON_GPU", 40)


def placed_batches(batches: list[GradiendBatch], device: str) -> list[GradiendBatch]:
    """Gradients where the base model is; labels on the CPU, where the loop makes them."""
    return [GradiendBatch(b.source.to(device), b.target.to(device), b.label) for b in batches]


# Settings of the step and of the model; supervised training has one label, so one latent.
CURVED = {"activation_decoder": "tanh", "bias_decoder": False}
MODES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_grad_norm": 0.05}, {}),
    ({"max_grad_norm": 0.05, "optim": "adam"}, {"latent_dim": 2, **CURVED}),
    ({"moments_dtype": "bfloat16"}, {"latent_dim": 2}),
    ({"supervised": "encoder"}, {}),
    ({"supervised": "decoder"}, {}),
    ({"supervised": "decoder"}, CURVED),
]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "devices", [("gpu:1", "gpu:2", "gpu:3"), ("gpu:1", "gpu:2", "gpu:1"), ("gpu:1", "gpu:1", "gpu:2")], ids=str
)
@pytest.mark.parametrize(("mode", "changes"), MODES, ids=str)
def test_step__on_several_devices_mixes_none_waits_for_none_and_is_the_same(devices, mode, changes):
    """Fails if a `.to` is missing or wrong anywhere, or if the step makes the host wait for a GPU."""
    encoder, decoder, base = devices
    reference = SlicedEngine(make_model(**changes), options(**mode))
    with pretend_gpus(3):
        model = make_model(device_encoder=encoder, device_decoder=decoder, **changes)
        engine = SlicedEngine(model, options(**mode))
        for step, sizes in enumerate(([1], [3], [2, 1])):
            expected = reference.step(make_batches(sizes, seed=step), 1e-2)
            batches = placed_batches(make_batches(sizes, seed=step), base)
            with waits() as counted:
                found = engine.step(batches, 1e-2)
                if step == 1:
                    engine.flip(with_decoder_bias=False)
            assert not counted
            assert str(found.device) == decoder
            assert torch.equal(found.cpu(), expected)
            if step == 1:
                reference.flip(with_decoder_bias=False)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(state(engine), state(reference), strict=True))
        assert {str(m.device) for m in engine.encoder_optimizer.moments} == {encoder}
        assert {str(m.device) for m in engine.decoder_optimizer.moments} == {decoder}


# --- parts of n


class Meeting:
    """Engines in threads that add up as ranks do: everyone's sums, in the order of the ranks, for everyone."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.sums: list[Any] = [None] * world_size

    def total(self, rank: int, partial: Tensor) -> Tensor:
        self.sums[rank] = partial
        self.barrier.wait()
        found = torch.stack(self.sums).sum(0)
        self.barrier.wait()  # nobody overwrites what another still reads
        return found


class ThreadComm(Comm):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank=rank)
        self.meeting = meeting

    def total(self, tensor: Tensor) -> Tensor:
        return self.meeting.total(self.rank, tensor)


def take_part(batch: GradiendBatch, part: Slices) -> GradiendBatch:
    source, target = (torch.stack([part.take(row) for row in rows]) for rows in (batch.source, batch.target))
    return GradiendBatch(source, target, batch.label)


PARTS = {
    "two": [Slices.even(N, rank, 2) for rank in range(2)],
    "interleaved": [Slices(N, ((0, 20), (60, 70))), Slices(N, ((20, 60), (70, N)))],
    "one of nothing": [Slices(N, ((0, 50),)), Slices(N, ((50, 50),)), Slices(N, ((50, N),))],
}


@pytest.mark.usefixtures("small_chunks")
# Every mode sums other things, each way that a step goes as well: all pairs of these, with the cuts in turn.
@pytest.mark.parametrize(
    ("mode", "changes", "sizes", "parts"),
    [
        (mode, changes, sizes, list(PARTS.values())[(row + column) % 3])
        for row, (mode, changes) in enumerate(MODES)
        for column, sizes in enumerate([[1], [3], [2, 1]])
    ],
    ids=str,
)
def test_step__parts_of_n_together_are_the_whole(parts, sizes, mode, changes):
    """Fails if a sum over n does not go through `Comm.total`, is longer on a rank of nothing, or is added twice."""
    whole = SlicedEngine(make_model(**changes), options(**mode))
    meeting = Meeting(len(parts))
    engines = [
        SlicedEngine(make_model(slices=part, **changes), options(**mode), ThreadComm(meeting, rank))
        for rank, part in enumerate(parts)
    ]
    with ThreadPoolExecutor(len(parts)) as threads:
        for step in range(4):
            batches = make_batches(sizes, seed=step)
            expected = whole.step(batches, 1e-2)
            steps = [
                threads.submit(engine.step, [take_part(batch, engine.slices) for batch in batches], 1e-2)
                for engine in engines
            ]
            results = [one.result() for one in steps]
            assert all(torch.equal(result, results[0]) for result in results)
            torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-7)
    for engine in engines:
        for name, tensor in engine.model.state_dict().items():
            wanted = whole.model.state_dict()[name]
            if name.startswith("encoder") and name.endswith("weight"):
                wanted = torch.stack([engine.slices.take(row) for row in wanted])
            elif name.startswith("decoder"):
                wanted = engine.slices.take(wanted)
            torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    ("sizes", "latent_dim", "decoder"),
    [([1], 1, "id"), ([3], 2, "id"), ([2, 1], 1, "id"), ([1], 2, "tanh"), ([3], 1, "tanh"), ([2, 1], 2, "tanh")],
    ids=str,
)
def test_step__a_part_of_nothing_adds_zeros(sizes, latent_dim, decoder):
    """A rank that owns no entry still takes part in every sum: alone, its loss and norms are zero."""
    generator = torch.Generator().manual_seed(2)
    part = Slices(10, ((4, 4),))
    model = GradiendModel(10, latent_dim, slices=part, activation_decoder=decoder, generator=generator)
    batches = [GradiendBatch(torch.zeros(k, 0), torch.zeros(k, 0), torch.ones(k, 1)) for k in sizes]
    engine = SlicedEngine(model, options(max_grad_norm=0.1))
    assert list(chunks.chunks(part.size, torch.device("cpu"))) == []
    assert torch.equal(engine.step(batches, 1e-2), torch.zeros(4))


def test_step__copies_nothing_from_the_host_that_it_has_copied_before(monkeypatch):
    """What items count is made once for each composition of a step: a copy from the host waits for the device."""
    engine = SlicedEngine(make_model(), options())
    for sizes in ([1], [3, 2]):
        engine.step(make_batches(sizes), 1e-2)
    given = [make_batches(sizes, seed=1) for sizes in ([3, 2], [1])]
    monkeypatch.setattr(torch, "tensor", lambda *_args, **_more: pytest.fail("a tensor was made of numbers"))
    for batches in given:
        engine.step(batches, 1e-2)
