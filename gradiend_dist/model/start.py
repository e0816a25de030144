"""The random start of a GRADIEND model by position: each rank draws its own entries, on their device.

A number depends on the seed, on the tensor and on its position in the whole tensor, and on nothing that was drawn
before: neither the number of ranks nor the kind of device changes a bit of it. `GradiendModel.reset_parameters` draws
the reference's numbers instead: one after the other, so that every rank draws all 5n of them on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradiend_dist.model.gradiend import GradiendModel

# Of SplitMix64: the step from one state to the next, and the two factors that mix a state.
STEP = 0x9E3779B97F4A7C15

FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

# Numbers that are drawn together; five times their 8 bytes are in memory for a moment.
DRAWN_TOGETHER = 2**20

DRAWN_TOGETHER_ON_GPU = 2**24

MANTISSA_BITS = 24


@torch.no_grad()
def draw_start(model: GradiendModel, seed: int) -> None:
    """Uniform weights and biases in (-1 / sqrt(n), 1 / sqrt(n)), the reference's distribution; of slices their entries.

    No communication.
    """
    n, m = model.input_dim, model.latent_dim
    bound, bias = 1 / math.sqrt(n), model.decoder_bias_vector
    for own, there in model.slices.range_pairs():
        for row in range(m):
            fill(model.encoder_weight[row, own], row * n + there.start, bound, seed, stream=0)
        # A row of the decoder's weight for each entry.
        fill(model.decoder_weight[own].view(-1), there.start * m, bound, seed, stream=1)
        if bias is not None:
            fill(bias[own], there.start, bound, seed, stream=2)
    fill(model.encoder_bias, 0, bound, seed, stream=3)


def fill(into: Tensor, first: int, bound: float, seed: int, *, stream: int) -> None:
    """The numbers of a stream from position `first` on, uniform in (-bound, bound)."""
    together = DRAWN_TOGETHER_ON_GPU if into.device.type == "cuda" else DRAWN_TOGETHER
    key = _mixed(_mixed(seed) + stream)
    for start in range(0, len(into), together):
        stop = min(start + together, len(into))
        state = torch.arange(first + start, first + stop, device=into.device)
        bits = _mix(state.mul_(_signed(STEP)).add_(_signed(key))).bitwise_right_shift_(64 - MANTISSA_BITS)
        bits &= 2**MANTISSA_BITS - 1  # a shift to the right keeps the sign
        # Odd numbers between -2^24 and 2^24, which float32 holds exactly: one rounding, the same on every device.
        odd = bits.mul_(2).sub_(2**MANTISSA_BITS - 1).float()
        into[start:stop] = odd.mul_(bound / 2**MANTISSA_BITS)


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's output for these states, in place; products are those of 64 bits, as int64 has them."""
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1])):
        state ^= (state >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        state *= _signed(factor)
    return state.bitwise_xor_((state >> 31).bitwise_and_(2**33 - 1))


def _mixed(number: int) -> int:
    """The same of one number."""
    state = (number * STEP) % 2**64
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1])):
        state = (state ^ (state >> shift)) * factor % 2**64
    return state ^ (state >> 31)


def _signed(number: int) -> int:
    """The int64 with the bits of these 64."""
    return number - 2**64 if number >= 2**63 else number
