"""What a language model says at the blanks of a feature, and how good a language model it still is.

    probabilities   of each class's words at the blanks of each class's rows
    lms             the language-model score on neutral text: masked models, the share of hidden tokens that they find;
                    causal models, 1 / (1 + mean negative log likelihood of a token)

`ModelScores` prepares both once and then measures the same base model in every state that rewriting brings it to.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.data.schedule import cap_per_group
from gradiend_dist.data.table import FeatureData
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.questions import Answers, Questions
from gradiend_dist.gradients.cloze import (
    Cloze,
    MaskedObjective,
    Objective,
    causal_text_questions,
    masked_text_questions,
    tokens_of,
)
from gradiend_dist.model.base import longest_input
from gradiend_dist.session import Session

LONGEST_TEXT = 512

CLASS_COLUMNS = ("factual_class", "alternative_class")


@dataclass(frozen=True)
class Words:
    """Whose probability is asked for at a blank."""

    by_class: Mapping[str, Sequence[str]]
    """Each class's words; empty where every row is asked for its own two words."""

    @property
    def row_wise(self) -> bool:
        return not self.by_class

    @staticmethod
    def of(data: FeatureData, config: TextPredictionConfig) -> Words:
        """As `decoder_eval_targets` says; by default all words of a class in the data, or, where classes share words,
        those of each row."""
        given = config.decoder_eval_targets
        if given == "label":
            return Words({})
        if given is not None:
            assert isinstance(given, Mapping), "checked with the configuration"
            unknown = [name for name in given if name not in data.all_classes]
            if unknown:
                raise UserError(
                    f"decoder_eval_targets has the class {unknown[0]!r}, the data has {', '.join(data.all_classes)}: "
                    "name classes of the data."
                )
            kept = {c: list(w) for c, w in given.items() if c in data.target_classes}
            if not config.decoder_eval_restrict_to_target_classes:
                kept = {name: list(words) for name, words in given.items()}
            missing = [name for name in data.target_classes if not kept.get(name)]
            if missing:
                raise UserError(f"decoder_eval_targets has no words for {missing[0]!r}: give them, or leave it out.")
            return Words(kept)
        by_class = {name: words_of(data, name) for name in data.target_classes}
        first, second = ({word.strip().lower() for word in words} for words in by_class.values())
        return Words({}) if first & second else Words(by_class)


def words_of(data: FeatureData, name: str) -> list[str]:
    table = data.table
    found = {
        word
        for side in ("factual", "alternative")
        for word in table.loc[table[f"{side}_class"] == name, side].dropna().astype(str)
    }
    return sorted(found)


def require_columns(name: str, frame: pd.DataFrame | None, columns: Sequence[str]) -> None:
    missing = [] if frame is None else [column for column in columns if column not in frame.columns]
    if missing:
        raise UserError(f"{name} has no column {missing[0]!r}: it needs {', '.join(columns)}.")


