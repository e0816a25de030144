"""What a language model says at the blanks of a feature, and how good a language model it still is.

    probabilities   of each class's words at the blanks of each class's rows
    lms             the language-model score on neutral text: masked models, the share of hidden tokens that they find;
                    causal models, 1 / (1 + mean negative log likelihood of a token)

`ModelScores` prepares both once and then measures the same base model in every state that rewriting brings it to.
"""

from __future__ import annotations

import contextlib
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
from gradiend_dist.evaluation.asker import Asker
from gradiend_dist.evaluation.balance import NEUTRAL
from gradiend_dist.evaluation.harm import TextLosses, TextScore, TextScores, losses_as_kept
from gradiend_dist.evaluation.texts import Texts
from gradiend_dist.gradients.cloze import Cloze, Objective
from gradiend_dist.session import Session

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


def scored_rows(session: Session, split: str, max_rows: int | None, given: pd.DataFrame | None = None) -> pd.DataFrame:
    """The pair's rows of a split, or of a given table."""
    args, data = session.args, session.data
    require_columns("training_like_df", given, ("masked", "factual", "alternative", *CLASS_COLUMNS))
    rows = given
    if rows is None:
        rows = cap_per_group(data.rows(split), max_rows, column="feature_class_id", seed=args.data_seed)
    rows = rows[rows[[*CLASS_COLUMNS]].isin(data.target_classes).all(axis=1)].reset_index(drop=True)
    missing = [name for name in data.target_classes if not (rows["factual_class"] == name).any()]
    if missing:
        raise UserError(f"The split {split!r} has no rows of class {missing[0]!r}: pass another split.")
    return rows


def require_columns(name: str, frame: pd.DataFrame | None, columns: Sequence[str]) -> None:
    missing = [] if frame is None else [column for column in columns if column not in frame.columns]
    if missing:
        raise UserError(f"{name} has no column {missing[0]!r}: it needs {', '.join(columns)}.")


class ModelScores:
    """The rows, words and texts that a model is scored on.

    Over a sharded base model all ranks score together; else each process scores its own points by itself.
    """

    def __init__(
        self,
        session: Session,
        config: TextPredictionConfig,
        rows: pd.DataFrame,
        texts: Texts,
        *,
        batch_size: int,
        neutral_blanks: Sequence[str] = (),
        by_search: bool = False,
    ) -> None:
        self.session, self.rows, self.texts = session, rows, texts
        self.words = Words.of(session.data, config)
        self.on_other_class = config.decoder_eval_prob_on_other_class
        self.neutral_blanks = tuple(neutral_blanks)
        self.asker = Asker(session, batch_size)
        self._blanks = Blanks(rows, self.words, session.objective, self.neutral_blanks)
        self._at_blanks = self.asker.questions(self._blanks.clozes)
        self._in_texts = TextScores(self.asker, texts, by_search=by_search)
        self.asker.prepare(self._at_blanks)

    def measure_base(self) -> dict[str, Any]:
        """The scores of the base model, and its losses text by text, which those of rewritten ones are compared to."""
        in_texts = self._in_texts.measure()
        return {**self._entry(in_texts), "text_losses": losses_as_kept(in_texts.losses)}

    def measure(self, base: TextLosses, limit: float | None = None) -> dict[str, Any]:
        """The scores of the model as it is now, with the names of the reference.

        One that is found to be harmful above `limit` has its harm alone.
        """
        in_texts = self._in_texts.measure(base, limit)
        assert in_texts.harm is not None
        harm = in_texts.harm.fields()
        return harm if in_texts.lms is None else {**self._entry(in_texts), **harm}

    def _entry(self, in_texts: TextScore) -> dict[str, Any]:
        answers = self.asker.ask(self._at_blanks)
        table = self._blanks.probabilities(self._at_blanks.sums(answers.log_probability))
        by_dataset = self._blanks.means(table)
        return {
            **self._selected(by_dataset),
            "lms": in_texts.lms,
            "_probs_by_dataset_grouping": "factual_id",
            "probs_by_dataset": by_dataset,
        }

    def row_table(self) -> pd.DataFrame:
        """Row by row: the probabilities of the factual and the alternative word, with the columns of the reference."""
        clozes = Blanks(self.rows, Words({}), self.session.objective)
        questions = self.asker.questions(clozes.clozes)
        table = clozes.probabilities(questions.sums(self.asker.ask(questions).log_probability))
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


class Blanks:
    """The rows' blanks and what is asked at them."""

    def __init__(self, rows: pd.DataFrame, words: Words, objective: Objective, neutral: Sequence[str] = ()) -> None:
        """`neutral` blanks, which are of no class, come after the rows."""
        self.dataset = [*rows["factual_class"], *([NEUTRAL] * len(neutral))]
        self.words = words
        self.other = [*rows["alternative_class"], *([NEUTRAL] * len(neutral))]
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
        for row, template in enumerate(neutral, start=len(rows)):
            for column, group in enumerate(words.by_class.values()):
                clozes = spellings(objective, template, group)
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
