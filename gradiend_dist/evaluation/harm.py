"""Harm: by how much a change of a language model raises its perplexity on neutral texts.

    harm = exp(mean loss of a token after - before) - 1

A continuous number, unlike a share of hits, and its error is that of the texts' own differences, since the same tokens
are asked for of every model: a few hundred tokens tell 0.1 % from 1 %.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.asker import Asker
from gradiend_dist.evaluation.questions import Answers, Questions
from gradiend_dist.evaluation.texts import READINGS, Texts, text_questions
from gradiend_dist.gradients.cloze import Cloze, MaskedObjective
from gradiend_dist.model.base import longest_input

LONGEST_TEXT = 512

# Tokens that a masked model is asked for: below it, the texts are read again with others hidden.
ENOUGH_TOKENS = 2000

# Of the loss of guessing any token with equal probability: a base model above it does not know such texts.
UNKNOWN_TEXTS = 2 / 3


@dataclass(frozen=True)
class Harm:
    """Growth of perplexity; 0.01 is 1 %."""

    value: float
    error: float
    """Its standard error."""

    def is_above(self, limit: float) -> bool:
        """Clearly so."""
        return self.value - 2.0 * self.error > limit

    def fields(self) -> dict[str, float]:
        return {"harm": self.value, "harm_error": self.error}


@dataclass(frozen=True)
class TextLosses:
    """Text by text: the mean loss of its tokens, and how many these are."""

    losses: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]

    @staticmethod
    def joined(groups: Sequence[TextLosses]) -> TextLosses:
        return TextLosses(*(np.concatenate([vars(group)[name] for group in groups]) for name in ("losses", "tokens")))

    def first(self, count: int) -> TextLosses:
        return TextLosses(self.losses[:count], self.tokens[:count])

    @property
    def mean(self) -> float:
        return float(np.average(self.losses, weights=self.tokens))

    def harm_against(self, base: TextLosses) -> Harm:
        """Of the model with these losses, compared to the base model; infinite for one that is broken."""
        difference, count = self.losses - base.losses, len(self.losses)
        mean = float(np.average(difference, weights=self.tokens))
        if not math.isfinite(mean) or mean > 50.0:
            return Harm(math.inf, 0.0)
        if count < 2:
            return Harm(math.expm1(mean), math.inf)  # nothing tells how much texts differ
        share = self.tokens / self.tokens.sum()
        error = math.sqrt(float((share**2 * (difference - mean) ** 2).sum()) * count / (count - 1))
        return Harm(math.expm1(mean), math.exp(mean) * error)


def losses_as_kept(losses: TextLosses) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in vars(losses).items()}


def kept_losses(entry: Mapping[str, Any]) -> TextLosses:
    return TextLosses(*(np.array(entry[name], dtype=np.float64) for name in ("losses", "tokens")))


class TextScores:
    """Neutral texts, and what is asked in them: prepared once, asked of a language model in all its versions."""

    def __init__(self, asker: Asker, asked: Texts, *, by_search: bool = False) -> None:
        """`by_search`: read often enough to tell a small harm, and a fifth of the texts first."""
        session = asker.session
        self.asker, self.texts, self.is_masked = asker, asked, isinstance(session.objective, MaskedObjective)
        longest, count = min(LONGEST_TEXT, longest_input(session.base_model, session.tokenizer)), len(asked.texts)
        found = text_questions(session, asked, longest)
        if not found:
            raise UserError(
                f"None of the {count} neutral texts has a token to score the language model on: pass longer ones as "
                "eval_neutral_data, or fewer decoder_eval_ignore_tokens."
            )
        tokens = sum(len(cloze.labels) for _, cloze in found)
        if by_search and self.is_masked and tokens < ENOUGH_TOKENS:
            readings = min(READINGS, math.ceil(ENOUGH_TOKENS / tokens))
            found = text_questions(session, Texts(asked.texts * readings, asked.ignored), longest)
        # Every fifth: texts in a file may be sorted.
        early = [(number, cloze) for number, cloze in found if number % count % 5 == 0]
        late = [(number, cloze) for number, cloze in found if number % count % 5 != 0]
        parts = [early, late] if by_search and early and late else [found]
        self._groups = [_TextGroup.of(asker, questions, count) for questions in parts]

    def measure(self, base: TextLosses | None = None, limit: float | None = None) -> TextScore:
        """Of the model as it is now, against the base; one that a fifth of the texts show to be far above `limit` is
        not asked for the others. Over a sharded model all ranks call this."""
        found: list[tuple[_TextGroup, Answers]] = []
        for group in self._groups:
            found.append((group, self.asker.ask(group.questions, predict=self.is_masked)))
            losses = TextLosses.joined([group.losses(answers) for group, answers in found])
            harm = None if base is None else losses.harm_against(base.first(len(losses.losses)))
            more_follow = len(found) < len(self._groups)
            if more_follow and harm is not None and limit is not None and harm.is_above(limit):
                return TextScore(losses, harm, None)
        labels = np.concatenate([group.questions.labels[group.is_first] for group, _ in found])
        predicted = [answers.predicted[group.is_first] for group, answers in found] if self.is_masked else []
        if self.is_masked:
            lms = masked_score(self.asker.session.tokenizer, labels, np.concatenate(predicted))
        else:
            lms = causal_score(np.concatenate([answers.log_probability for _, answers in found]))
        return TextScore(losses, harm, lms)


@dataclass(frozen=True)
class TextScore:
    losses: TextLosses
    harm: Harm | None
    lms: dict[str, float] | None
    """The reference's score; None for a model that was given up after a fifth of the texts."""


