"""Fused Adam over chunks of weights, and 8-bit AdamW where it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gradiend_dist.engines.base import StepOptions
from gradiend_dist.engines.rounding import Rounding, shifted, store_rounded
from gradiend_dist.errors import UserError


class Optimizer(ABC):
    """Updates weights chunk by chunk within one step: `begin`, then `update` once for every chunk of every weight.

    No communication. Weights are dense and cut along their first dimension: the kernels take plain memory.
    """

    can_be_cut: bool

    @abstractmethod
    def begin(self, learning_rate: float, not_finite: Tensor) -> None:
        """Start a step; where `not_finite` is 1.0 it changes nothing."""

    @abstractmethod
    def update(self, index: int, chunk: slice, gradient: Tensor) -> None:
        """Update the range `chunk` of n of weight number `index`."""

    @abstractmethod
    def negate_momentum(self, indices: list[int]) -> None:
        """Follow a change of sign of these weights."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that a step depends on, as the tensors themselves, by the number of the weight and what it is."""


class FusedAdam(Optimizer):
    """torch's fused Adam and AdamW kernels on views of the weights; moments in float32, with `rounding` in bfloat16."""

    can_be_cut = True

    def __init__(self, options: StepOptions, weights: list[Tensor], rounding: Rounding | None = None) -> None:
        self.options = options
        self.weights = weights
        self.rounding = rounding
        self._moments: tuple[list[Tensor], list[Tensor]] | None = None
        self.num_steps = torch.zeros((), device=weights[0].device)
        self._kernel = torch._fused_adamw_ if options.optim == "adamw" else torch._fused_adam_

    @property
    def moments(self) -> list[Tensor]:
        return self._both_moments()[0]

    @property
    def second_moments(self) -> list[Tensor]:
        return self._both_moments()[1]

    def _both_moments(self) -> tuple[list[Tensor], list[Tensor]]:
        """Made when they are first wanted: a closed form that takes no step has none."""
        if self._moments is None:
            first, second = (
                [torch.zeros_like(w, dtype=self._dtype_of(index)) for index, w in enumerate(self.weights)]
                for _ in range(2)
            )
            self._moments = first, second
        return self._moments

    def _dtype_of(self, index: int) -> torch.dtype:
        return torch.float32 if self.rounding is None else self.rounding.dtype_of(index)

    def begin(self, learning_rate: float, not_finite: Tensor) -> None:
        self._both_moments()
        self.num_steps += 1.0 - not_finite  # a step that changes nothing does not count
        self.learning_rate, self.not_finite = learning_rate, not_finite

    def update(self, index: int, chunk: slice, gradient: Tensor) -> None:
        weight = self.weights[index][chunk]
        assert gradient.shape == weight.shape, f"gradient {gradient.shape} for weight {weight.shape}"
        moments = self.moments[index][chunk], self.second_moments[index][chunk]
        if self.rounding is None or moments[0].dtype == torch.float32:
            self._update(weight, gradient, *moments)
            return
        # A step that changes nothing rounds what bfloat16 can hold: that changes nothing either.
        exact = moments[0].float(), moments[1].float()
        self._update(weight, gradient, *exact)
        noise = self.rounding.noise(index, self.weights[index], chunk, self.num_steps)
        store_rounded(exact[0], noise & 0xFFFF, moments[0])
        store_rounded(exact[1], shifted(noise, 16), moments[1])

    def _update(self, weight: Tensor, gradient: Tensor, moment: Tensor, second_moment: Tensor) -> None:
        self._kernel(
            [weight],
            [gradient.contiguous()],
            [moment],
            [second_moment],
            [],
            [self.num_steps],
            lr=self.learning_rate,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            weight_decay=self.options.weight_decay,
            eps=self.options.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=self.not_finite,
        )

    def negate_momentum(self, indices: list[int]) -> None:
        for index in indices if self._moments is not None else ():
            self.moments[index].neg_()

    def state(self) -> dict[str, Tensor]:
        state = {"num_steps": self.num_steps}
        for index, tensors in enumerate(zip(self.weights, self.moments, self.second_moments, strict=True)):
            for kind, tensor in zip(("weight", "moment", "second_moment"), tensors, strict=True):
                state[f"{index}.{kind}"] = tensor
        return state


class EightBitAdam(Optimizer):
    """bitsandbytes' AdamW: moments in 8 bits, on whole weights, so their gradients exist for the time of the step."""

    can_be_cut = False

    def __init__(self, options: StepOptions, weights: list[Tensor]) -> None:
        bitsandbytes = import_bitsandbytes()
        self.options = options
        self.weights = [torch.nn.Parameter(weight) for weight in weights]
        self.optimizer: Any = bitsandbytes.optim.AdamW8bit(
            self.weights, lr=1.0, betas=options.betas, eps=options.epsilon, weight_decay=options.weight_decay
        )
        self._seen = 0

    def begin(self, learning_rate: float, not_finite: Tensor) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self._skip = bool(not_finite)  # this optimizer cannot be told on the device
        self._seen = 0

    def update(self, index: int, chunk: slice, gradient: Tensor) -> None:  # noqa: ARG002
        self.weights[index].grad = gradient.contiguous()
        self._seen += 1
        if self._seen == len(self.weights):
            if not self._skip:
                self.optimizer.step()
            self.optimizer.zero_grad()

    def negate_momentum(self, indices: list[int]) -> None:
        """The quantization map is symmetric up to its largest code: code c stands for the value at c, -c at 255 - c."""
        for index in indices:
            state = self.optimizer.state[self.weights[index]]
            if "state1" not in state:
                continue
            if state["state1"].dtype != torch.uint8:
                state["state1"].neg_()  # small weights keep their moments in float32
                continue
            values = state["qmap1"]
            negated = torch.stack([(values + value).abs().argmin() for value in values]).to(torch.uint8)
            state["state1"].copy_(negated[state["state1"].long()])

    def state(self) -> dict[str, Tensor]:
        raise AssertionError("moments in 8 bits are kept in blocks that cannot be cut: nobody asks for them")


def import_bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError('optim=adamw_8bit needs bitsandbytes: pip install "gradiend_dist[8bit]".') from error
    return bitsandbytes


def make_optimizer(options: StepOptions, weights: list[Tensor], rounding: Rounding | None = None) -> Optimizer:
    """`rounding`: which numbers the weights are, for moments in bfloat16 if these are wanted."""
    if options.optim == "adamw_8bit":
        return EightBitAdam(options, weights)
    return FusedAdam(options, weights, rounding if options.moments_dtype == "bfloat16" else None)
