"""How the work is spread over processes: one engine for each way of launching. Accelerate's configuration chooses.

one process                placed   encoder, decoder and base on the documented devices
MULTI_GPU, MULTI_CPU       sliced   every rank a range of n; the base whole on each, rows split
FSDP                       sliced   every rank its shards of the base, and the same part of n
DEEPSPEED                  zero     encoder and decoder in a DeepSpeed engine; the base whole on each, rows split
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from gradiend_dist.arguments import TrainingArguments
from gradiend_dist.comm import Comm
from gradiend_dist.devices import Placement, placement_of
from gradiend_dist.engines import Engine, StepOptions
from gradiend_dist.engines.placed import PlacedEngine
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.errors import UserError
from gradiend_dist.model import ParamMappedGradiendModel
from gradiend_dist.sharding import shard_model, shard_of
from gradiend_dist.space import ParameterSpace, Part

logger = logging.getLogger(__name__)

# One per process, as Accelerate and torch have one default group.
_joined: list[Launch] = []

DEVICE_ARGUMENTS = ("device", "device_encoder", "device_decoder", "device_base_model", "encoder_decoder_same_device")


@dataclass(frozen=True)
class Launch:
    """The processes that were started, and what for."""

    engine: str
    """placed, sliced or zero."""
    comm: Comm
    accelerator: Any = None
    shards_base: bool = False

    def __str__(self) -> str:
        if self.engine == "placed":
            return "one process"
        base = "base model sharded with FSDP2" if self.shards_base else "base model on every rank"
        return f"{self.comm.world_size} ranks, engine {self.engine}, {base}"


def launched(timeout: float) -> Launch:
    """The processes that work together, and this one among them; the first call joins them."""
    if not _joined:
        _joined.append(_join(timeout))
    return _joined[0]


def _join(timeout: float) -> Launch:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed, fsdp = (_is_on(f"ACCELERATE_USE_{name}") for name in ("DEEPSPEED", "FSDP"))
    if world_size == 1 and not deepspeed:
        return Launch("placed", Comm(timeout=timeout))
    from accelerate import Accelerator, InitProcessGroupKwargs
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    on_cpu = not torch.cuda.is_available() or _is_on("ACCELERATE_USE_CPU")
    if on_cpu and deepspeed:
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=timedelta(seconds=timeout))
    # cpu=True would silently drop DeepSpeed; without it, and with gloo named, both are honoured.
    accelerator = Accelerator(cpu=on_cpu and not deepspeed, kwargs_handlers=[group])
    if deepspeed:
        # It is for encoder and decoder alone: under stage 3 transformers would cut the base model as well.
        unset_hf_deepspeed_config()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    comm = Comm.join(timeout)
    if comm.world_size != world_size or accelerator.num_processes != world_size:
        raise UserError(
            f"WORLD_SIZE={world_size} but {accelerator.num_processes} processes found each other: launch with "
            "`accelerate launch --config_file accelerate_configs/...`."
        )
    if fsdp:
        _require_fsdp2(accelerator)
    return Launch("zero" if deepspeed else "sliced", comm, accelerator, shards_base=fsdp)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _require_fsdp2(accelerator: Any) -> None:
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Torch shards on CPUs as well, Accelerate does not think of it: the same plugin, from the same environment.
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
    if accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise UserError("fsdp_version=1 flattens the weights beyond recognition: set fsdp_version: 2.")


@dataclass(frozen=True)
class Spread:
    """Where this process's share of everything is."""

    launch: Launch
    placement: Placement
    shards: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of a sharded base: which entries of each weight each rank holds."""

    @classmethod
    def of(cls, args: TrainingArguments) -> Spread:
        launch = launched(args.ddp_timeout)
        if launch.engine == "placed":
            placement = placement_of(args)
            logger.info("one process: %s", placement)
            if torch.cuda.device_count() > 1:
                logger.info(
                    "%d GPUs are visible; launch/single_node.sh --engine multi_gpu uses all of them at the same time",
                    torch.cuda.device_count(),
                )
            return cls(launch, placement)
        for name in DEVICE_ARGUMENTS:
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

    def settle(self, base_model: nn.Module, space: ParameterSpace) -> tuple[Spread, nn.Module]:
        """Put the base model where it belongs: on its device, or in shards on all of them."""
        if not self.launch.shards_base:
            return self, base_model.to(self.placement.base_model)
        plugin = self.launch.accelerator.state.fsdp_plugin
        wanted = {weight.name for weight in space.weights}
        sharded = shard_model(base_model, plugin, self.placement.base_model, wanted)
        shards = self.comm.gather({name: shard_of(parameter) for name, parameter in sharded.named_parameters()})
        return Spread(self.launch, self.placement, shards), sharded

    def parts(self, space: ParameterSpace) -> list[Part]:
        """What each rank owns of a vector over this space."""
        ranks = range(self.comm.world_size)
        if self.launch.engine == "zero":
            return [Part.whole(space.size) for _ in ranks]
        if self.shards:
            return [space.part_of_shards(shards) for shards in self.shards]
        return [Part.even(space.size, rank, len(ranks)) for rank in ranks]

    def part(self, space: ParameterSpace) -> Part:
        return self.parts(space)[self.comm.rank]

    def resting_parts(self, space: ParameterSpace) -> list[Part]:
        """What each rank owns of a model that is not being trained: pruned, encoded with, written."""
        if self.launch.engine == "zero":
            return [Part.even(space.size, rank, self.comm.world_size) for rank in range(self.comm.world_size)]
        return self.parts(space)

    def resting_part(self, space: ParameterSpace) -> Part:
        return self.resting_parts(space)[self.comm.rank]

    def own_shards(self) -> dict[str, tuple[int, int]] | None:
        return self.shards[self.comm.rank] if self.shards else None

    def make_engine(self, model: ParamMappedGradiendModel, options: StepOptions) -> Engine:
        if self.launch.engine == "zero":
            from gradiend_dist.engines.zero import ZeroEngine

            return ZeroEngine(model, options, self.comm, self.launch.accelerator)
        if self.launch.engine == "sliced":
            return SlicedEngine(model, options, self.comm)
        return PlacedEngine(model, options)
