"""Rewriting a base model along what was learnt: theta' = theta + learning_rate * s(v).

v is the decoder's vector for a feature factor, or one of the model's other vectors (`part`); s weighs its entries:

    plain       s(v) = v, as in the reference
    tensor      the share of each base weight gets that weight's own size (root mean square); |s(v)| = |v|
    curvature   v / (F + damping), F from the language model's own gradients; see `gradiend_dist.evaluation.curvature`

`InPlace` moves a base model to any number of points and back to the bit: it holds one copy of the entries that it
touches and nothing else of their number, since s(v) is formed piece by piece. `save_rewritten` writes a plain Hugging
Face model with a card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.fsdp import reshard
from gradiend_dist.engines.rounding import folded, mix, store_rounded
from gradiend_dist.errors import UserError
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import Weight
from gradiend_dist.storage.vectors import VectorPlace
from gradiend_dist.storage.weight_file import ENCODER_BIAS, shapes

# Of 32 random bits those that decide about the part of a float32 that bfloat16 has no room for.
LOWER_BITS = 2**16 - 1

# Entries of a weight that are moved together: on a CPU what stays in its cache, on a GPU enough to keep it busy.
CHUNK = 2**18

CHUNK_ON_GPU = 2**24


class Vectors(Protocol):
    """The vectors of a GRADIEND model, by ranges of their entries."""

    latent_dim: int
    decoder_activation: nn.Module

    def encoder(self, where: slice) -> Tensor: ...  # [m, k]

    def decoder(self, where: slice) -> Tensor: ...  # [k, m]

    def bias(self, where: slice) -> Tensor | None: ...  # [k]


class VectorsInMemory:
    """Those of a model, or of this rank's part of one."""

    def __init__(self, gradiend: Any) -> None:
        self.gradiend = gradiend
        self.latent_dim: int = gradiend.latent_dim
        self.decoder_activation: nn.Module = gradiend.decoder[1]

    def encoder(self, where: slice) -> Tensor:
        found: Tensor = self.gradiend.encoder_weight[:, where]
        return found

    def decoder(self, where: slice) -> Tensor:
        found: Tensor = self.gradiend.decoder_weight[where]
        return found

    def bias(self, where: slice) -> Tensor | None:
        bias: Tensor | None = self.gradiend.decoder_bias_vector
        return None if bias is None else bias[where]


class VectorsInFile:
    """Those of a saved model, read as they are wanted: for a rank that has only a part of them in memory."""

    def __init__(self, path: Path, gradiend: Any) -> None:
        self.latent_dim: int = gradiend.latent_dim
        self.decoder_activation: nn.Module = gradiend.decoder[1]
        try:
            self._file: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}): it is damaged or incomplete.") from error
        self._check_sizes(path, gradiend)
        self._has_bias = gradiend.bias_decoder

    def _check_sizes(self, path: Path, gradiend: Any) -> None:
        """The file is of the whole model, of which this rank may have a part."""
        names = set(self._file.keys())
        for name, shape in shapes(gradiend).items():
            if name == ENCODER_BIAS:
                continue  # no direction needs it, and some models have none
            there = self._file.get_slice(name).get_shape() if name in names else None
            if there != list(shape):
                raise UserError(f"{path} has {name} of shape {there}, not {list(shape)}: it is damaged.")

    def encoder(self, where: slice) -> Tensor:
        found: Tensor = self._file.get_slice("encoder.0.linear.weight")[:, where.start : where.stop]
        return found

    def decoder(self, where: slice) -> Tensor:
        found: Tensor = self._file.get_slice("decoder.0.linear.weight")[where.start : where.stop]
        return found

    def bias(self, where: slice) -> Tensor | None:
        if not self._has_bias:
            return None
        found: Tensor = self._file.get_slice("decoder.0.linear.bias")[where.start : where.stop]
        return found


