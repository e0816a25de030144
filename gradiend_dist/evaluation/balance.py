"""How balanced a model is between two classes: the indices of the GRADIEND paper.

With P(M) and P(F) the mean probabilities of the words of both classes at some blanks, and the language-model score:

    BPI   score * (1 - |P(M) - P(F)|) * (P(M) + P(F))   large where both are equally probable, and nothing else is
    MPI   score * (1 - P(F)) * P(M)                     large where M is, and F is not; FPI the other way round

Blanks of M, blanks of F and neutral ones are looked at apart: a model that says each word at the blanks of its own
class alone has equal means over all of them, and is as far from balanced as can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from gradiend_dist.evaluation.decoder import NEUTRAL

BALANCE = "balance"


def balance_by_blanks(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, dict[str, float]]:
    """BPI, and by class the index of the model that prefers it, at each kind of blanks that was asked."""
    score = float(entry["lms"]["lms"])
    found = {}
    for blanks in (*classes, NEUTRAL):
        if blanks not in entry["probs_by_dataset"]:
            continue
        first, second = (float(entry["probs_by_dataset"][blanks][name]) for name in classes)
        found[blanks] = {
            "bpi": score * (1.0 - abs(first - second)) * (first + second),
            f"pi_{classes[0]}": score * (1.0 - second) * first,
            f"pi_{classes[1]}": score * (1.0 - first) * second,
        }
    return found


def balance_of(entry: Mapping[str, Any], classes: tuple[str, str]) -> dict[str, float]:
    """The indices that a model is chosen by: at neutral blanks where there are any, else means of both classes'."""
    found = balance_by_blanks(entry, classes)
    chosen = [found[NEUTRAL]] if NEUTRAL in found else [found[name] for name in classes]
    return {index: fmean(each[index] for each in chosen) for index in chosen[0]}
