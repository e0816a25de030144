"""Moments in bfloat16: rounded without bias, by random numbers that depend on nothing but the entry and the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.optimizer import FusedAdam
from gradiend_dist.engines.rounding import Rounding, mix, mix_number, signed, store_rounded
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Slices

N = 257


def options(**changes: object) -> StepOptions:
    values = {"optim": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.999), "epsilon": 1e-8, "max_grad_norm": 0.0}
    return StepOptions(**{**values, "supervised": None, "moments_dtype": "bfloat16", **changes})  # type: ignore[arg-type]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    into = torch.empty(values.shape, dtype=torch.bfloat16)
    store_rounded(values, noise, into)
    return into.float()


# --- one rounding


@pytest.mark.parametrize("value", [1.001, -3.7e-12, 1.3e-39, 2.0**-140, -6.5e37])
def test_store_rounded__is_the_value_in_the_mean_over_all_random_numbers(value):
    """Fails by the least bias: a bit of noise too few, or a rounding to the nearest on the way."""
    values = torch.full((2**16,), value)
    found = rounded(values, torch.arange(2**16, dtype=torch.int32))
    assert len(found.unique()) == 2
    assert found.double().mean() == values[0].double()


def test_store_rounded__leaves_what_bfloat16_can_hold():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, float("inf"), -float("inf")])
    for bits in (0, 1, 2**16 - 1):
        found = rounded(values, torch.full_like(values, bits, dtype=torch.int32))
        assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def test_mix__is_the_same_hash_on_tensors_and_numbers():
    numbers = [0, 1, 5, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 123456789]
    found = mix(torch.tensor([signed(number) for number in numbers], dtype=torch.int32))
    assert found.tolist() == [signed(mix_number(number)) for number in numbers]
    assert len(set(found.tolist())) == len(numbers)


# --- the random numbers


def noise(rounding: Rounding, index: int = 0, width: int = 1, step: int = 3, chunk: slice | None = None) -> Tensor:
    weight = torch.empty(rounding.slices.size, width) if width > 1 else torch.empty(rounding.slices.size)
    return rounding.noise(index, weight, chunk or slice(0, len(weight)), torch.tensor(float(step)))


def test_noise__is_fair_and_another_for_each_step_half_weight_and_moment():
    """Every bit is set in half of the numbers, and no two of these agree more often than by chance."""
    rounding = Rounding(0, Slices.whole(2**14))
    drawn = [
        noise(rounding),
        noise(rounding, step=4),
        noise(rounding, index=1),
        noise(Rounding(1, rounding.slices)),
    ]
    bits = torch.stack([(one[:, None] >> torch.arange(32)) & 1 for one in drawn]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 0.02  # five standard deviations
    signs = (2 * bits - 1).movedim(0, 1).flatten(1)
    assert (signs.T @ signs / len(signs) - torch.eye(128)).abs().max() < 0.05


@pytest.mark.parametrize("width", [1, 3])
def test_noise__is_that_of_the_whole_vector_on_any_rank_and_chunk(width):
    """Fails if a rank counts from its own first entry, or a chunk from its own."""
    whole = noise(Rounding(1, Slices.whole(N)), width=width)
    for ranges in (((0, 100), (200, N)), ((100, 200),)):
        part = Slices(N, ranges)
        own = Rounding(1, part)
        assert torch.equal(noise(own, width=width), part.take(whole))
        pieces = [noise(own, width=width, chunk=slice(a, min(a + 37, part.size))) for a in range(0, part.size, 37)]
        assert torch.equal(torch.cat(pieces), part.take(whole))


def test_noise__goes_on_beyond_32_bits():
    far = noise(Rounding(0, Slices(2**33, ((2**32, 2**32 + 50),))))
    near = noise(Rounding(0, Slices(2**33, ((0, 50),))))
    assert not (far == near).any()


# --- the optimizer


def test_fused_adam__in_bfloat16_keeps_changes_of_a_thousandth():
    """Rounded to the nearest, the second moment would stand still at its first value and never come down."""
    size = 4096
    exact, rough = (
        FusedAdam(options(weight_decay=0.0), [torch.zeros(size)], rounding)
        for rounding in (None, Rounding(0, Slices.whole(size)))
    )
    for optimizer in (exact, rough):
        for step in range(300):
            optimizer.begin(1e-3, torch.tensor(0.0))
            optimizer.update(0, slice(0, size), torch.full((size,), 0.01 if step else 2.0))
    assert rough.second_moments[0].dtype == rough.moments[0].dtype == torch.bfloat16
    assert exact.second_moments[0][0] < 0.8 * 4.0 * 0.001
    for name in ("moments", "second_moments", "weights"):
        expected, found = (getattr(optimizer, name)[0].double().mean() for optimizer in (exact, rough))
        torch.testing.assert_close(found, expected, rtol=3e-3, atol=0)


def batches(step: int) -> list[GradiendBatch]:
    return [GradiendBatch(random(2, N, seed=step), random(2, N, seed=step + 50), torch.ones(2, 1))]


def engine(**changes: object) -> SlicedEngine:
    model = GradiendModel(N, 2, generator=torch.Generator().manual_seed(1))
    return SlicedEngine(model, options(**changes))  # type: ignore[arg-type]


def test_engine__keeps_few_numbers_in_float32_and_the_rest_in_bfloat16():
    state = engine().state()
    assert {name: t.dtype for name, t in state.same.items() if name.endswith("moment")} == {
        "encoder.2.moment": torch.float32,
        "encoder.2.second_moment": torch.float32,
    }
    assert {t.dtype for name, t in state.cut.items() if name.endswith("moment")} == {torch.bfloat16}


def test_engine__skips_a_step_that_is_not_finite_with_its_moments():
    trained = engine()
    trained.step(batches(0), 1e-2)
    before = {name: tensor.clone() for name, tensor in vars(trained.state())["cut"].items()}
    bad = batches(1)
    bad[0].target[0, 3] = float("inf")
    trained.step(bad, 1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state().cut.items())


def test_engine__goes_on_from_its_state_to_the_same_bits():
    """Fails if a random number depends on anything that is not in the state."""
    whole, again = engine(), engine()
    for step in range(6):
        whole.step(batches(step), 1e-2)
        if step == 2:
            for kind in ("cut", "same"):
                for name, tensor in getattr(again.state(), kind).items():
                    tensor.copy_(getattr(whole.state(), kind)[name])
        if step > 2:
            again.step(batches(step), 1e-2)
    for kind in ("cut", "same"):
        for name, tensor in getattr(again.state(), kind).items():
            assert torch.equal(tensor, getattr(whole.state(), kind)[name]), name
