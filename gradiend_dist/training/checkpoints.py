"""Model directories that are written while a seed trains: at steps, after epochs, and of the best step so far."""

from __future__ import annotations

from pathlib import Path

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.training.history import Best, SeedRun, chooses_by_loss

# After a closed form: correlations that differ by less are the same, and the held-out loss decides.
SAME_CORRELATION = 0.01


class Checkpoints:
    """Saves checkpoints and decides which is the best. All ranks call every method."""

    def __init__(self, args: TrainingArguments, comm: Comm, clock: Clock) -> None:
        self.args, self.comm, self.clock = args, comm, clock
        self.by_loss = chooses_by_loss(args)

    def save(self, run: SeedRun, path: Path) -> None:
        """All ranks call this: each writes its slices of the weights."""
        with self.clock.spending("save"):
            model = run.model.over(run.engine.weights())
            record = run.record(self.args, self.clock)
            model.save_pretrained(path, training=record, with_tokenizer=False, comm=self.comm)

    def save_epoch(self, run: SeedRun, epoch: int, num_epochs: int) -> None:
        if not self.args.save_only_best and not self.args.delete_models and num_epochs > 1:
            run.read_steps()
            self.save(run, run.epoch_path(epoch))

    def offer_correlation(self, run: SeedRun, step: int, epoch: int, correlation: float) -> None:
        """The step becomes the best one if its correlation is better."""
        if self.by_loss or (step == 0 and not (self.args.behaviour.step_zero_competes or run.starts_trained)):
            return
        score = abs(correlation)
        if self.args.keeps_best and not is_better(run, step, score):
            return  # without checkpoints the last model is the one that stays
        run.best = Best(score, correlation=correlation, step=step, epoch=epoch, saved=run.best.saved)
        self._save_best(run)

    def offer_loss(self, run: SeedRun, step: int, epoch: int, *, at_evaluation: bool, evaluates: bool) -> None:
        """The step becomes the best one if its loss is lower, where losses decide."""
        as_reference = self.args.behaviour.step_zero_competes
        if self.by_loss and (at_evaluation or as_reference):
            # Single losses jump with their items: away from the reference, the mean since the last evaluation decides.
            loss = run.losses[-1] if as_reference else run.recent_loss(self.args.eval_steps)
            if run.best.score is None or -loss > run.best.score:
                run.best = Best(-loss, loss=loss, step=step, epoch=epoch, saved=run.best.saved)
                self._save_best(run)
        elif not evaluates and step == 1 and as_reference:
            # Without a score the reference has -1.0: at step 0 if it tried to evaluate, else from the first step on.
            run.best = Best(1.0, correlation=-1.0, step=0 if self.args.do_eval else 1, epoch=0)
            if run.best.step:
                self._save_best(run)

    def offer_closed_form(self, run: SeedRun) -> None:
        """A closed form that took no step has no loss of training: the loss of its own items stands for it."""
        if self.by_loss and run.best.score is None and run.starts_trained and not run.losses:
            loss = run.stats["spectral"]["loss"]
            run.best = Best(None if loss is None else -loss, loss=loss, step=0, epoch=0)

    def _save_best(self, run: SeedRun) -> None:
        if not self.args.keeps_best or (run.best.step == 0 and not run.starts_trained):
            return
        self.save(run, run.best_path)
        run.best.saved = True


def is_better(run: SeedRun, step: int, score: float) -> bool:
    """Is the correlation larger than the best one?

    After a closed form, the smaller held-out loss decides among almost equal correlations, and nothing is better whose
    held-out loss is larger than it was at the start.
    """
    best, losses = run.best, run.stats.get("held_out_loss", {})
    if best.score is None or not (run.starts_trained and 0 in losses):
        return best.score is None or score > best.score
    highest = max(abs(other) for other in run.stats["scores"].values() if other == other)
    if losses[step] > losses[0] or score < highest - SAME_CORRELATION:
        return False  # not below the last best alone: many small losses would add up
    return bool(score > best.score + SAME_CORRELATION or losses[step] < losses[best.step])
