"""The given rows -> one unified table: a sentence, the token that stands in it, and one of another class that could.

By default sentences are split first and open alternatives are drawn from the row's own split; the reference draws first
and splits afterwards. Everything before (`relations`) and after is shared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.data.pairs import Classes, Input, Request, edge_frame, read_input, relations, resolve_classes
from gradiend_dist.data.readers import read_neutral
from gradiend_dist.data.splits import (
    normalise_split,
    one_to_one_pairs,
    order_splits,
    reference_resplit,
    split_pairs,
    split_rows,
    split_words,
    stream,
)
from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)

__all__ = ["FeatureData", "TextPredictionConfig", "load_feature_data", "read_neutral"]

TEXT_COLUMNS = ["masked", "split", "factual_class", "alternative_class", "factual", "alternative"]

TABLE_COLUMNS = [*TEXT_COLUMNS, "transition", "feature_class_id", "label"]


@dataclass(eq=False)
class FeatureData:
    """The unified table of one feature, and neutral texts beside it."""

    target_classes: tuple[str, str]
    """[0] is encoded towards +1, [1] towards -1."""
    all_classes: tuple[str, ...]
    table: pd.DataFrame
    """masked, split, factual_class, alternative_class, factual, alternative, transition, feature_class_id (int; 0 and 1
    are the two directions of the pair), label (float: +1, -1, 0 by the factual class); identity rows come last."""
    neutral: pd.DataFrame | None = None
    """One column, `text`."""
    reference: bool = False
    """Number feature_class_id by appearance in the rows asked for, as the reference does, not in the whole table."""
    num_given: int = 0
    """Rows of the table before this one are no identity rows, whatever they look like."""
    load_others: Callable[[], FeatureData] | None = field(default=None, repr=False)
    """Gives the data with the transitions between all classes; they are many and rarely asked for."""

    def rows(self, split: str, *, include_other_classes: bool = False) -> pd.DataFrame:
        """The rows of a split, in the order of the table: both directions of the pair and identity rows.

        With `include_other_classes` also the transitions between all other classes; those are built on first use.
        """
        if include_other_classes and self.load_others is not None:
            return self._with_others.rows(split, include_other_classes=True)
        rows = self.table if include_other_classes else self.table[self._trained()]
        of_split = rows[rows["split"] == normalise_split(split)].reset_index(drop=True)
        if of_split.empty:
            raise UserError(f"There are no rows in split {split!r}, only in {', '.join(order_splits(rows['split']))}.")
        return _numbered(of_split, self.target_classes) if self.reference else of_split

    def _trained(self) -> pd.Series:
        """The pair, and identity rows. The reference does not train on identities that the input itself has."""
        table, pair = self.table, self.target_classes
        identity = (table["factual_class"] == table["alternative_class"]) & ~table["factual_class"].isin(pair)
        return _is_pair(table, pair) | (identity & (table.index >= self.num_given))

    @cached_property
    def _with_others(self) -> FeatureData:
        assert self.load_others is not None, "the caller has looked"
        return self.load_others()

    def splits(self) -> tuple[str, ...]:
        """Splits of the pair's rows: train, validation, test, then others by name."""
        return order_splits(self.table.loc[_is_pair(self.table, self.target_classes), "split"])

    def evaluation_split(self) -> str:
        """The split to judge training by: validation, else test, else train."""
        for split in ("validation", "test", "train"):
            if split in self.splits():
                return split
        raise UserError(f"The data has only the splits {', '.join(self.splits())}: name one train, validation or test.")

    def fingerprint(self) -> str:
        """A hash of the table's content: equal on every machine, different if any cell, row order or class differs."""
        digest = hashlib.sha256(json.dumps([self.target_classes, self.all_classes]).encode())
        for name in self.table.columns:
            digest.update(json.dumps([name, self.table[name].tolist()]).encode())
        return digest.hexdigest()


def load_feature_data(
    config: TextPredictionConfig, *, seed: int, add_identity_for_other_classes: bool = False, reference: bool = False
) -> FeatureData:
    """Read what `config` names and bring it into the unified form; a pure function of its arguments and the data.

    `reference` gives the reference's table row for row (with an explicit `random_state`, without which the reference is
    not reproducible): alternatives from all splits, its casing, its splits of the pair's rows only.
    """
    return _load(Request(config, seed, add_identity_for_other_classes, reference))