@torch.no_grad()
def direction(vectors: Vectors, where: slice, step: Step) -> Tensor:
    """The entries `where` of v, in float32."""
    part = step.part
    if part == "encoder-weight":
        return vectors.encoder(where).sum(0).float()
    bias = vectors.bias(where)
    if part == "decoder-bias":
        assert bias is not None, "checked before"
        return bias.float()
    decoder = vectors.decoder(where)
    if part == "decoder":
        latent = torch.as_tensor(step.feature_factor, dtype=decoder.dtype, device=decoder.device).reshape(-1)
        # Column by column: several times faster than a product where there is one, and the same to the bit however the
        # factors are given, where a product depends on how they lie in memory.
        factors = latent.expand(vectors.latent_dim)
        linear = decoder[:, 0] * factors[0]
        for column in range(1, vectors.latent_dim):
            linear += decoder[:, column] * factors[column]
        found: Tensor = vectors.decoder_activation(linear if bias is None else linear.add_(bias))
        return found.float()
    return (decoder.sum(1) if part == "decoder-weight" or bias is None else decoder.sum(1) + bias).float()


class Places(NamedTuple):
    """Where entries of a weight are among all weights: the same on every rank and in every file."""

    base_offset: int
    """Of the weight."""
    selected: Tensor | slice
    """Of its entries."""

    def listed(self, device: torch.device) -> Tensor:
        if isinstance(self.selected, slice):
            start, stop = self.selected.start + self.base_offset, self.selected.stop + self.base_offset
            return torch.arange(start, stop, device=device)
        return self.selected.to(device) + self.base_offset


class Piece(NamedTuple):
    """Some entries of v before they are scaled, and of the base model before it is moved."""

    weight: int
    """Which of the weights."""
    where: slice
    """In the vectors."""
    step: Tensor
    entries: Tensor
    places: Places
    """Of the entries in the whole unpruned space."""


class Factors(Protocol):
    """What the entries of one v are multiplied with."""

    def at(self, weight: int, where: slice) -> Tensor | float: ...


class Scaling(Protocol):
    """How the entries of v are weighed against each other: the factors depend on all of v."""

    def fit(self, pieces: Iterable[Piece]) -> Factors: ...


class ByTensor:
    """Every base weight moves by the same share of its size; with `comm` each rank has a part of each weight."""

    def __init__(self, comm: Comm | None = None) -> None:
        self.comm = comm or Comm()

    def fit(self, pieces: Iterable[Piece]) -> Factors:
        """All ranks of `comm` call this."""
        sums: dict[int, list[float]] = {}
        for piece in pieces:
            of_step, of_weight = sums.setdefault(piece.weight, [0.0, 0.0])
            sums[piece.weight] = [of_step + squares(piece.step), of_weight + squares(piece.entries)]
        # A rank has nothing of a weight that is smaller than the number of ranks.
        count = int(self.comm.largest(1 + max(sums, default=-1))[0])
        own = torch.tensor([sums.get(weight, [0.0, 0.0]) for weight in range(count)], dtype=torch.float64)
        return _PerWeight(self.comm.total_on_host(own.reshape(count, 2)).tolist())


class _PerWeight:
    """`sums` of the squares of each weight's (share of v, own entries)."""

    def __init__(self, sums: Sequence[Sequence[float]]) -> None:
        before = sum(of_step for of_step, _ in sums)
        after = sum(of_weight for of_step, of_weight in sums if of_step > 0.0)
        constant = before / after if after > 0.0 else 0.0  # all that v would move is zero, and has no size
        self._factors = [math.sqrt(constant * own / step) if step > 0.0 else 0.0 for step, own in sums]

    def at(self, weight: int, where: slice) -> float:  # noqa: ARG002
        return self._factors[weight]


def scaling_without_texts(name: str) -> Scaling | None:
    """What a model can do that has no data beside it."""
    if name == "curvature":
        raise UserError(
            "scaling=curvature needs neutral texts and a model has none: use the rewrite_base_model of a "
            "TextPredictionTrainer, or scaling=tensor."
        )
    return ByTensor() if name == "tensor" else None


def squares(entries: Tensor) -> float:
    """Their sum: squared in float32, since half precision has no room for it, and added up in float64."""
    return float(entries.float().square().sum(dtype=torch.float64))


@dataclass(frozen=True)
class DirectionNorms:
    """How long s(v) and the weights that it moves are: what turns a relative change into a learning rate."""

    length: float
    weights: float

    def rate(self, change: float) -> float:
        """The learning rate that moves the weights by this share of their norm."""
        return change * self.weights / self.length


