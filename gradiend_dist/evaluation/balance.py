"""How balanced a model is between two classes: the indices of the GRADIEND paper.

With P(M) and P(F) the mean probabilities of the words of both classes at the same blanks, and the language-model score:

    BPI   score * (1 - |P(M) - P(F)|) * (P(M) + P(F))   large where both are equally probable, and nothing else is
    MPI   score * (1 - P(F)) * P(M)                     large where M is, and F is not; FPI the other way round
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradiend_dist.evaluation.decoder import NEUTRAL

BALANCE = "balance"


def probabilities(entry: Mapping[str, Any], classes: tuple[str, str]) -> tuple[float, float]:
    """At neutral blanks where there are any; else at the rows of both classes, which count the same."""
    by_dataset = entry["probs_by_dataset"]
    datasets = [NEUTRAL] if NEUTRAL in by_dataset else list(classes)
    first, second = (sum(by_dataset[dataset][name] for dataset in datasets) / len(datasets) for name in classes)
    return first, second


def balance_of(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, float]:
    """BPI, and by class the index of the model that prefers it."""
    score = float(entry["lms"]["lms"])
    first, second = probabilities(entry, classes)
    return {
        "bpi": score * (1.0 - abs(first - second)) * (first + second),
        f"pi_{classes[0]}": score * (1.0 - second) * first,
        f"pi_{classes[1]}": score * (1.0 - first) * second,
    }