def _load(request: Request) -> FeatureData:
    given = read_input(request)
    classes = resolve_classes(request, given)
    sources, edges = relations(request, given, classes)
    num_given = 0
    if request.reference:
        table = _reference_table(request, given, classes, sources, edges)
        if not given.per_class:
            classes = replace(classes, every=tuple(sorted({*table["factual_class"], *table["alternative_class"]})))
        num_given = len(table)
        table = pd.concat([table, *_reference_identity(request, given, classes, table, sources)], ignore_index=True)
    else:
        table = _corrected_table(request, classes, sources, edges)
    return FeatureData(
        target_classes=classes.pair,
        all_classes=classes.every,
        table=_finished(request, classes, table),
        neutral=_neutral(request.config),
        reference=request.reference,
        num_given=num_given,
        load_others=partial(_load, replace(request, others=True)) if _has_others(request, given, classes) else None,
    )


def _neutral(config: TextPredictionConfig) -> pd.DataFrame | None:
    if config.eval_neutral_data is None:
        return None
    trust = config.dataset_trust_remote_code
    return read_neutral(config.eval_neutral_data, max_rows=config.eval_neutral_max_rows, trust_remote_code=trust)


def _has_others(request: Request, given: Input, classes: Classes) -> bool:
    """Whether there is more to load for `include_other_classes`."""
    if request.reference and (not given.per_class or request.config.all_classes is None):
        return False
    return not request.others and len(classes.every) > 2


# --- the table: split, then draw