class InPlace(AbstractContextManager["InPlace"]):
    """A base model that can be moved and is itself again, bit for bit, when the block ends.

    `weights` say where in `vectors` the entries of each weight are: of the whole space, or, over a sharded base model,
    of this rank's shards; a `scaling` then has to know the other ranks.
    """

    def __init__(
        self,
        base_model: nn.Module,
        weights: Sequence[Weight],
        vectors: Vectors,
        scaling: Scaling | None = None,
        place: VectorPlace | None = None,
    ) -> None:
        self.base_model, self.vectors, self.scaling = base_model, vectors, scaling
        reshard(base_model)
        parameters = dict(base_model.named_parameters())
        self._places: list[tuple[Weight, Tensor, Tensor | None]] = []
        for weight in weights:
            flat = flat_entries(parameters[weight.name])
            indices = None if weight.selected is None else weight.selected.to(flat.device)
            self._places.append((weight, flat, indices))
        place = place or VectorPlace(next(base_model.parameters()).device)
        self._originals = self._copies(place)
        self._factors: dict[Step, Factors] = {}

    def _copies(self, place: VectorPlace) -> list[Tensor]:
        """Of the entries that are moved, those of each dtype in one piece."""
        sizes: dict[torch.dtype, int] = {}
        for weight, flat, _ in self._places:
            sizes[flat.dtype] = sizes.get(flat.dtype, 0) + weight.num_selected
        rooms, copies = {dtype: place.empty(size, dtype) for dtype, size in sizes.items()}, []
        for weight, flat, indices in self._places:
            room = rooms[flat.dtype]
            copy, rooms[flat.dtype] = room[: weight.num_selected], room[weight.num_selected :]
            copies.append(copy.copy_(flat if indices is None else flat[indices]))
        return copies

    @torch.no_grad()
    def move(self, step: Step) -> None:
        """To this point, from wherever the model is."""
        reshard(self.base_model)
        factors = self._fitted(step)
        for (_, flat, indices), (inside, piece) in self._pieces(step):
            values = moved(piece.entries, scaled_step(piece, factors) * step.learning_rate, piece.places)
            if indices is None:
                flat[inside] = values
            else:
                flat[indices[inside]] = values

    @torch.no_grad()
    def extent(self, step: Step, comm: Comm) -> DirectionNorms:
        """Of the step's direction; over a sharded base model, all ranks of `comm` call this."""
        factors, own = self._fitted(step), torch.zeros(2, dtype=torch.float64)
        for _, (_, piece) in self._pieces(step):
            own += torch.tensor([squares(scaled_step(piece, factors)), squares(piece.entries)], dtype=torch.float64)
        length, weights = comm.total_on_host(own).sqrt().tolist()
        if not (length > 0.0 and math.isfinite(length)):
            raise UserError(
                f"The {step.part} vector of this model is {'zero' if length == 0.0 else 'not finite'}, so there is no "
                "direction to rewrite along: train it again, with initialization=spectral or other arguments."
            )
        return DirectionNorms(length, weights)

    def _pieces(self, step: Step) -> Iterator[tuple[tuple[Weight, Tensor, Tensor | None], tuple[slice, Piece]]]:
        """Of the model as it was: (place, (entries of the place, piece))."""
        for number, (place, original) in enumerate(zip(self._places, self._originals, strict=True)):
            for piece in pieces_of(number, place[0], original, self.vectors, step, device=place[1].device):
                yield place, piece

    def _fitted(self, step: Step) -> Factors | None:
        """The activation and the bias make another v of each factor: once for each, not for each learning rate."""
        if self.scaling is None:
            return None
        if step.direction not in self._factors:
            self._factors[step.direction] = self.scaling.fit(piece for _, (_, piece) in self._pieces(step))
        return self._factors[step.direction]

    @torch.no_grad()
    def restore(self) -> None:
        reshard(self.base_model)
        for (_, flat, indices), original in zip(self._places, self._originals, strict=True):
            if indices is None:
                flat.copy_(original)
            else:
                flat[indices] = original.to(flat.device)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def pieces_of(
    number: int,
    weight: Weight,
    entries: Tensor,
    vectors: Vectors,
    of: Step,
    indices: Tensor | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[slice, Piece]]:
    """(place among the weight's selected entries, piece); `indices` say which of `entries` these are, None: all.

    Pieces are on `device`; None: where the entries are.
    """
    device = device or entries.device
    for inside in chunks(weight.num_selected, device):
        where = slice(weight.offset + inside.start, weight.offset + inside.stop)
        step = direction(vectors, where, of).to(device)
        own = entries[inside] if indices is None else entries[indices[inside].to(entries.device)]
        own = own.to(device)
        selected = inside if weight.selected is None else weight.selected[inside]
        yield inside, Piece(number, where, step, own, Places(weight.base_offset, selected))


