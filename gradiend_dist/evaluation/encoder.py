"""Encoding the rows of a split, and what the encodings say about the feature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from gradiend_dist.data import FeatureData
from gradiend_dist.evaluation.metrics import encoder_metrics, encoding_rows
from gradiend_dist.gradients import GradientSource, ItemRows
from gradiend_dist.objectives import Objective
from gradiend_dist.schedule import cap_per_group, make_schedule

Encode = Callable[[Tensor], Tensor]


class EncoderEvaluation:
    """The rows of one split, ready to be encoded again and again while their gradients stay what they are."""

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
    ) -> None:
        self.data, self.gradients, self.source = data, gradients, source
        self.mask_placeholder = objective.mask_placeholder
        rows = data.rows(split, include_other_classes=include_other_classes)
        if balance:
            group = "factual_class" if source == "factual" else "feature_class_id"
            rows = cap_per_group(rows, max_size, column=group, seed=seed)
            schedule = make_schedule(rows, 1, seed=seed, reference=reference, shuffle=False)
            order = np.concatenate([schedule.batches[i] for i in schedule.epoch(0)])
        else:
            rows = rows if max_size is None else rows.sample(min(max_size, len(rows)), random_state=seed)
            rows = rows.reset_index(drop=True)
            order = np.arange(len(rows))
        self.visited = rows.iloc[order].reset_index(drop=True)
        # Small groups are repeated to weigh as much as large ones; each row is encoded once.
        self.unique, self.place = np.unique(order, return_inverse=True)
        self.items = ItemRows(rows, objective)

    def encode(self, encode: Encode) -> npt.NDArray[np.float64]:
        """Encodings [visited rows, m]."""
        positions = [[position] for position in self.unique]
        return encode_items(self.gradients, self.items, positions, self.source, encode)[self.place]

    def table(self, encode: Encode) -> pd.DataFrame:
        """One line per visited row, with the columns of the reference's CSV file."""
        return encoding_rows(
            self.visited,
            self.encode(encode),
            source=self.source,
            target_classes=self.data.target_classes,
            mask_placeholder=self.mask_placeholder,
        )

    def metrics(self, encode: Encode) -> dict[str, Any]:
        return encoder_metrics(
            self.table(encode),
            target_classes=self.data.target_classes,
            all_classes=self.data.all_classes,
            source=self.source,
        )


def encode_items(
    gradients: GradientSource, rows: ItemRows, positions: Sequence[Sequence[int]], kind: str, encode: Encode
) -> npt.NDArray[np.float64]:
    """Encodings [items, m]; they stay on the device until the last one, one wait for all."""
    encoded = [
        encode(gradients.get(rows.item(group), [kind], keep=True)[kind].unsqueeze(0)).squeeze(0) for group in positions
    ]
    return torch.stack(encoded).double().cpu().numpy()
