"""Questions to a language model: tokenized, sorted and batched once, then asked of the model in all its versions.

A question is a `Cloze`: what is read, the places that are looked at, and the token that is wanted at each of them.
Questions that read the same (the words of all classes at one blank) share a forward pass, the head runs on the places
alone, and the answers of all questions come to the host together: one wait for a whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import to_device
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch, LogitsAt

# Logits of one batch, at most: a vocabulary times the places of all its rows.
LOGITS_BYTES = 2**28


@dataclass(frozen=True)
class Answers:
    """One entry for each wanted token, question after question."""

    log_probability: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.int64]
    """The most probable token there; empty where nobody asked for it."""


@dataclass(frozen=True)
class _Batch:
    inputs: ClozeBatch
    place: Tensor
    """Of each wanted token: the row of the batch's logits."""
    token: Tensor
    answer: Tensor
    """Of each wanted token: where its answer goes."""


class Questions:
    """A fixed list of questions for models of one architecture."""

    def __init__(
        self, clozes: Sequence[Cloze], *, pad_id: int, device: torch.device, batch_size: int, vocabulary: int
    ) -> None:
        lengths = [len(cloze.labels) for cloze in clozes]
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        """Question i has the answers from starts[i] up to starts[i + 1]."""
        self.labels = np.array([label for cloze in clozes for label in cloze.labels], dtype=np.int64)
        readings: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, cloze in enumerate(clozes):
            readings.setdefault((cloze.input_ids, cloze.positions), []).append(number)
        # Rows of one length side by side: little is padded. The order is fixed by content, not by who asks.
        ordered = sorted(readings.values(), key=lambda numbers: len(clozes[numbers[0]].input_ids))
        most_places = max(1, LOGITS_BYTES // (4 * vocabulary))
        groups = _grouped(
            [(numbers, len(clozes[numbers[0]].positions)) for numbers in ordered], batch_size, most_places
        )
        self._batches = [self._batch(group, clozes, pad_id, device) for group in groups]
        self._device = device

    def _batch(self, group: list[list[int]], clozes: Sequence[Cloze], pad_id: int, device: torch.device) -> _Batch:
        place: list[int] = []
        token: list[int] = []
        answer: list[int] = []
        first = 0
        for numbers in group:
            for number in numbers:
                labels = clozes[number].labels
                place += range(first, first + len(labels))
                token += labels
                answer += range(int(self.starts[number]), int(self.starts[number + 1]))
            first += len(clozes[numbers[0]].positions)
        inputs = ClozeBatch.of([clozes[numbers[0]] for numbers in group], pad_id, device)
        return _Batch(inputs, *(to_device(column, device) for column in (place, token, answer)))

    @torch.no_grad()
    def ask(
        self,
        logits_at: LogitsAt,
        *,
        predict: bool = False,
        precision: contextlib.AbstractContextManager[None] | None = None,
        comm: Comm | None = None,
    ) -> Answers:
        """The model's answers; with `comm` all ranks call and share the batches (a sharded model needs them all)."""
        # Sums of zeros and one answer are exact: who answered does not matter.
        log_probability = torch.zeros(len(self.labels), dtype=torch.float64, device=self._device)
        predicted = torch.zeros(len(self.labels) if predict else 0, dtype=torch.int64, device=self._device)
        for batch, counts in self._share(comm or Comm()):
            with precision or contextlib.nullcontext():
                logits = logits_at(batch.inputs)
            logits = logits.float()
            if not counts:
                continue
            wanted = logits[batch.place, batch.token] - logits.logsumexp(-1)[batch.place]
            log_probability[batch.answer] = wanted.double()
            if predict:
                predicted[batch.answer] = logits.argmax(-1)[batch.place]
        if comm is not None:
            comm.total(log_probability)
            comm.total(predicted)
        return Answers(log_probability.cpu().numpy(), predicted.cpu().numpy())

    def prepare(self, logits_at: LogitsAt, precision: contextlib.AbstractContextManager[None]) -> None:
        """Let `logits_at` look at the model while it is sound: a broken one may tell nothing about its head."""
        with torch.no_grad(), precision:
            logits_at.prepare(self._batches[0].inputs)

    def _share(self, comm: Comm) -> Iterator[tuple[_Batch, bool]]:
        """This rank's batches, as many as every other's: the last may only keep the others company."""
        for start in range(0, len(self._batches), comm.world_size):
            mine = start + comm.rank
            yield self._batches[min(mine, len(self._batches) - 1)], mine < len(self._batches)

    def sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """One number for each question: the sum over its places."""
        found: npt.NDArray[np.float64] = np.add.reduceat(values, self.starts[:-1])  # every question has a place
        return found


def _grouped(readings: Sequence[tuple[list[int], int]], batch_size: int, most_places: int) -> Iterator[list[list[int]]]:
    """Consecutive readings, at most `batch_size` of them and `most_places` places in all (but at least one reading)."""
    group: list[list[int]] = []
    places = 0
    for numbers, count in readings:
        if group and (len(group) == batch_size or places + count > most_places):
            yield group
            group, places = [], 0
        group.append(numbers)
        places += count
    if group:
        yield group
