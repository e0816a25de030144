"""The closed-form start: encoder and decoder from k gradient items, before the first step.

A target `diff` changes its sign with the class, so the class axis is the leading principal component of the targets.
With x_i and y_i the source and target of item i,

    Sx, Sy   k x k Gram matrices of the centred sources and targets
    t        leading eigenvector of Sy, mean |t| = 1 over both directions   the wanted latent of each item
    a        solves (Sx + ridge * mean diag(Sx)) a = t
    We       gain * sum_i a_i x_i,  be = -We.mean(x)                        then h_i = act(We.x_i + be)
    Wd, bd   least squares of y on h: one slope and one offset per weight

Everything of size n is a weighted sum of the items. So there are two passes over them: one for the Gram matrices (by
`Sketch`: no two items need to be in memory), k x k algebra, and one for the sums, which go straight into the model.
Gradients that the store has room for are computed once, for both passes and for training; else each weight's is folded
and added as the backward pass completes it, and forgotten: no vector of size n is there but the model's own.

Labels are used for the sign of the latent, and to tell whether what was found is the feature; in supervised training
they are the wanted latent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.data.schedule import Schedule
from gradiend_dist.data.splits import stream
from gradiend_dist.distributed.messages import sendable
from gradiend_dist.engines.base import Rates
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.buckets import Deliver
from gradiend_dist.gradients.items import Item
from gradiend_dist.gradients.sketch import Sketch
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.model.gradiend import ACTIVATION_MODULES, GradiendModel

logger = logging.getLogger(__name__)

RIDGE = 0.1

# tanh(1.5) = 0.9: far enough out to be told apart, and not so far that nothing can be learnt any more.
GAINS = {"tanh": 1.5, "sigmoid": 1.5}

# Slope at 0 of decoder activations whose answer to a small number is almost linear; gradients are small numbers.
SLOPES = {"id": 1.0, "tanh": 1.0, "smht": 1.0, "elu": 1.0, "gelu": 0.5, "silu": 0.5}

# Of inner products in float32, as a share of the largest: an eigenvalue below it is zero.
ROUNDING = 1e-6

# The encoder's gradient is that of a latent, y^2 at most; where classes are told apart already, this share of it.
USUAL_SHARE = 0.02

# Below these the leading component is not, or may not be, the feature.
LEAST_GAP = 0.5

LEAST_LABEL_CORRELATION = 0.5


def draw_items(schedule: Schedule, labels: Sequence[float], count: int, seed: int) -> list[int]:
    """Numbers of up to `count` items of a schedule; both directions and, where they are trained, identities take turns.

    `labels` are those of the schedule's rows. A direction with fewer items than its share gives what it has.
    """
    sides: dict[float, list[int]] = {1.0: [], -1.0: [], 0.0: []}
    for number, rows in enumerate(schedule.batches):
        sides[labels[int(rows[0])]].append(number)
    pools = [pool for pool in sides.values() if pool]
    drawn = []
    for side, pool in enumerate(pools):
        share = count // len(pools) + (side < count % len(pools))
        order = stream(seed, "spectral", side).permutation(len(pool))[:share]
        drawn.append([pool[index] for index in order])
    turns = max(len(side) for side in drawn)
    return [side[turn] for turn in range(turns) for side in drawn if turn < len(side)]


@dataclass(frozen=True)
class Measured:
    """What the first pass finds; k x k numbers and fewer."""

    sources: Tensor | None
    """[k, k] inner products; None where the encoder is not trained, or the decoder for `targets`."""
    targets: Tensor | None
    source_size: float
    """Mean over the items of |x|_1."""
    n: int

    def rates(self) -> Rates:
        """Step sizes that depend neither on n nor on the scale of the gradients.

        One step of Adam moves a latent by rate * (|x|_1 + 1), with the bias, and a decoder entry by rate. Entries whose
        gradient is far below the usual one, such as the embeddings of rare tokens, must not take part as if it were
        not: epsilon is the usual one, 2 y / n for the decoder and a share of y^2 x for the encoder.
        """
        y = 1.0 if self.targets is None else _rms(self.targets, self.n)
        if y == 0.0:
            raise UserError(
                "learning_rate=auto goes with the size of the targets, and these are zero for all items it looks at: "
                "check that factual and alternative words differ, or pass a number."
            )
        x = 1.0 if self.sources is None else _rms(self.sources, self.n)
        d_latent = y * y  # of order 1 where the loss is that of the label
        return Rates(
            encoder=1.0 / (self.source_size + 1.0),
            decoder=y,
            encoder_epsilon=USUAL_SHARE * d_latent * x,
            decoder_epsilon=2.0 * y / self.n,
        )


def _rms(gram: Tensor, n: int) -> float:
    return float((gram.diagonal().mean() / n).sqrt())


@sendable
@dataclass(frozen=True)
class ClosedForm:
    """Encoder and decoder as weighted sums of the items' vectors."""

    encoder: Tensor | None
    """[m, k]: We = encoder @ X; None where it is not fitted."""
    bias: Tensor | None
    decoder: Tensor | None
    """[m, k]: Wd^T = decoder @ Y."""
    offset: Tensor | None
    """[k]: bd = offset @ Y."""
    facts: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Does the leading component stand out, and is it the feature?"""
        gap = self.facts["gap"]
        return self.is_feature and (gap is None or gap >= LEAST_GAP)

    @property
    def is_feature(self) -> bool:
        found = self.facts["label_correlation"]
        return found is not None and abs(found) >= LEAST_LABEL_CORRELATION


class SpectralStart:
    """The items of one seed, and what is worked out from them."""

    def __init__(
        self,
        args: TrainingArguments,
        gradients: GradientSource,
        items: Sequence[Item],
        labels: Sequence[float],
        *,
        whole_items: bool = False,
    ) -> None:
        self.args, self.gradients, self.items, self.whole_items = args, gradients, list(items), whole_items
        self.labels = torch.tensor(labels, dtype=torch.float64)
        self.comm = gradients.base.comm
        fits_source, fits_target = not args.supervised_decoder, not args.supervised_encoder
        self.source = args.source if fits_source else None
        self.target = args.target if fits_target else None
        self._measured: Measured | None = None

    def measured(self) -> Measured:
        """The first pass, made once. All ranks call this."""
        if self._measured is None:
            self._measured = self._measure()
        return self._measured

    def solve(self) -> ClosedForm:
        """The closed form of these items. All ranks call this."""
        measured = self.measured()
        form = self.comm.first(
            "the closed form", lambda: solve(measured.sources, measured.targets, self.labels, measured.n, self.args)
        )
        shown = ", ".join(
            f"{name.replace('_', ' ')} {form.facts[name]:.4f}"
            for name in ("gap", "label_correlation", "explained")
            if form.facts[name] is not None
        )
        logger.info("spectral start from %d items: %s", form.facts["items"], shown)
        return form

    def warn(self, form: ClosedForm) -> None:
        """Say where the theory does not hold. No communication."""
        if self.comm.is_first:
            for warning in warnings(form.facts, self.labels, self.args):
                logger.warning("spectral start: %s", warning)

    def fill(self, model: GradiendModel, form: ClosedForm) -> dict[str, Any]:
        """Put the closed form into a model, or into this rank's slices of one; returns what training.json says of it.

        All ranks call this.
        """
        self._sum_up(model, form)
        return form.facts

    def _measure(self) -> Measured:
        """All ranks call this."""
        base = self.gradients.base
        kinds = self.args.trained_kinds
        sketches = {kind: Sketch(len(self.items), base.slices, self.comm, base.device) for kind in kinds}
        sizes = torch.zeros(len(self.items), dtype=torch.float64, device=base.device)

        def take(number: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
            for kind, factor in into:
                sketches[kind].add(number, where, entries, factor)
                if kind == self.source:
                    sizes[number] += torch.linalg.vector_norm(entries, 1) * abs(factor)

        # Products add up over the passes of an item; sizes, which learning_rate=auto is made of, do not.
        self._hand_out(take, "closed form, products", complete=self.args.refines)
        if not base.slices.is_whole:
            self.comm.total(sizes)
        names = [item.name for item in self.items]
        grams = {kind: sketch.gram(names, kind) for kind, sketch in sketches.items()}
        return Measured(
            None if self.source is None else grams[self.source],
            None if self.target is None else grams[self.target],
            float(sizes.mean()),
            base.space.size,
        )

    def _hand_out(self, deliver: Deliver, words: str, *, complete: bool = False) -> None:
        """All ranks call this."""
        kinds = self.args.trained_kinds
        self.gradients.hand_out(self.items, kinds, deliver, complete=complete, whole_items=self.whole_items, bar=words)

    def _sum_up(self, model: GradiendModel, form: ClosedForm) -> None:
        """The second pass: weighted sums, straight into the model's tensors. All ranks call this."""
        bias = model.decoder_bias_vector
        if form.encoder is not None:
            assert form.bias is not None
            model.encoder_weight.zero_()
            model.encoder_bias.copy_(form.bias)
        if form.decoder is not None:
            model.decoder_weight.zero_()
        if form.offset is not None and bias is not None:
            bias.zero_()

        def take(number: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
            for kind, factor in into:
                if form.encoder is not None and kind == self.source:
                    source = entries.to(model.device_encoder)
                    for row, weights in zip(model.encoder_weight, form.encoder, strict=True):
                        row[where].add_(source, alpha=factor * float(weights[number]))
                if form.decoder is None or kind != self.target:
                    continue
                target = entries.to(model.device_decoder)
                for column, weights in zip(model.decoder_weight.T, form.decoder, strict=True):
                    column[where].add_(target, alpha=factor * float(weights[number]))
                if form.offset is not None and bias is not None:
                    bias[where].add_(target, alpha=factor * float(form.offset[number]))

        self._hand_out(take, "closed form, sums")


def solve(
    sources: Tensor | None, targets: Tensor | None, labels: Tensor, n: int, args: TrainingArguments
) -> ClosedForm:
    """The k x k algebra, in float64; a pure function."""
    count, m = len(labels), args.latent_dim
    _require_both_directions(labels)
    gap, shares = None, torch.zeros(0)
    if targets is None or sources is None:
        wanted = labels.unsqueeze(1)
    else:
        wanted, shares = leading_components(targets, m, args)
        wanted = wanted / wanted[labels != 0].abs().mean(0)  # identities, almost 0, would blow up the others
        following = float(shares[m]) if len(shares) > m else 0.0
        gap = 1.0 - following / float(shares[m - 1]) if count > m + 1 else None
        wanted = wanted * _signs(wanted, labels)
    latent, encoder, bias = wanted, None, None
    if sources is not None:
        encoder, bias, latent = fit_encoder(sources, wanted, args.activation_encoder)
    decoder = offset = explained = residual = None
    if targets is not None:
        decoder, offset, residual = fit_decoder(targets, latent, has_bias=args.bias_decoder)
        explained = 1.0 - residual / float(targets.trace())
        slope = SLOPES.get(args.activation_decoder, 1.0)
        decoder, offset = decoder / slope, None if offset is None else offset / slope
    facts = {
        "items": count,
        "eigenvalues": shares[:8].tolist(),
        "gap": gap,
        "label_correlation": correlation(latent[:, 0], labels),
        "explained": explained,
        "loss": None if residual is None else residual / (count * n),
    }
    return ClosedForm(encoder, bias, decoder, offset, facts)


def _require_both_directions(labels: Tensor) -> None:
    if not ((labels > 0).any() and (labels < 0).any()):
        raise UserError(
            "initialization=spectral found training items of one direction alone: check target_classes and the split "
            "train, or use initialization=random."
        )


def leading_components(targets: Tensor, m: int, args: TrainingArguments) -> tuple[Tensor, Tensor]:
    """[k, m] leading eigenvectors of the centred targets; all eigenvalues as shares, largest first."""
    values, vectors = torch.linalg.eigh(centred(targets))
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    total, size = float(values.sum()), float(targets.trace())
    if total <= ROUNDING * size:
        found = "zero" if size == 0.0 else "the same"
        raise UserError(
            f"target={args.target} is {found} for all {len(values)} spectral items, so nothing tells their classes "
            "apart: check that factual and alternative words differ, or choose another target."
        )
    rank = int((values > ROUNDING * values[0]).sum())
    if rank < m:
        raise UserError(
            f"The targets of {len(values)} spectral items have {rank} components and latent_dim={m}: raise "
            "spectral_items, or lower latent_dim."
        )
    return vectors[:, :m], values / total


def _signs(wanted: Tensor, labels: Tensor) -> Tensor:
    """The first component is turned along the labels, further ones so that their largest entry is positive."""
    largest = wanted.gather(0, wanted.abs().argmax(0, keepdim=True))[0]
    along = (wanted * labels.unsqueeze(1)).sum(0)
    signs = torch.where(largest < 0, -1.0, 1.0).to(wanted)
    if float(along[0]) != 0.0:
        signs[0] = 1.0 if float(along[0]) > 0 else -1.0
    return signs


def fit_encoder(sources: Tensor, wanted: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(weights of the sources [m, k], biases [m], latents [k, m]) of the ridge regression on the wanted latents."""
    middle = centred(sources)
    usual = float(middle.diagonal().mean())
    if usual <= ROUNDING * float(sources.diagonal().mean()):
        raise UserError(
            f"The sources of all {len(sources)} spectral items are the same, or zero, so nothing tells their classes "
            "apart: check the rows, or choose another source."
        )
    ridge = RIDGE * usual * torch.eye(len(sources), dtype=torch.float64)
    gain = GAINS.get(activation, 1.0)
    weights = gain * torch.linalg.solve(middle + ridge, wanted - wanted.mean(0))
    weights = weights - weights.mean(0)  # exactly: what all items share has no weight
    biases = -(weights.T @ sources).mean(1)
    latent: Tensor = ACTIVATION_MODULES[activation]()(middle @ weights)
    return weights.T, biases, latent


def fit_decoder(targets: Tensor, latent: Tensor, *, has_bias: bool) -> tuple[Tensor, Tensor | None, float]:
    """(weights of the targets [m, k], of the offset [k], squared error of all items) of the least squares."""
    count, m = latent.shape
    inputs = torch.cat([latent, torch.ones(count, 1, dtype=latent.dtype)], dim=1) if has_bias else latent
    weights = torch.linalg.pinv(inputs)
    left = torch.eye(count, dtype=torch.float64) - inputs @ weights
    residual = float((left @ targets * left).sum())
    return weights[:m], weights[m] if has_bias else None, residual


def centred(gram: Tensor) -> Tensor:
    """The Gram matrix of the same vectors without their mean."""
    return gram - gram.mean(0, keepdim=True) - gram.mean(1, keepdim=True) + gram.mean()


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's; None where one of them does not vary."""
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return None if size == 0.0 else float(a @ b) / size


def warnings(facts: dict[str, Any], labels: Tensor, args: TrainingArguments) -> Iterator[str]:
    """Where the theory does not hold, or cannot be checked; each with its remedy."""
    unsupervised = not (args.supervised_encoder or args.supervised_decoder)
    if unsupervised and args.target != "diff":
        yield (
            f"target={args.target} does not change its sign with the class, so its leading component need not be the "
            "feature: use target=diff, or look at the correlation"
        )
    if unsupervised and facts["gap"] is None:
        yield (
            f"{facts['items']} items are too few to see whether the leading component stands out: raise spectral_items "
            "(16), or lower train_batch_size to have more items"
        )
    elif unsupervised and facts["gap"] < LEAST_GAP:
        yield (
            f"the eigenvalues of the targets have no clear gap after the first {args.latent_dim} ({facts['gap']:.2f}): "
            "raise train_batch_size for items with less noise, raise spectral_items, or change latent_dim"
        )
    found = facts["label_correlation"]
    if found is None or abs(found) < LEAST_LABEL_CORRELATION:
        shown = "none" if found is None else f"{found:.2f}"
        yield (
            f"the latent has a correlation of {shown} with the labels of its items, so it is not the feature: use "
            "target=diff, raise train_batch_size or spectral_items, or use initialization=random"
        )
    sizes = sorted((int((labels > 0).sum()), int((labels < 0).sum())))
    if 2 * sizes[0] < sizes[1]:
        yield (
            f"one direction has {sizes[0]} items and the other {sizes[1]}, so the mean leans to one class: lower "
            "train_batch_size, or add rows of the smaller class"
        )
    if args.activation_decoder not in SLOPES:
        yield (
            f"activation_decoder={args.activation_decoder} is not linear for small numbers, and the decoder was fitted "
            "as if it were: use id"
        )
