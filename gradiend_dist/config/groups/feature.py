"""How classes and blanks in the data are read."""

from __future__ import annotations

from dataclasses import dataclass

from gradiend_dist.config.checks import require
from gradiend_dist.config.fields import documented


@documented
@dataclass(kw_only=True)
class ClassArguments:
    """How classes and blanks are read: documented as arguments of both the training and the data."""

    class_merge_map: dict[str, list[str]] | None = None
    """Merged class -> its base classes."""
    class_merge_transition_groups: list[list[str]] | None = None
    """Base classes that may turn into another. None: any."""
    mask_placeholder: str = "[MASK]"
    """The blank in the texts; independent of the tokenizer's mask token."""

    def check(self) -> None:
        require(bool(self.mask_placeholder.strip()), "mask_placeholder is empty: pass e.g. [MASK].")
