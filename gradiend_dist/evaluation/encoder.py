"""Encoding the rows of a split, and what the encodings say about the feature."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from gradiend_dist.data.schedule import cap_per_group, make_schedule
from gradiend_dist.data.table import FeatureData
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.metrics import encoder_metrics, encoding_rows
from gradiend_dist.gradients.cloze import Objective
from gradiend_dist.gradients.forward_mode import encode_rows, has_modules_for_experts, row_products
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.session import Session

WEIGHED_TOGETHER = 2**20


@dataclass(frozen=True)
class Encoder:
    """What turns gradients into encodings: a whole model, or this rank's slices of one."""

    model: GradiendModel
    comm: Comm
    batch_size: int
    """Rows read together in forward mode."""

    @classmethod
    def of(cls, session: Session, model: GradiendModel) -> Encoder:
        return cls(model, session.comm, session.args.eval_batch_size)

    def products(self, vector: Tensor) -> Tensor:
        """What these slices add to We.x [m], in float64."""
        weight = self.model.encoder_weight
        return weigh(weight, vector.to(weight.device))

    def finish(self, products: Tensor) -> Tensor:
        """Encodings [items, m] from every rank's products: one sum over the ranks for all items."""
        bias = self.model.encoder_bias
        summed = products if self.model.slices.is_whole else self.comm.total(products)
        encoded: Tensor = self.model.encoder[1](summed.to(bias) + bias)
        return encoded


class EncoderEvaluation:
    """The rows of one split, ready to be encoded again and again while their gradients stay what they are.

    All ranks make it and call its methods.
    """

    def __init__(
        self,
        data: FeatureData,
        objective: Objective,
        gradients: GradientSource,
        *,
        split: str,
        source: str,
        max_size: int | None,
        balance: bool,
        include_other_classes: bool,
        seed: int,
        reference: bool,
        by_class: bool,
        repeated: bool,
    ) -> None:
        self.data, self.gradients, self.source, self.repeated = data, gradients, source, repeated
        self.mask_placeholder = objective.mask_placeholder
        rows = data.rows(split, include_other_classes=include_other_classes)
        if balance:
            group = "factual_class" if source == "factual" else "feature_class_id"
            rows = cap_per_group(rows, max_size, column=group, seed=seed)
            turns = group if by_class else "feature_class_id"
            schedule = make_schedule(rows, 1, seed=seed, reference=reference, shuffle=False, by=turns)
            order = np.concatenate([schedule.batches[i] for i in schedule.epoch(0)])
        elif by_class:
            rows = cap_per_group(rows, max_size, column="feature_class_id", seed=seed)
            order = np.argsort(rows["label"].to_numpy(), kind="stable")
        else:
            rows = rows if max_size is None else rows.sample(min(max_size, len(rows)), random_state=seed)
            rows = rows.reset_index(drop=True)
            order = np.arange(len(rows))
        self.visited = rows.iloc[order].reset_index(drop=True)
        # Small groups are repeated to weigh as much as large ones; each row is encoded once.
        self.unique, self.place = np.unique(order, return_inverse=True)
        self.items = ItemRows(rows, objective)

    @classmethod
    def of(
        cls,
        session: Session,
        gradients: GradientSource,
        split: str,
        max_size: int | None,
        *,
        source: str,
        repeated: bool,
    ) -> EncoderEvaluation:
        """The evaluation of a split as the run's arguments want it."""
        args = session.args
        return cls(
            session.data,
            session.objective,
            gradients,
            split=split,
            source=source,
            max_size=max_size,
            balance=args.encoder_eval_balance,
            include_other_classes=args.include_other_classes,
            seed=args.data_seed,
            reference=args.behaviour.reference_data,
            by_class=args.behaviour.evaluation_by_class,
            repeated=repeated,
        )

    def encode(self, encoder: Encoder) -> npt.NDArray[np.float64]:
        """Encodings [visited rows, m]."""
        return encode_items(self.gradients, self._unique_items, self.source, encoder, keep=self.repeated)[self.place]

    @functools.cached_property
    def _unique_items(self) -> list[Item]:
        """Made once: an item remembers its key, which takes longer to compute than a pruned encoding."""
        return [self.items.item([position]) for position in self.unique]

    def table(self, encoder: Encoder) -> pd.DataFrame:
        """One line per visited row, with the columns of the reference's CSV file."""
        return encoding_rows(
            self.visited,
            self.encode(encoder),
            source=self.source,
            target_classes=self.data.target_classes,
            mask_placeholder=self.mask_placeholder,
        )

    def metrics(self, encoder: Encoder) -> dict[str, Any]:
        return encoder_metrics(
            self.table(encoder),
            target_classes=self.data.target_classes,
            all_classes=self.data.all_classes,
            source=self.source,
        )


