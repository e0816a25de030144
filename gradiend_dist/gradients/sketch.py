"""Inner products of gradients that are never in memory together.

Up to `SKETCH` entries a vector is kept as it is and its products are exact. A longer one is folded: cut into blocks of
`SKETCH` entries, each block multiplied by random signs, all blocks added up. Products of folded vectors are those of
the vectors up to |x| |y| / sqrt(SKETCH), a thousandth, whatever n is: entries that meet in one place have random signs.
Signs go with positions in the whole space, so the number of ranks does not change them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.space import Slices

SKETCH = 2**20

# Odd, so that no two of the first SKETCH blocks have the same signs.
STRIDE = 0x9E3779B1

MULTIPLIED_TOGETHER = 2**18


class Sketch:
    """`count` vectors over a space, each rank its slices; 4 bytes x `count` x min(their size, SKETCH) per rank."""

    def __init__(self, count: int, slices: Slices, comm: Comm, device: torch.device) -> None:
        self.slices, self.comm = slices, comm
        self.folds = slices.total > SKETCH
        self.values = torch.zeros(count, SKETCH if self.folds else slices.size, device=device)

    def add(self, number: int, where: slice, entries: Tensor, factor: float = 1.0) -> None:
        """Entries of a vector, `where` in this rank's slices of it; parts of an entry add up. No communication."""
        if not self.folds:
            self.values[number, where].add_(entries, alpha=factor)
            return
        for own, there in self.slices.pairs_within(where):
            start = there.start
            while start < there.stop:
                block, first = divmod(start, SKETCH)
                stop = min(there.stop, (block + 1) * SKETCH)
                place, inside = slice(first, first + stop - start), own.start - where.start + start - there.start
                signs = block_signs(block, entries.device)[place]
                self.values[number, place].addcmul_(entries[inside : inside + stop - start], signs, value=factor)
                start = stop

    def put(self, number: int, vector: Tensor) -> None:
        """A whole vector. No communication."""
        self.add(number, slice(0, self.slices.size), vector)

    def gram(self, names: Sequence[str], kind: str) -> Tensor:
        """[count, count] inner products in float64, on the host, the same on every rank. All ranks call this.

        A vector that is not finite is told by its name: nothing that follows could.
        """
        products = self._products()
        finite = products.diagonal().isfinite()
        if not finite.all():
            raise UserError(
                f"The {kind} gradient of {names[int(finite.int().argmin())]} is not finite: check the base model's "
                "weights and these rows, or leave out fp16 if it is set."
            )
        return products

    def _products(self) -> Tensor:
        """All ranks call this."""
        whole = self.values
        if self.folds and not self.slices.is_whole:
            whole = self.comm.total(whole)  # before products: pieces of different ranks meet in one place
        found = torch.zeros(len(whole), len(whole), dtype=torch.float64, device=whole.device)
        for chunk in whole.split(MULTIPLIED_TOGETHER, dim=1):
            found += chunk @ chunk.T
        if not self.folds and not self.slices.is_whole:
            found = self.comm.total(found)
        return found.cpu()


def block_signs(block: int, device: torch.device) -> Tensor:
    """[SKETCH] of +1 and -1: a view of one fixed vector, at another place for each block."""
    first = block * STRIDE % SKETCH
    return _random_signs(SKETCH, device)[first : first + SKETCH]


@functools.lru_cache(maxsize=2)
def _random_signs(size: int, device: torch.device) -> Tensor:
    drawn = torch.randint(0, 2, (2 * size,), generator=torch.Generator().manual_seed(size), dtype=torch.int8)
    return drawn.mul_(2).sub_(1).float().to(device)
