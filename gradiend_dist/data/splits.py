"""Split names, and the two ways to make splits: rows at random, or words that only one split may see."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gradiend_dist.errors import UserError

HELDOUT = "heldout"  # the value of split_col that asks for a vocabulary split

SPLITS = ("train", "validation", "test")

MIN_REFERENCE_ROWS = 10  # per target class, for a vocabulary split of the reference

Ratios = tuple[float, float, float]

GroupKey = Callable[[str], str] | Sequence[Callable[[str], str]] | None

Cased = Callable[[str, str], str]


@dataclass(frozen=True)
class SplitRule:
    """How rows without a split column get their split."""

    heldout: bool
    """Split the words, not the rows."""
    group_col: str
    """The column whose values are kept together by a vocabulary split."""
    group_key: Callable[[str], str]
    """What of a value counts: by default without surrounding blanks and case."""
    ratios: Ratios
    seed: int
    reference: bool


def stream(seed: int, *names: int | str) -> np.random.Generator:
    """A random generator for one named purpose, so that one purpose never moves the draws of another."""
    words = [zlib.crc32(name.encode()) if isinstance(name, str) else name for name in (seed, *names)]
    return np.random.default_rng([word & 0xFFFFFFFFFFFFFFFF for word in words])


def normalise_split(name: str) -> str:
    """The split's name as the table spells it: lower case, and `validation` for `val`."""
    lower = name.lower()
    return "validation" if lower == "val" else lower


def order_splits(names: Iterable[str]) -> tuple[str, ...]:
    """train, validation, test as far as present, then the others in alphabetical order."""
    present = sorted(set(names))
    return tuple([name for name in SPLITS if name in present] + [name for name in present if name not in SPLITS])


def group_key(key: GroupKey) -> Callable[[str], str]:
    """One function out of none, one or several that are applied in order."""
    steps = (str.strip, str.casefold) if key is None else (key,) if callable(key) else tuple(key)

    def apply(value: str) -> str:
        for step in steps:
            value = step(value)
        return value

    return apply


def bucket_counts(n: int, rule: SplitRule) -> list[int]:
    """How many of n go to train, validation and test: none of the asked-for buckets is empty if n allows it."""
    counts = _rounded_counts(n, rule.ratios)
    if rule.ratios[2] == 0 and not rule.reference:  # rounding leaves some for a test split that nobody asked for
        counts = [counts[0] + counts[2], counts[1], 0]
    if n < _num_buckets(rule.ratios):
        return counts
    for bucket, ratio in enumerate(rule.ratios):
        largest = counts.index(max(counts))
        if ratio > 0 and counts[bucket] == 0 and counts[largest] > 1:
            counts[largest] -= 1
            counts[bucket] = 1
    return counts


def _rounded_counts(n: int, ratios: Ratios) -> list[int]:
    """Rounded shares for train and validation; test is the rest."""
    train = round(n * ratios[0])
    validation = min(round(n * ratios[1]), n - train)
    return [train, validation, n - train - validation]


def _num_buckets(ratios: Ratios) -> int:
    return sum(ratio > 0 for ratio in ratios)


def _names(counts: Sequence[int]) -> list[str]:
    return [name for name, count in zip(SPLITS, counts, strict=True) for _ in range(count)]


def split_rows(classes: pd.Series, rule: SplitRule) -> pd.Series:
    """A random split of the rows of each class; the order of rows is kept."""
    parts = []
    for _, rows in classes.groupby(classes, sort=False):
        shuffled = rows.sample(frac=1, random_state=rule.seed)
        parts.append(pd.Series(_names(bucket_counts(len(rows), rule)), index=shuffled.index))
    return pd.concat(parts).reindex(classes.index)


def split_words(words: pd.Series, classes: pd.Series, rule: SplitRule, targets: Sequence[str]) -> pd.Series:
    """A split of the distinct words of each class, so that no word is in two splits.

    Only the target classes must fill every split: the others take part with what they have.
    """
    parts = []
    for name, rows in words.groupby(classes, sort=False):
        if name in targets:
            _require_words(rows, rule, f"class {name!r}")
        parts.append(_by_word(rows, rule))
    return pd.concat(parts).reindex(words.index)


def split_pairs(pairs: pd.Series, rule: SplitRule) -> pd.Series:
    """A split of word pairs: both words of a pair are in the same split."""
    _require_words(pairs, rule, "the word pairs of both classes")
    return _by_word(pairs, rule)


def _by_word(words: pd.Series, rule: SplitRule) -> pd.Series:
    distinct = words.drop_duplicates().sample(frac=1, random_state=rule.seed)
    split_of = dict(zip(distinct, _names(bucket_counts(len(distinct), rule)), strict=True))
    return words.map(split_of)


