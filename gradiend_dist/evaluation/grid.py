"""evaluate_decoder: the base model rewritten at every point of feature_factor x learning_rate, scored, and selected.

One grid serves the strengthening and the weakening of both classes: every point is scored on the rows of both. Points
are spread over the ranks in rounds, one each; each rank rewrites its own copy of the base model in place and takes the
change back to the bit at the end. Over a sharded base model all ranks score one point together. Rank 0 writes every
point when its round is over, so that a run that was stopped goes on with the next one.

    decoder/base_split_<s>_max_<a>_neutral_<b>.json               scores of the base model
    decoder/split_<s>_max_<a>_neutral_<b>_<factor>_<rate>.json    scores of a point
    decoder_grid_cache.json                                       the whole grid, the last one that was asked for

The names are the reference's; those of a `scaling` that the reference does not have begin with it. Each file also says
what it depends on, and is not read when any of that has changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.curvature import CurvatureTexts, scaling_in_place
from gradiend_dist.evaluation.decoder import ModelScores
from gradiend_dist.evaluation.selection import BASE
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting.move import SCALINGS, InPlace, Vectors, VectorsInFile, VectorsInMemory, check_direction
from gradiend_dist.session import Session
from gradiend_dist.storage.files import explained, jsonable, read_json, write_json
from gradiend_dist.storage.fingerprint import content_hash, model_files_hash, text_hash
from gradiend_dist.storage.layout import GRID_CACHE, GRID_POINTS, ROW_WISE_CSV, WEIGHTS
from gradiend_dist.storage.model_dir import is_model_directory

logger = logging.getLogger(__name__)

# The reference's: 100, 50, 20, ..., 0.002, 0.001.
LEARNING_RATES = tuple(m * 10**e for e in range(2, -4, -1) for m in (5, 2, 1) if m * 10**e <= 100)

# For a scaled direction, which goes from no effect to too much of it within a decade: 100, 63.1, 39.8, ..., 0.001.
FINE_LEARNING_RATES = tuple(float(f"{10 ** (2 - step / 5):.3g}") for step in range(26))

Point = tuple[float, float]
"""(feature_factor, learning_rate)"""


@dataclass(frozen=True)
class GridOptions:
    """Which points are scored, on what."""

    feature_factors: Sequence[float]
    lrs: Sequence[float]
    part: str = "decoder"
    scaling: str = "plain"
    split: str = "test"
    max_size_training_like: int | None = None
    max_size_neutral: int | None = None
    eval_batch_size: int = 32
    training_like_df: pd.DataFrame | None = None
    neutral_df: pd.DataFrame | None = None

    def __post_init__(self) -> None:
        require_choice("scaling", self.scaling, SCALINGS)
        require(len(self.feature_factors) > 0, "feature_factors is empty: pass at least one, or None for the default.")
        require(len(self.lrs) > 0, "lrs is empty: pass at least one learning rate, or None for the default.")
        for name in ("max_size_training_like", "max_size_neutral", "eval_batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1: pass a larger number.")

    def points(self) -> list[Point]:
        """In ascending order, as the reference visits them: ties are broken by it."""
        return sorted({(factor, plain(rate)) for factor in self.feature_factors for rate in self.lrs})

    @property
    def key(self) -> str:
        key = f"split_{self.split}_max_{self.max_size_training_like}_neutral_{self.max_size_neutral}"
        return key if self.scaling == "plain" else f"{self.scaling}_{key}"

    def file_name(self, point: Point | None) -> str:
        if point is None:
            return f"{BASE}_{self.key}.json"
        return f"{self.key}_{point[0]}_{point[1]}.json"


class DecoderGrid:
    """The grid of one trained model; see `TextPredictionTrainer.evaluate_decoder`."""

    def __init__(
        self,
        session: Session,
        model: ModelWithGradiend,
        config: TextPredictionConfig,
        options: GridOptions,
        *,
        saved_at: Path | None,
    ) -> None:
        self.session, self.model, self.config, self.options = session, model, config, options
        self.comm, self.saved_at = session.comm, saved_at
        gradiend = model.gradiend
        for factor in options.feature_factors:
            check_direction(factor, options.part, latent_dim=gradiend.latent_dim, bias=gradiend.bias_decoder)
        self._curvature_texts = CurvatureTexts.draw(session, config) if options.scaling == "curvature" else None

    def results(self, directory: Path | None, *, use_cache: bool) -> dict[Any, dict[str, Any]]:
        """{"base": scores, (feature_factor, learning_rate): scores}; from `directory` where they are still right."""
        scores = self._scores()
        depends_on = self._depends_on(scores)
        wanted: list[Point | None] = [None, *self.options.points()]
        found: dict[Point | None, dict[str, Any]] = {}
        if use_cache and directory is not None:
            found = self.comm.first("looking for scored points", lambda: self._stored(directory, wanted, depends_on))
            if found:
                logger.info("%d of %d points of the grid are there already", len(found), len(wanted))
        missing = [point for point in wanted if point not in found]
        for point, entry in self._scored(scores, missing):
            found[point] = {**entry, "id": _id(point)}
            if directory is not None:
                path = directory / GRID_POINTS / self.options.file_name(point)
                if self.comm.is_first:
                    write_json(path, {**entry, "depends_on": depends_on})
        results = {BASE if point is None else point: found[point] for point in wanted}
        if directory is not None:
            self.comm.first(f"writing {GRID_CACHE}", lambda: self._write_grid(directory, results, depends_on))
            self._export_rows(scores, directory)
        return results

    def _scores(self) -> ModelScores:
        options, neutral = self.options, self.options.neutral_df
        if self._curvature_texts is not None:
            neutral = self._others_than(self._curvature_texts, neutral)
        return ModelScores.prepare(
            self.session,
            self.config,
            split=options.split,
            max_rows=options.max_size_training_like,
            max_texts=options.max_size_neutral,
            batch_size=options.eval_batch_size,
            rows=options.training_like_df,
            neutral=neutral,
        )

    def _others_than(self, drawn: CurvatureTexts, neutral: pd.DataFrame | None) -> pd.DataFrame | None:
        """The neutral texts without those that the direction was fitted to."""
        neutral = self.session.data.neutral if neutral is None else neutral
        if neutral is None or "text" not in neutral.columns:
            return neutral
        others = neutral[~neutral["text"].astype(str).isin(drawn.texts)]
        if len(neutral) and not len(others):
            raise UserError(
                "scaling=curvature is measured on all of the neutral texts, and none is left to score: pass more, or "
                "scaling=tensor."
            )
        return others

    def _scored(self, scores: ModelScores, points: list[Point | None]) -> Iterator[tuple[Point | None, dict[str, Any]]]:
        """(point, scores) one after the other, on every rank; whoever stops in between leaves the base as it was."""
        if not points:
            return
        base_model = self.session.base_model
        shards = self.session.spread.own_shards()
        space = self.model.gradiend.space
        scaling = scaling_in_place(self.options.scaling, self.session, self.config, space)
        weights = space.active() if shards is None else space.weights_of_shards(shards)
        size = 1 if shards is not None else self.comm.world_size
        bar = tqdm(total=len(points), desc="decoder grid", unit="point", disable=None if self.comm.is_first else True)
        with bar, InPlace(base_model, weights, self._vectors(), scaling) as moved:
            for start in range(0, len(points), size):
                together = points[start : start + size]
                mine = self.comm.rank if size > 1 else 0
                entry = self._measure(scores, moved, together[mine]) if mine < len(together) else None
                entries = self.comm.gather(entry)
                for place, point in enumerate(together):
                    found = entries[place]
                    assert found is not None, "each rank of a round has scored its point"
                    yield point, found
                bar.update(len(together))

    def _measure(self, scores: ModelScores, moved: InPlace, point: Point | None) -> dict[str, Any]:
        if point is None:
            moved.restore()
        else:
            moved.move(point[1], point[0], self.options.part)
        return scores.measure()

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
                f"{self.comm.world_size} ranks each have a part of the model, and {path} is not there for all of them "
                "to read: save the model in a directory that they share, or launch one process."
            )
        return VectorsInFile(path, gradiend)

    # --- what is kept

    def _depends_on(self, scores: ModelScores) -> dict[str, Any]:
        """All that a point depends on besides its place, by name."""
        args, model = self.session.args, self.model
        scaling = {} if self.options.scaling == "plain" else {"scaling": self.options.scaling}
        if self._curvature_texts is not None:
            drawn = self._curvature_texts
            scaling["curvature_texts"] = text_hash([*drawn.texts, *drawn.ignored])
        return {
            "model": content_hash(model.gradiend, self.comm),
            "space": model.gradiend.space.fingerprint(),
            "base_model": model.name_or_path,
            "base_model_files": model_files_hash(model.name_or_path),
            "rows": text_hash(scores.rows[["masked", "factual", "alternative", "factual_class"]].values.tolist()),
            "texts": text_hash(scores.texts),
            "words": text_hash([*scores.words.by_class.items(), *scores.ignored]),
            "prob_on_other_class": scores.on_other_class,
            "part": self.options.part,
            **scaling,
            "torch_dtype": args.torch_dtype,
            "autocast": f"bf16={args.bf16}, fp16={args.fp16}",
            "max_length": args.max_length,
            "compat": args.compat,
        }

    def _stored(
        self, directory: Path, wanted: Sequence[Point | None], depends_on: Mapping[str, Any]
    ) -> dict[Point | None, dict[str, Any]]:
        found = {}
        told = set()
        for point in wanted:
            path = directory / GRID_POINTS / self.options.file_name(point)
            if not path.is_file():
                continue
            entry: dict[str, Any] = read_json(path)
            before = entry.pop("depends_on", {})
            changed = [name for name, value in jsonable(depends_on).items() if before.get(name) != value]
            if not changed:
                # JSON has no infinity: the perplexity of a broken model is null there.
                lms = {name: math.inf if value is None else value for name, value in entry["lms"].items()}
                found[point] = {**entry, "lms": lms, "id": _id(point)}
            elif changed[0] not in told:
                told.add(changed[0])
                logger.info("%s is not reused: %s changed", path, changed[0])
        return found

    def _write_grid(self, directory: Path, results: Mapping[Any, Mapping[str, Any]], depends_on: Any) -> None:
        options, classes = self.options, list(self.session.data.target_classes)
        write_json(
            directory / GRID_CACHE,
            {
                "part": options.part,
                **({} if options.scaling == "plain" else {"scaling": options.scaling}),
                "split": options.split,
                "max_size_training_like": options.max_size_training_like,
                "max_size_neutral": options.max_size_neutral,
                "feature_factors": list(options.feature_factors),
                "lrs": list(options.lrs),
                "results": list(results.values()),
                "selection_context": {
                    "prob_on_other_class": self.config.decoder_eval_prob_on_other_class,
                    "increase_target_probabilities": True,
                    "metrics_for_summary": sorted(classes),
                    "classes_to_eval": sorted(classes),
                },
                "depends_on": depends_on,
            },
        )

    def _export_rows(self, scores: ModelScores, directory: Path) -> None:
        if not self.config.decoder_eval_export_row_wise_csv:
            return
        table = scores.row_table()
        path = directory / ROW_WISE_CSV

        def write() -> None:
            with explained(path):
                table.to_csv(path, index=False)

        self.comm.first(f"writing {path.name}", write)


def plain(rate: float) -> float:
    """A whole number is written as one, whatever its type: it is part of a file's name."""
    return int(rate) if float(rate).is_integer() else float(rate)


def _id(point: Point | None) -> Any:
    return BASE if point is None else {"feature_factor": point[0], "learning_rate": point[1]}