@torch.no_grad()
def encode_items(
    gradients: GradientSource, items: Sequence[Item], kind: str, encoder: Encoder, *, keep: bool
) -> npt.NDArray[np.float64]:
    """Encodings [items, m] of one-row items; they stay on the device until the last one, one wait for all.

    A whole model on several ranks: each rank encodes some of the items. Slices on each rank: all ranks compute some of
    the gradients, and everyone weighs its slices of all of them.
    """
    comm, is_whole = encoder.comm, encoder.model.slices.is_whole
    mine = items[comm.rank :: comm.world_size] if is_whole else items
    values = (_encode_whole if is_whole else _encode_slices)(gradients, mine, kind, encoder, keep=keep)
    found = values.double().cpu().numpy().reshape(len(mine), -1)
    if is_whole and not comm.is_alone:
        found = _interleave(comm.gather(found), len(items))
    finite = np.isfinite(found).all(axis=1)
    _require_finite_gradients(gradients, [item for item, fine in zip(items, finite, strict=True) if not fine], kind)
    return found


def _encode_whole(
    gradients: GradientSource, items: Sequence[Item], kind: str, encoder: Encoder, *, keep: bool
) -> Tensor:
    """From the gradients, where these are kept or will be (`keep`: they are wanted again); else by forward mode."""
    if not items:
        return torch.empty(0, encoder.model.latent_dim)
    if not gradients.holds(items, kind, will_keep=keep):
        return encode_rows(gradients.base, items, kind, encoder.model, encoder.batch_size)
    vectors = (gradients.get(item, [kind], keep=keep)[kind] for item in items)
    return encoder.finish(torch.stack([encoder.products(vector) for vector in vectors]))


def _encode_slices(
    gradients: GradientSource, items: Sequence[Item], kind: str, encoder: Encoder, *, keep: bool
) -> Tensor:
    """From the gradients where these are kept or will be; else each piece is weighed as it arrives, and dropped.

    All ranks call this.
    """
    weight = encoder.model.encoder_weight
    products = torch.zeros(len(items), len(weight), dtype=torch.float64, device=weight.device)
    if gradients.holds(items, kind, will_keep=keep):
        gradients.prepare(items, [kind])
        for number, item in enumerate(items):
            products[number] = encoder.products(gradients.get(item, [kind], keep=keep)[kind])
        return encoder.finish(products)

    if gradients.base.is_sharded and _rows_fit_shards(gradients, items[0], kind, encoder):
        return encoder.finish(row_products(gradients.base, items, kind, weight, encoder.batch_size))

    def weigh_piece(number: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
        ((_, factor),) = into
        products[number] += weigh(weight[:, where], entries.to(weight.device)) * factor

    gradients.base.hand_out(items, [kind], weigh_piece)
    return encoder.finish(products)


def _rows_fit_shards(gradients: GradientSource, item: Item, kind: str, encoder: Encoder) -> bool:
    """Does forward mode give what the gradient does? Some models use a weight without calling its module.

    Looked at once, on one row. All ranks call this.
    """
    base, weight = gradients.base, encoder.model.encoder_weight
    if base.rows_in_shards is None and has_modules_for_experts(base.model):
        base.rows_in_shards = False  # ranks would gather the weights of different experts
    if base.rows_in_shards is None:
        by_rows = encoder.comm.total(row_products(base, [item], kind, weight, 1))
        gradient = gradients.get(item, [kind], keep=False)[kind]
        by_gradient = encoder.comm.total(encoder.products(gradient))
        norms = [torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in (weight, gradient)]
        squares = encoder.comm.total(torch.stack(norms).square())
        scale = max(float(by_gradient.abs().max()), 1e-3 * float(squares.prod().sqrt()))
        rounded = next(base.model.parameters()).dtype != torch.float32 or base.autocast is not None
        fits = bool((by_rows[0] - by_gradient).abs().max() <= (5e-2 if rounded else 1e-3) * scale)
        base.rows_in_shards = encoder.comm.all_agree(fits)
    return base.rows_in_shards


def weigh(weight: Tensor, vector: Tensor) -> Tensor:
    """We.x [m] in float64; chunks are summed in float32."""
    found = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    for start in range(0, len(vector), WEIGHED_TOGETHER):
        chunk = slice(start, start + WEIGHED_TOGETHER)
        found += weight[:, chunk] @ vector[chunk].to(weight.dtype)
    return found


def _interleave(by_rank: list[npt.NDArray[np.float64]], count: int) -> npt.NDArray[np.float64]:
    """Undo items[rank :: world_size]."""
    found = np.empty((count, max(values.shape[1] for values in by_rank)))
    for rank, values in enumerate(by_rank):
        found[rank :: len(by_rank)] = values
    return found


def _require_finite_gradients(gradients: GradientSource, suspects: Sequence[Item], kind: str) -> None:
    """An encoding that is not finite is the base model's doing if the gradient is not; if it is, the encoder's.

    All ranks call this.
    """
    for item in suspects:
        fine = bool(gradients.get(item, [kind], keep=False)[kind].isfinite().all())
        if not gradients.base.comm.all_agree(fine):
            raise UserError(
                f"The base model's gradient of {item.name} is not finite: check the model's weights and this row, or "
                "leave out fp16 if it is set."
            )
