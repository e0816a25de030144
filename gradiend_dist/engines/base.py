"""How encoder and decoder are spread and stepped. The trainer sees `Engine` and nothing below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.space import Slices


@dataclass(frozen=True)
class Rates:
    """What the learning rate is multiplied by for each half, and Adam's epsilons."""

    encoder: float
    decoder: float
    encoder_epsilon: float
    decoder_epsilon: float


@dataclass(frozen=True)
class StepOptions:
    """What an optimizer step needs to know of the arguments."""

    optim: str
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float
    supervised: str | None
    """"encoder" or "decoder": train this half alone, on the labels."""
    auto: Rates | None = None
    """None: the learning rate and epsilon are those of both halves."""
    moments_dtype: str = "float32"
    """Or bfloat16, rounded at random: see `rounding`."""
    triton_kernels: bool = True
    """On GPUs that can run them: see `fused`."""

    @property
    def rates(self) -> Rates:
        return self.auto or Rates(1.0, 1.0, self.epsilon, self.epsilon)

    @classmethod
    def of(cls, args: TrainingArguments, auto: Rates | None = None) -> StepOptions:
        supervised = "encoder" if args.supervised_encoder else "decoder" if args.supervised_decoder else None
        return cls(
            optim=args.optim,
            # Rates that go with the gradients would let weights decay the faster the larger these are.
            weight_decay=args.weight_decay if auto is None else 0.0,
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_epsilon,
            max_grad_norm=args.max_grad_norm,
            supervised=supervised,
            auto=auto,
            moments_dtype=args.moments_dtype,
            triton_kernels=args.triton_kernels,
        )


@dataclass(frozen=True)
class GradiendBatch:
    """k gradient items: sources [k, n], targets [k, n] and labels [k, 1]; None where the mode does not need them.

    n is the length of the engine's `slices`: what this rank must know of a gradient.
    """

    source: Tensor | None
    target: Tensor | None
    label: Tensor


@dataclass(frozen=True)
class EngineState:
    """Weights, moments and step counts by name."""

    cut: dict[str, Tensor]
    """Their first dimension is n: this rank's slices of it."""
    same: dict[str, Tensor]
    """Few numbers, the same on every rank."""


class Engine(ABC):
    """One GRADIEND model in training, wherever its weights are. All ranks call every method together."""

    model: ParamMappedGradiendModel
    slices: Slices
    """Which entries of a gradient this rank hands to `step`."""

    @abstractmethod
    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        """One optimizer step over the mean of `batches`; returns [loss, gradient norm, encoder norm, decoder norm].

        The result is the same on every rank, and stays on the device: reading it is the caller's decision, because it
        waits for the device. If the loss or a gradient is not finite no weight changes, and the returned loss or norm
        shows it.
        """

    @abstractmethod
    def flip(self, *, with_decoder_bias: bool) -> None:
        """Turn the latent axis around. With the decoder bias: as the reference does, moments left as they are."""

    def encoding_model(self) -> GradiendModel:
        """The weights that `evaluation` encodes with: the rank's slices, or the whole of them on every rank."""
        return self.model

    def weights(self) -> ParamMappedGradiendModel:
        """This rank's slices of the weights as they are now, for reading: those of all ranks together are the model."""
        return self.model

    def state(self) -> EngineState | None:
        """All that the next step depends on, as the tensors themselves: loading writes into them.

        None: the engine has a format of its own, `save_own` and `load_own`.
        """
        return None

    def save_own(self, directory: Path) -> None:
        """Write the state into a new directory."""
        raise NotImplementedError

    def load_own(self, directory: Path) -> None:
        """Go on from what `save_own` wrote."""
        raise NotImplementedError
