"""The passes of a step in Triton kernels, on GPUs that can run them; elsewhere torch's operations, chunk by chunk.

On a GPU chunks do not stay in a cache, so every operation of a chunked pass goes to memory and back. The kernels of
`kernels.py` read and write each number once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradiend_dist.engines.base import StepOptions
from gradiend_dist.engines.halves import DecoderHalf, EncoderHalf
from gradiend_dist.engines.items import StepItems
from gradiend_dist.engines.optimizer import FusedAdam, Optimizer
from gradiend_dist.engines.rounding import signed
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Slices

logger = logging.getLogger(__name__)

# Takes tuples of pointers.
OLDEST_TRITON = (3, 4)

# Numbers of one tensor that a program holds at once: with 4 warps 8 for each thread, two loads of 16 bytes.
BLOCK = 1024

# Above this many products of an item and a latent, loops that are unrolled outgrow the registers; and matrix products
# begin to pay.
MOST_PRODUCTS = 12


def encoder_half(model: GradiendModel, optimizer: Optimizer) -> EncoderHalf:
    if isinstance(optimizer, FusedAdam) and uses_kernels(model.encoder_weight, optimizer.options):
        return FusedEncoderHalf(model, optimizer)
    return EncoderHalf(model, optimizer)


def decoder_half(model: GradiendModel, optimizer: Optimizer) -> DecoderHalf:
    if isinstance(optimizer, FusedAdam) and uses_kernels(model.decoder_weight, optimizer.options):
        return FusedDecoderHalf(model, optimizer)
    return DecoderHalf(model, optimizer)


def uses_kernels(weight: Tensor, options: StepOptions) -> bool:
    """Will this half of a model be stepped by the kernels?"""
    wanted = options.triton_kernels and weight.dtype == torch.float32
    return wanted and weight.device.type == "cuda" and torch.backends.cuda.is_built() and _triton_works()


@functools.cache  # said once
def _triton_works() -> bool:
    missing = _what_triton_lacks()
    if missing:
        logger.warning("Steps use torch's operations, which move nearly twice as many bytes: %s", missing)
    return not missing


def _what_triton_lacks() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)."
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton has version {triton.__version__}, the kernels need {'.'.join(map(str, OLDEST_TRITON))}."
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler to build its launchers with (gcc, clang, or what CC names)."
    return ""


class FusedEncoderHalf(EncoderHalf):
    """We, stepped by kernels; the few numbers of be go the plain way."""

    def __init__(self, model: GradiendModel, optimizer: FusedAdam) -> None:
        super().__init__(model, optimizer)
        self.adam = optimizer
        self.latents, self.size = self.weight.shape
        self.padded = power_of_two(self.latents)
        # Loops over the latents are unrolled: the more of them, the fewer entries have room in the registers.
        self.block = BLOCK // self.padded

    def products(self, items: StepItems) -> Tensor:
        sources = rows_of(items.sources, self.latents)
        if sources is None:
            return super().products(items)
        arguments = {"sources": sources, "weight": self.weight, "stride": self.size, "padded": self.padded}
        return self._launch("encode", len(items) * self.latents + (len(items) == 1), arguments)

    def gradient_square(self, items: StepItems, d_encoder: Tensor) -> Tensor:
        sources = rows_of(items.sources, self.latents)
        if sources is None:
            return super().gradient_square(items, d_encoder)
        arguments = {"sources": sources, "d_encoder": d_encoder.contiguous()}
        return self._launch("encoder_gradient_square", 1, arguments)

    def _update_weight(self, items: StepItems, d_encoder: Tensor) -> Tensor:
        sources = rows_of(items.sources, self.latents)
        if sources is None:
            return super()._update_weight(items, d_encoder)
        arguments = {"sources": sources, "d_encoder": d_encoder.contiguous(), "weights": tuple(self.weight)}
        arguments |= adam_arguments(self.adam, self.latents)
        return self._launch("update_encoder", 1, arguments, slices_of(self.adam, self.size))

    def _launch(self, name: str, width: int, arguments: dict[str, Any], slices: Slices | None = None) -> Tensor:
        arguments = {**arguments, "latents": self.latents, "block": self.block}
        return launch(name, arguments, like=self.weight, size=self.size, width=width, slices=slices)


class FusedDecoderHalf(DecoderHalf):
    """Wd and bd, stepped by kernels."""

    def __init__(self, model: GradiendModel, optimizer: FusedAdam) -> None:
        super().__init__(model, optimizer)
        self.adam = optimizer
        self.size, self.latents = self.weight.shape
        padded = power_of_two(self.latents)
        self.shape = {"latents": self.latents, "padded": padded, "block": BLOCK // padded}
        self.activation_name = model.activation_decoder

    def sums(self, items: StepItems, latent: Tensor) -> Tensor:
        targets = rows_of(items.targets, self.latents)
        if targets is None:
            return super().sums(items, latent)
        # Shares are of the order of one; factors, the n-th part, could vanish in float32 when they are squared.
        arguments = {"targets": targets, "latent": latent.contiguous(), "shares": items.label_factors}
        size = latent.numel()
        sums = self._launch("reduce_decoder", size + 3, arguments)
        d_latent = (sums[:size].view_as(latent) * items.factors).view(-1)
        return torch.cat([d_latent, sums[size : size + 1] / (2 * items.input_dim), sums[-2:] / items.input_dim**2])

    def update(self, items: StepItems, latent: Tensor, factors: Tensor) -> Tensor:
        targets = rows_of(items.targets, self.latents)
        if targets is None:
            return super().update(items, latent, factors)
        arguments = {"targets": targets, "latent": latent.contiguous(), "factors": factors}
        arguments |= adam_arguments(self.adam, len(self.adam.weights))
        return self._launch("update_decoder", 1, arguments, slices_of(self.adam, self.size))

    def _launch(self, name: str, width: int, arguments: dict[str, Any], slices: Slices | None = None) -> Tensor:
        arguments = {**arguments, **self.shape, "weight": self.weight, "bias": self.bias}
        arguments["activation"] = self.activation_name
        return launch(name, arguments, like=self.weight, size=self.size, width=width, slices=slices)


def rows_of(batches: list[Tensor], latents: int) -> tuple[Tensor, ...] | None:
    """The gradients of all items, each a dense vector; None where the kernels are not made for them."""
    rows = tuple(row for batch in batches for row in batch)
    if len(rows) * latents > MOST_PRODUCTS:
        return None
    return rows if all(row.dtype == torch.float32 and row.is_contiguous() for row in rows) else None


def power_of_two(number: int) -> int:
    """The smallest one that is not below `number`: what Triton's tiles measure."""
    return 1 << (number - 1).bit_length()


