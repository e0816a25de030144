"""How sensitive a language model is to each of its weights, and a rewriting direction that takes heed of it.

A step v gains g.v for the feature and costs v'Hv of the language model's loss on neutral text. For a given cost the
best v is H^-1 g: the learnt direction, divided by the curvature. The diagonal F of the empirical Fisher matrix, the
mean squared gradient of that loss over a few texts, stands in for H:

    s(v) = c * v / (F + 0.1 * mean F),   c such that sum F s(v)^2 = sum F v^2

Equal learning rates so do equal damage, as far as F can tell. It matters most for weights that every token passes, as
BERT's token-type embeddings: they may hold half of v, and do nearly all of the damage.
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
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import (
    HIDDEN_SHARE,
    ClozeRow,
    MaskedObjective,
    causal_text_questions,
    masked_text_questions,
    tokens_of,
)
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.base import longest_input
from gradiend_dist.rewriting.move import ByTensor, Factors, Piece, Scaling
from gradiend_dist.session import Session
from gradiend_dist.space import ParameterSpace, Slices

NUM_TEXTS = 8

FEWEST_TEXTS = 2

DAMPING = 0.1

# Of a text: enough to see what the model does with it, and short of what a training item needs in memory.
LONGEST_TEXT = 128

# A masked model reads each text so often, with other tokens hidden, that most of them are hidden once.
READINGS = round(1 / HIDDEN_SHARE)


class ByCurvature:
    """`curvature` has a number for each entry of the vectors; with `comm` each rank has its part of both."""

    def __init__(self, curvature: Tensor, comm: Comm | None = None) -> None:
        self.curvature, self.comm = curvature, comm or Comm()
        own = torch.tensor([float(curvature.sum(dtype=torch.float64)), float(curvature.numel())], dtype=torch.float64)
        total, count = self.comm.total_on_host(own).tolist()
        if not math.isfinite(total) or total <= 0.0:
            raise UserError(
                f"The neutral texts' gradients over the model's {count:.0f} weights are "
                f"{'zero' if total == 0.0 else 'not finite'}: pass other eval_neutral_data, or scaling=tensor."
            )
        self.damping = DAMPING * total / count

    def fit(self, pieces: Iterable[Piece]) -> Factors:
        own = torch.zeros(2, dtype=torch.float64)
        for piece in pieces:
            curvature = self.curvature[piece.where].to(piece.step.device)
            for number, step in enumerate((piece.step, piece.step / (curvature + self.damping))):
                own[number] += float((curvature * step * step).sum(dtype=torch.float64))
        before, after = self.comm.total_on_host(own).tolist()
        # Where v leaves alone all that the texts are sensitive to, no step does damage: it stays what it is.
        return _PerEntry(self, math.sqrt(before / after) if after > 0.0 else self.damping)


@dataclass(frozen=True)
class _PerEntry:
    scaling: ByCurvature
    constant: float

    def at(self, weight: int, where: slice) -> Tensor:  # noqa: ARG002
        return self.constant / (self.scaling.curvature[where] + self.scaling.damping)


@dataclass(frozen=True)
class CurvatureTexts:
    """What the curvature is measured on: no neutral text that a rewritten model is scored on."""

    texts: tuple[str, ...]
    ignored: tuple[str, ...]
    """Words that are not asked for."""

    @staticmethod
    def draw(session: Session, config: TextPredictionConfig) -> CurvatureTexts:
        """Some neutral texts of the run, at most half of them; where it has none, rows of training with their words.

        The draw depends on nothing but the data and their seed: a model that is rewritten later moves as the scored
        one did.
        """
        args, neutral = session.args, session.data.neutral
        ignored = config.decoder_eval_ignore_tokens
        if neutral is not None and len(neutral):
            count = min(NUM_TEXTS, len(neutral) // 2)
            texts = neutral.sample(n=count, random_state=args.data_seed)["text"].astype(str).tolist()
        else:
            if "train" not in session.data.splits():
                raise too_few(0)
            rows = session.data.rows("train")
            some = rows.sample(n=min(NUM_TEXTS, len(rows)), random_state=args.data_seed)
            filled = zip(some["masked"], some["factual"], strict=True)
            texts = [text.replace(args.mask_placeholder, word) for text, word in filled]
            if ignored is None:  # as where such rows score a model: the feature's own words do not count
                ignored = sorted({*rows["factual"], *rows["alternative"]})
        if len(texts) < FEWEST_TEXTS:
            raise too_few(len(texts))
        return CurvatureTexts(tuple(texts), tuple(ignored or ()))

    def items(self, session: Session) -> list[Item]:
        """One for each text that has a token to ask for."""
        tokenizer, is_masked = session.tokenizer, isinstance(session.objective, MaskedObjective)
        make, readings = (masked_text_questions, READINGS) if is_masked else (causal_text_questions, 1)
        longest = min(LONGEST_TEXT, longest_input(session.base_model, tokenizer))
        ignored, hide_special = tokens_of(tokenizer, self.ignored), session.args.behaviour.lms_on_special_tokens
        items = []
        for number, text in enumerate(self.texts):
            clozes = make(tokenizer, [text] * readings, longest, ignored, hide_special=hide_special)
            if clozes:
                items.append(Item(tuple(ClozeRow(cloze, cloze) for cloze in clozes), f"neutral text {number}"))
        if len(items) < FEWEST_TEXTS:
            raise too_few(len(items))
        return items


def too_few(count: int) -> UserError:
    return UserError(
        f"scaling=curvature finds {count} neutral texts to measure it on and needs {FEWEST_TEXTS}, besides as many to "
        "score: pass more or longer ones as eval_neutral_data, or scaling=tensor."
    )


def mean_squares(base: BaseGradients, items: Sequence[Item]) -> Tensor:
    """Mean over the items of the squared gradient, of this rank's part; one more vector of its length for a moment."""
    total, gradient = base.empty().zero_(), {"factual": base.empty()}
    for item in items:
        base.compute(item, ["factual"], out=gradient)
        total.addcmul_(gradient["factual"], gradient["factual"], value=1.0 / len(items))
    return total


def curvature_of(session: Session, config: TextPredictionConfig, space: ParameterSpace) -> tuple[Tensor, list[Slices]]:
    """The curvature over a space and what each rank has of it: its shards' part, or all of it.

    A base model that is whole on every rank is asked by every rank for itself: a few texts, without a word exchanged
    and the same bits as in one process.
    """
    items = CurvatureTexts.draw(session, config).items(session)
    if session.spread.shards:
        reshard(session.base_model)  # who has just scored it has left some weights whole
        base = session.base_gradients(space, slices_by_rank=session.spread.inference_slices(space))
    else:
        base = session.base_gradients(space, Comm(), [Slices.whole(space.size)])
    return mean_squares(base, items), list(base.slices_by_rank)


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
    comm = session.comm if session.spread.shards else Comm()
    if name == "curvature":
        return ByCurvature(curvature_of(session, config, space)[0], comm)
    return ByTensor(comm) if name == "tensor" else None
