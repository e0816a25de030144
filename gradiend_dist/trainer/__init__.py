"""The public object and its configurations, under the names that the reference has for them.

Names are imported on first use: commands import this package before they know whether they train.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "TextPredictionTrainer": "trainer.text_prediction",
    "TextPredictionConfig": "data.config",
    "TrainingArguments": "config.arguments",
    "PrePruneConfig": "config.pruning",
    "PostPruneConfig": "config.pruning",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradiend_dist.trainer' has no attribute {name!r}")
    return getattr(import_module(f"gradiend_dist.{_HOMES[name]}"), name)
