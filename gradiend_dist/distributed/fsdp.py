"""The base model cut over the ranks with FSDP2, one layer at a time.

Loading is CPU-first (every rank reads the files and keeps its shards) or, with `fsdp_cpu_ram_efficient_loading`, from
rank 0 alone: transformers then gives the other ranks a model without weights, and they receive one layer after the
other, so that no host reads more than one copy of the model and no device holds more than its shards and one layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gradiend_dist.errors import UserError

# By the id of a tensor: the tensor, kept alive so that no other takes its id, and the one that stands for it now.
Arrived = dict[int, tuple[Tensor, Tensor]]


def shard_model(model: nn.Module, plugin: Any, device: torch.device, wanted: set[str]) -> nn.Module:
    """Cut `model` in place, as Accelerate's FSDP plugin says; weights named in `wanted` will get gradients."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # logits that are a view: nobody writes to them
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    options: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": plugin.cpu_offload if isinstance(plugin.cpu_offload, OffloadPolicy) else OffloadPolicy(),
    }
    if isinstance(options["offload_policy"], CPUOffloadPolicy):
        raise UserError("fsdp_offload_params=true keeps gradients on the host, GRADIEND needs them: set it to false.")
    arrived: Arrived = {}
    for layer in layers_of(model, plugin.transformer_cls_names_to_wrap):
        receive(layer, device, arrived, plugin.cpu_ram_efficient_loading)
        fully_shard(layer, **options)
    receive(model, device, arrived, plugin.cpu_ram_efficient_loading)
    fully_shard(model, **{**options, "reshard_after_forward": False})  # its own weights are needed again at once
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The sum over ranks is the item's gradient: rows are weighted by their share already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def layers_of(model: nn.Module, names: list[str] | None) -> Iterator[nn.Module]:
    """The blocks to cut one by one: those that the configuration or the model's authors name.

    Not a block that holds the embeddings: where these are tied to the head they belong to the model as a whole.
    """
    wanted = names or list(getattr(model, "_no_split_modules", None) or [])
    embeddings = model.get_input_embeddings().weight  # type: ignore[operator]
    found = [module for module in model.modules() if type(module).__name__ in wanted]
    found = [module for module in found if not any(parameter is embeddings for parameter in module.parameters())]
    if not found:
        raise UserError(
            f"FSDP finds no layers in {type(model).__name__}: name their class in fsdp_transformer_layer_cls_to_wrap."
        )
    yield from found


def receive(top: nn.Module, device: torch.device, arrived: Arrived, from_first: bool) -> None:
    """Put the weights and buffers of a module on the device, from rank 0 if the other ranks have none.

    `arrived` remembers what came for which tensor, so that tied weights stay tied.
    """
    if not from_first:
        return  # fully_shard moves what is there
    for module in top.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in arrived:
                    arrived[id(tensor)] = (tensor, _from_first(tensor, device))
                tensors[name] = arrived[id(tensor)][1]  # type: ignore[assignment]


def _from_first(tensor: Tensor, device: torch.device) -> Tensor:
    here = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_rank() == 0:
        here.copy_(tensor.detach())
    dist.broadcast(here, src=0)
    if not isinstance(tensor, nn.Parameter):
        return here
    return nn.Parameter(here, requires_grad=tensor.requires_grad)


def shard_of(parameter: Tensor) -> tuple[int, int]:
    """Which of a weight's entries (row-major) this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    width = parameter.numel() // max(1, parameter.shape[0])
    return offset[0] * width, (offset[0] + shape[0]) * width


def reshard(model: nn.Module) -> None:
    """Have a sharded model read its shards anew. FSDP leaves the outermost weights gathered after a forward pass: what
    is then written to the shards would not be seen."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
