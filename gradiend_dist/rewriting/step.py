"""A step of rewriting: how far, and along what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.config.choices import PARTS
from gradiend_dist.errors import UserError

SCALINGS = ("plain", "tensor", "curvature")

# What a step may go along: the decoder's answer to a feature factor, or one of the model's other vectors.
VECTORS = ("decoder", *PARTS)


@dataclass(frozen=True)
class Step:
    """theta' = theta + learning_rate * s(v); see `gradiend_dist.rewriting.move`."""

    learning_rate: float
    feature_factor: float | tuple[float, ...] = 1.0
    """What the decoder is asked for, one number or one for each latent; the other parts do not depend on it."""
    part: str = "decoder"
    """The decoder's answer, or one of the model's other vectors."""
    scaling: str = "plain"
    """How the entries of v are weighed against each other."""

    def __post_init__(self) -> None:
        require_choice("scaling", self.scaling, SCALINGS)
        require_choice("part", self.part, VECTORS)
        if isinstance(self.feature_factor, Sequence):
            object.__setattr__(self, "feature_factor", tuple(self.feature_factor))
        factors = self.feature_factor if isinstance(self.feature_factor, tuple) else (self.feature_factor,)
        for name, values in (("learning_rate", (self.learning_rate,)), ("feature_factor", factors)):
            for value in values:
                require(math.isfinite(value), f"{name}={value} is no finite number: pass one, e.g. 0.1.")

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> Step:
        """The step that an entry of decoder results is about; the reference's name no part and no scaling."""
        return cls(
            entry["learning_rate"],
            entry["feature_factor"],
            entry.get("part", "decoder"),
            entry.get("scaling", "plain"),
        )

    @property
    def point(self) -> dict[str, Any]:
        """How decoder results name it, given part and scaling."""
        return {"feature_factor": self.feature_factor, "learning_rate": self.learning_rate}

    @property
    def direction(self) -> Step:
        """The same for steps of all lengths."""
        return self.of_rate(1.0)

    def of_rate(self, learning_rate: float) -> Step:
        return replace(self, learning_rate=learning_rate)

    def check(self, gradiend: Any) -> None:
        """Does this GRADIEND model have such a vector?"""
        if self.part == "decoder":
            count = len(self.feature_factor) if isinstance(self.feature_factor, tuple) else 1
            if count not in (1, gradiend.latent_dim):
                raise UserError(
                    f"feature_factor has {count} values, latent_dim is {gradiend.latent_dim}: pass as many."
                )
        elif self.part in ("decoder-bias", "decoder-sum") and not gradiend.bias_decoder:
            raise UserError(f"part={self.part} needs a decoder bias, this model has none: use decoder-weight.")
