"""How sensitive a language model is to each of its weights, and a rewriting direction that takes heed of it.

A step v gains g.v for the feature and costs v'Hv of the language model's loss on neutral text. For a given cost the
best v is H^-1 g: the learnt direction, divided by the curvature. The diagonal F of the empirical Fisher matrix, the
mean squared gradient of that loss over a few texts, stands in for H:

    s(v) = c * v / (F + 0.1 * mean F of the same weight tensor),   c such that sum F s(v)^2 = sum F v^2

Equal learning rates so do equal damage, as far as F can tell. (It cannot tell how much: F is that of a few texts, and s
goes where these are not sensitive; predictions from it were too small by 10^4.) It matters most for weights that every
token passes, as BERT's token-type embeddings: they may hold half of v, and do nearly all of the damage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.fsdp import reshard
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.texts import FEWEST_TEXTS, READINGS, Texts, curvature_texts, text_questions, too_few
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import ClozeRow, MaskedObjective
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.base import longest_input
from gradiend_dist.rewriting.move import ByTensor, Factors, Piece, Scaling
from gradiend_dist.session import Session
from gradiend_dist.space import ParameterSpace, Slices, Weight
from gradiend_dist.storage.vectors import VectorPlace

DAMPING = 0.1

# Of the model's mean: a tensor with less has no curvature of its own but rounding errors, which must not be divided by.
# Attention leaves all keys' biases alone, for example.
LEAST_SHARE = 1e-4

# Of a text: enough to see what the model does with it, and short of what a training item needs in memory.
LONGEST_TEXT = 128


class ByCurvature:
    """`curvature` has a number for each entry of the vectors, in which `weights` are; with `comm` each rank has its
    slices of all three, and all ranks make this and call `fit`."""

    def __init__(self, curvature: Tensor, weights: Sequence[Weight], comm: Comm | None = None) -> None:
        self.curvature, self.comm = curvature, comm or Comm()
        own = torch.zeros(len(weights), 2, dtype=torch.float64)
        for number, weight in enumerate(weights):
            mine = curvature[weight.offset : weight.stop]
            own[number, 0], own[number, 1] = mine.sum(dtype=torch.float64), mine.numel()
        sums = self.comm.total_on_host(own)
        total, count = sums.sum(0).tolist()
        if not math.isfinite(total) or total <= 0.0:
            raise UserError(
                f"The neutral texts' gradients over the model's {count:.0f} weights are "
                f"{'zero' if total == 0.0 else 'not finite'}: pass other eval_neutral_data, or scaling=tensor."
            )
        means = sums[:, 0] / sums[:, 1].clamp_min(1.0)
        self.damping: list[float] = (DAMPING * means.clamp_min(LEAST_SHARE * total / count)).tolist()

    def fit(self, pieces: Iterable[Piece]) -> Factors:
        own = torch.zeros(2, dtype=torch.float64)
        for piece in pieces:
            curvature = self.curvature[piece.where].to(piece.step.device)
            for number, step in enumerate((piece.step, piece.step / (curvature + self.damping[piece.weight]))):
                own[number] += float((curvature * step * step).sum(dtype=torch.float64))
        before, after = self.comm.total_on_host(own).tolist()
        # Where v leaves alone all that the texts are sensitive to, no step does damage: it stays what it is.
        return _PerEntry(self, math.sqrt(before / after) if after > 0.0 else None)


@dataclass(frozen=True)
class _PerEntry:
    scaling: ByCurvature
    constant: float | None

    def at(self, weight: int, where: slice) -> Tensor | float:
        if self.constant is None:
            return 1.0
        return self.constant / (self.scaling.curvature[where] + self.scaling.damping[weight])


def curvature_items(session: Session, config: TextPredictionConfig) -> list[Item]:
    """One for each text of `curvature_texts` that has a token to ask for."""
    drawn = curvature_texts(session, config)
    longest = min(LONGEST_TEXT, longest_input(session.base_model, session.tokenizer))
    readings = READINGS if isinstance(session.objective, MaskedObjective) else 1
    items = []
    for number, text in enumerate(drawn.texts):
        clozes = [cloze for _, cloze in text_questions(session, Texts((text,) * readings, drawn.ignored), longest)]
        if clozes:
            items.append(Item(tuple(ClozeRow(cloze, cloze) for cloze in clozes), f"neutral text {number}"))
    if len(items) < FEWEST_TEXTS:
        raise too_few(len(items))
    return items


def mean_squares(base: BaseGradients, items: Sequence[Item], place: VectorPlace) -> Tensor:
    """Mean over the items of the squared gradient, of this rank's slices.

    All ranks of `base` call this.
    """
    total = place.zeros(base.slices.size)

    def add(_item: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        ((_, factor),) = into
        entries = entries.to(total.device)
        total[where].addcmul_(entries, entries, value=factor**2 / len(items))

    base.hand_out(items, ["factual"], add, complete=True, bar="curvature")
    return total


def curvature_of(session: Session, config: TextPredictionConfig, space: ParameterSpace) -> tuple[Tensor, list[Slices]]:
    """The curvature over a space and what each rank has of it: its shards' entries, or all of it.

    A base model that is whole on every rank is asked by every rank for itself: a few texts, without a word exchanged
    and the same bits as in one process.
    """
    items = curvature_items(session, config)
    if session.spread.shards:
        reshard(session.base_model)  # who has just scored it has left some weights whole
        base = session.base_gradients(space, slices_by_rank=session.spread.inference_slices(space))
    else:
        base = session.base_gradients(space, Comm(), [Slices.whole(space.size)])
    return mean_squares(base, items, session.vectors), list(base.slices_by_rank)


def whole_curvature(session: Session, config: TextPredictionConfig, space: ParameterSpace) -> Tensor | None:
    """All of it on the host of rank 0; None on the other ranks, which all call this."""
    comm = session.comm
    if not (session.spread.shards or comm.is_first):
        return None  # without shards every rank would compute all of it for itself
    own, slices_by_rank = curvature_of(session, config, space)
    own = own.cpu()
    if not session.spread.shards:
        return own
    if not comm.is_first:
        if own.numel():
            comm.send(own, 0)
        return None
    whole = torch.empty(space.size)
    for rank, slices in enumerate(slices_by_rank):
        if rank and slices.size:
            own = comm.receive(torch.empty(slices.size), rank)
        for here, there in slices.range_pairs():
            whole[there] = own[here]
    return whole


def scaling_in_place(
    name: str, session: Session, config: TextPredictionConfig, space: ParameterSpace
) -> Scaling | None:
    """For the base model of the session, before it is moved; all ranks call this."""
    shards = session.spread.own_shards()
    comm = Comm() if shards is None else session.comm
    if name == "curvature":
        weights = space.active() if shards is None else space.weights_of_shards(shards)
        return ByCurvature(curvature_of(session, config, space)[0], weights, comm)
    return ByTensor(comm) if name == "tensor" else None
