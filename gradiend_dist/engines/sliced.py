"""Many ranks, each with a part of n: We, Wd, bd, their moments, x and y are cut alike, so nothing of size n moves.

The step is that of a single process. Its sums over n (We.x; the loss and dloss/dh; norms) are the only traffic: a few
numbers in three all-reduces, four where a step has several items, with the same result on every rank. Encoder biases, m
numbers, live on every rank and are updated by the same numbers everywhere.
"""

from __future__ import annotations

from torch import Tensor

from gradiend_dist.comm import Comm
from gradiend_dist.engines import StepOptions
from gradiend_dist.engines.placed import PlacedEngine
from gradiend_dist.model import ParamMappedGradiendModel


class SlicedEngine(PlacedEngine):
    def __init__(self, model: ParamMappedGradiendModel, options: StepOptions, comm: Comm) -> None:
        super().__init__(model, options)
        self.comm = comm

    def total(self, partial: Tensor) -> Tensor:
        return self.comm.total(partial)
