"""Training the seeds of a run: together or one after another, judged in order, the best one promoted."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig
from gradiend_dist.distributed.comm import PeerLost
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.engines.base import StepOptions
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import explained, jsonable, read_json, write_json
from gradiend_dist.storage.fingerprint import reusable
from gradiend_dist.storage.layout import SEED_REPORT, STATS, TRAINING
from gradiend_dist.storage.model_dir import restore_weights
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training import seeds
from gradiend_dist.training.history import Plan, SeedRun, own_copies
from gradiend_dist.training.inputs import TrainingInputs
from gradiend_dist.training.loop import TrainingLoop, keeps_whole_items
from gradiend_dist.training.pruning import post_prune
from gradiend_dist.training.seeds import SeedResult
from gradiend_dist.training.state import StateKeeper

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """Where a run's results go."""

    model: Path
    """The promoted model."""
    seeds: Path
    experiment: Path | None
    """None: the results are in a temporary directory."""

    def state(self, args: TrainingArguments) -> Path | None:
        """What an unfinished run goes on from; tasks of a job array have one each."""
        name = "state" if args.only_seed is None else f"state_seed_{args.only_seed}"
        return None if self.experiment is None else self.experiment / name

    @property
    def logs(self) -> Path:
        """Where metrics and plots go."""
        return self.seeds if self.experiment is None else self.experiment

    def seed(self, seed: int, args: TrainingArguments) -> Path:
        """A seed's own directory; a single seed is promoted where it stands."""
        return self.seeds / f"seed_{seed}" if args.max_seeds > 1 else self.model


