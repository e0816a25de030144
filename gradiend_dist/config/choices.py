"""The words that arguments choose from, as types and as tuples."""

from __future__ import annotations

from typing import Literal, get_args

Gradient = Literal["factual", "alternative", "diff"]

Part = Literal["encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum"]

Activation = Literal["tanh", "relu", "leakyrelu", "gelu", "silu", "elu", "sigmoid", "smht", "id"]

Scheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]

GRADIENTS: tuple[str, ...] = get_args(Gradient)

PARTS: tuple[str, ...] = get_args(Part)

ACTIVATIONS: tuple[str, ...] = get_args(Activation)

TRACKERS = ("wandb", "tensorboard")
