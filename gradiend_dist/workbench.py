"""What all seeds of a run share: the frozen base model, its tokenizer, the data, and the gradients over a space."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from torch import Tensor, nn

from gradiend_dist.arguments import PrePruneConfig, TrainingArguments
from gradiend_dist.checkpoint import load_gradiend, read_context
from gradiend_dist.comm import Comm
from gradiend_dist.data import FeatureData
from gradiend_dist.devices import Placement
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.gradients import BaseGradients, GradientSource, GradientStore, Item, ItemRows, store_directory
from gradiend_dist.model import GradiendModel, ModelWithGradiend, ParamMappedGradiendModel, load_base_model
from gradiend_dist.objectives import Objective, choose_objective
from gradiend_dist.pruning import pre_prune, pre_prune_by_items, top_over_ranks
from gradiend_dist.reconstruction import ITEMS_OF_A_SIDE, HeldOut
from gradiend_dist.schedule import Schedule, cap_per_group, make_schedule
from gradiend_dist.space import ParameterSpace, Part
from gradiend_dist.spectral import SpectralStart, draw_items
from gradiend_dist.spread import Spread

logger = logging.getLogger(__name__)

GIB = 2**30
# Weights and two moments of encoder, decoder and decoder bias in float32.
BYTES_PER_ENTRY_AND_SEED = 36


@dataclass
class Workbench:
    args: TrainingArguments
    data: FeatureData
    base_model: nn.Module
    tokenizer: Any
    spread: Spread
    objective: Objective
    space: ParameterSpace
    """The space before pre-pruning."""
    cache_dir: Path | None
    """Where gradients are kept with use_cached_gradients."""
    budget_bytes: int | None = None
    """Memory for kept gradients, once a run has settled on it."""
    _gradients: GradientSource | None = None
    _items: ItemRows | None = None
    _schedule: Schedule | None = None
    _evaluations: dict[tuple[Any, ...], EncoderEvaluation] = field(default_factory=dict)

    @classmethod
    def open(
        cls, args: TrainingArguments, data: FeatureData, model: str | ModelWithGradiend, cache_dir: Path | None
    ) -> Workbench:
        """Load the base model (or take the given one) and put it where it belongs."""
        spread = Spread.of(args)
        if isinstance(model, ModelWithGradiend):
            base_model, tokenizer, space = model.base_model, model.tokenizer, model.gradiend.space
        else:
            base_model, tokenizer = load_base_model(
                model, torch_dtype=args.torch_dtype, trust_remote_code=args.trust_remote_code
            )
            space = ParameterSpace.of_model(base_model, args.params)
        spread, base_model = spread.settle(base_model.eval(), space)
        objective = choose_objective(
            args.prediction_objective,
            base_model,
            tokenizer,
            max_length=args.max_length,
            mask_placeholder=args.mask_placeholder,
            as_reference=args.behaviour.reference_labels,
        )
        return cls(args, data, base_model, tokenizer, spread, objective, space, cache_dir)

    @property
    def comm(self) -> Comm:
        return self.spread.comm

    @property
    def placement(self) -> Placement:
        return self.spread.placement

    def new_model(self, space: ParameterSpace, seed: int, *, drawn: bool = True) -> ModelWithGradiend:
        """A GRADIEND model, or what this rank trains of it, with the start that `seed` draws, or none."""
        args = self.args
        gradiend = ParamMappedGradiendModel(
            space,
            args.latent_dim,
            part=self.spread.part(space),
            activation_encoder=args.activation_encoder,
            activation_decoder=args.activation_decoder,
            bias_decoder=args.bias_decoder,
            device_encoder=self.placement.encoder,
            device_decoder=self.placement.decoder,
            generator=torch.Generator().manual_seed(seed),
            initialize=drawn,
        )
        return self.wrap(gradiend)

    def wrap(self, gradiend: ParamMappedGradiendModel) -> ModelWithGradiend:
        """A GRADIEND model together with the shared base model."""
        model = ModelWithGradiend(
            self.base_model,
            gradiend,
            self.tokenizer,
            source=self.args.source,
            target=self.args.target,
            objective=self.objective.name,
            mask_placeholder=self.args.mask_placeholder,
            max_length=self.args.max_length,
            reference_labels=self.args.behaviour.reference_labels,
        )
        first, second = self.data.target_classes
        model.feature_class_encoding_direction = {first: 1, second: -1}
        return model

    def load(self, path: Path) -> ModelWithGradiend:
        """A saved GRADIEND model over the shared base model, or this rank's part of it.

        Source, target and directions are those that it was trained with, whatever the arguments say now.
        """
        model = self.wrap(
            load_gradiend(
                path,
                comm=self.comm,
                part=self.spread.resting_part,
                device_encoder=self.placement.encoder,
                device_decoder=self.placement.decoder,
            )
        )
        context = self.comm.first(f"reading {path}", lambda: read_context(path))
        model.source, model.target = context["source"], context["target"]
        model.feature_class_encoding_direction |= context.get("feature_class_encoding_direction", {})
        return model

    def top_weights(self, path: Path, part: str, topk: int) -> list[int]:
        """Base-global positions of the most important weights of a saved model, each rank looking through its part."""
        model = self.load(path).gradiend
        return top_over_ranks(self.comm, model, part, topk)

    def base_gradients(
        self, space: ParameterSpace, comm: Comm | None = None, parts: Sequence[Part] | None = None
    ) -> BaseGradients:
        """The base model's gradients over a space; by default of all ranks, each for the part that it trains."""
        autocast = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return BaseGradients(
            self.base_model,
            self.tokenizer,
            self.objective,
            space,
            micro_batch_size=self.args.base_micro_batch_size,
            autocast=autocast,
            comm=comm or self.comm,
            parts=parts or self.spread.parts(space),
            shards=self.spread.own_shards(),
        )

    def gradients(self, space: ParameterSpace) -> GradientSource:
        """The gradients over the space that is trained in; what was kept for another space is dropped."""
        if self._gradients is None or self._gradients.base.space != space:
            base = self.base_gradients(space)
            self._gradients = GradientSource(base, GradientStore(self.store_bytes(), self._directory(space, base)))
            self._evaluations = {}
        return self._gradients

    def _directory(self, space: ParameterSpace, base: BaseGradients) -> Path | None:
        if self.cache_dir is None:
            return None
        root = self.cache_dir
        if not base.part.is_whole:
            root = root / f"rank_{self.comm.rank}_of_{self.comm.world_size}"
        return store_directory(root, self.base_model, self.tokenizer, space, base)

    def _gradients_of_evaluations(self, space: ParameterSpace, *, repeated: bool) -> GradientSource:
        """Those that training uses, or, for another space or for a model at rest, others that are not kept.

        While DeepSpeed trains, every rank has the whole encoder: it encodes its share of the rows by itself.
        """
        in_training = repeated or (self._gradients is not None and self._gradients.base.space == space)
        if self.spread.launch.engine != "zero" and in_training:
            return self.gradients(space)
        if repeated:
            alone = self.base_gradients(space, Comm(), [Part.whole(space.size)])
            return GradientSource(alone, GradientStore(self.store_bytes() // 2))
        base = self.base_gradients(space, parts=self.spread.resting_parts(space))
        return GradientSource(base, GradientStore(budget_bytes=0))

    def store_bytes(self) -> int:
        """Memory for gradients that are used again: on each rank as much, so that all ranks keep the same."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.args.gradient_store_gib is not None:
            return int(self.args.gradient_store_gib * GIB)
        return int(self._free_everywhere(self.placement.base_model) // 4)

    def _free_everywhere(self, device: torch.device) -> float:
        """Free memory of this rank, where it is least; ranks of one host share that."""
        free = free_bytes(device)
        return self.comm.smallest(free if device.type == "cuda" else free / self.comm.local_world_size)[0]

    def evaluation(
        self, space: ParameterSpace, split: str, max_size: int | None, *, repeated: bool, source: str | None = None
    ) -> EncoderEvaluation:
        """The evaluation of a split over a space; a `repeated` one is made once and keeps its gradients."""
        key = (split, max_size)
        if repeated:
            self.gradients(space)  # those of another space are dropped, and their evaluations with them
            if key in self._evaluations:
                return self._evaluations[key]
        gradients = self._gradients_of_evaluations(space, repeated=repeated)
        evaluation = EncoderEvaluation(
            self.data,
            self.objective,
            gradients,
            split=split,
            source=source or self.args.source,
            max_size=max_size,
            balance=self.args.encoder_eval_balance,
            include_other_classes=self.args.include_other_classes,
            seed=self.args.data_seed,
            reference=self.args.behaviour.reference_data,
            by_class=self.args.behaviour.evaluation_by_class,
            repeated=repeated,
        )
        if repeated:
            self._evaluations[key] = evaluation
        return evaluation

    def encoder(self, model: GradiendModel) -> Encoder:
        return Encoder(model, self.comm, self.args.eval_batch_size)

    def training_rows(self) -> pd.DataFrame:
        rows = self.data.rows("train")
        return cap_per_group(rows, self.args.train_max_size, column="feature_class_id", seed=self.args.data_seed)

    def training_items(self) -> ItemRows:
        """The training rows, tokenized once for all seeds."""
        if self._items is None:
            self._items = ItemRows(self.training_rows(), self.objective)
        return self._items

    def schedule(self) -> Schedule:
        """Which training rows make which gradient item: the same for all seeds."""
        if self._schedule is None:
            self._schedule = make_schedule(
                self.training_items().rows,
                self.args.train_batch_size,
                seed=self.args.data_seed,
                reference=self.args.behaviour.reference_data,
            )
        return self._schedule

    def spectral_items(self, seed: int) -> tuple[list[Item], list[float]]:
        """The items of training that `seed` draws for a closed form, and the class that the encoder sees in each."""
        return self._drawn(self.schedule(), self.training_items(), self.args.spectral_items, seed)

    def _drawn(self, schedule: Schedule, rows: ItemRows, count: int, seed: int) -> tuple[list[Item], list[float]]:
        batches = [schedule.batches[number] for number in draw_items(schedule, rows.labels, count, seed)]
        labels = [self.args.seen_label(rows.labels[int(batch[0])]) for batch in batches]
        return [rows.item(batch) for batch in batches], labels

    def spectral_start(self, space: ParameterSpace, seed: int, *, whole_items: bool) -> SpectralStart:
        items, labels = self.spectral_items(seed)
        return SpectralStart(self.args, self.gradients(space), items, labels, whole_items=whole_items)

    def held_out(self, space: ParameterSpace) -> HeldOut | None:
        """What the decoder's share of the target is measured on: items like those of training, of the split that
        training is judged by; smaller ones where it has few rows."""
        args, split = self.args, self.data.evaluation_split()
        if not args.measures_decoder or split == "train":
            return None
        rows = self.data.rows(split)
        fewest = min(int((rows["feature_class_id"] == direction).sum()) for direction in (0, 1))
        size = min(args.train_batch_size, max(1, fewest // ITEMS_OF_A_SIDE))
        schedule, table = make_schedule(rows, size, seed=args.data_seed), ItemRows(rows, self.objective)
        count = ITEMS_OF_A_SIDE * len(set(table.labels))
        items, labels = self._drawn(schedule, table, count, args.data_seed)
        source = None if args.supervised_decoder else args.source
        return HeldOut(self.gradients(space), items, labels, source, args.target)

    def pre_pruned(self, config: PrePruneConfig, seed: int) -> ParameterSpace:
        """The space that pre-pruning leaves; `seed` draws its examples."""
        base = self.base_gradients(self.space, parts=self.spread.resting_parts(self.space))
        keep = pre_prune(base, self.training_rows(), config, seed=seed, behaviour=self.args.behaviour)
        return self.space.select(keep)

    def prunes_by_items(self, config: PrePruneConfig) -> bool:
        """Do the items of the closed form rank the weights as well? They are more examples than were asked for.

        Not where the examples are fixed by a seed of their own, or by the reference.
        """
        args = self.args
        if not args.starts_trained or args.behaviour.pre_prune_by_row_number or config.seed is not None:
            return False
        items, labels = self.spectral_items(args.data_seed)
        return config.n_samples <= sum(len(i.rows) for i, label in zip(items, labels, strict=True) if label)

    def pruned_by_items(self, config: PrePruneConfig, known: ParameterSpace | None = None) -> ParameterSpace:
        """The space that pre-pruning by the closed form's items leaves; `known` where it was found before.

        Where their gradients over the whole space fit the memory for gradients, they are computed once: what is kept of
        them goes to the store of the pruned space, for the closed form and for training.
        """
        args, spread = self.args, self.spread
        items, labels = self.spectral_items(args.data_seed)
        base = self.base_gradients(self.space, parts=spread.resting_parts(self.space))
        kinds = list(dict.fromkeys((config.source, *args.trained_kinds)))
        one_pass = (
            spread.launch.engine != "zero"  # its ranks train on whole gradients, and prune by parts of them
            and 4 * base.largest_part * len(kinds) * len(items) <= self.store_bytes()
        )
        if known is not None and not one_pass:
            return known
        wide = GradientSource(base, GradientStore(self.store_bytes() if one_pass else 0))
        if one_pass:
            wide.prepare(items, kinds)

        def gradient(item: Item) -> Tensor:
            found = wide.get(item, kinds if one_pass else [config.source], keep=one_pass)[config.source]
            return found.clone() if one_pass else found

        if known is None:
            keep = pre_prune_by_items(base, gradient, items, labels, config, args.behaviour)
        else:
            keep = known.positions_in(self.space)
        space = known or self.space.select(keep)
        if one_pass:
            self._take_over(wide, items, space, keep)
        return space

    def _take_over(self, wide: GradientSource, items: Sequence[Item], space: ParameterSpace, keep: Tensor) -> None:
        """Put what a pruned space keeps of these gradients into its store, each rank its part."""
        narrow, own = self.gradients(space), wide.base.part.local(keep).to(wide.base.device)
        before, after = [part.after(keep) for part in wide.base.parts], narrow.base.parts
        for item in items:
            for kind, vector in wide.get(item, self.args.trained_kinds, keep=True).items():
                kept = vector[own]
                if not (self.comm.is_alone or self.spread.shards):  # shards of a base model stay where they are
                    kept = self.comm.redistribute(kept, before, after)
                narrow.store.put(item.key, kind, kept)

    def seeds_fit_together(self, space: ParameterSpace, num_seeds: int) -> bool:
        """May all seeds' weights and moments be in memory at once? Half of what is free is left alone."""
        largest = max(part.size for part in self.spread.parts(space))
        needed = num_seeds * largest * BYTES_PER_ENTRY_AND_SEED
        devices = dict.fromkeys((self.placement.encoder, self.placement.decoder))
        return all(needed / len(devices) < self._free_everywhere(device) / 2 for device in devices)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
