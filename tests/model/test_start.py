"""The random start by position: the same on any number of ranks and on any device, drawn by each rank for itself."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from pretend_gpu import pretend_gpus, waits
from torch import Tensor

from gradiend_dist.model import start
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.model.start import draw_start
from gradiend_dist.space import Slices

N = 1003


def drawn(seed: int = 5, latent_dim: int = 2, n: int = N, **options: object) -> GradiendModel:
    model = GradiendModel(n, latent_dim, initialize=False, **options)  # type: ignore[arg-type]
    draw_start(model, seed)
    return model


def interleaved(rank: int) -> Slices:
    """As under FSDP: a piece of every weight."""
    return Slices(N, tuple((start, min(start + 7, N)) for start in range(7 * rank, N, 7 * 3)))


@pytest.mark.parametrize("cut", [lambda rank: Slices.even(N, rank, 3), interleaved], ids=["even", "interleaved"])
@pytest.mark.parametrize("latent_dim", [1, 2])
def test_start__of_each_part_is_that_of_the_whole(cut, latent_dim, monkeypatch):
    """Fails if a number depends on what was drawn before it, in its own part or block."""
    whole = drawn(latent_dim=latent_dim)
    monkeypatch.setattr(start, "DRAWN_TOGETHER", 50)
    for rank in range(3):
        slices = cut(rank)
        part = drawn(latent_dim=latent_dim, slices=slices)
        assert torch.equal(part.encoder_weight.T, slices.take(whole.encoder_weight.T))
        assert torch.equal(part.decoder_weight, slices.take(whole.decoder_weight))
        assert torch.equal(part.decoder_bias_vector, slices.take(whole.decoder_bias_vector))
        assert torch.equal(part.encoder_bias, whole.encoder_bias)


def test_start__of_a_rank_draws_its_own_numbers_alone():
    """A rank of 64 that draws for all takes an hour at 70B."""
    counted = []
    fill = start.fill

    def counting(into: Tensor, *args: object, **options: object) -> None:
        counted.append(len(into))
        fill(into, *args, **options)  # type: ignore[arg-type]

    with mock.patch.object(start, "fill", counting):
        drawn(latent_dim=1, slices=Slices.even(N, 5, 64))
    assert sum(counted) <= 3 * -(-N // 64) + 1


def test_start__on_a_gpu_is_the_same_to_the_bit_and_is_drawn_there():
    with pretend_gpus(2), waits() as counted:
        on_gpus = drawn(device_encoder="gpu:1", device_decoder="gpu:2")
        assert not counted
        weights = [tensor.cpu() for tensor in on_gpus.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(weights, drawn().state_dict().values(), strict=True))


def test_start__is_uniform_and_no_two_tensors_are_alike():
    model = drawn(n=200_001)
    bound = 200_001**-0.5
    tensors = [*model.encoder_weight, *model.decoder_weight.T, model.decoder_bias_vector]
    for tensor in tensors:
        assert tensor.abs().max() <= bound
        shares = torch.histc(tensor / bound, bins=10, min=-1, max=1) / len(tensor)
        assert (shares - 0.1).abs().max() < 0.004  # six standard errors
        assert abs(torch.corrcoef(torch.stack([tensor[1:], tensor[:-1]]))[0, 1]) < 0.014
    apart = torch.corrcoef(torch.stack(tensors)) - torch.eye(len(tensors))
    assert apart.abs().max() < 0.014
    other = drawn(seed=6, n=200_001)
    assert abs(torch.corrcoef(torch.stack([model.encoder_weight[0], other.encoder_weight[0]]))[0, 1]) < 0.014


def test_start__numbers_are_those_of_splitmix64():
    """Its published first outputs for the seed 1234567, as the 24 highest bits; on and off the device the same."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    with mock.patch.object(start, "_mixed", lambda _: 1234567 + start.STEP):
        start.fill(found := torch.empty(3), 0, 2.0**24, 0, stream=0)
    assert found.tolist() == [2 * (number >> 40) - 2**24 + 1 for number in published]
