"""The processes that Accelerate started, and what for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.launcher import follow_the_launcher
from gradiend_dist.errors import UserError

# One per process, as Accelerate and torch have one default group.
_joined: list[Launch] = []


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

    @property
    def recomputes_layers(self) -> bool:
        """Does FSDP's configuration ask for layers that are computed again in the backward pass?"""
        return self.shards_base and bool(self.accelerator.state.fsdp_plugin.activation_checkpointing)


def launched(timeout: float) -> Launch:
    """The processes that work together, and this one among them; the first call joins them. All ranks call this."""
    if not _joined:
        _joined.append(_join(timeout))
    return _joined[0]


def _join(timeout: float) -> Launch:
    # The commands have done so already, a user's own script has not. That of a single process is not followed: its
    # environment may come from a shell that has nothing to do with a launcher.
    if "TORCHELASTIC_RUN_ID" in os.environ and not follow_the_launcher():
        raise UserError("The launcher is gone: start it again.")
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
    from accelerate.utils import disable_fsdp_ram_efficient_loading

    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Torch shards on CPUs as well, Accelerate does not think of it: the same plugin, from the same environment.
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
    # The plugin remembers it. Where transformers sees it in the environment, it fills models with zeros on all ranks
    # but one, and leaves the rest to Accelerate; here each rank reads its own rows.
    disable_fsdp_ram_efficient_loading()
    if accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise UserError("fsdp_version=1 flattens the weights beyond recognition: set fsdp_version: 2.")
