"""Moments in bfloat16: rounded up or down at random, so that many small changes are kept in the mean.

bfloat16 has 8 bits of precision, and Adam's second moment changes by a thousandth in a step: rounded to the nearest it
would never move. The random bits are a hash of which number of the whole model it is and of how many steps it has made
(counter-based, as Philox is): nothing is drawn, a run that goes on after a kill rounds as it would have, and so does
any number of ranks. `kernels.py` has the same hash.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradiend_dist.space import Slices

# Of the hash by C. Wellons ("lowbias32"): shift, multiply, shift, multiply, shift. All arithmetic is modulo 2^32.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B

# 2^32 over the golden ratio: what numbers beyond the first 2^32 are told apart by.
GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class Rounding:
    """Which numbers of the whole model the weights of one half are."""

    half: int
    """0: the encoder, 1: the decoder."""
    slices: Slices
    """The rank's entries of n: the first dimension of all weights but `uncut`."""
    uncut: int | None = None
    """The weight that every rank has whole, the encoder's bias: so few numbers keep their moments in float32."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Of the moments of weight number `index`."""
        return torch.float32 if index == self.uncut else torch.bfloat16

    def salt(self, index: int) -> int:
        """What makes the random bits of one weight other than those of the next."""
        return mix_number((self.half << 24) + index)

    def noise(self, index: int, weight: Tensor, chunk: slice, num_steps: Tensor) -> Tensor:
        """32 random bits for each number of `weight[chunk]`: the lower 16 are for its first moment."""
        width = weight[0].numel() if weight.ndim > 1 else 1
        counters = self._counters(chunk, width, weight.device)
        counters ^= mix(num_steps.to(torch.int32).view(1) ^ signed(self.salt(index)))
        return mix(counters).view(-1, *weight.shape[1:])

    def _counters(self, chunk: slice, width: int, device: torch.device) -> Tensor:
        """Places in the whole weight of the numbers in the rank's rows `chunk`, in 32 bits."""
        is_far = self.slices.total * width > 2**31
        dtype = torch.int64 if is_far else torch.int32
        pieces = []
        for own, there in self.slices.range_pairs():
            start, stop = max(own.start, chunk.start), min(own.stop, chunk.stop)
            if start < stop:
                ahead = there.start - own.start
                first, behind = (start + ahead) * width, (stop + ahead) * width
                pieces.append(torch.arange(first, behind, dtype=dtype, device=device))
        places = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return folded(places) if is_far else places


def folded(places: Tensor) -> Tensor:
    """64-bit places in 32 bits: those below 2^32 as they are."""
    return places.to(torch.int32) ^ ((places >> 32).to(torch.int32) * signed(GOLDEN))


def mix(bits: Tensor) -> Tensor:
    """A permutation of 32-bit numbers (int32, in place) in which every bit depends on all."""
    bits ^= shifted(bits, 16)
    bits *= FIRST_FACTOR
    bits ^= shifted(bits, 15)
    bits *= signed(SECOND_FACTOR)
    bits ^= shifted(bits, 16)
    return bits


def shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, with zeros from the left. In place from the second operation on: new memory costs most here."""
    found = bits >> places
    found &= 2 ** (32 - places) - 1
    return found


def mix_number(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * FIRST_FACTOR % 2**32
    bits ^= bits >> 15
    bits = bits * SECOND_FACTOR % 2**32
    return bits ^ (bits >> 16)


def signed(bits: int) -> int:
    """The int32 with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def store_rounded(values: Tensor, noise: Tensor, into: Tensor) -> None:
    """Round float32 values to bfloat16 neighbours: up with the probability of what is cut off.

    `noise`, 16 random bits each, is used up. What bfloat16 can hold stays as it is, and so does an infinity: their
    lower bits are 0, so nothing is carried.
    """
    noise += values.view(torch.int32)
    noise >>= 16
    into.view(torch.int16).copy_(noise)
