"""What `effect.py` compares on: a base model, rows with he or she, and three disjoint sets of neutral texts.

    search    given to every contestant: whatever it chooses, it chooses on these and on the rows for validation
    held_out  of the same kind, seen by none before it is judged
    second    of another kind

Rows are the same for all models but the embedded ones, which know no other sentences than their own: nouns and names
with another clause, names and endings of each split its own (`convergence.stories`). Texts of a causal model's own kind
are told by itself: on news, the perplexity of one that has read nothing but stories is in the thousands, where harm
cannot be seen. Those of a masked model are sentences of a corpus in JSON lists.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from convergence import CLASSES, LOOKS, NAMES, THINGS, sample, stories
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradiend_dist import TextPredictionTrainer, TrainingArguments, demo
from gradiend_dist.errors import UserError
from gradiend_dist.storage.files import read_json, write_json

GENDERED_WORDS = (
    "s?he him her his hers himself herself m[ae]n wom[ae]n boys? girls? kings? queens? princ\\w* mothers? fathers? "
    "mom\\w* dad\\w* mum\\w* brothers? sisters? sons? daughters? lady ladies lords? sir mrs? ms miss wife wives "
    "husband\\w* aunts? uncles? grand\\w+ actress\\w* guys? gentlem[ae]n boyfriend\\w* girlfriend\\w*"
).split()
GENDERED = re.compile(rf"\b({'|'.join([*GENDERED_WORDS, *NAMES['M'], *NAMES['F']])})\b", re.IGNORECASE)
ROWS = {"train": 160, "validation": 20, "test": 40}
"""Of each class."""
OPENINGS = ("One day,", "In the morning,", "It was a sunny day and", "Once upon a time,", "That night,", "Suddenly,")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
TOLD_TOKENS = 60
FEWEST_WORDS = 8
ENDS = ("The birds sang in the sky.", "The grass was green.", "There were many flowers.", "The wind was strong.")


@dataclass(frozen=True)
class Case:
    name: str
    model: Path
    rows: pd.DataFrame
    search: tuple[str, ...]
    held_out: tuple[str, ...]
    second: tuple[str, ...]

    def trainer(self, directory: Path, **arguments: Any) -> TextPredictionTrainer:
        return TextPredictionTrainer(
            str(self.model),
            data=self.rows,
            target_classes=list(CLASSES),
            eval_neutral_data=pd.DataFrame({"text": self.search}),
            args=TrainingArguments(experiment_dir=str(directory), **arguments),
        )

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.rows.to_csv(directory / "rows.csv", index=False)
        texts = {"search": self.search, "held_out": self.held_out, "second": self.second}
        write_json(directory / "case.json", {"name": self.name, "model": str(self.model.resolve()), **texts})

    @staticmethod
    def load(directory: Path) -> Case:
        found = read_json(directory / "case.json")
        texts = {name: tuple(found[name]) for name in ("search", "held_out", "second")}
        return Case(found["name"], Path(found["model"]), pd.read_csv(directory / "rows.csv"), **texts)


@dataclass(frozen=True)
class Amounts:
    """Neutral texts of each set."""

    search: int
    judged: int


def embedded_case(kind: str, directory: Path, amounts: Amounts) -> Case:
    """One of the package's own models. Texts of another kind, to it, are sentences about people, not things."""
    build = {"masked": demo.build_masked_lm, "causal": demo.build_causal_lm}[kind]
    frames = demo.feature_data()
    rows = [with_alternative(frames[name], name) for name in CLASSES]
    things, people = demo.neutral_data()["text"].tolist(), frames["N"]
    return Case(
        f"embedded {kind}",
        build(directory / kind),
        pd.concat(rows, ignore_index=True),
        *dealt_texts(things, amounts),
        tuple(people["masked"].str.replace("[MASK]", "they", regex=False).head(amounts.judged)),
    )


def with_alternative(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of a class, as many of each split as of the other models."""
    other = next(found for found in CLASSES if found != name)
    parts = [frame[frame["split"] == split].head(count) for split, count in ROWS.items()]
    columns = {"label_class": name, "alternative": CLASSES[other], "alternative_class": other}
    return pd.concat(parts).assign(**columns)


def causal_case(model: Path, amounts: Amounts) -> Case:
    return Case(model.name, model, story_rows(), *dealt_texts(told_texts(model, amounts), amounts), templates(amounts))


def masked_case(model: Path, corpus: Path, amounts: Amounts) -> Case:
    texts = corpus_texts(corpus, amounts.search + amounts.judged)
    return Case(model.name, model, story_rows(), *dealt_texts(texts, amounts), templates(amounts))


def story_rows() -> pd.DataFrame:
    return pd.DataFrame([row for name in CLASSES for split in ROWS for row in stories(name, split)[: ROWS[split]]])


def dealt_texts(texts: Sequence[str], amounts: Amounts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of the search, and those held out."""
    wanted = amounts.search + amounts.judged
    if len(texts) < wanted:
        raise UserError(f"{wanted} neutral texts are asked for and {len(texts)} are there: ask for fewer.")
    return tuple(texts[: amounts.search]), tuple(texts[amounts.search : wanted])


def templates(amounts: Amounts) -> tuple[str, ...]:
    """About things, all of one shape: unlike a corpus, and unlike what a model tells by itself."""
    parts = sample((THINGS, LOOKS, ENDS), amounts.judged, "neutral")
    return tuple(f"{thing.capitalize()} {look}. {end}" for thing, look, end in parts)


def told_texts(model: Path, amounts: Amounts) -> list[str]:
    """What a causal model goes on with after neutral beginnings, up to the first sentence with a gendered word."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    teller = AutoModelForCausalLM.from_pretrained(model)
    beginnings = [f"{opening} {thing}" for opening in OPENINGS for thing in THINGS]
    found: dict[str, None] = {}
    torch.manual_seed(0)
    for _ in range(20):
        inputs = tokenizer(beginnings, return_tensors="pt", padding=True, return_token_type_ids=False)
        told = teller.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=TOLD_TOKENS)
        found.update(dict.fromkeys(neutral_beginnings(tokenizer.batch_decode(told, skip_special_tokens=True))))
        if len(found) >= amounts.search + amounts.judged:
            break
    return shuffled(found)


def neutral_beginnings(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        sentences = SENTENCE_END.split(text)[:-1]  # the last one is cut off
        gendered = (place for place, sentence in enumerate(sentences) if GENDERED.search(sentence))
        kept = " ".join(sentences[: next(gendered, None)]).replace("\n", " ")
        if len(kept.split()) >= FEWEST_WORDS:
            yield kept


def corpus_texts(corpus: Path, count: int) -> list[str]:
    """Sentences without a gendered word, of JSON lists in a directory."""
    files = sorted(corpus.glob("*.json"))
    if not files:
        raise UserError(f"--corpus={corpus} has no JSON file: pass a directory of lists of sentences.")
    sentences = (text.strip() for file in files for text in json.loads(file.read_text()))
    fine = dict.fromkeys(text for text in sentences if 40 <= len(text) <= 200 and not GENDERED.search(text))
    return shuffled(fine)[:count]


def shuffled(texts: dict[str, None]) -> list[str]:
    return random.Random(0).sample(list(texts), len(texts))