class SeedTraining:
    """One call of `train()`."""

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
        self.session = session = inputs.session
        self.fingerprint, self.callbacks, self.facts = fingerprint, callbacks, facts
        self.comm = session.comm
        self.keeper = StateKeeper(
            places.state(args),
            self.comm,
            keep=args.save_total_limit,
            save_steps=None if args.save_strategy == "no" else args.save_steps,
            interrupt=interrupt,
            saves_steps=args.optim != "adamw_8bit",  # its moments are in blocks that cannot be cut
        )
        self._pruned: tuple[int, ParameterSpace] | None = None

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
        self.session.budget_bytes = self.keeper.store_bytes
        with self._tracking() as tracking:
            try:
                results = self._reported(tracking) if self.keeper.promoted else self._train_all(tracking)
                if self.args.only_seed is None:
                    self._finish(results)
                    self._track(results, tracking)
            except BaseException as error:
                # Trackers are told why it ends; a launcher that ends the other ranks meanwhile must not cut that short,
                # and ranks that look for a lost one must not take this one for it.
                self.keeper.interrupt.ignore()
                if isinstance(error, PeerLost):
                    self.comm.sign()
                raise
        self.keeper.close()
        return results

    def _tracking(self) -> Tracking:
        launch = self.session.spread.launch
        facts = {
            "engine": launch.engine,
            "base_model_sharded": launch.shards_base,
            "world_size": self.comm.world_size,
            "space_size": self.session.space.size,
        }
        if self.comm.is_first:  # versions, commit and hardware are asked for once
            facts = {**self.facts(), **facts}
        return Tracking(self.args, self.comm, self.places.logs, self.keeper.tracker_run_id, facts)

    def _train_all(self, tracking: Tracking) -> list[SeedResult]:
        """The seeds of this process in order, each judged before the next."""
        all_seeds = self._seeds()
        cached = [s for s in all_seeds if s in self.keeper.seeds_done or self._is_reusable(s)]
        to_train = [s for s in all_seeds if s not in cached]
        if self.args.select_only:
            require(not to_train, _missing_seeds(to_train, self.places))
        tracking.reuse(cached)
        together = self._in_parallel(to_train)
        records: dict[int, dict[str, Any]] = {}
        results: list[SeedResult] = []
        for seed in all_seeds:
            if seed in to_train and seed not in records:
                group = to_train if together else [seed]
                later = [s for s in to_train if s > group[-1]]
                records.update(self._train_group(group, tracking, more_follow=bool(later)))
                self.keeper.seed_is_done(group)
            results.append(self._result(seed, records.get(seed), results))
            logger.info("seed %d: %s (%s)", seed, *_verdict_words(results[-1]))
            tracking.seed_summary(seed, _seed_summary(results[-1]))
            if not self.args.select_only and seeds.enough(results, self.args) is not None:
                self._drop([s for s in all_seeds if s > seed and (s in records or s in self.keeper.seeds_done)])
                break
        return results

    def _seeds(self) -> list[int]:
        if self.args.only_seed is not None:
            return [self.args.only_seed]
        return [self.args.first_seed + i for i in range(self.args.max_seeds)]

    def _track(self, results: list[SeedResult], tracking: Tracking) -> None:
        """The end of the run, for those who watch it."""
        best, score, _ = seeds.select_best(results, self.args)
        count = sum(result.verdict.converged for result in results)
        values = {
            "best_seed": best.seed,
            "selection_score": score,
            "converged": best.verdict.converged,
            "convergent_count": count,
            "best_step": best.record["best_score_checkpoint"]["global_step"],
            "space_size": self.session.space.size,
            "pruned_size": best.record["cache_fingerprint"]["gradiend_input_dim"],
        }
        rows = [{"seed": r.seed, **_seed_summary(r), "selected": r.seed == best.seed} for r in results]
        images = self._plots(results, best) if self.comm.is_first and self.args.trackers else {}
        tracking.summary(values, rows, images, self.places.model)

    def _plots(self, results: list[SeedResult], best: SeedResult) -> dict[str, Path]:
        if importlib.util.find_spec("matplotlib") is None:
            return {}
        from gradiend_dist.report.plots import plot_seed_convergence, plot_training_convergence

        records = [(result.seed, jsonable(result.record)) for result in results]
        name = "training_convergence"
        found = {name: plot_training_convergence(dict(records)[best.seed], self.places.logs / f"{name}.png")}
        if len(records) > 1:
            name = "seed_convergence"
            found[name] = plot_seed_convergence(records, best.seed, self.places.logs / f"{name}.png")
        return {f"plots/{name}": path for name, path in found.items()}

    def _reported(self, tracking: Tracking) -> list[SeedResult]:
        """The run was killed between promotion and its end: seeds may be stripped already, so the report speaks."""

        def read() -> list[SeedResult]:
            entries = read_json(self.places.seeds / SEED_REPORT)["runs"]
            return [self._reported_seed(entry) for entry in entries]

        results = self.comm.first("reading the report on the seeds", read)
        tracking.reuse(result.seed for result in results)
        tracking.begin([], 0)
        return results

    def _reported_seed(self, entry: dict[str, Any]) -> SeedResult:
        path = self._seed_path(entry["seed"])
        record = read_json(path / TRAINING)
        verdict = seeds.judge(record, self.args, among_seeds=True)
        return SeedResult(entry["seed"], path, record, entry["trained"], verdict, entry["eval_correlation"])

    def _is_reusable(self, seed: int) -> bool:
        path = self._seed_path(seed)
        return self.comm.first(
            f"looking at {path}",
            lambda: reusable(path, self.fingerprint, self.args.reuses, of_one_seed=True),
        )

    def _in_parallel(self, to_train: list[int]) -> bool:
        """Should all seeds ride on one stream of gradients?

        If every gradient can be kept, training one after another costs no more and may stop early. If not, the base
        model's work would be done once per seed: then together, where memory allows.
        """
        args = self.args
        if args.seeds_in_parallel is False or len(to_train) < 2:
            return False
        if args.prunes_each_seed:
            return False
        if args.seeds_in_parallel:
            return True
        space = self._space(to_train[0])
        fits = self.inputs.seeds_fit_together(space, len(to_train))
        return fits and not self._gradients_fit(space)

    def _gradients_fit(self, space: ParameterSpace) -> bool:
        plan = self._plan()
        kinds = len({self.args.source, self.args.target})
        largest = max(slices.size for slices in self.session.spread.training_slices(space))
        return 4 * largest * kinds * len(plan.visited()) <= self.session.store_bytes()

    def _plan(self) -> Plan:
        return Plan.of(self.args, self.inputs.schedule())

    def _space(self, seed: int) -> ParameterSpace:
        """The space a seed is trained in: one for all seeds, unless the reference's sampling is asked for."""
        config = self.args.pre_prune_config
        if config is None:
            return self.session.space
        sample_seed = self.args.data_seed if config.seed is None else config.seed
        if self.args.prunes_each_seed:
            sample_seed = seed
        if self._pruned is None or self._pruned[0] != sample_seed:
            self._pruned = (sample_seed, self._pruned_space(config, sample_seed))
        return self._pruned[1]

    def _pruned_space(self, config: PrePruneConfig, sample_seed: int) -> ParameterSpace:
        """As an earlier part of this run has found it: on other ranks rounding may choose another entry at the edge."""
        space = self.keeper.find_space(f"sample_{sample_seed}")
        if self.inputs.prunes_by_items(config):
            space = self.inputs.pruned_by_items(config, space)  # its gradients are wanted again in any case
        elif space is None:
            space = self.inputs.pre_pruned(config, sample_seed)
        self.keeper.keep_space(f"sample_{sample_seed}", space)
        return space

    def _seed_path(self, seed: int) -> Path:
        return self.places.seed(seed, self.args)

    def _train_group(self, group: list[int], tracking: Tracking, *, more_follow: bool) -> dict[int, dict[str, Any]]:
        """Train these seeds on one stream of gradients; their outputs are complete afterwards."""
        session, args = self.session, self.args
        space = self._space(group[0])
        if args.post_prune_config is not None:
            check_mask(args.post_prune_config, space)
        evaluation = None
        if args.evaluates:
            max_size = args.encoder_eval_train_max_size or args.encoder_eval_max_size
            evaluation = self.inputs.evaluation(space, session.data.evaluation_split(), max_size)
        plan, gradients, held_out = self._plan(), session.gradients(space), self.inputs.held_out(space)
        whole_items = keeps_whole_items(args, plan, gradients, evaluation, held_out)
        loop = TrainingLoop(
            args,
            [self._new_run(space, seed, whole_items=whole_items) for seed in group],
            plan,
            self.inputs.training_items(),
            gradients,
            evaluation,
            held_out,
            self.keeper,
            tracking,
            whole_items=whole_items,
            more_seeds_follow=more_follow,
        )
        loop.run()
        return {run.seed: self._complete(run, loop) for run in loop.runs}

    def _new_run(self, space: ParameterSpace, seed: int, *, whole_items: bool) -> SeedRun:
        """A seed at its start: drawn at random, or worked out from a few items.

        A run that goes on works it out again, and then takes the weights of its state: what the store keeps, and how it
        was computed, is as it was.
        """
        session, args = self.session, self.args
        filled = args.starts_trained and not (args.supervised_encoder or args.supervised_decoder)
        model = session.new_model(space, seed, drawn=not filled)
        stats: dict[str, Any] = {}
        rates = None
        if args.looks_at_items:
            start = self.inputs.spectral_start(space, seed, whole_items=whole_items)
            if args.starts_trained:
                stats["spectral"] = start.fill(model.gradiend)
            if args.refines:
                rates = start.measured().rates()
                stats["rates"] = vars(rates)
        engine = session.spread.make_engine(model.gradiend, StepOptions.of(args, rates))
        run = SeedRun(seed, model, engine, self._seed_path(seed), own_copies(self.callbacks))
        run.stats.update(stats)
        return run

    def _complete(self, run: SeedRun, loop: TrainingLoop) -> dict[str, Any]:
        """Bring a finished run's output into its final form: best or last weights, post-pruned, with its record."""
        record = {**loop.record(run), "cache_fingerprint": {**self.fingerprint, "gradiend_input_dim": len(run.model)}}
        verdict = seeds.judge(record, self.args, among_seeds=False)
        record["convergence_info"] = seeds.convergence_info([verdict], self.args, verdict)
        model = run.model.over(run.engine.weights())
        if self.args.save_only_best and run.best.saved:
            # In place: a second model would be the run's memory peak.
            restore_weights(model.gradiend, run.best_path, self.comm)
        if self.args.post_prune_config is not None:
            post_prune(model, self.args.post_prune_config, self.comm)
            record["cache_fingerprint"]["gradiend_input_dim"] = len(model)
        model.save_pretrained(run.output, training=record, comm=self.comm)
        self.comm.first(f"tidying up around {run.output}", lambda: self._tidy_up(run))
        return record

    def _tidy_up(self, run: SeedRun) -> None:
        if self.args.save_only_best and run.best.saved:  # only now: a full disk must not cost the trained weights
            with explained(run.best_path):
                shutil.rmtree(run.best_path)
        if self.args.delete_models:
            self._delete_intermediate(run.output)

    def _delete_intermediate(self, output: Path) -> None:
        for pattern in (f"{output.name}_step_*", f"{output.name}_epoch_*", f"{output.name}_best"):
            for path in output.parent.glob(pattern):
                with explained(path):
                    shutil.rmtree(path)

    def _result(self, seed: int, record: dict[str, Any] | None, earlier: list[SeedResult]) -> SeedResult:
        """Judge a seed; `record` is None where its earlier result is reused."""
        path = self._seed_path(seed)
        trained = record is not None
        if record is None:
            record = self.comm.first(f"reading {path}", lambda: read_json(path / TRAINING))
        verdict = seeds.judge(record, self.args, among_seeds=self.args.max_seeds > 1)
        result = SeedResult(seed, path, record, trained, verdict)
        if (
            self.args.max_seeds > 1
            and self.args.evaluates
            and seeds.wants_selection_evaluation(result, earlier, self.args)
        ):
            max_size = self.args.seed_selection_eval_max_size or self.args.encoder_eval_max_size
            model = self.session.load(path).gradiend
            gradients = self.session.gradients_for_encoding(model.space, repeated=False)
            evaluation = EncoderEvaluation.of(
                self.session,
                gradients,
                self.session.data.evaluation_split(),
                max_size,
                source=self.args.source,
                repeated=False,
            )
            with torch.no_grad():
                result.eval_correlation = evaluation.metrics(Encoder.of(self.session, model))["correlation"]
        return result

    def _drop(self, surplus: list[int]) -> None:
        def drop() -> None:
            for seed in surplus:
                logger.info("seed %d is dropped: enough seeds before it converged", seed)
                with explained(self._seed_path(seed)):
                    shutil.rmtree(self._seed_path(seed), ignore_errors=True)

        self.comm.first("dropping seeds that are not needed", drop)

    def _finish(self, results: list[SeedResult]) -> None:
        """Promote the best seed and write the reports; the promoted model is complete before anything is deleted."""
        best = results[self.comm.decide(results.index(seeds.select_best(results, self.args)[0]))]
        if self.args.max_seeds > 1 and not self.keeper.promoted:
            stability = seeds.topk_stability(results, self.args, self.inputs.top_weights)
            self.comm.first("promoting the best seed", lambda: self._promote(results, best, stability))
            self.keeper.is_promoted()
        self.comm.first("clearing away", lambda: self._clear_away(results, best))

    def _promote(self, results: list[SeedResult], best: SeedResult, stability: dict[str, Any] | None) -> None:
        args = self.args
        info = seeds.convergence_info([result.verdict for result in results], args, best.verdict)
        report = seeds.seed_report(results, args)
        if stability is not None:
            report["topk_stability"] = info["topk_stability"] = stability
        seeds.promote(best.output, self.places.model)
        write_json(self.places.model / TRAINING, {**best.record, "convergence_info": info})
        write_json(self.places.seeds / SEED_REPORT, report)

    def _clear_away(self, results: list[SeedResult], best: SeedResult) -> None:
        if self.args.max_seeds > 1:
            seeds.strip_models(results, self.args)
        if self.places.experiment is not None:
            write_json(self.places.experiment / STATS, _all_stats(results, best), indent=None)


