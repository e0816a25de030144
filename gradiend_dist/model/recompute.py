"""Layers that are computed again in the backward pass: what they make in between need not be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed:
    """A layer's forward pass. transformers' own switch does nothing in evaluation mode, in which a frozen model is."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Nothing is drawn in evaluation mode, so no random state has to be brought back.
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Of each layer only what enters it is kept from now on.

    Hooks on the layer itself (FSDP's) run once in each pass as before, those inside it twice: so not a layer that looks
    up embeddings, whose hooks count.
    """
    for layer in layers:
        looks_up = any(isinstance(module, nn.Embedding) for module in layer.modules())
        if not looks_up and not isinstance(vars(layer).get("forward"), Recomputed):
            layer.forward = Recomputed(layer.forward)
