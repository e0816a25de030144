"""Training a group of seeds on one stream of gradients, up to their finished model directories."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig
from gradiend_dist.engines.base import StepOptions
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import explained
from gradiend_dist.storage.model_dir import link_model, restore_weights
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.callbacks import SeedCallbacks
from gradiend_dist.training.gradient_batches import GradientBatches, keeps_whole_items
from gradiend_dist.training.history import SeedRun
from gradiend_dist.training.inputs import TrainingInputs
from gradiend_dist.training.loop import TrainingLoop
from gradiend_dist.training.places import Places
from gradiend_dist.training.pruning import post_prune
from gradiend_dist.training.seed_start import SeedStart
from gradiend_dist.training.seeds import convergence_info, judge
from gradiend_dist.training.state import StateKeeper


class GroupTraining:
    """Trains groups of seeds, one after another. All ranks call every method, unless it says otherwise."""

    def __init__(
        self,
        args: TrainingArguments,
        inputs: TrainingInputs,
        places: Places,
        fingerprint: dict[str, Any],
        callbacks: Sequence[TrainerCallback],
        keeper: StateKeeper,
    ) -> None:
        self.args, self.inputs, self.session, self.comm = args, inputs, inputs.session, inputs.session.comm
        self.places, self.fingerprint, self.callbacks, self.keeper = places, fingerprint, callbacks, keeper
        self._pruned: tuple[int, ParameterSpace] | None = None

    def train(self, group: list[int], tracking: Tracking, *, more_follow: bool) -> dict[int, dict[str, Any]]:
        """Train these seeds on one stream of gradients; their outputs are complete afterwards. Records by seed."""
        args, space = self.args, self.space(group[0])
        if args.post_prune_config is not None:
            check_mask(args.post_prune_config, space)
        evaluation = None
        if args.evaluates:
            max_size = args.encoder_eval_train_max_size or args.encoder_eval_max_size
            evaluation = self.inputs.evaluation(space, self.session.data.evaluation_split(), max_size)
        plan, gradients, held_out = self.inputs.plan(), self.session.gradients(space), self.inputs.held_out(space)
        whole_items = keeps_whole_items(args, plan, gradients, evaluation, held_out)
        runs = [self._new_run(space, seed, whole_items=whole_items) for seed in group]
        keep = more_follow or plan.visits_items_again()
        batches = GradientBatches(
            args, plan, self.inputs.training_items(), gradients, keep=keep, whole_items=whole_items
        )
        loop = TrainingLoop(args, runs, batches, evaluation, held_out, self.keeper, tracking)
        loop.run()
        return {run.seed: self._complete(run, loop) for run in runs}

    def space(self, seed: int) -> ParameterSpace:
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
        """As it was before the run was interrupted: on other ranks rounding may choose another entry at the edge."""
        name = f"sample_{sample_seed}"
        space = self.keeper.run.spaces.find(name)
        if self.inputs.prunes_by_items(config):
            space = self.inputs.pruned_by_items(config, space)  # its gradients are wanted again in any case
        elif space is None:
            space = self.inputs.pre_pruned(config, sample_seed)
        self.keeper.run.spaces.keep(name, space)
        return space

    def _new_run(self, space: ParameterSpace, seed: int, *, whole_items: bool) -> SeedRun:
        """A seed at its start: drawn at random, or worked out from a few items.

        A run that goes on works it out again, and then takes the weights of its state: what the store keeps, and how it
        was computed, is as it was.
        """
        session, args = self.session, self.args
        start = SeedStart(args, self.inputs, session.gradients(space), seed, whole_items=whole_items)
        solved, stats = start.closed_form(), {}
        filled = solved is not None and not (args.supervised_encoder or args.supervised_decoder)
        model = session.new_model(space, seed, drawn=not filled)
        if solved is not None:
            stats["spectral"] = solved.fill(model.gradiend)
        rates = start.rates() if args.refines else None
        if rates is not None:
            stats["rates"] = vars(rates)
        engine = session.spread.make_engine(model.gradiend, StepOptions.of(args, rates))
        callbacks = SeedCallbacks(args, model, self.callbacks)
        run = SeedRun(seed, model, engine, self.places.seed(seed, args), callbacks)
        run.stats.update(stats)
        return run

    def _complete(self, run: SeedRun, loop: TrainingLoop) -> dict[str, Any]:
        """Bring a finished run's output into its final form: best or last weights, post-pruned, with its record."""
        fingerprint = {**self.fingerprint, "gradiend_input_dim": len(run.model)}
        record = {**run.record(self.args, loop.clock), "cache_fingerprint": fingerprint}
        verdict = judge(record, self.args, among_seeds=False)
        record["convergence_info"] = convergence_info([verdict], self.args, verdict)
        takes_best, config = self.args.save_only_best and run.best.saved, self.args.post_prune_config
        if takes_best and config is None:  # its weights are written already
            self.comm.first(
                f"completing {run.output}",
                lambda: link_model(run.best_path, run.output, training=record, tokenizer=run.model.tokenizer),
            )
        else:
            model = run.model.over(run.engine.weights())
            if takes_best:
                # In place: a second model would be the run's memory peak.
                restore_weights(model.gradiend, run.best_path, self.comm)
            if config is not None:
                post_prune(model, config, self.comm)
                fingerprint["gradiend_input_dim"] = len(model)
            model.save_pretrained(run.output, training=record, comm=self.comm)
        self.comm.first(f"tidying up around {run.output}", lambda: self._delete_checkpoints(run))
        return record

    def _delete_checkpoints(self, run: SeedRun) -> None:
        """Rank 0 alone, and only now: a full disk must not cost the trained weights."""
        name = run.output.name
        patterns = [f"{name}_step_*", f"{name}_epoch_*", f"{name}_best"] if self.args.delete_models else []
        paths = {path for pattern in patterns for path in run.output.parent.glob(pattern)}
        if self.args.save_only_best and run.best.saved:
            paths.add(run.best_path)
        for path in sorted(paths):
            with explained(path):
                shutil.rmtree(path)


def check_mask(config: PostPruneConfig, space: ParameterSpace) -> None:
    """A mask over another space would be found out only when training is over."""
    mask = config.mask
    require(
        mask is None or len(mask) == space.size,
        f"post_prune_config.mask has {0 if mask is None else len(mask)} entries and the trained space {space.size}: "
        "pass as many.",
    )