def scaled_step(piece: Piece, factors: Factors | None) -> Tensor:
    if factors is None:
        return piece.step
    factor = factors.at(piece.weight, piece.where)
    return piece.step * (factor.to(piece.step.device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def rewrite(
    base_model: nn.Module, weights: Sequence[Weight], vectors: Vectors, step: Step, scaling: Scaling | None = None
) -> None:
    """Move a model for good, with no copy of anything."""
    parameters = dict(base_model.named_parameters())
    for weight, inside, change in changes(base_model, weights, vectors, step, scaling):
        add_to(flat_entries(parameters[weight.name]), weight.base_offset, weight.selected, inside, change)


@torch.no_grad()
def changes(
    base_model: nn.Module, weights: Sequence[Weight], vectors: Vectors, step: Step, scaling: Scaling | None = None
) -> Iterator[tuple[Weight, slice, Tensor]]:
    """What a step adds to a model: (weight, which of its selected entries, numbers in float32), piece by piece."""
    factors = None
    if scaling is not None:
        factors = scaling.fit(piece for _, _, piece in _pieces(base_model, weights, vectors, step))
    for weight, inside, piece in _pieces(base_model, weights, vectors, step):
        yield weight, inside, scaled_step(piece, factors) * step.learning_rate


def add_to(flat: Tensor, base_offset: int, selected: Tensor | None, inside: slice, change: Tensor) -> None:
    """Add to some entries of a weight, or of those that are `selected` of it."""
    entries = inside if selected is None else selected[inside].to(flat.device)
    flat[entries] = moved(flat[entries], change, Places(base_offset, entries))


@torch.no_grad()
def scaled_direction(
    base_model: nn.Module, weights: Sequence[Weight], vectors: Vectors, step: Step, scaling: Scaling
) -> Tensor:
    """All of s(v) at once, for who wants to look at it."""
    pieces = [piece for _, _, piece in _pieces(base_model, weights, vectors, step)]
    factors = scaling.fit(pieces)
    return torch.cat([scaled_step(piece, factors) for piece in pieces])


def _pieces(
    base_model: nn.Module, weights: Sequence[Weight], vectors: Vectors, step: Step
) -> Iterator[tuple[Weight, slice, Piece]]:
    parameters = dict(base_model.named_parameters())
    for number, weight in enumerate(weights):
        flat = flat_entries(parameters[weight.name])
        for inside, piece in pieces_of(number, weight, flat, vectors, step, weight.selected):
            yield weight, inside, piece


def moved(entries: Tensor, change: Tensor, places: Places) -> Tensor:
    """Their sum in the entries' dtype; the change is in float32.

    bfloat16 has steps of a 256th of a number, and a usual change is a thousandth of it: rounded to the nearest, half of
    the change would be lost. So the sum is rounded up or down at random, by the entry's place and nothing else: kept
    in the mean, and the same on any rank, in place or for good. Other dtypes are added as the reference does it.
    """
    if entries.dtype is not torch.bfloat16:
        return entries + change.to(entries.dtype)
    noise = mix(folded(places.listed(entries.device)))
    noise &= LOWER_BITS
    found = torch.empty_like(entries)
    store_rounded(entries.float() + change, noise, found)
    return found


def flat_entries(parameter: Tensor) -> Tensor:
    """The entries that this process holds, to be written to."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
    return local.view(-1)


def chunks(count: int, device: torch.device) -> Iterator[slice]:
    size = CHUNK_ON_GPU if device.type == "cuda" else CHUNK
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
