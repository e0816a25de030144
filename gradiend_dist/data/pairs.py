"""What the input says, as two relations: sources and edges.

*Sources* are the given sentences, one line each. *Edges* say which other class could stand in a sentence and, where it
is written down, with which token; an edge without a token is open, and a token will be drawn for it. All input forms
(per class or one table, with or without alternatives, file, directory, hub) end here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gradiend_dist.data.cells import column_of, listed, tell_several_blanks, texts_of
from gradiend_dist.data.config import SPLIT_COLUMN, TextPredictionConfig
from gradiend_dist.data.readers import Frames, as_local_path, hub_frames, hub_table, incomplete_classes, read_path
from gradiend_dist.data.splits import HELDOUT, SplitRule, group_key, normalise_split
from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)

SOURCE_COLUMNS = ["masked", "factual", "split", "raw_class", "factual_class"]

FACTUAL_COLUMNS = ("label", "token")  # where a per-class frame has its token if no column has the name of the class

ALTERNATIVE_COLUMNS = ("alternative", "alternative_class")  # in tables that we make


@dataclass(frozen=True)
class Request:
    """The arguments of a load, and the questions that are answered by them alone."""

    config: TextPredictionConfig
    seed: int
    identity: bool
    reference: bool
    others: bool = False

    @property
    def named_pair(self) -> tuple[str, str] | None:
        """The two classes of the feature if the arguments tell."""
        merged = self.config.class_merge_map or {}
        names = self.config.target_classes or (list(merged) if len(merged) == 2 else None)
        return (names[0], names[1]) if names else None

    @cached_property
    def merged_names(self) -> dict[str, str]:
        """Class of the data -> the merged class it belongs to."""
        return {base: name for name, bases in (self.config.class_merge_map or {}).items() for base in bases}

    def bases(self, name: str) -> list[str]:
        """The classes of the data that make up class `name`."""
        return (self.config.class_merge_map or {}).get(name, [name])

    def may_pair(self, raw: str, other: str) -> bool:
        """Whether class `other` of the data may give alternatives for class `raw` of the data."""
        groups = self.config.class_merge_transition_groups
        return not groups or (raw != other and any(raw in group and other in group for group in groups))

    @property
    def column_names_are_classes(self) -> bool:
        return self.config.use_class_names_as_columns or self.reference  # the reference has the switch and ignores it

    @property
    def makes_splits(self) -> bool:
        return self.config.split_col in (None, HELDOUT)

    @cached_property
    def split_rule(self) -> SplitRule:
        config = self.config
        return SplitRule(
            heldout=config.split_col == HELDOUT,
            group_col=config.split_group_col or "factual",
            group_key=group_key(config.split_group_key),
            ratios=config.ratios,
            seed=self.seed,
            reference=self.reference,
        )

    @property
    def draw_seed(self) -> int:
        return self.seed if self.config.random_state is None else self.config.random_state


@dataclass(frozen=True)
class Input:
    """The given rows in one of two forms: `table` has an alternative in every row, `frames` has the rows by class."""

    table: pd.DataFrame | None = None
    alternative_columns: tuple[str, str] = ALTERNATIVE_COLUMNS
    """Where `table` has the other token and its class."""
    frames: Frames = field(default_factory=dict)
    wide: bool = False
    """Columns of `frames` that are named like classes hold alternatives."""
    per_class: bool = False
    """Given as one frame per class, not as one table."""
    incomplete: tuple[str, ...] = ()
    """Classes that a file beside the data lists as left out."""


@dataclass(frozen=True)
class Classes:
    """Which classes there are (after merging), and between which of them transitions are wanted."""

    pair: tuple[str, str]
    every: tuple[str, ...]
    linked: tuple[str, ...]

    @property
    def neutral(self) -> list[str]:
        return [name for name in self.every if name not in self.pair]


# --- reading


def read_input(request: Request) -> Input:
    """The data that the configuration names."""
    config = request.config
    if config.hf_dataset is not None:
        trust = config.dataset_trust_remote_code
        return _merged_input(request, hub_table(config.hf_dataset, config.hf_subset, config.hf_splits, trust))
    if isinstance(config.data, (str, Path)):
        return _read_named(request, config.data)
    if config.data is None:
        raise UserError("There is no data: give data or hf_dataset.")
    return _as_input(request, config.data)


def _read_named(request: Request, name: str | Path) -> Input:
    """What a path or, if nothing has that path, a hub id stands for."""
    config = request.config
    path = as_local_path(name, "data")
    if path is None:
        split_col = None if request.makes_splits else config.split_col
        trust = config.dataset_trust_remote_code
        return _as_input(request, hub_frames(str(name), _hub_classes(request), config.hf_splits, split_col, trust))
    given = _as_input(request, read_path(path, as_text=not request.reference))
    return replace(given, incomplete=incomplete_classes(path, config.label_class_col))


def _hub_classes(request: Request) -> list[str] | None:
    """Configurations to download: no more than the classes in use; None is all."""
    wanted: Sequence[str] | None = request.named_pair
    if wanted is None or request.others or (request.identity and not request.reference):
        wanted = request.config.all_classes
    return None if wanted is None else [base for name in wanted for base in request.bases(name)]


def _as_input(request: Request, given: Any) -> Input:
    if isinstance(given, pd.DataFrame):
        return _merged_input(request, given)
    if not isinstance(given, Mapping) or not all(isinstance(frame, pd.DataFrame) for frame in given.values()):
        raise UserError(f"data is a {type(given).__name__}: give a DataFrame, a dict of them by class, or a path.")
    return _per_class_input(request, {str(name): frame for name, frame in given.items()})


def _per_class_input(request: Request, frames: Frames) -> Input:
    if not frames:
        raise UserError("data is an empty dict: give a DataFrame for each class.")
    empty = [name for name, frame in frames.items() if frame.empty]
    if empty:
        raise UserError(f"data has no rows for class {empty[0]!r}: add rows or leave the class out.")
    paired = [name for name, frame in frames.items() if {"source", "target"} <= set(frame.columns)]
    if not paired:
        return Input(frames=frames, wide=request.column_names_are_classes, per_class=True)
    unpaired = [name for name in frames if name not in paired]
    if unpaired:
        raise UserError(f"Class {paired[0]!r} has columns 'source' and 'target', class {unpaired[0]!r} lacks them.")
    table = pd.concat([_paired_rows(request, name, frame) for name, frame in frames.items()], ignore_index=True)
    return Input(table=table, per_class=True)


def _paired_rows(request: Request, name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """A frame of (source, target) tokens as part of a table; `a_to_b` names the classes if no column does."""
    config = request.config
    own, _, other = name.partition("_to_")
    if not other and "target_id" not in frame:
        pair = request.named_pair
        if pair is None or name not in pair:
            raise UserError(f"Class {name!r} does not say to which class its 'target' tokens belong: add 'target_id'.")
        other = pair[1] if name == pair[0] else pair[0]
    columns = {
        config.masked_col: column_of(frame, config.masked_col, f"data of class {name!r}"),
        config.label_col: frame["source"],
        config.label_class_col: frame.get("source_id", own),
        "alternative": frame["target"],
        "alternative_class": frame.get("target_id", other),
    }
    if not request.makes_splits and config.split_col in frame:
        columns[str(config.split_col)] = frame[config.split_col]
    return pd.DataFrame(columns).dropna(subset=[config.label_col, "alternative"])


def _merged_input(request: Request, table: pd.DataFrame) -> Input:
    if table.empty:
        raise UserError("data has no rows: check the file, or hf_splits.")
    config = request.config
    if _alternatives_are_written(request, table):
        return Input(table=table, alternative_columns=(str(config.alternative_col), str(config.alternative_class_col)))
    classes = texts_of(column_of(table, config.label_class_col, "data"), config.label_class_col)
    names = list(dict.fromkeys(classes))
    wide = request.column_names_are_classes and len(names) > 1 and all(name in table for name in names)
    if request.reference and not wide and not config.class_merge_map:
        return Input(table=_first_token_table(request, table, classes))
    own = np.array(classes, dtype=object)
    return Input(frames={name: table[own == name] for name in names}, wide=wide)


def _alternatives_are_written(request: Request, table: pd.DataFrame) -> bool:
    """Whether the table has both alternative columns; to have one of them, or to lack a named one, is an error."""
    config = request.config
    names = {"alternative_col": config.alternative_col, "alternative_class_col": config.alternative_class_col}
    missing = [option for option, column in names.items() if column is None or column not in table]
    renamed = [option for option in missing if names[option] not in (None, option.removesuffix("_col"))]
    if not request.reference and (len(missing) == 1 or renamed):
        option = (renamed or missing)[0]
        raise UserError(
            f"data has no column {names[option]!r} ({option}), it has {listed(table.columns)}: "
            "a table has both the alternative and its class, or neither."
        )
    return not missing


def _first_token_table(request: Request, table: pd.DataFrame, classes: list[str]) -> pd.DataFrame:
    """The reference's reading of a table without alternatives: the first token of the other class, for all rows."""
    pair = request.named_pair or tuple(sorted(set(classes)))
    if len(pair) != 2 or not set(pair) <= set(classes):
        raise UserError(f"Give two target_classes that are in the data, which has {listed(sorted(set(classes)))}.")
    labels = [str(word) for word in column_of(table, request.config.label_col, "data")]
    other_class = {pair[0]: pair[1], pair[1]: pair[0]}
    other_token = {name: labels[classes.index(other_class[name])] for name in pair}
    kept = [name in pair for name in classes]
    own = [name for name in classes if name in pair]
    return table[kept].assign(
        alternative=[other_token[name] for name in own], alternative_class=[other_class[name] for name in own]
    )


