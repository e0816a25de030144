"""The base model cut over the ranks with FSDP2, one layer at a time.

A model that is cut before it is loaded has no memory yet: each rank then reads its own rows alone (model/sharded.py).
One that was loaded whole is cut where it is, and goes to the device one layer after the other.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gradiend_dist.errors import UserError


def shard_model(model: nn.Module, plugin: Any, device: torch.device, wanted: set[str]) -> nn.Module:
    """Cut `model` in place, as Accelerate's FSDP plugin says; weights named in `wanted` will get gradients.

    All ranks call this.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # logits that are a view: nobody writes to them
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": precision_of(plugin),
        "offload_policy": plugin.cpu_offload if isinstance(plugin.cpu_offload, OffloadPolicy) else OffloadPolicy(),
    }
    if isinstance(options["offload_policy"], CPUOffloadPolicy):
        raise UserError("fsdp_offload_params=true keeps gradients on the host, GRADIEND needs them: set it to false.")
    for layer in layers_of(model, plugin.transformer_cls_names_to_wrap):
        fully_shard(layer, **options)
    fully_shard(model, **{**options, "reshard_after_forward": False})  # its own weights are needed again at once
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The sum over ranks is the item's gradient: rows are weighted by their share already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A rank whose rows go to other experts must send zeros, or ranks meet in collectives of different sizes.
            module.set_reduce_scatter_unused_params(True, recurse=False)
    return model


def precision_of(plugin: Any) -> MixedPrecisionPolicy:
    """What the launch asks for; gradients are always added up in float32, as where the base model is replicated.

    Left alone, FSDP adds them in the dtype of the weights: bfloat16 would lose what the ranks add, more with each.
    """
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    return dataclasses.replace(policy, reduce_dtype=torch.float32)


def layers_of(model: nn.Module, names: list[str] | None) -> Iterator[nn.Module]:
    """The blocks to cut one by one: those that the configuration or the model's authors name.

    Not a block that holds the embeddings: where these are tied to the head they belong to the model as a whole.
    """
    found = blocks_of(model, names)
    if not found:
        raise UserError(
            f"FSDP finds no layers in {type(model).__name__}: name their class in fsdp_transformer_layer_cls_to_wrap."
        )
    yield from found


def blocks_of(model: nn.Module, names: list[str] | None) -> list[nn.Module]:
    """The same, or nothing."""
    wanted = names or list(getattr(model, "_no_split_modules", None) or [])
    embeddings = model.get_input_embeddings().weight  # type: ignore[operator]
    # FSDP makes a subclass of what it has cut.
    found = [module for module in model.modules() if any(kind.__name__ in wanted for kind in type(module).__mro__)]
    return [module for module in found if not any(parameter is embeddings for parameter in module.parameters())]


def shard_of(parameter: Tensor) -> tuple[int, int]:
    """Which of a weight's entries (row-major) this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    width = parameter.numel() // max(1, parameter.shape[0])
    return offset[0] * width, (offset[0] + shape[0]) * width


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Have a sharded model read its shards anew. FSDP leaves the outermost weights gathered after a forward pass: what
    is then written to the shards would not be seen."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
