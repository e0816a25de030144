"""The training loop: one stream of gradients, on which one or several seeds train.

A step: gather the gradients of the next items, step each seed's model, advance the learning rate; then evaluate, save
and log where it is time to. Numbers stay on the device until they are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.engines.base import Engine
from gradiend_dist.evaluation.encoder import EncoderEvaluation
from gradiend_dist.evaluation.explained import HeldOut
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.checkpoints import Checkpoints
from gradiend_dist.training.evaluator import SeedEvaluator
from gradiend_dist.training.gradient_batches import GradientBatches
from gradiend_dist.training.history import SeedRun
from gradiend_dist.training.learning_rate import LearningRate
from gradiend_dist.training.monitor import Monitor
from gradiend_dist.training.state import StateKeeper

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Trains `runs` on the same items; all of them see the same gradients. All ranks run it together."""

    def __init__(
        self,
        args: TrainingArguments,
        runs: Sequence[SeedRun],
        batches: GradientBatches,
        evaluation: EncoderEvaluation | None,
        held_out: HeldOut | None,
        keeper: StateKeeper,
        tracking: Tracking,
    ) -> None:
        self.args, self.runs, self.batches, self.plan = args, list(runs), batches, batches.plan
        self.keeper, self.comm, self.tracking = keeper, keeper.comm, tracking
        device = batches.gradients.base.device
        # Over several devices, single sections cannot be told apart without waiting.
        model = self.runs[0].model.gradiend
        on_one_gpu = {model.device_encoder, model.device_decoder} == {device} and device.type == "cuda"
        self.clock = self.comm.clock = batches.clock = Clock(device if on_one_gpu else None)
        self.learning_rate = LearningRate(args, self.plan.total_steps)
        self.checkpoints = Checkpoints(args, self.comm, self.clock)
        self.evaluator = SeedEvaluator(args, evaluation, held_out, self.checkpoints, tracking, self.comm, self.clock)
        self.monitor = Monitor(args, self.plan, device, tracking, self.comm, self.clock)

    def run(self) -> None:
        """Train all runs to their ends. Their models then hold the last weights, their outputs the best ones."""
        self.batches.tokenize_all()
        for run in self.runs:
            run.callbacks.begin_training(self.plan.total_steps, self.plan.num_epochs, is_first=self.comm.is_first)
        done = self.keeper.load(self)
        self.tracking.begin([run.seed for run in self.runs], done)
        self.evaluator.start(self.runs, done)
        with self.keeper.interrupt.deferring_to_steps():
            self._train_from(done)
        for run in self.runs:
            run.read_steps()
            self.checkpoints.offer_closed_form(run)
            self.evaluator.measure_decoder_at_end(run)
            run.callbacks.call("on_train_end")

    def _train_from(self, done: int) -> None:
        """The steps after the first `done` ones."""
        bar = tqdm(
            total=self.plan.total_steps,
            initial=done,
            desc=f"seed {', '.join(str(run.seed) for run in self.runs)}",
            unit="step",
            disable=None if self.comm.is_first else True,
            leave=False,
        )
        self.monitor.start(done)
        current = -1
        with bar:
            for step, epoch, batches in self.plan.steps():
                if step <= done:
                    current = epoch
                    continue
                if all(run.stopped for run in self.runs):
                    break
                if epoch != current:
                    self._end_epoch(current)
                    self._begin_epoch()
                    current = epoch
                self._step(step, epoch, batches)
                bar.update()
                self.keeper.after_step(self, step)
            self._end_epoch(current)

    def _begin_epoch(self) -> None:
        for run in self.runs:
            if not run.stopped:
                run.callbacks.call("on_epoch_begin")

    def _end_epoch(self, epoch: int) -> None:
        for run in self.runs:
            if epoch >= 0 and run.callbacks.state.epoch == epoch:
                run.callbacks.call("on_epoch_end")
                self.checkpoints.save_epoch(run, epoch, self.plan.num_epochs)

    def _step(self, step: int, epoch: int, numbers: list[list[int]]) -> None:
        active = [run for run in self.runs if not run.stopped]
        for run in active:
            run.callbacks.state.epoch = epoch
            run.callbacks.call("on_step_begin")
        with self.clock.spending("data"):
            batches, names = self.batches.gather(numbers)
        with self.clock.spending("gradiend"):
            for run in active:
                run.step(step, batches, self.learning_rate.value, names)
        self.learning_rate.advance()
        for run in active:
            self._after_step(run, step, epoch)

    def _after_step(self, run: SeedRun, step: int, epoch: int) -> None:
        last = step == self.plan.total_steps
        run.callbacks.state.global_step, run.callbacks.state.epoch = step, epoch
        logs = step % self.args.logging_steps == 0 or last
        evaluates = self.evaluator.is_on and (step % self.args.eval_steps == 0 or last)
        # On the CPU nothing is waited for by reading; elsewhere numbers are read when they are wanted.
        if logs or evaluates or run.unread[-1][1].device.type == "cpu":
            run.read_steps()
        if evaluates:
            self.evaluator.evaluate(run, step, epoch)
        self.checkpoints.offer_loss(run, step, epoch, at_evaluation=evaluates or last, evaluates=self.evaluator.is_on)
        if self.args.save_strategy == "steps" and step % self.args.save_steps == 0:
            self.checkpoints.save(run, run.step_path(step))
        if logs:
            self.monitor.log(run, step, self.batches.num_rows)
        run.callbacks.call("on_step_end", metrics=None)
        self._do_what_callbacks_ask(run, step, epoch, evaluated=evaluates)

    def _do_what_callbacks_ask(self, run: SeedRun, step: int, epoch: int, *, evaluated: bool) -> None:
        """In this order: a callback may ask for more in its `on_evaluate`."""
        control = run.callbacks.control
        if control.should_evaluate and self.evaluator.is_on and not evaluated:
            run.read_steps()
            self.evaluator.evaluate(run, step, epoch)
            evaluated = True
        if control.should_save:
            self.checkpoints.save(run, run.step_path(step))
        control.should_evaluate = control.should_save = control.should_log = False
        if control.should_training_stop and not run.stopped:
            logger.info("seed %d stopped by a callback at step %d", run.seed, step)
            run.stopped = True
            run.read_steps()
            if self.evaluator.is_on and not evaluated:
                self.evaluator.evaluate(run, step, epoch)

    # --- what a saved state needs of the loop (see `state.Resumable`)

    @property
    def engines(self) -> dict[int, Engine]:
        return {run.seed: run.engine for run in self.runs}

    @property
    def best_paths(self) -> dict[int, Path]:
        """Where the best checkpoints so far are, by seed."""
        return {run.seed: run.best_path for run in self.runs if run.best.saved}

    def progress(self, step: int) -> dict[str, Any]:
        """All that the rest of the training depends on besides the engines: plain values. No communication."""
        runs = [run.progress() for run in self.runs]
        return {
            "step": step,
            "seeds": [run.seed for run in self.runs],
            "scheduler": self.learning_rate.progress(),
            "seconds": self.clock.as_dict(),
            "runs": runs,
        }

    def restore(self, progress: dict[str, Any]) -> None:
        self.learning_rate.restore(progress["scheduler"])
        self.clock.go_on(progress["seconds"])
        for run, saved in zip(self.runs, progress["runs"], strict=True):
            run.restore(saved)
