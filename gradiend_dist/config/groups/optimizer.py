"""Where training starts, and how large its steps are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradiend_dist.config.checks import require, require_positive, require_share
from gradiend_dist.config.choices import Scheduler
from gradiend_dist.config.fields import documented

# One step of learning_rate=auto moves a latent by at most this, and a decoder entry by this share of the target's rms.
AUTO_RATE = 0.03


@documented
@dataclass(kw_only=True)
class OptimizerArguments:
    """Where training starts, and how large its steps are."""

    initialization: Literal["auto", "random", "spectral"] = "auto"
    """random: the reference's start; spectral: encoder and decoder in closed form from a few gradients; auto: spectral
    where target is diff and the form holds, random with compat."""
    spectral_items: int = 16
    """Gradients that the closed form and learning_rate=auto work with, as many of each direction."""
    learning_rate: float | str = 1e-5
    """Peak learning rate, or auto: steps in proportion to the gradients, for encoder and decoder each."""
    lr_scheduler_type: Scheduler = "constant"
    """One of constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    warmup_ratio: float = 0.0
    """Share of all steps that warm up, when warmup_steps is 0."""
    weight_decay: float = 1e-2
    """Weight decay on all weights."""
    adam_beta1: float = 0.9
    """Adam's beta1."""
    adam_beta2: float = 0.999
    """Adam's beta2."""
    adam_epsilon: float = 1e-8
    """Adam's epsilon."""
    optim: Literal["adamw", "adam", "adamw_8bit"] = "adamw"
    """adamw, adam, or adamw_8bit (needs bitsandbytes; a killed seed starts anew)."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Adam's moments: float32, or bfloat16 at half the memory, rounded up or down at random (not with DeepSpeed)."""
    triton_kernels: bool = True
    """Fused kernels for the step on GPUs, where Triton is installed; False: torch's operations, as on CPUs."""
    max_grad_norm: float = 0.0
    """Clip the gradient's norm at this. 0: no clipping."""

    def check(self) -> None:
        require_positive("adam_epsilon", self.adam_epsilon)
        self._check_rate()
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            require_positive(name, vars(self)[name], zero=True)
        require_share("warmup_ratio", self.warmup_ratio)
        require(
            not (self.warmup_steps and self.warmup_ratio), "warmup_steps and warmup_ratio are both set: pass only one."
        )
        require(
            self.lr_scheduler_type != "constant" or not (self.warmup_steps or self.warmup_ratio),
            "lr_scheduler_type=constant has no warm-up: pass constant_with_warmup, or leave the warm-up out.",
        )
        for name, value in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            require(0 <= value < 1, f"{name}={value} is not in [0, 1): pass e.g. 0.9.")
        require(
            self.optim != "adamw_8bit" or self.moments_dtype == "float32",
            f"moments_dtype={self.moments_dtype} has no effect with optim=adamw_8bit, whose moments have 8 bits: "
            "leave one of them out.",
        )

    def _check_rate(self) -> None:
        rate = self.learning_rate
        require(
            rate == "auto" or (not isinstance(rate, str) and rate > 0),
            f"learning_rate={rate!r} is neither a positive number nor auto: pass e.g. 1e-5.",
        )
        for name in ("weight_decay", "adam_epsilon"):
            given, default = vars(self)[name], OptimizerArguments.__dataclass_fields__[name].default
            require(
                not self.refines or given in (0.0, default),
                f"{name}={given} has no effect with learning_rate=auto, which decays nothing and chooses epsilon: "
                f"leave {name} out, or pass a number as learning_rate.",
            )

    @property
    def refines(self) -> bool:
        """Are step sizes those that the gradients allow?"""
        return self.learning_rate == "auto"

    @property
    def peak_rate(self) -> float:
        """What the scheduler scales: a learning rate, or, with auto, a share of what the gradients allow."""
        return AUTO_RATE if isinstance(self.learning_rate, str) else self.learning_rate
