"""Training the seeds of a run: together or one after another, judged in order, the best one promoted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.distributed.peers import PeerLost
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.storage.fingerprint import reusable
from gradiend_dist.storage.layout import SEED_REPORT
from gradiend_dist.storage.records import read_seed_report, read_training
from gradiend_dist.storage.sums import file_sum
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training import promotion, seeds
from gradiend_dist.training.gradient_batches import gradients_fit, vectors_of_training
from gradiend_dist.training.inputs import TrainingInputs
from gradiend_dist.training.places import Places
from gradiend_dist.training.pruning import top_over_ranks
from gradiend_dist.training.run_summary import seed_summary, track_results
from gradiend_dist.training.seed_group import GroupTraining
from gradiend_dist.training.seeds import SeedResult
from gradiend_dist.training.state import StateKeeper

logger = logging.getLogger(__name__)


class SeedTraining:
    """One call of `train()`. All ranks call every method, unless it says otherwise."""

    def __init__(
        self,
        args: TrainingArguments,
        inputs: TrainingInputs,
        places: Places,
        fingerprint: dict[str, Any],
        callbacks: Sequence[TrainerCallback],
        interrupt: Interrupt,
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.args, self.inputs, self.places = args, inputs, places
        self.session, self.comm = inputs.session, inputs.session.comm
        self.fingerprint, self.facts = fingerprint, facts
        self.keeper = StateKeeper(
            places.state(args),
            self.comm,
            keep=args.save_total_limit,
            save_steps=None if args.save_strategy == "no" else args.save_steps,
            interrupt=interrupt,
            saves_steps=args.optim != "adamw_8bit",  # its moments are in blocks that cannot be cut
        )
        self.group = GroupTraining(args, inputs, places, fingerprint, callbacks, self.keeper)

    def run(self) -> list[SeedResult]:
        """Seeds in order, each judged before the next, until enough have converged.

        Seeds that ride on one stream of gradients end together; they are judged in the same order, and those after the
        last needed one are dropped, so that the result does not depend on how the seeds were trained.
        """
        self.keeper.open(
            self.fingerprint,
            engine=self.session.spread.launch.engine,
            store_bytes=self.session.store_bytes(),
            resume=self.args.resume,
        )
        self.session.budget_bytes = self.keeper.run.store_bytes
        with self._tracking() as tracking:
            try:
                trains = self.keeper.run.promoted is None
                results = self._train_all(tracking) if trains else self._results_of_report(tracking)
                if self.args.only_seed is None:
                    self._finish(results)
                    track_results(results, self.args, self.places, tracking, space_size=self.session.space.size)
            except BaseException as error:
                # Trackers are told why it ends; a launcher that ends the other ranks meanwhile must not cut that short,
                # and ranks that look for a lost one must not take this one for it.
                self.keeper.interrupt.ignore()
                if isinstance(error, PeerLost):
                    self.comm.peers.note_alive()
                raise
        self.keeper.close()
        return results

    def _tracking(self) -> Tracking:
        """No communication."""
        launch = self.session.spread.launch
        facts = {
            "engine": launch.engine,
            "base_model_sharded": launch.shards_base,
            "world_size": self.comm.world_size,
            "space_size": self.session.space.size,
        }
        if self.comm.is_first:  # versions, commit and hardware are asked for once
            facts = {**self.facts(), **facts}
        return Tracking(self.args, self.comm, self.places.logs, self.keeper.run.tracker_run_id, facts)

    def _train_all(self, tracking: Tracking) -> list[SeedResult]:
        """The seeds of this process in order, each judged before the next."""
        all_seeds = [self.args.first_seed + i for i in range(self.args.max_seeds)]
        if self.args.only_seed is not None:
            all_seeds = [self.args.only_seed]
        self.keeper.run.forget_damaged(lambda seed: self.places.seed(seed, self.args))
        cached = [s for s in all_seeds if s in self.keeper.run.seeds_done or self._is_reusable(s)]
        to_train = [s for s in all_seeds if s not in cached]
        if self.args.select_only:
            require(not to_train, _missing_seeds(to_train, self.places))
        tracking.reuse(cached)
        together = self._trains_together(to_train)
        records: dict[int, dict[str, Any]] = {}
        results: list[SeedResult] = []
        for seed in all_seeds:
            if seed in to_train and seed not in records:
                group = to_train if together else [seed]
                later = [s for s in to_train if s > group[-1]]
                records.update(self.group.train(group, tracking, more_follow=bool(later)))
                self.keeper.finish_seeds({one: self.places.seed(one, self.args) for one in group})
            result = self._result(seed, records.get(seed), results)
            results.append(result)
            converged = "converged" if result.verdict.converged else "did not converge"
            logger.info("seed %d: %s (%s)", seed, converged, result.verdict.reason)
            tracking.seed_summary(seed, seed_summary(result))
            if not self.args.select_only and seeds.reason_to_stop(results, self.args) is not None:
                done = {*records, *self.keeper.run.seeds_done}
                surplus = [s for s in all_seeds if s > seed and s in done]
                delete = partial(promotion.delete_seeds, surplus, self.args, self.places)
                self.comm.first("dropping seeds that are not needed", delete)
                break
        return results

    def _results_of_report(self, tracking: Tracking) -> list[SeedResult]:
        """The run was killed between promotion and its end: seeds may be stripped already, so the report speaks."""

        def read() -> list[SeedResult]:
            results = []
            for entry in self._own_report()["runs"]:
                path = self.places.seed(entry["seed"], self.args)
                record = read_training(path)
                verdict = seeds.judge(record, self.args, among_seeds=True)
                correlation = entry["eval_correlation"]
                results.append(SeedResult(entry["seed"], path, record, entry["trained"], verdict, correlation))
            return results

        results = self.comm.first("reading the report on the seeds", read)
        tracking.reuse(result.seed for result in results)
        tracking.begin([], 0)
        return results

    @property
    def _report_path(self) -> Path:
        return self.places.seeds / SEED_REPORT

    def _own_report(self) -> dict[str, Any]:
        """Rank 0 alone: the report on the seeds, as this run has written it."""
        report = read_seed_report(self.places.seeds)
        require(
            file_sum(self._report_path) == self.keeper.run.promoted,
            f"{self._report_path} is damaged: pass --resume false to start anew.",
        )
        return report

    def _is_reusable(self, seed: int) -> bool:
        path = self.places.seed(seed, self.args)
        return self.comm.first(
            f"looking at {path}",
            lambda: reusable(path, self.fingerprint, self.args.reuses, of_one_seed=True),
        )

    def _trains_together(self, to_train: list[int]) -> bool:
        """Should all seeds train on one stream of gradients?

        If every gradient can be kept, training one after another costs no more and may stop early. If not, the base
        model's work would be done once per seed: then together, where memory allows.
        """
        args = self.args
        if args.seeds_in_parallel is False or len(to_train) < 2 or args.prunes_each_seed:
            return False
        if args.seeds_in_parallel:
            return True
        space = self.group.space(to_train[0])
        num_vectors = vectors_of_training(args, self.inputs.plan())
        largest = max(slices.size for slices in self.session.spread.training_slices(space))
        return self.inputs.seeds_fit_together(largest, len(to_train)) and not gradients_fit(
            num_vectors, largest, self.session.training_store_bytes()
        )

    def _result(self, seed: int, record: dict[str, Any] | None, earlier: list[SeedResult]) -> SeedResult:
        """Judge a seed; `record` is None where its earlier result is reused."""
        path, several = self.places.seed(seed, self.args), self.args.max_seeds > 1
        trained = record is not None
        if record is None:
            record = self.comm.first(f"reading {path}", lambda: read_training(path))
        result = SeedResult(seed, path, record, trained, seeds.judge(record, self.args, among_seeds=several))
        if several and self.args.evaluates and seeds.wants_selection_evaluation(result, earlier, self.args):
            result.eval_correlation = self._selection_correlation(result)
        return result

    def _selection_correlation(self, result: SeedResult) -> float:
        """The correlation that seeds are compared by: of the saved model, on more rows than in training.

        From no gradient that was kept: which ones are depends on what the process has done before, and the last digits
        of an encoding on the way that it is computed; a near tie must not depend on where a run was interrupted.
        """
        kept = self.keeper.run.selection_score(result.seed)
        if kept is not None:
            return kept
        max_size = self.args.seed_selection_eval_max_size or self.args.encoder_eval_max_size
        model, split = self.session.load(result.output).gradiend, self.session.data.evaluation_split()
        gradients = self.session.gradients_at_rest(model.space)
        evaluation = EncoderEvaluation.of(
            self.session, gradients, split, max_size, source=self.args.source, repeated=False
        )
        with torch.no_grad():
            correlation: float = evaluation.metrics(Encoder.of(self.session, model))["correlation"]
        self.keeper.run.keep_selection_score(result.seed, correlation)
        return correlation

    def _finish(self, results: list[SeedResult]) -> None:
        """Promote the best seed and write the reports; the promoted model is complete before anything is deleted."""
        args, places = self.args, self.places
        best = results[self.comm.decide(results.index(seeds.select_best(results, args)[0]))]
        if args.max_seeds > 1 and self.keeper.run.promoted is None:
            stability = seeds.topk_stability(
                results,
                args,
                lambda path, part, topk: top_over_ranks(self.comm, self.session.load(path).gradiend, part, topk),
            )
            self.comm.first(
                "promoting the best seed", lambda: promotion.promote(results, best, args, places, stability)
            )
            self.keeper.run.update(promoted=self.comm.first("promoting", lambda: file_sum(self._report_path)))

        def clear_away() -> None:
            if args.max_seeds > 1:
                promotion.strip_models(results, args)
            if places.experiment is not None:
                promotion.write_stats(results, best, places.experiment)

        self.comm.first("clearing away", clear_away)


def _missing_seeds(missing: list[int], places: Places) -> str:
    names = ", ".join(map(str, missing))
    return (
        f"select_only finds no finished model of seed {names} in {places.seeds} that was trained with these arguments: "
        "train it with only_seed, or leave select_only out."
    )
