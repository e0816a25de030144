"""Arithmetic over one chunk of n at a time: what is small enough to stay in a cache, and the sums over all chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Entries of n that are worked on together, so that a handful of fp32 vectors stay in the cache. With one
# thread 2^17 and 2^18 are equal, with two 2^18 is faster by a tenth; at 2^15 calls cost a third more, with two twice.
CHUNK = 2**18

# A GPU's cache is no reason to cut; fewer, larger kernels are.
CHUNK_ON_GPU = 2**26


def chunks(size: int, device: torch.device) -> Iterator[slice]:
    """The ranges of a vector of `size` entries, each as long as suits the device."""
    length = CHUNK_ON_GPU if device.type == "cuda" else CHUNK
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


def affine(latent: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """latent weight^T + bias for latent [k, m] and weight [q, m]; in one pass over the memory."""
    if bias is None:
        return outer(latent.T, weight.T)
    if latent.shape[1] == 1:
        return torch.addcmul(bias, latent, weight.T)
    return torch.addmm(bias, latent, weight.T)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b for a [k, p] and b [k, q]; a broadcast product when k = 1, which no matrix kernel does as fast."""
    return a.T * b if len(a) == 1 else a.T @ b


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a b^T for a [k, n] and b [m, n]; when k = m = 1 the plain dot product, without dimensions."""
    if len(a) == 1 and len(b) == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return a @ b.T


def square(a: Tensor) -> Tensor:
    """Sum of squares of a chunk, in its own precision; what is added up from them is in float64."""
    flat = a.reshape(-1)
    return torch.dot(flat, flat)


class Sums:
    """Several sums over the chunks at once, in float64.

    Each chunk's terms are added at once: small tensors that stay behind between the large ones of each chunk would keep
    malloc from using those again, and a step would take 8 bytes per weight more.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, *terms: Tensor) -> None:
        self.values += terms[0].view(-1) if len(terms) == 1 else torch.cat([term.view(-1) for term in terms])
