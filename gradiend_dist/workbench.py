"""What all seeds of a run share: the frozen base model, its tokenizer, the data, and the gradients over a space."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from torch import nn

from gradiend_dist.arguments import PrePruneConfig, TrainingArguments
from gradiend_dist.checkpoint import load_gradiend
from gradiend_dist.data import FeatureData
from gradiend_dist.devices import Placement, placement_of
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.gradients import BaseGradients, GradientSource, GradientStore, ItemRows, store_directory
from gradiend_dist.model import GradiendModel, ModelWithGradiend, ParamMappedGradiendModel, load_base_model
from gradiend_dist.objectives import Objective, choose_objective
from gradiend_dist.pruning import pre_prune
from gradiend_dist.schedule import cap_per_group
from gradiend_dist.space import ParameterSpace

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
    placement: Placement
    objective: Objective
    space: ParameterSpace
    """The space before pre-pruning."""
    cache_dir: Path | None
    """Where gradients are kept with use_cached_gradients."""
    _gradients: GradientSource | None = None
    _items: ItemRows | None = None
    _evaluations: dict[tuple[Any, ...], EncoderEvaluation] = field(default_factory=dict)

    @classmethod
    def open(
        cls, args: TrainingArguments, data: FeatureData, model: str | ModelWithGradiend, cache_dir: Path | None
    ) -> Workbench:
        """Load the base model (or take the given one) and put it where it belongs."""
        placement = placement_of(args)
        logger.info("one process: %s", placement)
        if isinstance(model, ModelWithGradiend):
            base_model, tokenizer, space = model.base_model, model.tokenizer, model.gradiend.space
        else:
            base_model, tokenizer = load_base_model(
                model, torch_dtype=args.torch_dtype, trust_remote_code=args.trust_remote_code
            )
            space = ParameterSpace.of_model(base_model, args.params)
        base_model = base_model.to(placement.base_model).eval()
        objective = choose_objective(
            args.prediction_objective,
            base_model,
            tokenizer,
            max_length=args.max_length,
            mask_placeholder=args.mask_placeholder,
            as_reference=args.behaviour.reference_labels,
        )
        return cls(args, data, base_model, tokenizer, placement, objective, space, cache_dir)

    def new_model(self, space: ParameterSpace, seed: int) -> ModelWithGradiend:
        """A GRADIEND model with the start that `seed` draws."""
        args = self.args
        gradiend = ParamMappedGradiendModel(
            space,
            args.latent_dim,
            activation_encoder=args.activation_encoder,
            activation_decoder=args.activation_decoder,
            bias_decoder=args.bias_decoder,
            device_encoder=self.placement.encoder,
            device_decoder=self.placement.decoder,
            generator=torch.Generator().manual_seed(seed),
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
        """A saved GRADIEND model over the shared base model."""
        return self.wrap(
            load_gradiend(path, device_encoder=self.placement.encoder, device_decoder=self.placement.decoder)
        )

    def base_gradients(self, space: ParameterSpace) -> BaseGradients:
        autocast = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return BaseGradients(
            self.base_model,
            self.tokenizer,
            self.objective,
            space,
            micro_batch_size=self.args.base_micro_batch_size,
            autocast=autocast,
        )

    def gradients(self, space: ParameterSpace) -> GradientSource:
        """The gradients over the space that is trained in; what was kept for another space is dropped."""
        if self._gradients is None or self._gradients.base.space != space:
            base = self.base_gradients(space)
            directory = None
            if self.cache_dir is not None:
                directory = store_directory(self.cache_dir, self.base_model, self.tokenizer, space, base)
            self._gradients = GradientSource(base, GradientStore(self.store_bytes(), directory))
            self._evaluations = {}
        return self._gradients

    def _gradients_for_once(self, space: ParameterSpace) -> GradientSource:
        """Gradients over any space, kept only if it is the one that is trained in."""
        if self._gradients is not None and self._gradients.base.space == space:
            return self._gradients
        return GradientSource(self.base_gradients(space), GradientStore(budget_bytes=0))

    def store_bytes(self) -> int:
        """Memory for gradients that are used again."""
        if self.args.gradient_store_gib is not None:
            return int(self.args.gradient_store_gib * GIB)
        return free_bytes(self.placement.base_model) // 4

    def evaluation(
        self, space: ParameterSpace, split: str, max_size: int | None, *, repeated: bool
    ) -> EncoderEvaluation:
        """The evaluation of a split over a space; a `repeated` one is made once and keeps its gradients."""
        gradients = self.gradients(space) if repeated else self._gradients_for_once(space)
        key = (split, max_size)
        if repeated and key in self._evaluations:
            return self._evaluations[key]
        evaluation = EncoderEvaluation(
            self.data,
            self.objective,
            gradients,
            split=split,
            source=self.args.source,
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
        return Encoder(model.forward_encoder, model, self.args.eval_batch_size)

    def training_rows(self) -> pd.DataFrame:
        rows = self.data.rows("train")
        return cap_per_group(rows, self.args.train_max_size, column="feature_class_id", seed=self.args.data_seed)

    def training_items(self) -> ItemRows:
        """The training rows, tokenized once for all seeds."""
        if self._items is None:
            self._items = ItemRows(self.training_rows(), self.objective)
        return self._items

    def pre_pruned(self, config: PrePruneConfig, seed: int) -> ParameterSpace:
        """The space that pre-pruning leaves; `seed` draws its examples."""
        base = self.base_gradients(self.space)
        keep = pre_prune(base, self.training_rows(), config, seed=seed, behaviour=self.args.behaviour)
        return self.space.select(keep)

    def seeds_fit_together(self, space: ParameterSpace, num_seeds: int) -> bool:
        """May all seeds' weights and moments be in memory at once? Half of what is free is left alone."""
        needed = num_seeds * space.size * BYTES_PER_ENTRY_AND_SEED
        devices = {self.placement.encoder, self.placement.decoder}
        return all(needed / len(devices) < free_bytes(device) / 2 for device in devices)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
