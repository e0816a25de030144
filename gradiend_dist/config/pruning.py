"""Pruning before and after training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradiend_dist.config.checks import check_seed, check_topk, check_types, require, require_positive
from gradiend_dist.config.choices import Gradient, Part
from gradiend_dist.config.fields import FLAG, NO_FLAG, documented
from gradiend_dist.config.foreign import OF_POST_PRUNING, OF_PRE_PRUNING, accepting


@accepting(OF_PRE_PRUNING)
@documented
@dataclass(kw_only=True)
class PrePruneConfig:
    """Pruning before training, by the mean gradient of a few examples."""

    n_samples: int = 8
    """Examples whose mean gradient ranks the weights, split evenly over both directions; initialization=spectral ranks
    by all rows of its items where these are more."""
    topk: int | float | None = 0.1
    """Weights to keep: a share (0.01) or a count (1000)."""
    threshold: float | None = None
    """Keep weights whose absolute mean gradient is at least this."""
    source: Gradient = "alternative"
    """Which gradient ranks: factual, alternative or diff."""
    seed: int | None = None
    """Seed of the sample. None: the seed of the run."""

    def __post_init__(self) -> None:
        check_topk("pre_prune_config.topk", self.topk)
        check_types(type(self), vars(self), "pre_prune_config.")
        require_positive("pre_prune_config.n_samples", self.n_samples)
        require_positive("pre_prune_config.threshold", self.threshold, zero=True)
        check_seed("pre_prune_config.seed", self.seed)
        require(
            self.topk is not None or self.threshold is not None,
            "pre_prune_config has neither topk nor threshold: pass one of them, or leave pre_prune_config out.",
        )


@accepting(OF_POST_PRUNING)
@documented
@dataclass(kw_only=True)
class PostPruneConfig:
    """Pruning after training, by the size of the trained weights."""

    topk: int | float | None = 0.01
    """Weights to keep: a share (0.01) or a count (1000)."""
    threshold: float | None = None
    """Keep weights whose importance is at least this."""
    mask: Any = field(default=None, metadata={FLAG: NO_FLAG})
    """Boolean mask over the trained space; Python only."""
    part: Part = "decoder-weight"
    """Importance is read from: encoder-weight, decoder-weight, decoder-bias, decoder-sum."""

    def __post_init__(self) -> None:
        check_topk("post_prune_config.topk", self.topk)
        check_types(type(self), vars(self), "post_prune_config.")
        require_positive("post_prune_config.threshold", self.threshold, zero=True)
        if self.mask is not None:
            import torch  # a mask is a tensor: who passes one has paid for the import

            require(
                isinstance(self.mask, torch.Tensor) and self.mask.dtype == torch.bool and self.mask.ndim == 1,
                f"post_prune_config.mask={self.mask!r:.60} is no flat torch.bool tensor: pass one, in Python.",
            )
        require(
            self.topk is not None or self.threshold is not None or self.mask is not None,
            "post_prune_config has none of topk, threshold and mask: pass one, or leave post_prune_config out.",
        )
