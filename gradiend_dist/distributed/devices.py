"""The documented placement of encoder, decoder and base model in a single process."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.errors import UserError


def to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """A few numbers of the host as a tensor, without waiting: `torch.tensor(numbers, device=...)` waits for a GPU."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def sharing(device: torch.device, local_world_size: int) -> int:
    """How many ranks of a host have this memory: a GPU is one rank's own."""
    return 1 if device.type == "cuda" else local_world_size


@dataclass(frozen=True)
class Placement:
    encoder: torch.device
    decoder: torch.device
    base_model: torch.device

    def __str__(self) -> str:
        return f"encoder on {self.encoder}, decoder on {self.decoder}, base model on {self.base_model}"


def place(
    num_gpus: int,
    *,
    device: str | None = None,
    device_encoder: str | None = None,
    device_decoder: str | None = None,
    device_base_model: str | None = None,
    encoder_decoder_same_device: bool = False,
) -> Placement:
    """Which device holds what, from the number of visible GPUs alone; explicit devices override.

    0: all on the CPU. 1: all on cuda:0. 2: encoder and base on 0, decoder on 1. From 3: encoder 0, decoder 1, base 2.
    With `encoder_decoder_same_device` and at least 2: encoder and decoder on 0, base on 1.
    """
    if num_gpus == 0:
        default = ("cpu", "cpu", "cpu")
    elif num_gpus == 1:
        default = ("cuda:0", "cuda:0", "cuda:0")
    elif encoder_decoder_same_device:
        default = ("cuda:0", "cuda:0", "cuda:1")
    elif num_gpus == 2:
        default = ("cuda:0", "cuda:1", "cuda:0")
    else:
        default = ("cuda:0", "cuda:1", "cuda:2")
    wanted = {
        "device_encoder": device_encoder,
        "device_decoder": device_decoder,
        "device_base_model": device_base_model,
    }
    chosen = [
        _device(name if explicit else "device", explicit or device or fallback, num_gpus)
        for (name, explicit), fallback in zip(wanted.items(), default, strict=True)
    ]
    return Placement(*chosen)


def placement_of(args: TrainingArguments) -> Placement:
    """What these arguments ask for on this machine."""
    found = place(
        torch.cuda.device_count(),
        device=args.device,
        device_encoder=args.device_encoder,
        device_decoder=args.device_decoder,
        device_base_model=args.device_base_model,
        encoder_decoder_same_device=args.encoder_decoder_same_device,
    )
    if not args.offload:
        return found
    # Alone on its device, the base model needs no other one than the first.
    host, base = torch.device("cpu"), torch.device("cuda:0")
    asked = args.device or args.device_base_model
    return Placement(host, host, found.base_model if asked or found.base_model.type == "cpu" else base)


def _device(name: str, value: str, num_gpus: int) -> torch.device:
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise UserError(f"{name}={value} is not a device: pass e.g. cpu or cuda:0.") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{name}={value} is not supported: pass cpu or a CUDA device, e.g. cuda:0.")
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UserError(f"{name}={value} does not exist, this machine shows {num_gpus} GPUs: pass another device.")
    return device


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has held at most: on its GPU, or on the host where there is none."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_utilisation(device: torch.device) -> float | None:
    """Per cent of the last moments in which the GPU was busy; None without one, or without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        return float(torch.cuda.utilization(device))
    except (RuntimeError, pynvml.NVMLError):  # a slice of a GPU has none
        return None
