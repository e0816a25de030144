"""Where rows come from: files, directories, the Hugging Face hub. Nothing here knows what the columns mean."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from gradiend_dist.config.checks import check_path
from gradiend_dist.config.documents import DocumentError, parse_json
from gradiend_dist.data.splits import normalise_split
from gradiend_dist.errors import MissingFile, UserError

logger = logging.getLogger(__name__)

TABLE_SUFFIXES = (".csv", ".parquet", ".jsonl", ".json")

TRAINING_STEM = "training"  # the file of a directory that holds one table for all classes

INCOMPLETE = "_incomplete_classes"  # stem of the file in which the reference's data creator lists classes it left out

Frames = dict[str, pd.DataFrame]


def as_local_path(value: str | Path, argument: str) -> Path | None:
    """The existing file or directory that `value` names, or None if it can only be a hub id.

    A string that was meant as a path but does not exist is an error: asking the hub for it would give a message about
    the hub, or somebody else's data.
    """
    check_path(argument, value)
    path = Path(os.path.expanduser(value))  # Path.expanduser raises for the home of nobody
    if path.is_file() or path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{argument}={str(value)!r} is a pipe or a device: give a regular file.")
    if isinstance(value, Path) or _looks_like_path(value):
        raise MissingFile(f"{argument}={str(value)!r} does not exist: give an existing file or directory, or a hub id.")
    return None


def _looks_like_path(value: str) -> bool:
    """Hub ids are `name` or `owner/name`; a known suffix or an existing folder before the slash makes it a path."""
    if value.lower().endswith((*TABLE_SUFFIXES, ".txt")) or value.startswith((".", "~", os.sep)):
        return True
    separators = value.count("/") + value.count("\\")
    return separators > 1 or (separators == 1 and Path(value).parent.is_dir())


def read_table(path: Path, *, as_text: bool = True) -> pd.DataFrame:
    """The rows of a csv, parquet or jsonl file.

    With `as_text` a csv cell is what is written there: `null` and `NA` are words, `01` is not 1, and only the empty
    cell is missing. Without, pandas guesses, as it does for the reference.
    """
    suffix = path.suffix.lower()
    if suffix not in TABLE_SUFFIXES:
        raise UserError(f"{str(path)!r} has the suffix {suffix!r}: give one of {', '.join(TABLE_SUFFIXES)}.")
    if suffix == ".parquet":
        return _read_parquet(path)
    if suffix != ".csv":
        return _read_json_lines(path)
    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""]) if as_text else pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{str(path)!r} is not a csv file: {str(error).strip()}.") from error


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise UserError(f"Reading {str(path)!r} needs pyarrow: pip install pyarrow.") from error
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:  # pyarrow's are each of them
        raise UserError(f"{str(path)!r} is not a parquet file: {error}") from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at other characters, inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read as UTF-8 text: {error}.") from error


def _read_json_lines(path: Path) -> pd.DataFrame:
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            rows.append(_json_object(line, f"{str(path)!r}, line {number}"))
    return pd.DataFrame(rows)


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except DocumentError as error:
        raise UserError(f"{where} is not JSON ({error}): write one object per line.") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is a JSON {type(value).__name__}: write one object per line.")
    return value


def read_path(path: Path, *, as_text: bool = True) -> pd.DataFrame | Frames:
    """A file's table; a directory's training table if it has one, else one frame for each of its files, named by it."""
    if path.is_file():
        return read_table(path, as_text=as_text)
    training = _training_file(path)
    if training is not None:
        return read_table(training, as_text=as_text)
    frames: Frames = {}
    for file in (file for file in _tables_in(path) if not file.stem.endswith(INCOMPLETE)):
        if file.stem in frames:
            raise UserError(f"{str(path)!r} has two files for class {file.stem!r}: remove one of them.")
        frames[file.stem] = read_table(file, as_text=as_text)
    if not frames:
        raise UserError(f"{str(path)!r} holds neither {TRAINING_STEM}.csv nor <class>.csv (or .parquet, .jsonl) files.")
    return frames


def _tables_in(directory: Path) -> list[Path]:
    try:
        files = sorted(file for file in directory.iterdir() if file.suffix.lower() in TABLE_SUFFIXES)
    except OSError as error:
        raise UserError(f"{str(directory)!r} cannot be read ({error.strerror}): check its permissions.") from error
    strange = [file for file in files if not file.is_file()]
    if strange:
        raise UserError(f"{str(strange[0])!r} is named like a table and is no file: remove or rename it.")
    return files


def _training_file(directory: Path) -> Path | None:
    candidates = [directory / f"{TRAINING_STEM}{suffix}" for suffix in TABLE_SUFFIXES]
    return next((file for file in candidates if file.is_file()), None)


def incomplete_classes(path: Path, class_col: str) -> tuple[str, ...]:
    """Classes that the reference's data creator left out of this table for want of rows."""
    table = path if path.is_file() else _training_file(path)
    sidecar = table and table.with_name(f"{table.stem}{INCOMPLETE}{table.suffix}")
    if sidecar is None or not sidecar.is_file():
        return ()
    rows = read_table(sidecar)
    return tuple(sorted(rows[class_col].dropna().astype(str).unique())) if class_col in rows else ()


# --- the hub


