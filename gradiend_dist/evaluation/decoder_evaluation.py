"""evaluate_decoder: how far to rewrite the base model for each class, by search or on the reference's grid.

A search finds, along the direction that strengthens a class, the step that makes it most probable within an allowed
harm (`search`, `harm`), measures it again on texts that it was not chosen on, and says so where there is none. It is
the default. With `lrs`, a `selector` or in `compat` mode the points are those of a grid (`grid`, `selection`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradiend_dist.config.checks import require
from gradiend_dist.data.readers import read_neutral
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.balance import BALANCE, without_balance
from gradiend_dist.evaluation.decoder import ModelScores, Words, scored_rows
from gradiend_dist.evaluation.grid import FINE_LEARNING_RATES, LEARNING_RATES, grid_steps
from gradiend_dist.evaluation.held_out import scored_base
from gradiend_dist.evaluation.points import Entry, Place, PointCache, Points, grid_key, shown
from gradiend_dist.evaluation.request import DecoderRequest, first_given
from gradiend_dist.evaluation.selection import (
    BASE,
    WEAKEN,
    default_policy,
    pushes,
    require_pushing,
    summarize,
    tell_edges,
)
from gradiend_dist.evaluation.strength import ClassSearches, SearchDirection
from gradiend_dist.evaluation.texts import Texts, curvature_texts, scored_texts, without_repeats
from gradiend_dist.evaluation.trained_run import TrainedRun
from gradiend_dist.rewriting.step import Step
from gradiend_dist.storage.files import explained, write_json
from gradiend_dist.storage.fingerprint import content_hash, model_files_hash, text_hash
from gradiend_dist.storage.layout import GRID_CACHE, ROW_WISE_CSV

logger = logging.getLogger(__name__)

# A vector that no factor belongs to may push either way.
SIGNS = (1.0, -1.0)


class DecoderPlan:
    """What one call of `evaluate_decoder` is to measure, and along which ways. All ranks make it alike."""

    def __init__(self, run: TrainedRun, request: DecoderRequest) -> None:
        self.run, self.request, self.session = run, request, run.session
        self.args, self.config = run.args, run.config
        self.classes = run.target_classes
        by_grid = self.args.behaviour.strength_on_a_grid or self.args.decoder_eval_lrs
        self.by_search = not (request.selects_by_hand or by_grid)
        self.balances, named = without_balance(request.target_class)
        require(
            self.by_search or not self.balances,
            f"target_class={BALANCE} is found by search: leave lrs, selector, decoder_eval_lrs and compat out.",
        )
        self.wanted = run.classes_asked_for(named)
        self.factors = run.strengthening_factors() if request.part == "decoder" else {}
        of_classes = [] if self.balances and not named else self._metrics()
        self.metrics = [BALANCE] * self.balances + of_classes
        self.feature_factors = self._feature_factors()
        require_pushing(self.feature_factors, of_classes, self.factors)
        for factor in self.feature_factors:
            Step(1.0, factor, request.part).check(run.get_model().gradiend)
        self.scaling, self.left_out = self._scaling()
        self.rates = first_given(
            request.lrs,
            self.args.decoder_eval_lrs,
            LEARNING_RATES if self.scaling == "plain" else FINE_LEARNING_RATES,
        )

    def _metrics(self) -> list[str]:
        if self.request.summary_metrics is not None:
            return list(self.request.summary_metrics)
        return [name if self.request.increase_target_probabilities else f"{name}{WEAKEN}" for name in self.wanted]

    def _feature_factors(self) -> list[float]:
        request = self.request
        if request.part != "decoder":
            return [1.0]  # one vector: the learning rate's sign says which way it pushes
        given = first_given(request.feature_factors, self.args.decoder_eval_feature_factors)
        if given is not None:
            return list(given)
        pushed = self.wanted
        if self.balances:
            pushed = list(self.classes)  # either may be what is missing
        elif not request.increase_target_probabilities:
            pushed = [name for name in self.classes if [name] != self.wanted]
        return list(dict.fromkeys(self.factors[name] for name in pushed))

    def _scaling(self) -> tuple[str, Texts | None]:
        """The scaling, and the texts that it is measured on."""
        asked = self.request.scaling
        if asked not in (None, "curvature") or (asked is None and not self.by_search):
            return asked or "plain", None
        try:
            return "curvature", curvature_texts(self.session, self.config)
        except UserError as error:
            if asked is not None:
                raise
            logger.warning("the direction is scaled by tensor and not by curvature. %s", error)
            return "tensor", None

    def ways(self) -> dict[str, list[SearchDirection]]:
        """For each metric, the ways that may serve it."""
        request = self.request
        ways = [(factor, Step(1.0, factor, request.part, self.scaling)) for factor in self.feature_factors]
        if request.part != "decoder":
            return {
                metric: [SearchDirection(step, sign) for _, step in ways for sign in SIGNS] for metric in self.metrics
            }
        return {
            metric: [
                SearchDirection(step)
                for factor, step in ways
                if metric == BALANCE or pushes(factor, metric, self.factors)
            ]
            for metric in self.metrics
        }

    def caps(self) -> tuple[int | None, int | None]:
        request, args, cap = self.request, self.args, self.config.decoder_eval_lms_max_samples
        return (
            first_given(
                request.max_size_training_like, request.max_size, args.decoder_eval_max_size_training_like, cap
            ),
            first_given(request.max_size_neutral, request.max_size, args.decoder_eval_max_size_neutral, cap),
        )


class DecoderEvaluation(DecoderPlan):
    """One call of `evaluate_decoder`. All ranks make it and call its methods."""

    def __init__(self, run: TrainedRun, request: DecoderRequest) -> None:
        super().__init__(run, request)
        self.comm = run.comm

    def results(self) -> dict[str, Any]:
        """What `evaluate_decoder` returns, without a plot."""
        scores, report_texts = self.scores()
        points, directory = self.points(scores), self.run.experiment_dir
        with points:
            if self.by_search:
                search = ClassSearches(self.request, scores, points, self.ways(), self.name)
                found = search.results({"held_out": report_texts, "second": self._second_texts()})
            else:
                found = self._grid(scores, points)
        if directory is not None:
            grid, depends_on = found["grid"], points.kept.depends_on
            self.comm.first(f"writing {GRID_CACHE}", lambda: self._write_grid(directory, found, grid, depends_on))
            self._export_rows(scores, directory)
        return found

    def scores(self) -> tuple[ModelScores, Texts]:
        """What every point is scored on, and the texts that judge what a search has chosen."""
        request, session = self.request, self.session
        max_rows, max_texts = self.caps()
        rows = scored_rows(session, request.split, max_rows, request.training_like_df)
        drawn = scored_texts(session, self.config, rows, request.neutral_df, max_texts, without=self.left_out)
        search_texts, report_texts = without_repeats(drawn).halves() if self.by_search else (drawn, Texts(()))
        if self.by_search and not report_texts.texts:
            logger.warning(
                "one neutral text is left to score, so its harm has no error and nothing is held out to judge what is "
                "chosen: pass more as eval_neutral_data"
            )
        scores = ModelScores(
            session,
            self.config,
            rows,
            search_texts,
            batch_size=first_given(request.eval_batch_size, self.args.eval_batch_size),
            neutral_blanks=self._neutral_blanks(),
            by_search=self.by_search,
        )
        return scores, report_texts

    def points(self, scores: ModelScores) -> Points:
        """The base model, to be moved inside a `with` block."""
        use_cache = bool(first_given(self.request.use_cache, self.args.use_cache))
        kept = PointCache(self.comm, self.run.experiment_dir, self._depends_on(scores), use_cache=use_cache)
        model, saved_at = self.run.get_model(), self.run.saved_at()
        return Points(self.session, model, self.config, self.scaling, kept, saved_at=saved_at)

    def _neutral_blanks(self) -> list[str]:
        given = self.request.neutral_blanks
        if given is None:
            return []
        require(
            not Words.of(self.session.data, self.config).row_wise,
            "neutral_blanks needs words for each class, and the classes share words: pass decoder_eval_targets.",
        )
        texts: list[str] = read_neutral(given, argument="neutral_blanks")["text"].tolist()
        blank = self.args.mask_placeholder
        missing = [text for text in texts if blank not in text]
        require(not missing, f"neutral_blanks has a sentence without {blank}: {missing[:1]}: add the blank.")
        return texts

    def _second_texts(self) -> Texts | None:
        given = first_given(self.request.second_neutral_data, self.config.second_neutral_data)
        if given is None:
            return None
        texts = read_neutral(given, argument="second_neutral_data")["text"].tolist()
        return Texts(tuple(texts), tuple(self.config.decoder_eval_ignore_tokens or ()))

    def _grid(self, scores: ModelScores, points: Points) -> dict[str, Any]:
        """The grid, and what is selected of it."""
        request = self.request
        steps = grid_steps(self.feature_factors, self.rates, request.part, self.scaling)
        base, losses = scored_base(points, scores, self.name)
        known = points.each(steps, lambda: scores.measure(losses), name=self.name, bar="decoder grid")
        grid = {BASE: base, **{grid_key(place): shown(place, entry) for place, entry in known.items()}}
        policy = request.selector or default_policy(self.scaling)
        summary = summarize(
            grid, self.metrics, policy, self.factors, request.summary_extractor, part=request.part, scaling=self.scaling
        )
        if request.lrs is not None or self.args.decoder_eval_lrs:
            tell_edges(summary, self.rates)
        return {**summary, "grid": grid}

    # --- names and files

    def name(self, place: Place) -> str:
        max_rows, max_texts = self.caps()
        key = f"split_{self.request.split}_max_{max_rows}_neutral_{max_texts}"
        key = key if self.scaling == "plain" else f"{self.scaling}_{key}"
        return f"{BASE}_{key}" if place is None else f"{key}_{place.feature_factor}_{place.learning_rate}"

    def _depends_on(self, scores: ModelScores) -> dict[str, Any]:
        """All that a point depends on besides its place, by name."""
        args, model = self.args, self.run.get_model()
        scaling = {} if self.scaling == "plain" else {"scaling": self.scaling}
        if self.left_out is not None:
            scaling["curvature_texts"] = text_hash([*self.left_out.texts, *self.left_out.ignored])
        blanks = {"neutral_blanks": text_hash(list(scores.neutral_blanks))} if scores.neutral_blanks else {}
        return {
            "model": content_hash(model.gradiend, self.comm),
            "space": model.gradiend.space.fingerprint(),
            "base_model": model.name_or_path,
            "base_model_files": model_files_hash(model.name_or_path),
            "rows": text_hash(scores.rows[["masked", "factual", "alternative", "factual_class"]].values.tolist()),
            "texts": text_hash(list(scores.texts.texts)),
            "words": text_hash([*scores.words.by_class.items(), *scores.texts.ignored]),
            "prob_on_other_class": scores.on_other_class,
            "part": self.request.part,
            **scaling,
            **blanks,
            "by": "search" if self.by_search else "grid",
            "torch_dtype": args.torch_dtype,
            "autocast": f"bf16={args.bf16}, fp16={args.fp16}",
            "max_length": args.max_length,
            "compat": args.compat,
        }

    def _write_grid(
        self, directory: Path, found: Mapping[str, Any], grid: Mapping[Any, Entry], depends_on: Mapping[str, Any]
    ) -> None:
        max_rows, max_texts = self.caps()
        summary = {name: entry for name, entry in found.items() if name in self.metrics}
        write_json(
            directory / GRID_CACHE,
            {
                "part": self.request.part,
                **({} if self.scaling == "plain" else {"scaling": self.scaling}),
                "split": self.request.split,
                "max_size_training_like": max_rows,
                "max_size_neutral": max_texts,
                "feature_factors": list(self.feature_factors),
                "lrs": sorted({point[1] for point in grid if point != BASE}, reverse=True),
                "results": list(grid.values()),
                "selection_context": {
                    "prob_on_other_class": self.config.decoder_eval_prob_on_other_class,
                    "increase_target_probabilities": True,
                    "metrics_for_summary": sorted(self.classes),
                    "classes_to_eval": sorted(self.classes),
                },
                **({"selected": summary, "completions": found["completions"]} if self.by_search else {}),
                "depends_on": depends_on,
            },
        )

    def _export_rows(self, scores: ModelScores, directory: Path) -> None:
        if not self.config.decoder_eval_export_row_wise_csv:
            return
        table, path = scores.row_table(), directory / ROW_WISE_CSV

        def write() -> None:
            with explained(path):
                table.to_csv(path, index=False)

        self.comm.first(f"writing {path.name}", write)
