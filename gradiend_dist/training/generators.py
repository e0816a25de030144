"""The random generators of a process: the training loop draws nothing, a user's callback may."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, Any]:
    """As plain values."""
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": [version, list(numbers), gauss],
    }


def try_generators(saved: Any) -> bool:
    """Set them, or leave them as they are where this is no state of theirs."""
    before = generator_states()
    try:
        set_generators(saved)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        set_generators(before)
        return False
    return True


def set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(saved["cuda"], dtype=torch.uint8))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
