"""Neutral texts: which tell the curvature, which the strength of a rewriting is searched on, and which judge it.

No text is in two of these sets: a strength that was chosen on some texts looks less harmful on them than it is. Where a
run has no neutral texts, rows with their words filled in stand for them, and the feature's words are not asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from gradiend_dist.config.checks import require
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.cloze import (
    HIDDEN_SHARE,
    Cloze,
    MaskedObjective,
    causal_text_questions,
    masked_text_questions,
    tokens_of,
)
from gradiend_dist.session import Session

# With 8, a step that does 1 % of harm on the texts it was chosen on did 1.3 % on others; with 32, 0.8 %.
NUM_CURVATURE_TEXTS = 32

FEWEST_TEXTS = 2

# A masked model reads a text so often, with other tokens hidden, that most of them are hidden once.
READINGS = round(1 / HIDDEN_SHARE)


@dataclass(frozen=True)
class Texts:
    """What a language model is asked to predict."""

    texts: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Words that are not asked for."""

    def halves(self) -> tuple[Texts, Texts]:
        """Every other text."""
        return Texts(self.texts[::2], self.ignored), Texts(self.texts[1::2], self.ignored)


def text_questions(session: Session, asked: Texts, longest: int) -> list[tuple[int, Cloze]]:
    """(number of the text, question); what a masked model is asked for in a text depends on those before it."""
    make = masked_text_questions if isinstance(session.objective, MaskedObjective) else causal_text_questions
    hide_special = session.args.behaviour.lms_on_special_tokens
    ignored = tokens_of(session.tokenizer, asked.ignored)
    return make(session.tokenizer, asked.texts, longest, ignored, hide_special=hide_special)


def curvature_texts(session: Session, config: TextPredictionConfig) -> Texts:
    """Some neutral texts of the run, a third of them at most; where it has none, rows of training with their words.

    The draw depends on nothing but the data and their seed: a model that is rewritten later moves as the scored one
    did.
    """
    args, neutral = session.args, session.data.neutral
    if neutral is not None and len(neutral):
        count = min(NUM_CURVATURE_TEXTS, max(FEWEST_TEXTS, len(neutral) // 3), len(neutral) // 2)
        texts = neutral.sample(n=count, random_state=args.data_seed)["text"].astype(str).tolist()
        drawn = Texts(tuple(texts), tuple(config.decoder_eval_ignore_tokens or ()))
    else:
        if "train" not in session.data.splits():
            raise too_few(0)
        drawn = filled_rows(session, config, session.data.rows("train"), NUM_CURVATURE_TEXTS)
    if len(drawn.texts) < FEWEST_TEXTS:
        raise too_few(len(drawn.texts))
    return drawn


def scored_texts(
    session: Session,
    config: TextPredictionConfig,
    rows: pd.DataFrame,
    neutral: pd.DataFrame | None,
    max_texts: int | None,
    *,
    without: Texts | None,
) -> Texts:
    """Neutral texts but those in `without`, at most `max_texts`, sampled; where there are none, `rows` filled in."""
    neutral = session.data.neutral if neutral is None else neutral
    if neutral is None or not len(neutral):
        return filled_rows(session, config, rows, max_texts, without=without)
    require("text" in neutral.columns, "neutral_df has no column 'text': it needs text.")
    if without is not None:
        neutral = neutral[~neutral["text"].astype(str).isin(without.texts)]
        if not len(neutral):
            raise UserError(
                "scaling=curvature is measured on all of the neutral texts, and none is left to score: pass more, or "
                "scaling=tensor."
            )
    if max_texts is not None:
        neutral = neutral.sample(n=min(len(neutral), max_texts), random_state=session.args.data_seed)
    return Texts(tuple(neutral["text"].astype(str)), tuple(config.decoder_eval_ignore_tokens or ()))


def filled_rows(
    session: Session,
    config: TextPredictionConfig,
    rows: pd.DataFrame,
    max_texts: int | None,
    *,
    without: Texts | None = None,
) -> Texts:
    """Rows with their words but those in `without`, sampled and not the first ones, which are all of one class."""
    args, ignored = session.args, config.decoder_eval_ignore_tokens
    pairs = zip(rows["masked"], rows["factual"], strict=True)
    filled = pd.Series([text.replace(args.mask_placeholder, word) for text, word in pairs], dtype=object)
    if without is not None:
        filled = filled[~filled.isin(without.texts)]
        if filled.empty:
            raise UserError(
                "scaling=curvature is measured on all of these rows, and none is left to score: pass neutral texts as "
                "eval_neutral_data, another split, or scaling=tensor."
            )
    if max_texts is not None:
        filled = filled.sample(n=min(len(filled), max_texts), random_state=args.data_seed)
    texts = filled.tolist()
    if ignored is None:  # these texts are about the feature: its own words do not count
        ignored = sorted({*rows["factual"], *rows["alternative"]})
    return Texts(tuple(texts), tuple(ignored))


def without_repeats(asked: Texts) -> Texts:
    """Each text once, so that the halves have none in common."""
    return Texts(tuple(dict.fromkeys(asked.texts)), asked.ignored)


def too_few(count: int) -> UserError:
    return UserError(
        f"scaling=curvature finds {count} neutral texts to measure it on and needs {FEWEST_TEXTS}, besides as many to "
        "score: pass more or longer ones as eval_neutral_data, or scaling=tensor."
    )
