"""The parameter space: which entries of which base weights form the vector that GRADIEND sees, and in which order.

The order is that of `named_parameters()` of the whole base model, restricted to its backbone; every weight is read
row-major; after pruning only the selected entries count, in ascending order. Weights without a selected entry stay in
the list: files must name the whole backbone. Positions are 64-bit everywhere.

    base-global index   position in the unpruned space
    local index         position in the (pruned) space, what an encoder column or decoder row belongs to
"""

from __future__ import annotations

import functools
import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from gradiend_dist.errors import UserError

# Selections are stored as masks where indices would take more than this many bytes per entry (the reference's rule).
MASK_DENSITY = 0.8

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Weight:
    """One base weight and where it is in the space."""

    name: str
    shape: tuple[int, ...]
    base_offset: int
    """Where the weight starts in the unpruned space."""
    offset: int
    """Where its selected entries start in the (pruned) space."""
    selected: Tensor | None
    """Flat indices of the selected entries, ascending; None: all of them."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_selected(self) -> int:
        return self.numel if self.selected is None else self.selected.numel()

    @property
    def stop(self) -> int:
        return self.offset + self.num_selected

    def flat_indices(self) -> Tensor:
        return torch.arange(self.numel) if self.selected is None else self.selected

    def representation(self) -> str:
        """How the reference stores this selection: all, indices or mask."""
        if self.num_selected == self.numel:
            return "all"
        bytes_per_index = 4 if self.numel <= INT32_MAX else 8
        return "indices" if self.num_selected * bytes_per_index < MASK_DENSITY * self.numel else "mask"


@dataclass(frozen=True)
class Slices:
    """What one rank owns of a vector over a space: ascending ranges of its positions, one behind the other."""

    total: int
    """Length of the whole vector."""
    ranges: tuple[tuple[int, int], ...]
    is_whole: bool = False
    """Every rank has all of it. Not to be told from the ranges: one of several ranks may own all there is."""

    @staticmethod
    def whole(total: int) -> Slices:
        return Slices(total, ((0, total),), is_whole=True)

    @staticmethod
    def even(total: int, rank: int, world_size: int) -> Slices:
        """One range; those of two ranks differ by at most one in length, and may be empty."""
        start, stop = rank * total // world_size, (rank + 1) * total // world_size
        return Slices(total, ((start, stop),), is_whole=world_size == 1)

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def range_pairs(self) -> Iterator[tuple[slice, slice]]:
        """(range in the rank's own vector, range in the whole one) for each range."""
        offset = 0
        for start, stop in self.ranges:
            yield slice(offset, offset + stop - start), slice(start, stop)
            offset += stop - start

    def pairs_within(self, where: slice) -> Iterator[tuple[slice, slice]]:
        """The same for a part of the rank's own vector."""
        first = bisect_right(self._starts, where.start) - 1
        for place in range(max(first, 0), len(self.ranges)):
            begins, (start, stop) = self._starts[place], self.ranges[place]
            low, high = max(where.start, begins), min(where.stop, begins + stop - start)
            if begins >= where.stop:
                return
            if low < high:
                yield slice(low, high), slice(start + low - begins, start + high - begins)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where each range begins in the rank's own vector."""
        return [own.start for own, _ in self.range_pairs()]

    def take(self, vector: Tensor) -> Tensor:
        """The rank's own entries of a whole vector."""
        if len(self.ranges) == 1:
            return vector[slice(*self.ranges[0])]
        return torch.cat([vector[there] for _, there in self.range_pairs()])

    def positions(self, own: Tensor) -> Tensor:
        """Positions in the whole vector of these positions in the rank's own one."""
        if len(self.ranges) == 1:
            return own + self.ranges[0][0]
        starts = torch.tensor([start for start, _ in self.ranges], device=own.device)
        lengths = torch.tensor([stop - start for start, stop in self.ranges], device=own.device)
        before = lengths.cumsum(0) - lengths
        owner = torch.searchsorted(before, own, right=True) - 1
        return own - before[owner] + starts[owner]

    def local(self, positions: Tensor) -> Tensor:
        """Places in the rank's own vector of those of these positions (ascending) that it has."""
        edges = torch.tensor(self.ranges).reshape(-1)
        cuts = torch.searchsorted(positions, edges).reshape(-1, 2).tolist()
        pieces = zip(self.range_pairs(), cuts, strict=True)
        return torch.cat([positions[a:b] - there.start + own.start for (own, there), (a, b) in pieces])

    def after(self, keep: Tensor) -> Slices:
        """The same entries in the space that keeps the positions `keep` (ascending) alone."""
        edges = torch.tensor(self.ranges).reshape(-1)
        kept = torch.searchsorted(keep, edges).reshape(-1, 2).tolist()
        return Slices(keep.numel(), tuple((start, stop) for start, stop in kept), self.is_whole)


class ParameterSpace:
    """An ordered list of weights; immutable, so that it can be shared and hashed. No communication anywhere."""

    def __init__(self, weights: Sequence[tuple[str, tuple[int, ...], Tensor | None]]) -> None:
        self.weights: tuple[Weight, ...] = tuple(self._lay_out(weights))
        last = self.weights[-1] if self.weights else None
        self.size = last.stop if last else 0
        self.full_size = last.base_offset + last.numel if last else 0
        self._fingerprint: str | None = None

    @staticmethod
    def _lay_out(weights: Sequence[tuple[str, tuple[int, ...], Tensor | None]]) -> Iterator[Weight]:
        base_offset = offset = 0
        for name, shape, selected in weights:
            if selected is not None and selected.numel() == prod(shape):
                selected = None
            weight = Weight(name, tuple(shape), base_offset, offset, selected)
            yield weight
            base_offset += weight.numel
            offset += weight.num_selected

    @classmethod
    def of_model(cls, model: nn.Module, patterns: Sequence[str] | None = None) -> ParameterSpace:
        """The backbone of `model`, or as much of it as `patterns` name."""
        backbone = {id(parameter) for parameter in backbone_module(model).parameters()}
        # By their names in the whole model; tied weights come once.
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters() if id(weight) in backbone}
        names = list(shapes) if patterns is None else match_names(list(shapes), patterns)
        return cls([(name, shapes[name], None) for name in names])

    @property
    def is_pruned(self) -> bool:
        return self.size != self.full_size

    def active(self) -> list[Weight]:
        """The weights that have a selected entry: only these need gradients."""
        return [weight for weight in self.weights if weight.num_selected]

    def weights_of_shards(self, shards: dict[str, tuple[int, int]]) -> list[Weight]:
        """The weights as a rank has them that holds these ranges of their entries; offsets are in its own vector."""
        weights, offset = [], 0
        for weight in self.active():
            start, stop = shards[weight.name]
            selected = weight.selected
            if selected is not None:
                first, last = torch.searchsorted(selected, torch.tensor([start, stop])).tolist()
                selected = selected[first:last] - start
            own = Weight(weight.name, (stop - start,), weight.base_offset + start, offset, selected)
            weights.append(own)
            offset += own.num_selected
        return weights

    def slices_of_shards(self, shards: dict[str, tuple[int, int]]) -> Slices:
        """What a rank that holds these ranges of the weights' entries owns of a vector over this space."""
        ranges = []
        for weight in self.active():
            edges = torch.tensor(shards[weight.name])
            if weight.selected is not None:
                edges = torch.searchsorted(weight.selected, edges)
            start, stop = (weight.offset + edges).tolist()
            if start < stop:
                ranges.append((start, stop))
        return Slices(self.size, tuple(ranges) or ((0, 0),))

    def select(self, keep: Tensor) -> ParameterSpace:
        """The space of the local indices `keep` (ascending, unique)."""
        assert keep.dtype == torch.int64, "positions are 64-bit"
        keep = keep.cpu()
        bounds = torch.tensor([weight.offset for weight in self.weights] + [self.size])
        cuts = torch.searchsorted(keep, bounds).tolist()
        chosen = []
        for weight, start, stop in zip(self.weights, cuts[:-1], cuts[1:], strict=True):
            inside = keep[start:stop] - weight.offset
            selected = inside if weight.selected is None else weight.selected[inside]
            chosen.append((weight.name, weight.shape, selected))
        return ParameterSpace(chosen)

    def positions_in(self, wider: ParameterSpace) -> Tensor:
        """Where in a space that it was selected from its entries are, ascending."""
        found = []
        for mine, theirs in zip(self.weights, wider.weights, strict=True):  # the wider space may be too large to list
            inside = mine.flat_indices() if mine.num_selected else torch.zeros(0, dtype=torch.int64)
            if theirs.selected is not None:
                inside = torch.searchsorted(theirs.selected, inside)
            found.append(theirs.offset + inside)
        return torch.cat(found)

    def base_global(self, local: Tensor) -> Tensor:
        """Positions in the unpruned space of these local ones."""
        local = local.cpu()
        offsets = torch.tensor([weight.offset for weight in self.weights])
        # Weights without a selected entry share their offset with the next one: `right` finds the last of them.
        owner = torch.searchsorted(offsets, local, right=True) - 1
        out = torch.empty_like(local)
        for index in owner.unique().tolist():
            weight, mine = self.weights[index], owner == index
            inside = local[mine] - weight.offset
            out[mine] = weight.base_offset + (inside if weight.selected is None else weight.selected[inside])
        return out

    def fingerprint(self) -> str:
        """Content hash: equal exactly for spaces with the same names, shapes and selections."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for weight in self.weights:
                digest.update(f"{weight.name}{weight.shape}{weight.num_selected};".encode())
                if weight.selected is not None:
                    digest.update(weight.selected.contiguous().numpy().tobytes())
            self._fingerprint = digest.hexdigest()[:32]
        return self._fingerprint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterSpace) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __len__(self) -> int:
        return self.size


def backbone_module(model: nn.Module) -> nn.Module:
    """What Hugging Face calls the base model: the part that every head shares."""
    prefix = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, prefix, None) if prefix else None
    return backbone if isinstance(backbone, nn.Module) else model


def match_names(names: list[str], patterns: Sequence[str]) -> list[str]:
    """The names that a name or wildcard of `patterns` matches, in their order."""
    matched: set[str] = set()
    for pattern in patterns:
        expression = re.compile(".*".join(re.escape(piece) for piece in pattern.split("*")))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits:
            raise UserError(
                f"params pattern {pattern!r} matches no backbone weight: the first ones are {', '.join(names[:3])}."
            )
        matched.update(hits)
    return [name for name in names if name in matched]


def select_entries(gradient: Tensor, weight: Weight, indices: Tensor | None) -> Tensor:
    """The selected entries of one weight's gradient; `indices` is `weight.selected` on the gradient's device."""
    flat = gradient.reshape(-1)
    assert flat.numel() == weight.numel, f"{weight.name} has {flat.numel()} entries, the space expects {weight.numel}"
    return flat if indices is None else flat[indices]