# --- classes


def resolve_classes(request: Request, given: Input) -> Classes:
    """The pair, all classes, and the classes between which transitions are wanted."""
    config = request.config
    raw = _raw_classes(request, given)
    present = _merged_order(request, raw)
    pair = _resolve_pair(request, present, given.incomplete)
    if request.reference:
        return _reference_classes(request, given, raw, present, pair)
    unknown = [name for name in config.all_classes or () if name not in present]
    if unknown:
        raise UserError(f"Class {unknown[0]!r} of all_classes is not in the data, which has {listed(present)}.")
    every = config.all_classes or sorted(present)
    wanted = every if request.others else pair
    return Classes(pair, tuple(every), tuple(name for name in present if name in wanted))


def _reference_classes(
    request: Request, given: Input, raw: Sequence[str], present: Sequence[str], pair: tuple[str, str]
) -> Classes:
    config = request.config
    linked: Sequence[str] = pair
    if given.wide and not given.per_class and not config.class_merge_map:
        linked = present
    elif request.others and config.all_classes:
        linked = config.all_classes
    return Classes(pair, tuple(config.all_classes or sorted(raw)), tuple(linked))


def _raw_classes(request: Request, given: Input) -> list[str]:
    """The classes of the data, before merging, in order of appearance."""
    if given.table is None:
        return list(given.frames)
    columns = (request.config.label_class_col, given.alternative_columns[1])
    values = [column_of(given.table, column, "data").dropna().astype(str) for column in columns]
    return list(dict.fromkeys([*values[0], *values[1]]))


