"""What one training step is made of, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from gradiend_dist.config.checks import require, require_positive
from gradiend_dist.config.choices import Gradient
from gradiend_dist.config.fields import documented


@documented
@dataclass(kw_only=True)
class LoopArguments:
    """The training loop, in Hugging Face's words."""

    source: Gradient = "alternative"
    """Gradient that feeds the encoder: factual, alternative or diff."""
    target: Gradient = "diff"
    """Gradient that the decoder predicts: factual, alternative or diff."""
    train_batch_size: int = 32
    """Rows in one base-model gradient."""
    base_gradient_batch_size: int | None = None
    """The same under the reference's other name."""
    base_micro_batch_size: int | None = None
    """Rows per forward pass if train_batch_size does not fit."""
    gradiend_batch_size: int = 1
    """Gradient vectors in one GRADIEND batch."""
    gradient_accumulation_steps: int = 1
    """GRADIEND batches in one optimizer step."""
    train_max_size: int | None = None
    """At most this many training rows per direction."""
    add_identity_for_other_classes: bool = False
    """Add rows of other classes that must stay as they are."""
    max_length: int = 256
    """Longest row in tokens; longer ones keep a window around the blank."""
    num_train_epochs: int = 3
    """Passes over the data. Ignored when max_steps > 0."""
    max_steps: int = -1
    """Total optimizer steps; overrides num_train_epochs when > 0. 0: the spectral start alone."""
    supervised_encoder: bool = False
    """Train the encoder alone, on the class labels."""
    supervised_decoder: bool = False
    """Train the decoder alone, from the class labels."""
    normalize_gradiend: bool = True
    """Turn the encoding so that the first target class is positive."""

    def check(self) -> None:
        for name in (
            "train_batch_size", "base_micro_batch_size", "gradiend_batch_size", "train_max_size",
            "gradient_accumulation_steps", "num_train_epochs", "max_length",
        ):  # fmt: skip
            require_positive(name, vars(self)[name])
        require(
            not (self.supervised_encoder and self.supervised_decoder),
            "supervised_encoder and supervised_decoder are both set: pass only one.",
        )

    @property
    def trained_kinds(self) -> list[str]:
        """The gradients that a step needs: source and target, each once."""
        wanted = [self.source] * (not self.supervised_decoder) + [self.target] * (not self.supervised_encoder)
        return list(dict.fromkeys(wanted))
