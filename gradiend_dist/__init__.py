"""GRADIEND on one machine or many: learn a feature of a language model from its gradients.

Names are imported on first use, so that `import gradiend_dist` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_HOMES = {
    "TrainingArguments": "config.arguments",
    "PrePruneConfig": "config.pruning",
    "PostPruneConfig": "config.pruning",
    "TextPredictionTrainer": "trainer.text_prediction",
    "TextPredictionConfig": "data.config",
    "GradiendModel": "model.gradiend",
    "ParamMappedGradiendModel": "model.gradiend",
    "ModelWithGradiend": "model_with_gradiend",
    "create_model_with_gradiend": "model_with_gradiend",
    "load_delta": "rewriting.delta",
    "LMSThresholdPolicy": "evaluation.selection",
    "LMSTimesMetricPolicy": "evaluation.selection",
    "UserError": "errors",
    "MissingFile": "errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return version("gradiend_dist")
        except PackageNotFoundError:  # run from a source tree that was not installed
            return "0.0.0"
    if name not in _HOMES:
        raise AttributeError(f"module 'gradiend_dist' has no attribute {name!r}")
    return getattr(import_module(f"gradiend_dist.{_HOMES[name]}"), name)
