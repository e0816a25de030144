"""Sentences that a model completes, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gradiend_dist.evaluation.asker import Asker
from gradiend_dist.gradients.cloze import Cloze, MaskedObjective

NUM_SENTENCES = 3

# That a causal model goes on for.
NUM_TOKENS = 10


def sentences(rows: pd.DataFrame, classes: Sequence[str]) -> list[tuple[str, str]]:
    """(sentence with a blank, the word that was there): short ones of both classes in turn, each once."""
    by_class = [rows[rows["factual_class"] == name].drop_duplicates("masked") for name in classes]
    ordered = [frame.iloc[frame["masked"].str.len().argsort(kind="stable")] for frame in by_class]
    pairs = [zip(frame["masked"], frame["factual"], strict=True) for frame in ordered]
    turns = [found for turn in zip(*pairs, strict=False) for found in turn]
    return list(dict(turns).items())[:NUM_SENTENCES]


def completed(asker: Asker, asked_for: Sequence[tuple[str, str]]) -> list[str]:
    """Each with the model's most probable tokens at its blank, or, by a causal model, with what it goes on with.

    Over a sharded model all ranks call this.
    """
    objective, tokenizer = asker.session.objective, asker.session.tokenizer
    if isinstance(objective, MaskedObjective):
        questions = asker.questions([objective.whole_word(template, word) for template, word in asked_for])
        found = np.split(asker.ask(questions, predict=True).predicted, questions.starts[1:-1])
        return [
            template.replace(objective.mask_placeholder, f"[{_text(tokenizer, tokens.tolist())}]")
            for (template, _), tokens in zip(asked_for, found, strict=True)
        ]
    prefixes = [template.split(objective.mask_placeholder)[0] for template, _ in asked_for]
    read = [list(tokenizer(prefix.rstrip())["input_ids"]) for prefix in prefixes]
    starts = [len(ids) for ids in read]
    for _ in range(NUM_TOKENS):
        asked = [Cloze(tuple(ids), (len(ids) - 1,), (ids[-1],)) for ids in read]
        for ids, token in zip(read, asker.ask(asker.questions(asked), predict=True).predicted.tolist(), strict=True):
            ids.append(token)
    return [
        f"{prefix.rstrip()} [{_text(tokenizer, ids[start:])}]"
        for prefix, ids, start in zip(prefixes, read, starts, strict=True)
    ]


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return " ".join(str(tokenizer.decode(list(ids), skip_special_tokens=True)).split())
