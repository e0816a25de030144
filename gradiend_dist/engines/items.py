"""The gradient items of one optimizer step, and what each counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradiend_dist.distributed.devices import to_device
from gradiend_dist.engines.base import GradiendBatch
from gradiend_dist.model.gradiend import GradiendModel


class Shares:
    """What each item of a step counts: 2 / (batches x items in its batch), [K, 1] on one device.

    Made once for each composition of a step: a copy from the host in every step would wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[int, ...], Tensor] = {}

    def of(self, batches: list[GradiendBatch]) -> Tensor:
        counts = tuple(len(batch.label) for batch in batches)
        if counts not in self._made:
            shares = [2.0 / (len(counts) * count) for count in counts for _ in range(count)]
            self._made[counts] = to_device(shares, self.device).unsqueeze(1)
        return self._made[counts]


@dataclass(frozen=True)
class StepItems:
    """The K items of one optimizer step, over all its batches: only their weights in the loss differ."""

    sources: list[Tensor]
    """[k, n] of each batch, where the encoder is."""
    targets: list[Tensor]
    """[k, n] of each batch, where the decoder is."""
    label: Tensor
    factors: Tensor
    """[K, 1]: d loss / d error = factor * error for the mean squared error over a batch and over n."""
    label_factors: Tensor
    """The same for the error in the label."""
    input_dim: int
    """n: by how much the two differ."""

    @staticmethod
    def of(batches: list[GradiendBatch], model: GradiendModel, shares: Shares) -> StepItems:
        label_factors = shares.of(batches)
        return StepItems(
            [batch.source.to(model.device_encoder) for batch in batches if batch.source is not None],
            [batch.target.to(model.device_decoder) for batch in batches if batch.target is not None],
            torch.cat([batch.label for batch in batches]),
            label_factors / model.input_dim,
            label_factors,
            model.input_dim,
        )

    def source(self, chunk: slice) -> Tensor:
        return _rows(self.sources, chunk)

    def target(self, chunk: slice) -> Tensor:
        return _rows(self.targets, chunk)

    def label_on(self, device: torch.device) -> Tensor:
        """The labels, which the loop makes on the host, copied without waiting for the device."""
        label = self.label
        if device.type == "cuda" and label.device.type == "cpu" and torch.cuda.is_available():
            label = label.pin_memory()  # a copy from other memory makes the host wait
        return label.to(device, non_blocking=True)

    def compare_with_labels(self, latent: Tensor, at: torch.device) -> tuple[Tensor, Tensor]:
        """The loss, on device `at`, and dloss/dh of an encoder that is trained on the labels. No communication."""
        difference = latent - self.label_on(latent.device).to(latent.dtype)
        factors = self.label_factors.to(latent.device)
        loss = (difference.double().square() * factors).sum() / 2.0
        return loss.to(at), difference * factors

    def __len__(self) -> int:
        return len(self.label)


def _rows(batches: list[Tensor], chunk: slice) -> Tensor:
    """[K, chunk]: a view of a single batch, a copy in the cache of several."""
    return batches[0][:, chunk] if len(batches) == 1 else torch.cat([batch[:, chunk] for batch in batches])
