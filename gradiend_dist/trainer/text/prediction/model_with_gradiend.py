"""The model under the name and at the place that the reference documents."""

from gradiend_dist.model_with_gradiend import ModelWithGradiend as TextPredictionModelWithGradiend

__all__ = ["TextPredictionModelWithGradiend"]
