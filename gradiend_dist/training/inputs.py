"""What training takes from a session: rows and their order, what judges it, where it starts, what is pruned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.groups.evaluation import ITEMS_OF_A_SIDE
from gradiend_dist.config.pruning import PrePruneConfig
from gradiend_dist.data.schedule import Schedule, cap_per_group, make_schedule
from gradiend_dist.data.table import FeatureData
from gradiend_dist.evaluation.encoder import EncoderEvaluation
from gradiend_dist.evaluation.explained import HeldOut
from gradiend_dist.gradients.buckets import Deliver
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.gradients.store import GradientSource, GradientStore
from gradiend_dist.memory import Head, sliced
from gradiend_dist.session import Session
from gradiend_dist.space import ParameterSpace
from gradiend_dist.training.gradient_batches import gradients_fit
from gradiend_dist.training.history import StepPlan
from gradiend_dist.training.pruning import RankingGradients, computed, pre_prune, pre_prune_by_items
from gradiend_dist.training.spectral import draw_items


@dataclass(frozen=True)
class TrainingRows:
    """The rows of training and their order, the same for all seeds: known before any weight is loaded."""

    rows: pd.DataFrame
    schedule: Schedule
    """Which rows make which gradient item, in which order."""

    @classmethod
    def of(cls, args: TrainingArguments, data: FeatureData) -> TrainingRows:
        """No communication: all ranks make the same."""
        rows = cap_per_group(data.rows("train"), args.train_max_size, column="feature_class_id", seed=args.data_seed)
        reference = args.behaviour.reference_data
        return cls(rows, make_schedule(rows, args.train_batch_size, seed=args.data_seed, reference=reference))


class TrainingInputs:
    """The inputs of all seeds of a run, each made once. All ranks make and ask them in the same order."""

    def __init__(self, session: Session, training: TrainingRows) -> None:
        self.session, self.training = session, training
        self._items: ItemRows | None = None
        self._kept: GradientSource | None = None
        self._evaluations: dict[tuple[str, int | None], EncoderEvaluation] = {}

    def evaluation(self, space: ParameterSpace, split: str, max_size: int | None) -> EncoderEvaluation:
        """The evaluation that is repeated while a space is trained in: made once, and its gradients are kept."""
        kept = self.session.gradients(space)
        if kept is not self._kept:  # those of another space were dropped, and their evaluations go with them
            self._kept, self._evaluations = kept, {}
        key = (split, max_size)
        if key not in self._evaluations:
            gradients = self.session.gradients_for_encoding(space, repeated=True)
            self._evaluations[key] = EncoderEvaluation.of(
                self.session, gradients, split, max_size, source=self.session.args.source, repeated=True
            )
        return self._evaluations[key]

    def training_items(self) -> ItemRows:
        """The training rows, tokenized once for all seeds. No communication."""
        if self._items is None:
            self._items = ItemRows(self.training.rows, self.session.objective)
        return self._items

    def plan(self) -> StepPlan:
        """The steps of every seed. No communication."""
        return StepPlan.of(self.session.args, self.training.schedule)

    def spectral_items(self, seed: int, *, more: int = 1, larger: int = 1) -> tuple[list[Item], list[float]]:
        """The items of training that `seed` draws for a closed form, and the class that the encoder sees in each.

        `more` and `larger`: so many times as many, and of so many times as many rows.
        """
        args, schedule = self.session.args, self.training.schedule
        if larger > 1:
            schedule = make_schedule(self.training.rows, larger * args.train_batch_size, seed=args.data_seed)
        return self._draw(schedule, self.training_items(), more * args.spectral_items, seed)

    def _draw(self, schedule: Schedule, rows: ItemRows, count: int, seed: int) -> tuple[list[Item], list[float]]:
        batches = [schedule.batches[number] for number in draw_items(schedule, rows.labels, count, seed)]
        labels = [self.session.args.seen_label(rows.labels[int(batch[0])]) for batch in batches]
        return [rows.item(batch) for batch in batches], labels

    def held_out(self, space: ParameterSpace) -> HeldOut | None:
        """What the decoder's share of the target is measured on: items like those of training, of the split that
        training is judged by; smaller ones where it has few rows."""
        args, split = self.session.args, self.session.data.evaluation_split()
        if not args.measures_decoder or split == "train":
            return None
        rows = self.session.data.rows(split)
        fewest = min(int((rows["feature_class_id"] == direction).sum()) for direction in (0, 1))
        size = min(args.train_batch_size, max(1, fewest // ITEMS_OF_A_SIDE))
        schedule, table = make_schedule(rows, size, seed=args.data_seed), ItemRows(rows, self.session.objective)
        count = ITEMS_OF_A_SIDE * len(set(table.labels))
        items, labels = self._draw(schedule, table, count, args.data_seed)
        source = None if args.supervised_decoder else args.source
        return HeldOut(self.session.gradients(space), items, labels, source, args.target)

    def pre_pruned(self, config: PrePruneConfig, seed: int) -> ParameterSpace:
        """The space that pre-pruning leaves; `seed` draws its examples."""
        base = self.session.base_gradients(
            self.session.space, slices_by_rank=self.session.spread.inference_slices(self.session.space)
        )
        keep = pre_prune(
            base,
            self.training.rows,
            config,
            seed=seed,
            behaviour=self.session.args.behaviour,
            place=self.session.vectors,
        )
        return self.session.space.select(keep)

    def prunes_by_items(self, config: PrePruneConfig) -> bool:
        """Do the items of the closed form rank the weights as well? They are more examples than were asked for.

        Not where the examples are fixed by a seed of their own, or by the reference.
        """
        args = self.session.args
        if not args.starts_trained or args.behaviour.pre_prune_by_row_number or config.seed is not None:
            return False
        items, labels = self.spectral_items(args.data_seed)
        return config.n_samples <= sum(len(i.rows) for i, label in zip(items, labels, strict=True) if label)

    def pruned_by_items(self, config: PrePruneConfig, known: ParameterSpace | None = None) -> ParameterSpace:
        """The space that pre-pruning by the closed form's items leaves; `known` where it was found before.

        Where their gradients over the whole space fit the memory for gradients, they are computed once: what is kept of
        them goes to the store of the pruned space, for the closed form and for training.
        """
        args, spread = self.session.args, self.session.spread
        items, labels = self.spectral_items(args.data_seed)
        base = self.session.base_gradients(
            self.session.space, slices_by_rank=spread.inference_slices(self.session.space)
        )
        kinds = list(dict.fromkeys((config.source, *args.trained_kinds)))
        one_pass = (
            spread.launch.engine != "zero"  # its ranks train on whole gradients, and prune by parts of them
            # and the two vectors that rank the weights
            and gradients_fit(len(kinds) * len(items) + 2, base.largest_slices, self.session.store_bytes())
        )
        if known is not None and not one_pass:
            return known
        wide = GradientSource(base, GradientStore(self.session.store_bytes() if one_pass else 0))
        if one_pass:
            wide.prepare(items, kinds)

        def kept(wanted: Sequence[Item], deliver: Deliver) -> None:
            for number, item in enumerate(wanted):
                vector = wide.get(item, kinds, keep=True)[config.source]
                deliver(number, [(config.source, 1.0)], slice(0, len(vector)), vector)

        if known is None:
            gradients = RankingGradients(base, kept) if one_pass else computed(base, config.source)
            keep = pre_prune_by_items(gradients, items, labels, config, args.behaviour, place=self.session.vectors)
        else:
            keep = known.positions_in(self.session.space)
        space = known or self.session.space.select(keep)
        if one_pass:
            self._store_kept_entries(wide, items, space, keep)
        return space

    def _store_kept_entries(
        self, wide: GradientSource, items: Sequence[Item], space: ParameterSpace, keep: Tensor
    ) -> None:
        """Put what a pruned space keeps of these gradients into its store, each rank its slices."""
        narrow, own = self.session.gradients(space), wide.base.slices.local(keep).to(wide.base.device)
        before, after = [slices.after(keep) for slices in wide.base.slices_by_rank], narrow.base.slices_by_rank
        for item in items:
            for kind, vector in wide.get(item, self.session.args.trained_kinds, keep=True).items():
                kept = vector[own]
                # Shards of a base model stay where they are.
                if not (self.session.comm.is_alone or self.session.spread.shards):
                    kept = self.session.comm.redistribute(kept, before, after)
                narrow.store.put(item.key, kind, kept)

    def seeds_fit_together(self, largest_slice: int, num_seeds: int) -> bool:
        """May all seeds' weights and moments be in memory at once? Half of what is free is left alone."""
        args = self.session.args
        head = Head(largest_slice, args.latent_dim, args.bias_decoder, seeds=num_seeds)
        need = sliced(head, largest_slice)
        needed = need.weights + need.moments
        devices = dict.fromkeys((self.session.placement.encoder, self.session.placement.decoder))
        return all(needed / len(devices) < self.session.free_on_every_rank(device) / 2 for device in devices)
