"""When and on how many rows encoder and decoder are evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gradiend_dist.config.checks import require, require_positive
from gradiend_dist.config.fields import FLAG, NO_FLAG, documented

# Held-out items of each direction, and of identities where they are trained.
ITEMS_OF_A_SIDE = 4


@documented
@dataclass(kw_only=True)
class EvaluationArguments:
    """When and on how many rows the encoder is evaluated."""

    do_eval: bool = True
    """Evaluate the encoder during training."""
    eval_strategy: Literal["steps", "no"] = "steps"
    """steps: at step 0, every eval_steps and at the end; no: never."""
    eval_steps: int = 250
    """Evaluate every this many steps."""
    eval_batch_size: int = 32
    """Rows encoded together where their gradients are not kept."""
    encoder_eval_train_max_size: int | None = None
    """Rows per group of evaluations during training."""
    encoder_eval_max_size: int | None = None
    """Rows per group of all other evaluations. None: all."""
    encoder_eval_balance: bool = True
    """Give every feature class the same weight in an evaluation."""
    include_other_classes: bool = False
    """Evaluate transitions of other classes as well, with label 0."""
    seed_selection_eval_max_size: int | None = None
    """Rows per group when seeds are compared."""
    decoder_eval_lrs: list[float] | None = None
    """Learning rates of the decoder grid. None: 100 to 0.001."""
    decoder_eval_feature_factors: list[float] | None = None
    """Feature factors of the decoder grid. None: those that strengthen the target classes."""
    decoder_eval_max_size_training_like: int | None = None
    """Rows per direction of the decoder grid."""
    decoder_eval_max_size_neutral: int | None = None
    """Neutral texts of the decoder grid."""
    evaluate_fn: Any = field(default=None, metadata={FLAG: NO_FLAG})
    """Your own evaluation, f(model) -> {'correlation': ...}; Python only."""

    def check(self) -> None:
        for name in (
            "eval_steps", "eval_batch_size", "encoder_eval_train_max_size", "encoder_eval_max_size",
            "seed_selection_eval_max_size", "decoder_eval_max_size_training_like", "decoder_eval_max_size_neutral",
        ):  # fmt: skip
            require_positive(name, vars(self)[name])
        rates = self.decoder_eval_lrs
        require(
            rates is None or (len(rates) > 0 and min(rates) > 0),
            f"decoder_eval_lrs={rates} must be positive numbers: pass e.g. 1.0 0.1, or leave it out.",
        )
        require(self.evaluate_fn is None or callable(self.evaluate_fn), "evaluate_fn is not callable: pass a function.")
