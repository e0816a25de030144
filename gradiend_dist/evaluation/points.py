"""A base model at many points: moved there in place, scored, and itself again at the end.

Points are spread over the ranks in rounds, one each; each rank moves its own copy of the base model. Over a sharded
base model all ranks score one point together. Rank 0 writes every point when its round is over, so that an evaluation
that was stopped goes on with the next one.

    decoder/base_split_<s>_max_<a>_neutral_<b>.json               scores of the base model
    decoder/split_<s>_max_<a>_neutral_<b>_<factor>_<rate>.json    scores of a point

The names are the reference's; those of a `scaling` that the reference does not have begin with it. Each file also says
what it depends on, and is not read when any of that has changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.curvature import scaling_in_place
from gradiend_dist.evaluation.selection import BASE
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting.move import DirectionNorms, InPlace, Vectors, VectorsInFile, VectorsInMemory
from gradiend_dist.rewriting.step import Step
from gradiend_dist.session import Session
from gradiend_dist.storage.files import jsonable, read_json, write_json
from gradiend_dist.storage.layout import GRID_POINTS, WEIGHTS
from gradiend_dist.storage.model_dir import is_model_directory

logger = logging.getLogger(__name__)

Entry = dict[str, Any]

Place = Step | None
"""None: the base model."""


class PointCache:
    """What was found at points before, as far as it is still right."""

    def __init__(self, comm: Comm, directory: Path | None, depends_on: Mapping[str, Any], *, use_cache: bool) -> None:
        self.comm, self.directory, self.use_cache = comm, directory, use_cache
        self.depends_on: Mapping[str, Any] = jsonable(depends_on)
        self._told: set[str] = set()

    def read(self, names: Sequence[str]) -> dict[str, Entry]:
        """Entries by name. All ranks call this."""
        directory = self.directory
        if directory is None or not self.use_cache:
            return {}
        return self.comm.first("looking for scored points", lambda: self._read(directory, names))

    def _read(self, directory: Path, names: Sequence[str]) -> dict[str, Entry]:
        found = {}
        for name in names:
            path = directory / GRID_POINTS / f"{name}.json"
            if not path.is_file():
                continue
            entry: Entry = read_json(path)
            before = entry.pop("depends_on", {})
            changed = [key for key, value in self.depends_on.items() if before.get(key) != value]
            if not changed:
                found[name] = entry
            elif changed[0] not in self._told:
                self._told.add(changed[0])
                logger.info("%s is not reused: %s changed", path, changed[0])
        return found

    def write(self, name: str, entry: Entry) -> None:
        if self.directory is not None and self.comm.is_first:
            write_json(self.directory / GRID_POINTS / f"{name}.json", {**entry, "depends_on": self.depends_on})


class Points(AbstractContextManager["Points"]):
    """The base model of a session, moved along a GRADIEND model. All ranks call every method."""

    def __init__(
        self,
        session: Session,
        model: ModelWithGradiend,
        config: TextPredictionConfig,
        scaling: str,
        kept: PointCache,
        *,
        saved_at: Path | None,
    ) -> None:
        self.session, self.model, self.config, self.scaling = session, model, config, scaling
        self.comm, self.kept, self.saved_at = session.comm, kept, saved_at
        self._moved: InPlace | None = None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._moved is not None:
            self._moved.restore()

    def extent(self, step: Step, name: str) -> DirectionNorms:
        """How long the direction of a step is; kept as `name`."""
        known = self.kept.read([name]).get(name)
        if known is None:
            sharded = bool(self.session.spread.shards)
            found = self._in_place().extent(step, self.comm if sharded else Comm())
            known = self.comm.decide(dict(vars(found)))
            self.kept.write(name, known)
        return DirectionNorms(known["length"], known["weights"])

    def each(
        self,
        places: Sequence[Place],
        look: Callable[[], Entry],
        *,
        name: Callable[[Place], str],
        bar: str | None = None,
        holds: Callable[[Entry], bool] = lambda _: True,
    ) -> dict[Place, Entry]:
        """What `look` finds at each place, ready for JSON; kept as `name`, and taken from there where it `holds`."""
        names = {place: name(place) for place in places}
        known = {key: entry for key, entry in self.kept.read(list(names.values())).items() if holds(entry)}
        found = {place: known[names[place]] for place in places if names[place] in known}
        missing = [place for place in places if place not in found]
        if found and bar:
            logger.info("%d of %d points of the grid are there already", len(found), len(places))
        for place, entry in self._rounds(missing, look, bar):
            found[place] = entry
            self.kept.write(names[place], found[place])
        return {place: found[place] for place in places}

    def _rounds(self, places: list[Place], look: Callable[[], Entry], bar: str | None) -> Iterator[tuple[Place, Entry]]:
        if not places:
            return
        moved = self._in_place()
        size = 1 if self.session.spread.shards else self.comm.world_size
        hidden = None if self.comm.is_first and bar else True
        with tqdm(total=len(places), desc=bar, unit="point", disable=hidden) as progress:
            for start in range(0, len(places), size):
                together = places[start : start + size]
                mine = self.comm.rank if size > 1 else 0
                entry = None
                if mine < len(together):
                    place = together[mine]
                    if place is None:
                        moved.restore()
                    else:
                        moved.move(place)
                    entry = look()
                entries = self.comm.gather(entry)
                for number, place in enumerate(together):
                    of_place = entries[number]
                    assert of_place is not None, "each rank of a round has looked at its point"
                    yield place, of_place
                progress.update(len(together))

    def _in_place(self) -> InPlace:
        if self._moved is None:
            shards, space = self.session.spread.own_shards(), self.model.gradiend.space
            weights = space.active() if shards is None else space.weights_of_shards(shards)
            vectors = self._vectors()
            scaling = scaling_in_place(self.scaling, self.session, self.config, space)
            self._moved = InPlace(self.session.base_model, weights, vectors, scaling, self.session.vectors)
        return self._moved

    def _vectors(self) -> Vectors:
        """The whole vectors, or, over a sharded base model, those of this rank's shards."""
        gradiend, is_sharded = self.model.gradiend, bool(self.session.spread.shards)
        if gradiend.slices.is_whole and is_sharded:
            raise UserError(
                "The base model is in shards and the GRADIEND model is not: save it, and pass its directory."
            )
        if gradiend.slices.is_whole or is_sharded:
            return VectorsInMemory(gradiend)
        path = None if self.saved_at is None else self.saved_at / WEIGHTS
        readable = path is not None and is_model_directory(path.parent) and path.is_file()
        if path is None or not self.comm.all_agree(readable):
            raise UserError(
                f"{self.comm.world_size} ranks each have a slice of the model, and {path} is not there for all of them "
                "to read: save the model in a directory that they share, or launch one process."
            )
        return VectorsInFile(path, gradiend)


def from_file(entry: Entry) -> Entry:
    """JSON has no infinity: the perplexity and the harm of a broken model, or an unknown error, are null there."""
    entry = dict(entry)
    if "lms" in entry:
        entry["lms"] = {name: math.inf if value is None else value for name, value in entry["lms"].items()}
    for name in ("harm", "harm_error"):
        if name in entry and entry[name] is None:
            entry[name] = math.inf
    return entry


def point_id(place: Place) -> Any:
    return BASE if place is None else place.point


def grid_key(place: Place) -> Any:
    """A point as the reference names it: (feature_factor, learning_rate)."""
    return BASE if place is None else (place.feature_factor, place.learning_rate)


def shown(place: Place, entry: Entry) -> Entry:
    """An entry as it is returned, read from a file or just found."""
    entry = {name: value for name, value in from_file(entry).items() if name != "text_losses"}
    return {**entry, "id": point_id(place)}