def _corrected_table(request: Request, classes: Classes, sources: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """Split the sources, then draw open alternatives from the row's own split."""
    table = _joined(edges, sources)
    linked = table["factual_class"].isin(classes.linked) & table["alternative_class"].isin(classes.linked)
    edges = edges[linked]
    if request.identity:
        edges = pd.concat([edges, _identity_edges(classes, sources)], ignore_index=True)
    if not request.makes_splits:
        return _drawn(request, _joined(edges, sources), sources)
    if not request.split_rule.heldout:
        sources = sources.assign(split=split_rows(sources["factual_class"], request.split_rule))
        return _drawn(request, _joined(edges, sources), sources)
    return _heldout_table(request, classes, sources, edges)


def _joined(edges: pd.DataFrame, sources: pd.DataFrame) -> pd.DataFrame:
    return edges.join(sources, on="source")


def _identity_edges(classes: Classes, sources: pd.DataFrame) -> pd.DataFrame:
    """For each sentence of a class outside the pair: the token stays as it is."""
    if not classes.neutral:
        logger.warning("add_identity_for_other_classes has no effect: the data has no class besides target_classes.")
    neutral = sources[sources["factual_class"].isin(classes.neutral)]
    # A sentence with several written alternatives comes as several rows; its identity counts once.
    neutral = neutral.drop_duplicates(["masked", "factual", "factual_class", "split"])
    return edge_frame(neutral.index, neutral["factual_class"].tolist(), neutral["factual"].tolist())


def _heldout_table(request: Request, classes: Classes, sources: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """A vocabulary split: no word of a class is in two splits, neither as the token nor as the alternative."""
    rule = request.split_rule
    words = sources[rule.group_col].map(rule.group_key)
    pairs = _fixed_pairs(request, classes, _joined(edges, sources))
    if pairs is None:
        sources = sources.assign(split=split_words(words, sources["factual_class"], rule, classes.pair))
        return _drawn(request, _reopened(request, _joined(edges, sources), sources), sources)
    splits = split_words(words, sources["factual_class"], rule, ())
    splits.update(split_pairs(pairs, rule))
    sources = sources.assign(split=splits)
    return _drawn(request, _joined(edges, sources), sources)


def _fixed_pairs(request: Request, classes: Classes, table: pd.DataFrame) -> pd.Series | None:
    """A pair id by source if all words of the target classes are written down as pairs (king, queen); else None."""
    rule = request.split_rule
    rows = table[_is_pair(table, classes.pair)]
    if rule.group_col != "factual" or rows.empty or rows["alternative"].isna().any():
        return None
    pairs = one_to_one_pairs(rows, rule.group_key)
    return None if pairs is None else pairs.set_axis(rows["source"]).groupby(level=0).first()


def _reopened(request: Request, table: pd.DataFrame, sources: pd.DataFrame) -> pd.DataFrame:
    """Written alternatives that are not of the row's own split are drawn anew, so that words stay held out."""
    key = request.split_rule.group_key
    own = set(zip(sources["split"], sources["factual_class"], sources["factual"].map(key), strict=True))
    cells = zip(table["split"], table["alternative_class"], table["alternative"], strict=True)
    kept = [
        token if isinstance(token, str) and (split, name, key(token)) in own else None for split, name, token in cells
    ]
    return table.assign(alternative=pd.Series(kept, index=table.index, dtype=object))


# --- the table: draw, then split, as the reference does


def _reference_table(
    request: Request, given: Input, classes: Classes, sources: pd.DataFrame, edges: pd.DataFrame
) -> pd.DataFrame:
    """Draw from all splits, then split the pair's rows."""
    table = _drawn(request, _joined(edges, sources), sources)
    if given.table is not None and request.config.class_merge_map and request.named_pair:
        table = table[_is_pair(table, classes.pair)].reset_index(drop=True)
    if request.makes_splits:
        is_pair = _is_pair(table, classes.pair)
        table = reference_resplit(table, is_pair, request.split_rule, classes.pair, _reference_cased)
    return table


def _reference_identity(
    request: Request, given: Input, classes: Classes, table: pd.DataFrame, sources: pd.DataFrame
) -> list[pd.DataFrame]:
    """Identity rows from the table, then from the frames; a frame without a split column is in every split."""
    if not request.identity:
        return []
    parts = [table[table["factual_class"].isin(classes.neutral)]]
    from_frames = given.per_class and not request.config.class_merge_map
    for name in [name for name in classes.neutral if name in given.frames and from_frames]:
        rows = sources[sources["factual_class"] == name]
        if not request.makes_splits and request.config.split_col in given.frames[name]:
            parts.append(rows)
        else:
            parts.extend(rows.assign(split=split) for split in order_splits(table["split"]))
    return [part.assign(alternative_class=part["factual_class"], alternative=part["factual"]) for part in parts]


# --- drawing alternatives


def _drawn(request: Request, table: pd.DataFrame, sources: pd.DataFrame) -> pd.DataFrame:
    """Fill the open alternatives, block by block; a row with several draws becomes several rows."""
    block = ["factual_class", "alternative_class"] + ([] if request.reference else ["split", "raw_class"])
    shared = np.random.default_rng(request.draw_seed)  # the reference has one generator for all blocks, in row order
    table = table.reset_index(drop=True)
    filled: list[Any] = table["alternative"].tolist()
    for key, rows in table[table["alternative"].isna()].groupby(block, sort=False):
        names = tuple(str(name) for name in key)
        tokens, weights = _weighted(_candidates(request, sources, names), first_spelling=request.reference)
        rng = shared if request.reference else stream(request.draw_seed, "alternatives", *names)
        k = min(request.config.max_counterfactuals_per_sentence, len(tokens))
        for row, choice in zip(rows.index, _choices(rng, len(rows), k, weights), strict=True):
            filled[row] = [tokens[index] for index in choice]
    table = table.assign(alternative=pd.Series(filled, dtype=object)).explode("alternative", ignore_index=True)
    cased = _reference_cased if request.reference else _cased
    words = zip(table["factual"], table["alternative"], strict=True)
    return table.assign(alternative=[cased(factual, alternative) for factual, alternative in words])


def _choices(rng: np.random.Generator, rows: int, k: int, weights: np.ndarray) -> np.ndarray:
    """[rows, k] indices, without repetition within a row."""
    if k == 1:  # one call takes the same numbers from the generator as a call for each row
        return rng.choice(len(weights), size=(rows, 1), p=weights)
    return np.stack([rng.choice(len(weights), size=k, replace=False, p=weights) for _ in range(rows)])


def _candidates(request: Request, sources: pd.DataFrame, names: tuple[str, ...]) -> list[str]:
    """The tokens of the other class that a block of rows may get."""
    own, other = names[:2]
    rows = sources[sources["factual_class"] == other]
    if request.reference:
        return rows["factual"].tolist()
    split, raw = names[2:]
    rows = rows[rows["split"] == split]
    pairs = zip(rows["factual"], rows["raw_class"], strict=True)
    tokens = [token for token, base in pairs if request.may_pair(raw, base)]
    if not tokens:
        raise UserError(
            f"Class {other!r} has no token in split {split!r} that could be an alternative for class {own!r} ({raw!r}) "
            f"there: add rows of {other!r} to that split, or let split_col=None make the splits."
        )
    return tokens


def _weighted(tokens: list[str], first_spelling: bool) -> tuple[list[str], np.ndarray]:
    """The different tokens (ignoring case), each in one spelling, and their shares."""
    counts = Counter(token.lower() for token in tokens).most_common()
    # The most frequent spelling, not the one that happens to come first: "we" and not the "We" of one sentence start.
    spellings = tokens if first_spelling else [token for token, _ in Counter(tokens).most_common()]
    spelling: dict[str, str] = {}
    for token in spellings:
        spelling.setdefault(token.lower(), token)
    weights = np.array([count for _, count in counts], dtype=np.float64)
    return [spelling[lower] for lower, _ in counts], weights / weights.sum()


def _cased(factual: str, alternative: str) -> str:
    """The alternative, written like the factual token: lower, UPPER or Capitalised.

    One capital letter says nothing: "I" is neither shouted nor the start of a sentence.
    """
    if factual.islower():
        return alternative.lower()
    if len(factual) > 1 and factual.isupper():
        return alternative.upper()
    if len(factual) > 1 and factual[0].isupper() and factual[1:].islower():
        return alternative[0].upper() + alternative[1:]
    return alternative


def _reference_cased(factual: str, alternative: str) -> str:
    """The reference's rule: "I" turns "we" into "WE", "He" turns "they're" into "They'Re"."""
    if factual.islower():
        return alternative.lower()
    if factual.isupper():
        return alternative.upper()
    if factual[0].isupper() and factual[1:].islower():
        return alternative.title()
    return alternative


# --- derived columns


def _finished(request: Request, classes: Classes, table: pd.DataFrame) -> pd.DataFrame:
    """The table with its derived columns; both directions of the pair must be in it."""
    arrows = [_transition(*names) for names in zip(table["factual_class"], table["alternative_class"], strict=True)]
    first, second = classes.pair
    absent = [name for name in (_transition(first, second), _transition(second, first)) if name not in arrows]
    if len(absent) == 2 or (absent and not request.reference):
        raise UserError(f"The data has no row for {absent[0]}: both directions are needed, check target_classes.")
    _tell_equal_words(table, classes.pair)
    counts = Counter(table["split"])
    logger.info("%d rows: %s.", len(table), ", ".join(f"{counts[name]} {name}" for name in order_splits(counts)))
    sign = {first: 1.0, second: -1.0}
    labels = [sign.get(name, 0.0) for name in table["factual_class"]]
    # Built anew from lists, so that the types of columns do not tell which way the rows have come.
    texts = {name: table[name].tolist() for name in TEXT_COLUMNS}
    return _numbered(pd.DataFrame({**texts, "transition": arrows, "label": labels}), classes.pair)


def _tell_equal_words(table: pd.DataFrame, pair: tuple[str, str]) -> None:
    """A row whose word is the same in both classes says nothing of the feature; where all are so, there is none."""
    rows = table[_is_pair(table, pair)]
    equal = rows["factual"].str.strip() == rows["alternative"].str.strip()
    if equal.all():
        raise UserError(
            f"Classes {pair[0]!r} and {pair[1]!r} have the same word in every row ({rows['factual'].iloc[0]!r}): there "
            "is nothing to tell them apart by; correct the words or target_classes."
        )
    if equal.any():
        word = rows.loc[equal, "factual"].iloc[0]
        logger.warning(
            "%d of %d rows have the same word in both classes (%r): their gradients do not differ",
            equal.sum(),
            len(rows),
            word,
        )


def _numbered(table: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    """With feature_class_id: 0 and 1 for the pair, then the other transitions from 2 as they appear."""
    ids = {_transition(pair[0], pair[1]): 0, _transition(pair[1], pair[0]): 1}
    for name in table["transition"]:
        ids.setdefault(name, len(ids))
    return table.assign(feature_class_id=table["transition"].map(ids).astype("int64"))[TABLE_COLUMNS]


def _transition(factual_class: str, alternative_class: str) -> str:
    return f"{factual_class}→{alternative_class}"


def _is_pair(table: pd.DataFrame, pair: tuple[str, str]) -> pd.Series:
    own, other = table["factual_class"], table["alternative_class"]
    return own.isin(pair) & other.isin(pair) & (own != other)
