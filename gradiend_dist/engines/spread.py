"""How the work is spread over processes: one engine for each way of launching. Accelerate's configuration chooses.

one process                placed   encoder, decoder and base on the documented devices: one slice, all of n
MULTI_GPU, MULTI_CPU       sliced   every rank a slice of n; the base whole on each, rows split
FSDP                       sliced   every rank its shards of the base, and the same slices of n
DEEPSPEED                  zero     encoder and decoder in a DeepSpeed engine; the base whole on each, rows split
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import nn

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import Placement, placement_of
from gradiend_dist.distributed.fsdp import blocks_of, is_sharded, shard_model, shard_of
from gradiend_dist.distributed.launch import Launch, launched
from gradiend_dist.engines.base import Engine, StepOptions
from gradiend_dist.engines.deepspeed_config import fits_zero
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.engines.zero import ZeroEngine
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model.recompute import recompute
from gradiend_dist.model.sharded import Cut
from gradiend_dist.space import ParameterSpace, Slices

logger = logging.getLogger(__name__)

OF_ONE_PROCESS = (
    "device",
    "device_encoder",
    "device_decoder",
    "device_base_model",
    "encoder_decoder_same_device",
    "offload",
)


@dataclass(frozen=True)
class Spread:
    """Where this process's share of everything is."""

    launch: Launch
    placement: Placement
    shards: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of a sharded base: which entries of each weight each rank holds."""

    @classmethod
    def of(cls, args: TrainingArguments) -> Spread:
        """What the launch and these arguments ask for. All ranks call this: the first call joins them."""
        launch = launched(args.ddp_timeout)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
        if launch.engine == "placed":
            placement = placement_of(args)
            if placement.base_model.type == "cuda":
                torch.cuda.set_device(placement.base_model)  # events and streams without a device are of this one
            logger.info("one process: %s", placement)
            if torch.cuda.device_count() > 1:
                logger.info(
                    "%d GPUs are visible; launch/single_node.sh --engine multi_gpu uses all of them at the same time",
                    torch.cuda.device_count(),
                )
            return cls(launch, placement)
        for name in OF_ONE_PROCESS:
            if getattr(args, name):
                raise UserError(
                    f"{name}={getattr(args, name)} places a single process, and {launch.comm.world_size} were "
                    "launched: leave it out, or launch one."
                )
        device = torch.device(launch.accelerator.device)
        logger.info("%s", launch)
        return cls(launch, Placement(device, device, device))

    @property
    def comm(self) -> Comm:
        return self.launch.comm

    def cut_of(self, params: list[str] | None) -> Cut | None:
        """How to cut a base model before each rank reads its rows; None: it is read whole. No communication."""
        if not (self.launch.shards_base and self.launch.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading):
            return None
        return lambda model: self._cut(model, ParameterSpace.of_model(model, params))

    def recompute_layers(self, base_model: nn.Module, *, asked: bool) -> None:
        """As the argument or FSDP's configuration asks for it. No communication."""
        plugin = self.launch.accelerator.state.fsdp_plugin if self.launch.shards_base else None
        if not (asked or self.launch.recomputes_layers):
            return
        layers = blocks_of(base_model, plugin and plugin.transformer_cls_names_to_wrap)
        require(bool(layers), f"gradient_checkpointing finds no layers in {type(base_model).__name__}: leave it out.")
        recompute(layers)

    def _cut(self, base_model: nn.Module, space: ParameterSpace) -> nn.Module:
        """All ranks call this."""
        wanted = {weight.name for weight in space.weights}
        return shard_model(base_model, self.launch.accelerator.state.fsdp_plugin, self.placement.base_model, wanted)

    def place_base_model(self, base_model: nn.Module, space: ParameterSpace) -> tuple[Spread, nn.Module]:
        """Put the base model where it belongs: on its device, or in shards on all of them. All ranks call this."""
        if not self.launch.shards_base:
            return self, base_model.to(self.placement.base_model)
        sharded = base_model if is_sharded(base_model) else self._cut(base_model, space)
        shards = self.comm.gather({name: shard_of(parameter) for name, parameter in sharded.named_parameters()})
        return Spread(self.launch, self.placement, shards), sharded

    def training_slices(self, space: ParameterSpace) -> list[Slices]:
        """What each rank owns of a vector over this space while it trains. No communication."""
        ranks = range(self.comm.world_size)
        if self.launch.engine == "zero":
            return [Slices.whole(space.size) for _ in ranks]
        if self.shards:
            return [space.slices_of_shards(shards) for shards in self.shards]
        return [Slices.even(space.size, rank, len(ranks)) for rank in ranks]

    def require_trainable(self, space: ParameterSpace, latent_dim: int) -> None:
        """DeepSpeed's engine multiplies whole weights, and cuBLAS counts their entries in 32 bits. No communication."""
        require(
            self.launch.engine != "zero" or fits_zero(space.size, latent_dim),
            f"DeepSpeed cannot train encoder and decoder with {space.size * latent_dim:,} entries each, 2^31 or more: "
            "launch with multi_gpu.yaml or fsdp2.yaml, or prune with pre_prune_config.",
        )

    def own_training_slices(self, space: ParameterSpace) -> Slices:
        return self.training_slices(space)[self.comm.rank]

    def inference_slices(self, space: ParameterSpace) -> list[Slices]:
        """What each rank owns of a model that is not being trained: pruned, encoded with, written.

        No communication.
        """
        if self.launch.engine == "zero":
            return [Slices.even(space.size, rank, self.comm.world_size) for rank in range(self.comm.world_size)]
        return self.training_slices(space)

    def own_inference_slices(self, space: ParameterSpace) -> Slices:
        return self.inference_slices(space)[self.comm.rank]

    def own_shards(self) -> dict[str, tuple[int, int]] | None:
        return self.shards[self.comm.rank] if self.shards else None

    def make_engine(self, model: ParamMappedGradiendModel, options: StepOptions) -> Engine:
        """The engine of this launch, for a model that holds `own_training_slices`. All ranks call this."""
        if self.launch.engine == "zero":
            return ZeroEngine(model, options, self.comm, self.launch.accelerator)
        return SlicedEngine(model, options, self.comm)