def _merged_order(request: Request, raw: Sequence[str]) -> list[str]:
    """Merged classes as listed in class_merge_map, then the classes that are not merged as they appear in the data."""
    merge_map = request.config.class_merge_map or {}
    absent = [base for base in request.merged_names if base not in raw]
    if absent and not request.reference:
        raise UserError(f"class_merge_map has class {absent[0]!r}, which is not in the data: it has {listed(raw)}.")
    alone = [name for name in raw if name not in request.merged_names]
    clash = [name for name in alone if name in merge_map]
    if clash:
        raise UserError(f"class_merge_map makes a class {clash[0]!r} that the data already has: list it as a member.")
    return [name for name, bases in merge_map.items() if any(base in raw for base in bases)] + alone


def _resolve_pair(request: Request, present: Sequence[str], incomplete: Sequence[str]) -> tuple[str, str]:
    pair = request.named_pair
    if pair is None:
        if len(present) != 2:
            raise UserError(f"target_classes is needed: the data has not two classes but {listed(sorted(present))}.")
        first, second = sorted(present)
        return first, second
    missing = [name for name in pair if name not in present]
    if missing:
        why = " (a file beside it lists it as incomplete)" if missing[0] in incomplete else ""
        raise UserError(
            f"target class {missing[0]!r} is not in the data{why}, which has {listed(present)}: "
            "correct target_classes or the data."
        )
    return pair


