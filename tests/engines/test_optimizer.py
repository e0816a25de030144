"""Optimizers on chunks of weights: equal to torch's on whole weights; and the bookkeeping around an 8-bit one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.chunks import CHUNK
from gradiend_dist.engines.halves import ranges_of
from gradiend_dist.engines.optimizer import EightBitAdam, FusedAdam, make_optimizer
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import GradiendModel

FINE, BROKEN = torch.tensor(0.0), torch.tensor(1.0)


def options(**changes: Any) -> StepOptions:
    defaults: dict[str, Any] = {"optim": "adamw", "weight_decay": 0.1, "betas": (0.8, 0.95), "epsilon": 1e-6}
    return StepOptions(**{**defaults, "max_grad_norm": 0.0, "supervised": None, **changes})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weights() -> list[Tensor]:
    return [random(23, seed=1), random(23, 3, seed=2), random(2, seed=3)]


# --- the fused kernels


@pytest.mark.parametrize("optim", ["adamw", "adam"])
@pytest.mark.parametrize("size", [1, 7, 22, 23, 50])
def test_fused_adam__chunk_by_chunk_is_torchs_optimizer_on_whole_weights(optim, size):
    """Fails if a chunk updates another chunk's moments, or counts as a step of its own."""
    weights, expected = make_weights(), [torch.nn.Parameter(weight) for weight in make_weights()]
    kind = torch.optim.AdamW if optim == "adamw" else torch.optim.Adam
    plain = kind(expected, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    optimizer = make_optimizer(options(optim=optim), weights)
    for step in range(9):
        rate = 0.1 / (1 + step)
        optimizer.begin(rate, FINE)
        plain.param_groups[0]["lr"] = rate
        for index, weight in enumerate(weights):
            gradient = random(*weight.shape, seed=100 * step + index)
            expected[index].grad = gradient
            for start in range(0, len(weight), size):
                chunk = slice(start, start + size)
                optimizer.update(index, chunk, gradient[chunk])
        plain.step()
    for weight, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_fused_adam__updates_memory_that_is_shared_with_a_row():
    """Rows of a weight are optimized one by one: the weight itself must follow."""
    whole = random(2, 9)
    before = whole.clone()
    optimizer = FusedAdam(options(), [*whole])
    optimizer.begin(0.1, FINE)
    optimizer.update(1, slice(None), torch.ones(9))
    assert torch.equal(whole[0], before[0]) and not torch.equal(whole[1], before[1])


def test_fused_adam__takes_gradients_in_any_memory_layout():
    weights = [random(5, 3), random(5, 3)]
    gradient = random(3, 5, seed=4)
    for weight, given in zip(weights, (gradient.T, gradient.T.contiguous()), strict=True):
        optimizer = FusedAdam(options(), [weight])
        optimizer.begin(0.1, FINE)
        optimizer.update(0, slice(None), given)
    assert torch.equal(*weights)


def test_fused_adam__changes_nothing_where_a_number_is_not_finite():
    weights = make_weights()
    optimizer = FusedAdam(options(), weights)
    optimizer.begin(0.1, BROKEN)
    for index, weight in enumerate(weights):
        optimizer.update(index, slice(None), torch.full_like(weight, float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(weights, make_weights(), strict=True))
    assert not any(m.any() for m in (*optimizer.moments, *optimizer.second_moments)) and optimizer.num_steps == 0


def test_fused_adam__negates_the_first_moments_that_are_named():
    weights = make_weights()
    optimizer = FusedAdam(options(), weights)
    optimizer.begin(0.1, FINE)
    for index, weight in enumerate(weights):
        optimizer.update(index, slice(None), random(*weight.shape, seed=index))
    first, second = ([m.clone() for m in moments] for moments in (optimizer.moments, optimizer.second_moments))
    optimizer.negate_momentum([0, 2])
    assert [torch.equal(a, -b) for a, b in zip(optimizer.moments, first, strict=True)] == [True, False, True]
    assert torch.equal(optimizer.moments[1], first[1])
    assert all(torch.equal(a, b) for a, b in zip(optimizer.second_moments, second, strict=True))


def test_fused_adam__says_which_shapes_do_not_fit():
    optimizer = FusedAdam(options(), [random(5, 1)])
    optimizer.begin(0.1, FINE)
    with pytest.raises(AssertionError, match="gradient"):
        optimizer.update(0, slice(0, 5), random(5))


# --- 8-bit: bookkeeping on a stand-in


class StandInAdamW8bit(torch.optim.AdamW):
    """Not bitsandbytes: torch's AdamW behind its interface, to see what is handed over and when."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        assert all(p.grad is not None and p.grad.is_contiguous() for p in self.param_groups[0]["params"])
        self.steps += 1
        return super().step(closure)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=StandInAdamW8bit))
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)  # type: ignore[arg-type]


def batches(size: int, seed: int, n: int = 31) -> list[GradiendBatch]:
    return [
        GradiendBatch(random(size, n, seed=seed + i), random(size, n, seed=seed + i + 1), torch.ones(size, 1))
        for i in (0, 50)
    ]


def engine(optim: str, latent_dim: int = 1, n: int = 31, **changes: Any) -> SlicedEngine:
    keep = {name: changes.pop(name) for name in list(changes) if name == "bias_decoder"}
    model = GradiendModel(n, latent_dim, generator=torch.Generator().manual_seed(1), **keep)
    return SlicedEngine(model, options(optim=optim, **changes))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("latent_dim", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_eight_bit__gets_each_gradient_once_and_steps_once(latent_dim, bias, limit):
    """With torch's AdamW in place of the 8-bit one, training equals the fused kernels."""
    changes = {"latent_dim": latent_dim, "bias_decoder": bias, "max_grad_norm": limit}
    eight, fused = engine("adamw_8bit", **changes), engine("adamw", **changes)
    for step in range(6):
        rate = 0.02 / (1 + step)
        expected = fused.step(batches(2, step), rate)
        torch.testing.assert_close(eight.step(batches(2, step), rate), expected, rtol=1e-5, atol=1e-6)
        for optimizer in (eight.encoder_optimizer, eight.decoder_optimizer):
            assert isinstance(optimizer, EightBitAdam)
            assert optimizer.optimizer.steps == step + 1
            assert all(weight.grad is None for weight in optimizer.weights), "no gradient outlives the step"
    for a, b in zip(eight.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("supervised", ["encoder", "decoder"])
def test_eight_bit__leaves_the_half_alone_that_is_not_trained(supervised):
    eight = engine("adamw_8bit", supervised=supervised)
    before = {name: tensor.clone() for name, tensor in eight.model.state_dict().items()}
    eight.step(batches(2, 0), 0.02)
    for name, tensor in eight.model.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(supervised)


@pytest.mark.usefixtures("stand_in")
def test_eight_bit__changes_nothing_where_a_number_is_not_finite():
    eight, fused = engine("adamw_8bit"), engine("adamw")
    for step in range(4):
        given = batches(2, step)
        if step == 2:
            given[0].target[0, 0] = float("inf")
            before = [parameter.clone() for parameter in eight.model.parameters()]
            eight.step(given, 0.02)
            assert all(torch.equal(a, b) for a, b in zip(before, eight.model.parameters(), strict=True))
        else:
            expected = fused.step(given, 0.02)
            torch.testing.assert_close(eight.step(given, 0.02), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("stand_in")
def test_eight_bit__is_given_whole_weights():
    n = CHUNK + 3
    eight, fused = (engine(optim, n=n).encoder_optimizer for optim in ("adamw_8bit", "adamw"))
    assert list(ranges_of(eight, n, torch.device("cpu"))) == [slice(0, n)]
    assert len(list(ranges_of(fused, n, torch.device("cpu")))) == 2


@pytest.mark.usefixtures("stand_in")
def test_eight_bit__negates_codes_by_their_values_and_small_moments_as_they_are():
    """Codes of a map that is symmetric up to one value, as bitsandbytes': -1 has no code, its neighbour stands in."""
    positive = torch.linspace(0.01, 1.0, 128)
    values = torch.cat([-positive[:-1].flip(0), torch.zeros(1), positive])
    assert values.shape == (256,)
    optimizer = EightBitAdam(options(), make_weights())
    codes = torch.arange(256, dtype=torch.uint8)
    small = random(4)
    state = optimizer.optimizer.state
    state[optimizer.weights[0]] = {"state1": codes.clone(), "qmap1": values}
    state[optimizer.weights[1]] = {"state1": small.clone()}
    optimizer.negate_momentum([0, 1, 2])
    after = state[optimizer.weights[0]]["state1"]
    assert after.dtype == torch.uint8
    torch.testing.assert_close(values[after.long()][:-1], -values[codes.long()][:-1], rtol=0, atol=1e-6)
    assert values[after.long()][-1] == values[0]
    assert torch.equal(state[optimizer.weights[1]]["state1"], -small)


def test_eight_bit__says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r'optim=adamw_8bit needs bitsandbytes: pip install "gradiend_dist\[8bit\]"'):
        make_optimizer(options(optim="adamw_8bit"), make_weights())


# --- 8-bit: the real one


@pytest.mark.parametrize("n", [31, 5003])
def test_real_eight_bit__trains_close_to_adamw_and_follows_a_flip(n):
    """Below 4096 entries moments stay in float32; above they are 8-bit codes, and a flip negates the codes."""
    pytest.importorskip("bitsandbytes")
    eight, turned, fused = (engine(optim, n=n) for optim in ("adamw_8bit", "adamw_8bit", "adamw"))
    start = fused.model.decoder_weight.clone()
    for step in range(12):
        if step == 6:
            turned.flip(with_decoder_bias=False)
        given = batches(2, step, n)
        expected = fused.step(given, 1e-3)
        found, after_flip = eight.step(given, 1e-3), turned.step(given, 1e-3)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)
        torch.testing.assert_close(after_flip, found, rtol=0.02, atol=1e-3)
    moved = fused.model.decoder_weight - start
    assert (eight.model.decoder_weight - fused.model.decoder_weight).norm() < 0.2 * moved.norm()
    assert (turned.model.decoder_weight + eight.model.decoder_weight).norm() < 0.1 * moved.norm()
    state = eight.decoder_optimizer.optimizer.state[eight.decoder_optimizer.weights[0]]
    assert state["state1"].dtype == (torch.uint8 if n > 4096 else torch.float32)