@dataclass(frozen=True)
class _TextGroup:
    questions: Questions
    text_of: npt.NDArray[np.int64]
    """Of each question: readings of one text count together."""
    is_first: npt.NDArray[np.bool_]
    """Of each wanted token: is it of the first reading, which the score of the reference is about?"""

    @staticmethod
    def of(asker: Asker, questions: Sequence[tuple[int, Cloze]], num_texts: int) -> _TextGroup:
        numbers = np.array([number for number, _ in questions])
        lengths = [len(cloze.labels) for _, cloze in questions]
        texts = numbers % num_texts
        return _TextGroup(
            asker.questions([cloze for _, cloze in questions]),
            texts - texts.min(),
            np.repeat(numbers < num_texts, lengths),
        )

    def losses(self, answers: Answers) -> TextLosses:
        sums = np.bincount(self.text_of, -self.questions.sums(answers.log_probability))
        tokens = np.bincount(self.text_of, np.diff(self.questions.starts)).astype(float)
        asked = tokens > 0
        return TextLosses(sums[asked] / tokens[asked], tokens[asked])


def masked_score(tokenizer: Any, labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> dict[str, float]:
    """Tokens are compared as text, whatever their case; precision, recall and F1 weigh each by its frequency."""

    @functools.cache
    def text(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=True)).lower()

    true, found = ([text(int(token)) for token in tokens] for tokens in (labels, predicted))
    counts = pd.DataFrame({"true": true, "found": found})
    hits = counts.loc[counts["true"] == counts["found"], "true"].value_counts()
    support, chosen = counts["true"].value_counts(), counts["found"].value_counts()
    hit = hits.reindex(support.index).fillna(0.0)
    precision = (hit / chosen.reindex(support.index)).fillna(0.0)
    recall = hit / support
    f1 = (2 * precision * recall / (precision + recall)).fillna(0.0)
    share = support / len(counts)
    accuracy = float(hits.sum() / len(counts))
    weighted = {"precision": precision, "recall": recall, "f1": f1}
    return {
        "accuracy": accuracy,
        **{name: float((value * share).sum()) for name, value in weighted.items()},
        "lms": accuracy,
    }


def causal_score(log_probability: npt.NDArray[np.float64]) -> dict[str, float]:
    """0 for a model that is broken beyond any likelihood; `total_log_likelihood` is negated, as in the reference."""
    total = -float(log_probability.sum())
    mean = total / len(log_probability)
    broken = not math.isfinite(mean) or mean > 700.0
    return {
        "lms": 0.0 if broken else 1.0 / (1.0 + mean),
        "perplexity": math.inf if broken else math.exp(mean),
        "total_log_likelihood": math.inf if broken else total,
        "total_tokens": len(log_probability),
    }