def hub_table(
    dataset: str, subset: str | Sequence[str] | None, splits: Sequence[str] | None, trust_remote_code: bool | None
) -> pd.DataFrame:
    """All wanted configurations and splits of a hub dataset below each other; `split` names the hub's split."""
    names = [subset] if isinstance(subset, str) else list(subset or hub_configurations(dataset))
    parts = []
    for name in names:
        for split, frame in _wanted_splits(dataset, name, splits, trust_remote_code).items():
            parts.append(frame.assign(split=split))
    return pd.concat(parts, ignore_index=True)


def hub_frames(
    dataset: str,
    classes: Sequence[str] | None,
    splits: Sequence[str] | None,
    split_col: str | None,
    trust_remote_code: bool | None,
) -> Frames:
    """One frame for each configuration of a hub dataset, named by it; None means all configurations."""
    names = hub_configurations(dataset)
    unknown = [name for name in classes or () if name not in names]
    if unknown:
        raise UserError(
            f"Hub dataset {dataset!r} has no configuration for class {unknown[0]!r}, only {', '.join(names)}: "
            "correct target_classes, or give a dataset that is one table as hf_dataset."
        )
    frames = {}
    for name in classes or names:
        parts = _wanted_splits(dataset, name, splits, trust_remote_code)
        frames[name] = pd.concat([_with_split(part, split_col, key) for key, part in parts.items()], ignore_index=True)
    return frames


def _with_split(frame: pd.DataFrame, split_col: str | None, split: str) -> pd.DataFrame:
    return frame if split_col is None or split_col in frame else frame.assign(**{split_col: split})


def _wanted_splits(
    dataset: str, name: str | None, splits: Sequence[str] | None, trust_remote_code: bool | None
) -> Mapping[str, pd.DataFrame]:
    wanted = None if splits is None else [normalise_split(split) for split in splits]
    loaded = hub_splits(dataset, name, trust_remote_code)
    kept = {split: frame for split, frame in loaded.items() if wanted is None or split in wanted}
    if not kept:
        raise UserError(f"hf_splits={splits!r} names no split of {dataset!r} ({name}), which has {', '.join(loaded)}.")
    return kept


def hub_configurations(dataset: str) -> list[str]:
    """The names of a hub dataset's configurations."""
    datasets = _import_datasets()
    try:
        return list(datasets.get_dataset_config_names(dataset))
    except (OSError, ValueError) as error:
        raise UserError(_not_loaded(dataset, None, error)) from error


def hub_splits(dataset: str, name: str | None, trust_remote_code: bool | None) -> dict[str, pd.DataFrame]:
    """One configuration of a hub dataset, a frame for each split."""
    datasets = _import_datasets()
    # Newer versions of `datasets` refuse the keyword whatever its value, so it is passed only if the user set it.
    extra = {} if trust_remote_code is None else {"trust_remote_code": trust_remote_code}
    try:
        loaded = datasets.load_dataset(dataset, name, **extra)
    except (OSError, ValueError) as error:
        raise UserError(_not_loaded(dataset, name, error)) from error
    return {normalise_split(split): rows.to_pandas() for split, rows in loaded.items()}


def _not_loaded(dataset: str, name: str | None, error: Exception) -> str:
    which = f"{dataset!r}" if name is None else f"{dataset!r}, configuration {name!r},"
    return f"{which} is no local file or directory and could not be loaded from the Hugging Face hub: {error}"


def _import_datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise UserError("Data from the Hugging Face hub needs the package datasets: pip install datasets.") from error


# --- neutral texts


def read_neutral(
    value: pd.DataFrame | Sequence[str] | str | Path,
    *,
    max_rows: int | None = None,
    trust_remote_code: bool | None = None,
    argument: str = "eval_neutral_data",
) -> pd.DataFrame:
    """Texts without the feature, as a frame with the one column `text`; at most the first `max_rows`.

    Taken from a frame or table file with a column `text` or a single column, a text file with one text per line, a list
    of strings, or the train split of a hub dataset.
    """
    texts = _neutral_texts(value, trust_remote_code, argument)
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{argument} has no text in row {row} ({text!r}): remove the row.")
    if not texts:
        raise UserError(f"{argument} has no rows: give at least one text, or None.")
    return pd.DataFrame({"text": texts[:max_rows]})


def _neutral_texts(
    value: pd.DataFrame | Sequence[str] | str | Path, trust_remote_code: bool | None, argument: str
) -> list[Any]:
    if isinstance(value, (str, Path)):
        path = as_local_path(value, argument)
        if path is None:
            return _text_column(_hub_train_split(str(value), trust_remote_code))
        if path.suffix.lower() == ".txt":
            return [line for line in _lines(path) if line.strip()]
        return _text_column(read_table(path))
    return _text_column(value) if isinstance(value, pd.DataFrame) else list(value)


def _hub_train_split(dataset: str, trust_remote_code: bool | None) -> pd.DataFrame:
    splits = hub_splits(dataset, None, trust_remote_code)
    if "train" not in splits:
        raise UserError(f"eval_neutral_data={dataset!r} has no train split, only {', '.join(splits)}.")
    return splits["train"]


def _text_column(frame: pd.DataFrame) -> list[Any]:
    if "text" in frame:
        return frame["text"].tolist()
    if len(frame.columns) != 1:
        raise UserError(f"eval_neutral_data needs a column 'text' or a single column, it has {list(frame.columns)}.")
    return frame.iloc[:, 0].tolist()