# --- sources and edges


def relations(request: Request, given: Input, classes: Classes) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Sources (SOURCE_COLUMNS, numbered) and edges (source, alternative_class, alternative or None), in table order."""
    if given.table is not None:
        return _relations_of_table(request, given.table, given.alternative_columns)
    return _relations_of_frames(request, given, classes)


def _relations_of_table(
    request: Request, table: pd.DataFrame, columns: tuple[str, str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One source and one edge for every row that has an alternative."""
    config = request.config
    kept = table.dropna(subset=list(columns))
    if kept.empty:
        raise UserError(f"data has no row with both {listed(columns)}: fill these columns, or remove them.")
    if len(kept) < len(table):
        logger.info("%d of %d rows have no alternative and are left out.", len(table) - len(kept), len(table))
    raw = texts_of(column_of(kept, config.label_class_col, "data"), config.label_class_col)
    raw_other = texts_of(column_of(kept, columns[1], "data"), columns[1], raw)
    sources = _sources(request, kept, raw, config.label_col).assign(factual_class=_merge(request, raw))
    tokens = texts_of(column_of(kept, columns[0], "data"), columns[0], raw)
    edges = edge_frame(sources.index, _merge(request, raw_other), tokens)
    return sources, edges[_counts(request, sources, edges, raw, raw_other)]


def _merge(request: Request, raw: Iterable[str]) -> list[str]:
    return [request.merged_names.get(name, name) for name in raw]


def edge_frame(sources: pd.Index, alternative_class: str | list[str], alternative: list[str] | None) -> pd.DataFrame:
    """One edge from each of the sources; without tokens they are open."""
    tokens = pd.Series(alternative, index=range(len(sources)), dtype=object)
    return pd.DataFrame(
        {"source": sources.to_numpy(dtype=np.int64), "alternative_class": alternative_class, "alternative": tokens}
    )


def _counts(
    request: Request, sources: pd.DataFrame, edges: pd.DataFrame, raw: list[str], raw_other: list[str]
) -> np.ndarray:
    """Which written alternatives count: those of another (merged) class, within the transition groups."""
    if request.reference and not request.config.class_merge_map:
        return np.ones(len(edges), dtype=bool)
    differs = sources["factual_class"].to_numpy() != edges["alternative_class"].to_numpy()
    return differs & np.array([request.may_pair(*names) for names in zip(raw, raw_other, strict=True)])


