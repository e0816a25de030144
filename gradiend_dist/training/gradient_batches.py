"""The gradients of a step's items, as the batches that an engine steps on."""

from __future__ import annotations

import torch
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.engines.base import GradiendBatch
from gradiend_dist.evaluation.encoder import EncoderEvaluation
from gradiend_dist.evaluation.explained import HeldOut
from gradiend_dist.gradients.base import vector_bytes
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.training.history import StepPlan


class GradientBatches:
    """Gathers gradients from the store or the base model. All ranks gather the same items in the same order."""

    def __init__(
        self,
        args: TrainingArguments,
        plan: StepPlan,
        rows: ItemRows,
        gradients: GradientSource,
        *,
        keep: bool,
        whole_items: bool,
    ) -> None:
        self.args, self.plan, self.rows, self.gradients = args, plan, rows, gradients
        self.keep, self.whole_items = keep or whole_items, whole_items
        self.clock = Clock()
        """The loop puts its own here."""
        self.num_rows = 0
        """Rows of all items gathered so far."""
        self._visited = plan.visited()
        self._items: dict[int, Item] = {}

    def tokenize_all(self) -> None:
        """A row that cannot be tokenized is reported now, not in the last epoch. No communication."""
        for number in self._visited:
            self._item(number)

    def gather(self, numbers: list[list[int]]) -> tuple[list[GradiendBatch], str]:
        """The GRADIEND batches of a step, and the names of their items for messages. All ranks call this."""
        single = len(numbers) == 1 and len(numbers[0]) == 1
        batches, names = [], []
        for batch in numbers:
            sources, targets, labels = [], [], []
            for number in batch:
                item = self._item(number)
                names.append(f"item {number} ({item.name})")
                self.num_rows += len(item.rows)
                with self.clock.spending("base_gradient"):
                    source, target = self._source_and_target(number)
                # A vector that was not kept is overwritten by the next item's.
                sources.append(source if single or source is None else source.clone())
                targets.append(target if single or target is None else target.clone())
                first_row = int(self.plan.schedule.batches[number][0])
                labels.append([self.args.seen_label(float(self.rows.labels[first_row]))])
            batches.append(GradiendBatch(_stack(sources), _stack(targets), torch.tensor(labels)))
        return batches, "; ".join(names)

    def _item(self, number: int) -> Item:
        if number not in self._items:
            self._items[number] = self.rows.item(self.plan.schedule.batches[number])
        return self._items[number]

    def _source_and_target(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        item, kinds = self._item(number), self.args.trained_kinds
        if self.whole_items and not self.gradients.has(item, kinds):
            # This item and those that are first visited after it, one for each rank.
            place = self._visited.index(number)
            upcoming = self._visited[place : place + self.gradients.base.comm.world_size]
            self.gradients.prepare([self._item(other) for other in upcoming], kinds)
        vectors = self.gradients.get(item, kinds, keep=self.keep)
        return (
            None if self.args.supervised_decoder else vectors[self.args.source],
            None if self.args.supervised_encoder else vectors[self.args.target],
        )


def keeps_whole_items(
    args: TrainingArguments,
    plan: StepPlan,
    gradients: GradientSource,
    evaluation: EncoderEvaluation | None,
    held_out: HeldOut | None,
) -> bool:
    """Will all gradients of the run be kept, and is any used twice? Then each rank computes whole items.

    Not decided item by item: an item whose rows are split over the ranks has the same gradient up to the order of its
    sums, and a run that goes on after a kill must compute it in the way that it was computed before.
    """
    twice = args.max_seeds > 1 or args.looks_at_items or plan.visits_items_again()
    num_vectors = vectors_of_training(args, plan)
    if evaluation is not None:
        num_vectors += len(evaluation.unique)
    if held_out is not None:
        num_vectors += held_out.num_vectors
    if args.looks_at_items:
        num_vectors += len(args.trained_kinds) * args.spectral_items * args.max_seeds
    fit = gradients_fit(num_vectors, gradients.base.largest_slices, gradients.store.budget_bytes)
    return twice and gradients.base.in_rounds and fit


def vectors_of_training(args: TrainingArguments, plan: StepPlan) -> int:
    """Different gradients that the steps of a seed take."""
    return len(args.trained_kinds) * len(plan.visited())


def gradients_fit(num_vectors: int, largest_slice: int, budget_bytes: int) -> bool:
    """Can so many gradients be kept by the rank that has most entries of each?"""
    return vector_bytes(largest_slice) * num_vectors <= budget_bytes


def _stack(vectors: list[Tensor | None]) -> Tensor | None:
    present = [vector for vector in vectors if vector is not None]
    if not present:
        return None
    return present[0].unsqueeze(0) if len(present) == 1 else torch.stack(present)
