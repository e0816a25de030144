"""What all seeds of a run share: the frozen base model, its tokenizer, the data, and the gradients over a space."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.data.table import FeatureData
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import Placement, free_bytes, sharing
from gradiend_dist.engines.spread import Spread
from gradiend_dist.forecast import base_of, left_for_store, need_of, need_with_seeds, run_of
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import Objective, choose_objective
from gradiend_dist.gradients.store import GradientSource, GradientStore, store_directory
from gradiend_dist.memory import Need, Run
from gradiend_dist.model.base import load_base_model
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model.start import draw_start
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.space import ParameterSpace, Slices
from gradiend_dist.storage.model_dir import load_gradiend, read_context
from gradiend_dist.storage.vectors import VectorPlace

logger = logging.getLogger(__name__)

GIB = 2**30

# A word of the row may be longer than its placeholder.
ADDED_TOKENS = 8


@dataclass
class Session:
    """One base model with its data, loaded once. All ranks have one and use it in the same order."""

    args: TrainingArguments
    data: FeatureData
    base_model: nn.Module
    tokenizer: Any
    spread: Spread
    objective: Objective
    space: ParameterSpace
    """The space before pre-pruning."""
    directory: Path
    """Of the run, for files that it needs while it works."""
    budget_bytes: int | None = None
    """Memory for kept gradients, once a run has decided on it."""
    _gradients: GradientSource | None = None

    @classmethod
    def open(
        cls, args: TrainingArguments, data: FeatureData, model: str | ModelWithGradiend, directory: Path
    ) -> Session:
        """Load the base model (or take the given one) and put it where it belongs. All ranks call this."""
        spread = Spread.of(args)
        if isinstance(model, ModelWithGradiend):
            base_model, tokenizer, space = model.base_model, model.tokenizer, model.gradiend.space
        else:
            base_model, tokenizer = load_base_model(
                model,
                torch_dtype=args.torch_dtype,
                trust_remote_code=args.trust_remote_code,
                attn_implementation=args.attn_implementation,
                device=spread.placement.base_model,
                cut=spread.cut_of(args.params),
            )
            space = ParameterSpace.of_model(base_model, args.params)
        spread, base_model = spread.place_base_model(base_model.eval(), space)
        spread.recompute_layers(base_model, asked=args.gradient_checkpointing)
        objective = choose_objective(
            args.prediction_objective,
            base_model,
            tokenizer,
            max_length=args.max_length,
            mask_placeholder=args.mask_placeholder,
            as_reference=args.behaviour.reference_labels,
        )
        return cls(args, data, base_model, tokenizer, spread, objective, space, directory)

    @property
    def comm(self) -> Comm:
        return self.spread.comm

    @property
    def placement(self) -> Placement:
        return self.spread.placement

    def new_model(self, space: ParameterSpace, seed: int, *, drawn: bool = True) -> ModelWithGradiend:
        """A GRADIEND model, or what this rank trains of it, with the start that `seed` draws, or none.

        No communication: a rank's part of the start does not depend on the others'.
        """
        args = self.args
        self.spread.require_trainable(space, args.latent_dim)
        gradiend = ParamMappedGradiendModel(
            space,
            args.latent_dim,
            slices=self.spread.own_training_slices(space),
            activation_encoder=args.activation_encoder,
            activation_decoder=args.activation_decoder,
            bias_decoder=args.bias_decoder,
            device_encoder=self.placement.encoder,
            device_decoder=self.placement.decoder,
            initialize=False,
            new_weights=self.vectors.zeros if args.offload else None,
        )
        if drawn and args.behaviour.draws_on_host:
            gradiend.reset_parameters(torch.Generator().manual_seed(seed))
        elif drawn:
            draw_start(gradiend, seed)
        return self.wrap(gradiend)

    def wrap(self, gradiend: ParamMappedGradiendModel) -> ModelWithGradiend:
        """A GRADIEND model together with the shared base model. No communication."""
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
        All ranks call this.
        """
        model = self.wrap(
            load_gradiend(
                path,
                comm=self.comm,
                slices=self.spread.own_inference_slices,
                device_encoder=self.placement.encoder,
                device_decoder=self.placement.decoder,
                mapped=self.args.offload,
            )
        )
        context = self.comm.first(f"reading {path}", lambda: read_context(path))
        model.source, model.target = context["source"], context["target"]
        model.feature_class_encoding_direction |= context.get("feature_class_encoding_direction", {})
        return model

    def base_gradients(
        self, space: ParameterSpace, comm: Comm | None = None, slices_by_rank: Sequence[Slices] | None = None
    ) -> BaseGradients:
        """The base model's gradients over a space; by default of all ranks, each for the part that it trains.

        No communication here; all ranks of `comm` compute together.
        """
        autocast = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        return BaseGradients(
            self.base_model,
            self.tokenizer,
            self.objective,
            space,
            micro_batch_size=self.args.base_micro_batch_size,
            autocast=autocast,
            comm=comm or self.comm,
            slices_by_rank=slices_by_rank or self.spread.training_slices(space),
            shards=self.spread.own_shards(),
            shards_by_rank=self.spread.shards,
        )

    def gradients(self, space: ParameterSpace) -> GradientSource:
        """The gradients over the space that is trained in; what was kept for another space is dropped.

        All ranks call this: the first call may ask them for their free memory.
        """
        if self._gradients is None or self._gradients.base.space != space:
            base, budget = self.base_gradients(space), self.training_store_bytes()
            self._gradients = GradientSource(base, GradientStore(budget, self._store_directory(space, base)))
        return self._gradients

    def forget_gradients(self) -> None:
        """They know a device that the base model has left. No communication."""
        self._gradients = None

    def training_store_bytes(self) -> int:
        """Under DeepSpeed half of it: encodings have a store of their own. All ranks call this."""
        shares_it = self.spread.launch.engine == "zero" and self.args.evaluates
        return self.store_bytes() // 2 if shares_it else self.store_bytes()

    def _store_directory(self, space: ParameterSpace, base: BaseGradients) -> Path | None:
        if not self.args.use_cached_gradients:
            return None
        root = self.directory / "cache" / "gradients"
        if not base.slices.is_whole:
            root = root / f"rank_{self.comm.rank}_of_{self.comm.world_size}"
        return store_directory(root, self.base_model, self.tokenizer, space, base)

    def gradients_for_encoding(self, space: ParameterSpace, *, repeated: bool) -> GradientSource:
        """Those that training uses, or, for another space or for a model at rest, others that are not kept.

        While DeepSpeed trains, every rank has the whole encoder: it encodes its share of the rows by itself.
        All ranks call this.
        """
        in_training = repeated or (self._gradients is not None and self._gradients.base.space == space)
        if self.spread.launch.engine != "zero" and in_training:
            return self.gradients(space)
        if repeated:
            alone = self.base_gradients(space, Comm(), [Slices.whole(space.size)])
            return GradientSource(alone, GradientStore(self.store_bytes() // 2))
        return self.gradients_at_rest(space)

    def gradients_at_rest(self, space: ParameterSpace) -> GradientSource:
        """For a model that does not train: nothing is kept, and nothing that was kept is used.

        No communication here; all ranks compute together.
        """
        base = self.base_gradients(space, slices_by_rank=self.spread.inference_slices(space))
        return GradientSource(base, GradientStore(budget_bytes=0))

    def store_bytes(self) -> int:
        """Memory for gradients that are used again: on each rank as much, so that all ranks keep the same.

        What is free when all that a training still takes is there: asked before there are weights and moments.

        All ranks call this.
        """
        if self.budget_bytes is not None:
            return self.budget_bytes
        args, device = self.args, self.placement.base_model
        if args.gradient_store_gib is not None:
            return int(args.gradient_store_gib * GIB)
        dtype: torch.dtype = next(self.base_model.parameters()).dtype
        run = run_of(base_of(self.base_model, self.space, dtype.itemsize), args, self.longest_row)
        free = self.free_on_every_rank(device)
        need = need_with_seeds(lambda planned: self._need_of(planned, free), run, args, free)
        peak = need.peak_on_host if device.type == "cpu" and not args.offload else need.peak
        return left_for_store(free, peak - need.base, device)

    def _need_of(self, run: Run, free: float) -> Need:
        """`free` beside the base model, which is there."""
        launch, micro_batch_size = self.spread.launch, self.args.base_micro_batch_size
        base = need_of(run, launch, self.placement, micro_batch_size, 0.0).base
        return need_of(run, launch, self.placement, micro_batch_size, base + free)

    @property
    def vectors(self) -> VectorPlace:
        """Where vectors are that belong to no step of training. No communication."""
        return VectorPlace(self.placement.base_model, self.directory if self.args.offload else None)

    @property
    def longest_row(self) -> int:
        """Tokens of the row with most letters."""
        row = max(self.data.table["masked"], key=len, default="")
        return min(self.args.max_length, len(self.tokenizer(row)["input_ids"]) + ADDED_TOKENS)

    def free_on_every_rank(self, device: torch.device) -> float:
        """Free memory of this rank, where it is least; ranks of one host share that. All ranks call this."""
        return self.comm.smallest(free_bytes(device) / sharing(device, self.comm.local_world_size))[0]