def _relations_of_frames(request: Request, given: Input, classes: Classes) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The sources of all classes in use, and edges from each linked class to each other."""
    wanted = [*classes.linked, *(classes.neutral if request.identity else [])]
    names = [name for name in _merged_order(request, list(given.frames)) if name in wanted]
    members = {name: [base for base in request.bases(name) if base in given.frames] for name in names}
    _require_splits_in_all(request, {base: given.frames[base] for bases in members.values() for base in bases})
    frames: Frames = {}
    start = 0
    for name, bases in members.items():
        rows = pd.concat([_class_rows(request, given, base) for base in bases], ignore_index=True)
        frames[name] = rows.set_axis(rows.index + start).assign(factual_class=name)
        start += len(rows)
    links = [(own, other) for own in frames if own in classes.linked for other in classes.linked if own != other]
    edges = [_edges(request, frames[own], other) for own, other in links]
    return pd.concat(list(frames.values()))[SOURCE_COLUMNS], pd.concat(edges, ignore_index=True)


def _require_splits_in_all(request: Request, frames: Frames) -> None:
    column = request.config.split_col
    without = [name for name, frame in frames.items() if column not in frame]
    if not request.reference and not request.makes_splits and 0 < len(without) < len(frames):
        raise UserError(f"Class {without[0]!r} has no column {column!r} (split_col), other classes have: add it.")


def _class_rows(request: Request, given: Input, raw: str) -> pd.DataFrame:
    """The sources of one class of the data, with a column `→c` for each other class c that is a column of its frame."""
    frame = given.frames[raw]
    rows = _sources(request, frame, [raw] * len(frame), _factual_column(request, given, raw))
    known = [*given.frames, *request.merged_names, *(request.named_pair or ())]
    for name in dict.fromkeys(known):
        if given.wide and name != raw and name in frame:
            rows[f"→{name}"] = column_of(frame, name, f"data of class {raw!r}").to_numpy()
    return rows


def _factual_column(request: Request, given: Input, raw: str) -> str:
    config = request.config
    if not given.per_class:
        return config.label_col
    frame = given.frames[raw]
    named = [config.label_col] if config.label_col not in FACTUAL_COLUMNS and not request.reference else []
    # A column that was asked for by its name is not replaced by another one.
    candidates = ([raw] if request.column_names_are_classes else []) + (named or [config.label_col, *FACTUAL_COLUMNS])
    for column in candidates:
        if column in frame:
            return column
    raise UserError(
        f"data of class {raw!r} has no column with its tokens, it has {listed(frame.columns)}: "
        f"name one of them {' or '.join(map(repr, dict.fromkeys(candidates)))}."
    )


def _edges(request: Request, frame: pd.DataFrame, other: str) -> pd.DataFrame:
    """Alternatives of class `other` for the rows of one class: from the columns that have them, else open."""
    bases = [other] if request.reference else request.bases(other)
    written = [base for base in bases if f"→{base}" in frame]
    if not written:
        rows = frame[_may_pair_with(request, frame, bases)]
        return edge_frame(rows.index, other, None)
    parts = []
    for base in written:
        tokens = frame.loc[_may_pair_with(request, frame, [base]), f"→{base}"].dropna()
        parts.append(edge_frame(tokens.index, other, texts_of(tokens, base)))
    return pd.concat(parts, ignore_index=True)


def _may_pair_with(request: Request, frame: pd.DataFrame, bases: Sequence[str]) -> np.ndarray:
    if request.reference:  # it has no transition groups for frames
        return np.ones(len(frame), dtype=bool)
    allowed = {raw: any(request.may_pair(raw, base) for base in bases) for raw in frame["raw_class"].unique()}
    return np.array([allowed[raw] for raw in frame["raw_class"]], dtype=bool)


def _sources(request: Request, frame: pd.DataFrame, raw: list[str], factual_col: str) -> pd.DataFrame:
    """The given sentences, checked: errors name column, class and row as the user knows them."""
    config = request.config
    where = f"data of class {raw[0]!r}" if len(set(raw)) == 1 else "data"
    masked = texts_of(column_of(frame, config.masked_col, where), config.masked_col, raw)
    for at, text in enumerate(masked):
        if config.mask_placeholder not in text:
            raise UserError(
                f"Row {frame.index[at]} of class {raw[at]!r} has no mask_placeholder={config.mask_placeholder!r} in "
                f"column {config.masked_col!r} ({text[:80]!r}): correct the row or mask_placeholder."
            )
    tell_several_blanks(config.mask_placeholder, [str(row) for row in frame.index], masked)
    factual = texts_of(column_of(frame, factual_col, where), factual_col, raw)
    splits = _split_values(request, frame, raw)
    return pd.DataFrame({"masked": masked, "factual": factual, "split": splits, "raw_class": raw})


def _split_values(request: Request, frame: pd.DataFrame, raw: list[str]) -> list[str]:
    column = request.config.split_col
    if column is None or request.makes_splits:
        return ["train"] * len(frame)
    if column not in frame and (request.reference or column == SPLIT_COLUMN):
        return ["train"] * len(frame)
    values = column_of(frame, column, f"data of class {raw[0]!r}")
    texts = [str(value) for value in values] if request.reference else texts_of(values, column, raw)
    return [normalise_split(text) for text in texts]
