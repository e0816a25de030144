"""Items: the rows whose mean loss gives one gradient."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from gradiend_dist.distributed.interrupt import stop_if_told
from gradiend_dist.gradients.cloze import ClozeRow, Objective


@dataclass(frozen=True)
class Item:
    """The rows of one gradient."""

    rows: tuple[ClozeRow, ...]
    name: str = ""
    """What to call the item in messages: its direction and row numbers."""
    per_row_mean: bool = False
    """Every row counts the same (the mean of single-row gradients), however many pieces its word has."""

    @functools.cached_property
    def key(self) -> str:
        text = repr((self.rows, self.per_row_mean))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class ItemRows:
    """The rows of a unified table as items; a row is tokenized when it is first wanted."""

    def __init__(self, rows: pd.DataFrame, objective: Objective) -> None:
        self.rows = rows
        self.objective = objective
        self._columns = {name: rows[name].tolist() for name in ("masked", "factual", "alternative", "transition")}
        self.labels: list[float] = rows["label"].tolist()
        self._clozes: dict[int, ClozeRow] = {}

    def item(self, positions: Iterable[int], *, per_row_mean: bool = False) -> Item:
        numbers = [int(position) for position in positions]
        direction = self._columns["transition"][numbers[0]]
        name = f"{direction}, rows {', '.join(map(str, numbers))}"
        return Item(tuple(self._cloze_row(number) for number in numbers), name, per_row_mean)

    def _cloze_row(self, number: int) -> ClozeRow:
        if number not in self._clozes:
            stop_if_told()
            template, factual, alternative = (self._columns[n][number] for n in ("masked", "factual", "alternative"))
            first = self.objective.cloze(template, factual)
            second = first if alternative == factual else self.objective.cloze(template, alternative)
            self._clozes[number] = ClozeRow(first, second)
        return self._clozes[number]

    def __len__(self) -> int:
        return len(self.rows)