def slices_of(adam: FusedAdam, size: int) -> Slices:
    """Where in the whole vector the rank's `size` entries are; as one range where the kernels need not know."""
    return Slices.whole(size) if adam.rounding is None else adam.rounding.slices


class AdamNumbers(NamedTuple):
    """What Adam is set to. Kernels read float32, in which 1 - beta would have few digits left: it comes beside beta."""

    learning_rate: float
    weight_decay: float
    epsilon: float
    beta1: float
    rest1: float
    log_beta1: float
    beta2: float
    rest2: float
    log_beta2: float


def adam_arguments(adam: FusedAdam, count: int) -> dict[str, Any]:
    """What the kernels need to step the first `count` weights."""
    options, rounding = adam.options, adam.rounding
    (beta1, beta2), moments = options.betas, [*adam.moments[:count], *adam.second_moments[:count]]
    if rounding is not None:
        moments = [moment.view(torch.int16) for moment in moments]
    return {
        "moments": tuple(moments[:count]),
        "second_moments": tuple(moments[count:]),
        "salts": tuple(0 if rounding is None else signed(rounding.salt(index)) for index in range(count)),
        "num_steps": adam.num_steps,
        "not_finite": adam.not_finite,
        "adam": AdamNumbers(
            adam.learning_rate,
            options.weight_decay,
            options.epsilon,
            *(beta1, 1.0 - beta1, math.log(beta1) if beta1 else -math.inf),
            *(beta2, 1.0 - beta2, math.log(beta2) if beta2 else -math.inf),
        ),
        "decoupled": options.optim == "adamw",
    }


def launch(
    name: str, arguments: dict[str, Any], *, like: Tensor, size: int, width: int, slices: Slices | None
) -> Tensor:
    """Run a kernel over the rank's `size` entries, on the device of `like`; returns its `width` sums.

    With `slices` the kernel is told how far each range is ahead in the whole vector.
    """
    from gradiend_dist.engines import kernels

    block: int = arguments["block"]
    ranges = (slices or Slices.whole(size)).range_pairs()
    pieces = [(*piece, there.start - own.start) for own, there in ranges for piece in launches(own, block)]
    programs = [-(-(stop - start) // block) for start, stop, _ in pieces]
    sums = torch.empty(sum(programs), width, device=like.device)
    with torch.cuda.device_of(like):
        for (start, stop, ahead), count, own_sums in zip(pieces, programs, sums.split(programs), strict=True):
            where = {"sums": own_sums, "start": start, "stop": stop}
            if slices is not None:
                where["offset"] = ahead
            getattr(kernels, name)[(count,)](**arguments, **where)
    return sums.sum(0, dtype=torch.float64)


def launches(entries: slice, block: int) -> Iterator[tuple[int, int]]:
    """One launch, or one over whole blocks and one over the rest: see `kernels` for why ends are multiples of 16."""
    rest = (entries.stop - entries.start) % block
    whole = entries.stop - rest
    if rest % 16 == 0 or whole == entries.start:
        rest, whole = 0, entries.stop
    if entries.start < whole:
        yield entries.start, whole
    if rest:
        yield whole, entries.stop
