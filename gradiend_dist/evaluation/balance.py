"""How balanced a model is between two classes: the indices of the GRADIEND paper.

With P(M) and P(F) the mean probabilities of the words of both classes at some blanks, and the language-model score:

    BPI   score * (1 - |P(M) - P(F)|) * (P(M) + P(F))   large where both are equally probable, and nothing else is
    MPI   score * (1 - P(F)) * P(M)                     large where M is, and F is not; FPI the other way round

A model is chosen by its indices at neutral blanks, which either class may fill. Where there are none, by those of the
mean probabilities over the blanks of both classes, which count the same: a preference for one class is made good then,
what the texts tell about the class is not. So the indices at each kind of blanks are told beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

BALANCE = "balance"

# In place of a class: blanks that either may fill.
NEUTRAL = "neutral"


def without_balance(target_class: str | Sequence[str] | None) -> tuple[bool, list[str] | None]:
    """Is a balance asked for, and which classes besides? None: all, or, with a balance, none."""
    if target_class is None:
        return False, None
    names = [target_class] if isinstance(target_class, str) else list(target_class)
    classes = [name for name in names if name != BALANCE]
    return (True, classes or None) if BALANCE in names else (False, classes)


def balance_by_blanks(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, dict[str, float]]:
    """BPI, and by class the index of the model that prefers it, at each kind of blanks that was asked."""
    asked = entry["probs_by_dataset"]
    return {name: indices(entry, asked[name], classes) for name in (*classes, NEUTRAL) if name in asked}


def balance_of(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, float]:
    """The indices that a model is chosen by."""
    return indices(entry, compared(entry, classes), classes)


def gap_of(entry: Mapping[str, Any], classes: tuple[str, str]) -> float:
    """By how much the first class is more probable than the second: zero in a balanced model."""
    probabilities = compared(entry, classes)
    return probabilities[classes[0]] - probabilities[classes[1]]


def compared(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, float]:
    """The probabilities that are to become equal."""
    asked = entry["probs_by_dataset"]
    kinds = [NEUTRAL] if NEUTRAL in asked else classes
    return {name: fmean(float(asked[blanks][name]) for blanks in kinds) for name in classes}


def indices(entry: Mapping[str, Any], probabilities: Mapping[str, float], classes: tuple[str, str]) -> dict[str, float]:
    score = float(entry["lms"]["lms"])
    first, second = (probabilities[name] for name in classes)
    return {
        "bpi": score * (1.0 - abs(first - second)) * (first + second),
        f"pi_{classes[0]}": score * (1.0 - second) * first,
        f"pi_{classes[1]}": score * (1.0 - first) * second,
    }