def check_mask(config: PostPruneConfig, space: ParameterSpace) -> None:
    """A mask over another space would be found out only when training is over."""
    mask = config.mask
    require(
        mask is None or len(mask) == space.size,
        f"post_prune_config.mask has {0 if mask is None else len(mask)} entries and the trained space {space.size}: "
        "pass as many.",
    )


def _missing_seeds(missing: list[int], places: Places) -> str:
    names = ", ".join(map(str, missing))
    return (
        f"select_only finds no finished model of seed {names} in {places.seeds} that was trained with these arguments: "
        "train it with only_seed, or leave select_only out."
    )


def _seed_summary(result: SeedResult) -> dict[str, Any]:
    best = result.record["best_score_checkpoint"]
    return {
        "converged": result.verdict.converged,
        "best_step": best["global_step"],
        "best_correlation": best["correlation"],
        "selection_score": result.selection_score,
        **{name: value for name, value in seeds.explained_at_best(result.record).items() if value is not None},
    }


def _verdict_words(result: SeedResult) -> tuple[str, str]:
    return ("converged" if result.verdict.converged else "did not converge"), result.verdict.reason


def _all_stats(results: list[SeedResult], best: SeedResult) -> dict[str, Any]:
    """The documented training_stats.json: the promoted run's statistics, and those of every seed."""
    kept = ("training_stats", "losses", "best_score_checkpoint", "convergence_info", "time")
    per_seed = {result.seed: {name: result.record[name] for name in kept} for result in results}
    return {"best_seed": best.seed, **per_seed[best.seed], "seeds": per_seed}