def _require_words(words: pd.Series, rule: SplitRule, what: str) -> None:
    needed = _num_buckets(rule.ratios)
    if words.nunique() < needed:
        raise UserError(
            f"split_col='heldout' needs {needed} different {rule.group_col!r} values in {what}, one per split, "
            f"but there are {words.nunique()} ({', '.join(map(repr, words.unique()[:5]))}): "
            "add words, set the ratio of a split to 0, or use split_col=None to split rows."
        )


def one_to_one_pairs(table: pd.DataFrame, key: Callable[[str], str]) -> pd.Series | None:
    """A pair id per row if every row's alternative is the fixed counterpart of its word (king, queen); else None."""
    word_of = list(zip(table["factual_class"], table["factual"].map(key), strict=True))
    other_of = list(zip(table["alternative_class"], table["alternative"].map(key), strict=True))
    partners: dict[tuple[object, object], set[object]] = defaultdict(set)
    for word, other in zip(word_of, other_of, strict=True):
        partners[(word, other[0])].add(other)
        partners[(other, word[0])].add(word)
    if any(len(words) > 1 for words in partners.values()):
        return None
    return _connected(word_of, other_of, table.index)


def _connected(words: list[tuple[str, str]], others: list[tuple[str, str]], index: pd.Index) -> pd.Series:
    """The same id for all words that are linked, also over three or more classes."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(word: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(word, word) != word:
            word = parent[word]
        return word

    for word, other in zip(words, others, strict=True):
        parent[root(word)] = root(other)
    return pd.Series(["|".join(root(word)) for word in words], index=index)


# --- the reference: splits are made after the alternatives were drawn, for the rows of the pair only, and reorder them


def reference_resplit(
    table: pd.DataFrame, is_pair: pd.Series, rule: SplitRule, targets: Sequence[str], cased: Cased
) -> pd.DataFrame:
    """The table with the reference's splits, in the reference's row order: rows of the pair first, then the others."""
    pair_rows, others = table[is_pair], table[~is_pair]
    split = _reference_heldout if rule.heldout else _reference_random
    return pd.concat([split(pair_rows, rule, targets, cased), others], ignore_index=True)


def _reference_random(table: pd.DataFrame, rule: SplitRule, _targets: Sequence[str], _cased: Cased) -> pd.DataFrame:
    parts = []
    for name, rows in table.groupby("factual_class", sort=False):
        counts = _rounded_counts(len(rows), rule.ratios)
        shares = zip(SPLITS, counts, rule.ratios, strict=True)
        empty = [split for split, count, ratio in shares if ratio > 0 and count == 0]
        if empty and len(rows) >= _num_buckets(rule.ratios):
            raise UserError(
                f"split_col=None leaves no row of class {name!r} for {' and '.join(empty)}, with {len(rows)} rows in "
                "all: give more rows or other split_ratios."
            )
        parts.append(rows.sample(frac=1, random_state=rule.seed).assign(split=_names(counts)))
    return pd.concat(parts)


def _reference_heldout(table: pd.DataFrame, rule: SplitRule, targets: Sequence[str], cased: Cased) -> pd.DataFrame:
    words = table[rule.group_col].map(rule.group_key)
    for name in targets:
        rows = words[table["factual_class"] == name]
        _require_words(rows, rule, f"class {name!r}")
        if len(rows) < MIN_REFERENCE_ROWS:
            raise UserError(f"split_col='heldout' needs {MIN_REFERENCE_ROWS} rows of class {name!r}, not {len(rows)}.")
    pairs = one_to_one_pairs(table, rule.group_key)
    if pairs is not None:
        return table.assign(split=split_pairs(pairs, rule))
    splits = split_words(words, table["factual_class"], rule, targets)
    by_class = pd.concat([rows for _, rows in table.assign(split=splits).groupby("factual_class", sort=False)])
    return _round_robin_alternatives(by_class, rule.group_key, cased)


def _round_robin_alternatives(table: pd.DataFrame, key: Callable[[str], str], cased: Cased) -> pd.DataFrame:
    """Alternatives replaced, in turn, by the distinct words that the alternative's class has in the row's split."""
    choices: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for split, name, word in zip(table["split"], table["factual_class"], table["factual"], strict=True):
        choices[split, name].setdefault(key(word), word)
    turns: dict[tuple[str, str], int] = defaultdict(int)
    replaced = []
    for row in table[["split", "alternative_class", "factual", "alternative"]].itertuples(index=False, name=None):
        place, word, given = row[:2], row[2], row[3]
        words = list(choices[place].values()) or [given]
        replaced.append(cased(word, words[turns[place] % len(words)]))
        turns[place] += 1
    return table.assign(alternative=replaced)