class ModelScores:
    """The rows, words and texts that a model is scored on."""

    def __init__(
        self, session: Session, config: TextPredictionConfig, rows: pd.DataFrame, texts: Sequence[str], *,
        batch_size: int, ignored: Sequence[str],
    ) -> None:  # fmt: skip
        self.session, self.rows, self.texts, self.ignored = session, rows, list(texts), list(ignored)
        self.words = Words.of(session.data, config)
        self.on_other_class = config.decoder_eval_prob_on_other_class
        base = session.base_gradients(session.space)
        model: Any = session.base_model
        self._asking: dict[str, Any] = {
            "pad_id": base.pad_id,
            "device": base.device,
            "batch_size": batch_size,
            "vocabulary": int(model.get_input_embeddings().num_embeddings),
        }
        self._logits_at, self._precision, self._sharded = base.logits_at, base.precision, base.is_sharded
        self._blanks = Blanks(rows, self.words, session.objective)
        self._at_blanks = Questions(self._blanks.clozes, **self._asking)
        tokenizer, self.is_masked = session.tokenizer, isinstance(session.objective, MaskedObjective)
        longest = min(LONGEST_TEXT, longest_input(model, tokenizer))
        make = masked_text_questions if self.is_masked else causal_text_questions
        clozes = make(
            tokenizer, self.texts, longest, tokens_of(tokenizer, self.ignored),
            hide_special=session.args.behaviour.lms_on_special_tokens,
        )  # fmt: skip
        if not clozes:
            raise UserError(
                f"None of the {len(self.texts)} neutral texts has a token to score the language model on: pass longer "
                "ones as eval_neutral_data, or fewer decoder_eval_ignore_tokens."
            )
        self._in_texts = Questions(clozes, **self._asking)
        self._at_blanks.prepare(self._logits_at, self._precision())

    @staticmethod
    def prepare(
        session: Session,
        config: TextPredictionConfig,
        *,
        split: str,
        max_rows: int | None,
        max_texts: int | None,
        batch_size: int,
        rows: pd.DataFrame | None = None,
        neutral: pd.DataFrame | None = None,
    ) -> ModelScores:
        """The pair's rows of a split, and neutral texts, or, where there are none, the rows with their words."""
        args, data = session.args, session.data
        require_columns("training_like_df", rows, ("masked", "factual", "alternative", *CLASS_COLUMNS))
        require_columns("neutral_df", neutral, ("text",))
        if rows is None:
            rows = cap_per_group(data.rows(split), max_rows, column="feature_class_id", seed=args.data_seed)
        rows = rows[rows[[*CLASS_COLUMNS]].isin(data.target_classes).all(axis=1)].reset_index(drop=True)
        missing = [name for name in data.target_classes if not (rows["factual_class"] == name).any()]
        if missing:
            raise UserError(f"The split {split!r} has no rows of class {missing[0]!r}: pass another split.")
        neutral = data.neutral if neutral is None else neutral
        ignored = config.decoder_eval_ignore_tokens
        if neutral is not None and len(neutral):
            if max_texts is not None:
                neutral = neutral.sample(n=min(len(neutral), max_texts), random_state=args.data_seed)
            texts = neutral["text"].astype(str).tolist()
        else:
            # Not the first ones, which are all of one class.
            some = rows if max_texts is None else rows.sample(n=min(len(rows), max_texts), random_state=args.data_seed)
            filled = zip(some["masked"], some["factual"], strict=True)
            texts = [text.replace(args.mask_placeholder, word) for text, word in filled]
            if ignored is None:  # these texts are about the feature: its own words do not count
                ignored = sorted({*rows["factual"], *rows["alternative"]})
        return ModelScores(session, config, rows, texts, batch_size=batch_size, ignored=ignored or [])

    def measure(self) -> dict[str, Any]:
        """The scores of the base model as it is now, with the names of the reference."""
        comm = self.session.comm if self._sharded else None
        asked: dict[str, Any] = {"precision": self._precision(), "comm": comm}
        at_blanks = self._at_blanks.ask(self._logits_at, **asked)
        asked["precision"] = self._precision()
        in_texts = self._in_texts.ask(self._logits_at, predict=self.is_masked, **asked)
        table = self._blanks.probabilities(self._at_blanks.sums(at_blanks.log_probability))
        by_dataset = self._blanks.means(table)
        return {
            **self._selected(by_dataset),
            "lms": self._language_model_score(in_texts),
            "_probs_by_dataset_grouping": "factual_id",
            "probs_by_dataset": by_dataset,
        }

    def row_table(self) -> pd.DataFrame:
        """Row by row: the probabilities of the factual and the alternative word, with the columns of the reference."""
        comm = self.session.comm if self._sharded else None
        clozes = Blanks(self.rows, Words({}), self.session.objective)
        questions = Questions(clozes.clozes, **self._asking)
        answers = questions.ask(self._logits_at, precision=self._precision(), comm=comm)
        table = clozes.probabilities(questions.sums(answers.log_probability))
        rows = self.rows
        return pd.DataFrame(
            {
                "masked": rows["masked"],
                "factual": rows["factual"],
                "alternative": rows["alternative"],
                "factual_id": rows["factual_class"],
                "alternative_id": rows["alternative_class"],
                "dataset_class": rows["factual_class"],
                "other_class": rows["alternative_class"],
                "P_factual": table[:, 0],
                "P_alternative": table[:, 1],
            }
        )

    def _selected(self, by_dataset: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """What strengthening (`probs`) and weakening (`probs_factual`) are judged by, for each target class."""
        first, second = self.session.data.target_classes
        own = {name: by_dataset[name][name] for name in (first, second)}
        other = {first: by_dataset[second][first], second: by_dataset[first][second]}
        return {"probs": other if self.on_other_class else dict(own), "probs_factual": own}

    def _language_model_score(self, answers: Answers) -> dict[str, float]:
        if self.is_masked:
            return masked_score(self.session.tokenizer, self._in_texts.labels, answers.predicted)
        return causal_score(answers.log_probability)


class Blanks:
    """The rows' blanks and what is asked at them."""

    def __init__(self, rows: pd.DataFrame, words: Words, objective: Objective) -> None:
        self.dataset = rows["factual_class"].tolist()
        self.words = words
        self.other = rows["alternative_class"].tolist()
        self.clozes: list[Cloze] = []
        where: list[tuple[int, int]] = []
        seen: dict[str, list[list[Cloze]]] = {}
        for row, (template, factual, alternative) in enumerate(
            zip(rows["masked"], rows["factual"], rows["alternative"], strict=True)
        ):
            if words.row_wise:
                asked = [[objective.whole_word(template, factual)], [objective.whole_word(template, alternative)]]
            else:
                if template not in seen:
                    seen[template] = [spellings(objective, template, group) for group in words.by_class.values()]
                asked = seen[template]
            for column, clozes in enumerate(asked):
                self.clozes += clozes
                where += [(row, column)] * len(clozes)
        self._row, self._column = np.array(where).T
        self._num_columns = 2 if words.row_wise else len(words.by_class)

    def probabilities(self, log_probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[rows, classes]: what the words of each class get together; [rows, 2] of each row's own words.

        A model that a large step has broken may answer with NaN, which is no probability of any word.
        """
        table = np.zeros((len(self.dataset), self._num_columns))
        np.add.at(table, (self._row, self._column), np.nan_to_num(np.exp(log_probability)))
        return table

    def means(self, table: npt.NDArray[np.float64]) -> dict[str, dict[str, float]]:
        """{class of the rows: {class of the words: mean probability}}."""
        found: dict[str, dict[str, list[float]]] = {}
        for dataset, other, values in zip(self.dataset, self.other, table.tolist(), strict=True):
            names = (dataset, other) if self.words.row_wise else self.words.by_class
            for name, value in zip(names, values, strict=True):
                found.setdefault(dataset, {}).setdefault(name, []).append(value)
        return {
            dataset: {name: float(np.mean(values)) for name, values in by_class.items()}
            for dataset, by_class in found.items()
        }


def spellings(objective: Objective, template: str, words: Sequence[str]) -> list[Cloze]:
    """A word counts in every case that is one token at this blank; as it is written where none is."""
    found: dict[Cloze, None] = {}
    for word in words:
        written = word.strip()
        cases = dict.fromkeys((written, written.lower(), written.capitalize(), written.upper()))
        clozes = [objective.whole_word(template, written)]
        for case in list(cases)[1:]:  # another case may be unknown to the tokenizer; the word may not
            with contextlib.suppress(UserError):
                cloze = objective.whole_word(template, case)
                if objective.tokenizer.unk_token_id not in cloze.labels:
                    clozes.append(cloze)
        single = [cloze for cloze in clozes if len(cloze.labels) == 1]
        found.update(dict.fromkeys(single or clozes[:1]))
    return list(found)


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
