"""Columns of the given tables as texts; what is wrong is told by column, row and class, as the user knows them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from gradiend_dist.config.checks import shown
from gradiend_dist.config.documents import is_writable
from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)


def column_of(frame: pd.DataFrame, name: str, where: str) -> pd.Series:
    if name not in frame:
        raise UserError(f"{where} has no column {name!r}, it has {listed(frame.columns)}.")
    column = frame[name]
    if isinstance(column, pd.DataFrame):
        raise UserError(f"{where} has the column {name!r} {column.shape[1]} times: keep one of them.")
    return column


def texts_of(values: pd.Series, column: str, classes: Sequence[str] | None = None) -> list[str]:
    """The column as strings; an empty cell is an error."""
    texts = [str(value) for value in values]
    missing = values.isna().to_numpy(dtype=bool)
    for at, (value, text) in enumerate(zip(values, texts, strict=True)):
        wrong = None
        if missing[at] or not text.strip():
            wrong = "is empty"
        elif isinstance(value, list | tuple | dict | set | bytes | np.ndarray):
            wrong = f"has a {type(value).__name__} ({shown(value)})"
        elif not is_writable(text):
            wrong = f"has a character that cannot be written ({text[:40]!r})"
        if wrong is not None:
            of = f" of class {classes[at]!r}" if classes else ""
            raise UserError(f"Column {column!r} {wrong} in row {values.index[at]}{of}: fill it in or remove the row.")
    return texts


def listed(names: Iterable[object]) -> str:
    return ", ".join(repr(name) for name in names)


def tell_several_blanks(placeholder: str, rows: Sequence[str], texts: Sequence[str]) -> None:
    """The reference's data may have them, so they are read as it reads them; but rarely is it what was meant."""
    several = [at for at, text in enumerate(texts) if text.count(placeholder) > 1]
    if several:
        at = several[0]
        logger.warning(
            "%d of %d rows have several blanks (row %s: %r): a masked model is asked for the word at all of them, a "
            "causal one at the first",
            len(several),
            len(texts),
            rows[at],
            texts[at][:80],
        )
