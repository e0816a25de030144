"""The training loop: one stream of gradients, one or several seeds riding on it.

A step: gradients of the next items (from the store or the base model), one optimizer step for each seed's model, and
at their times logging, evaluation, normalisation and checkpoints. Numbers stay on the device until they are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import get_scheduler

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.distributed.devices import gpu_utilisation, peak_memory
from gradiend_dist.engines.base import GradiendBatch
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.evaluation.explained import HeldOut
from gradiend_dist.evaluation.metrics import flip
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.model.gradiend import ODD_ACTIVATIONS
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.history import Best, Plan, SeedRun, as_plain, keep_series
from gradiend_dist.training.monitor import History, signals
from gradiend_dist.training.state import StateKeeper

logger = logging.getLogger(__name__)

# Of the numbers that the decoder is measured by, those that are tracked.
DECODER_FIELDS = ("explained", "explained_centred", "explained_limit", "held_out_loss")

# Refinement of a closed form: correlations that differ by less are the same, and the held-out loss decides.
SAME_CORRELATION = 0.01


class TrainingLoop:
    """Trains `runs` on the same items; all of them see the same gradients."""

    def __init__(
        self,
        args: TrainingArguments,
        runs: Sequence[SeedRun],
        plan: Plan,
        rows: ItemRows,
        gradients: GradientSource,
        evaluation: EncoderEvaluation | None,
        held_out: HeldOut | None,
        keeper: StateKeeper,
        tracking: Tracking,
        *,
        whole_items: bool = False,
        more_seeds_follow: bool = False,
    ) -> None:
        self.args, self.runs, self.plan = args, list(runs), plan
        self.rows, self.gradients, self.evaluation, self.held_out = rows, gradients, evaluation, held_out
        self.keeper, self.comm, self.tracking = keeper, keeper.comm, tracking
        self.keep = more_seeds_follow or plan.visits_items_again()
        only_supervised = args.behaviour.loss_only_supervised
        self.by_loss = args.supervised_decoder if only_supervised else args.convergent_metric == "loss"
        self.clock = self.comm.clock = Clock(on_gpu=self._is_on_one_gpu())
        self._since: tuple[int, int, dict[str, float]] = (0, 0, {})
        """Step, rows and seconds when speed was last looked at."""
        self._speed: tuple[int, dict[str, float]] = (0, {})
        self._num_rows = 0
        self._items: dict[int, Item] = {}
        self._visited = plan.visited()
        self._whole_items = whole_items
        self._schedule = self._make_scheduler()

    def run(self) -> None:
        """Train all runs to their ends. Their models then hold the last weights, their outputs the best ones."""
        for number in self._visited:
            self._item(number)  # a row that cannot be tokenized is told now, not in the last epoch
        for run in self.runs:
            self._begin(run)
        done = self.keeper.load(self)
        self.tracking.begin([run.seed for run in self.runs], done)
        if self.evaluation is not None and done and self.args.evaluate_fn is None:
            self.evaluation.encode(self._encoder(self.runs[0]))  # its gradients are kept first, as at step 0
            self._measure_decoder(self.runs[0])
        elif self.evaluation is not None and not done:
            for run in self.runs:
                self._evaluate(run, step=0, epoch=0)
        names = ", ".join(str(run.seed) for run in self.runs)
        bar = tqdm(
            total=self.plan.total_steps,
            initial=done,
            desc=f"seed {names}",
            unit="step",
            disable=None if self.comm.is_first else True,
            leave=False,
        )
        with bar, self.keeper.interrupt.patiently():
            self._train(done, bar)
        for run in self.runs:
            run.read_steps()
            self._close_form(run)
            if self.evaluation is None:
                self._remember_decoder(run, len(run.losses))
            self._fire(run, "on_train_end")

    def _train(self, done: int, bar: Any) -> None:
        """The steps after the first `done` ones."""
        self._since = (done, 0, self._seconds())
        current = -1
        for step, epoch, batches in self.plan.steps():
            if step <= done:
                current = epoch
                continue
            if all(run.stopped for run in self.runs):
                break
            if epoch != current:
                self._turn_epoch(current, epoch)
                current = epoch
            self._step(step, epoch, batches)
            bar.update()
            self.keeper.after_step(self, step)
        self._turn_epoch(current, None)

    def progress(self, step: int) -> dict[str, Any]:
        """All that the rest of the training depends on besides the engines: plain values."""
        for run in self.runs:
            run.read_steps()
        return {
            "step": step,
            "seeds": [run.seed for run in self.runs],
            "scheduler": self._schedule[0].state_dict(),
            "seconds": self.clock.as_dict(),
            "runs": [run.progress() for run in self.runs],
        }

    def best_paths(self) -> dict[int, Path]:
        """Where the best checkpoints so far are, by seed."""
        return {run.seed: run.best_path for run in self.runs if run.best.saved}

    def restore(self, progress: dict[str, Any]) -> None:
        scheduler, carrier = self._schedule
        scheduler.load_state_dict(progress["scheduler"])
        carrier.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        self.clock.go_on(progress["seconds"])
        for run, found in zip(self.runs, progress["runs"], strict=True):
            run.restore(found)

    def _is_on_one_gpu(self) -> bool:
        """Do all sections queue on one device? Over several, single sections cannot be told apart without waiting."""
        model = self.runs[0].model.gradiend
        devices = {self.gradients.base.device, model.device_encoder, model.device_decoder}
        return len(devices) == 1 and self.gradients.base.device.type == "cuda"

    def _make_scheduler(self) -> Any:
        """Hugging Face's schedulers want an optimizer: one without weights carries the learning rate."""
        carrier = torch.optim.SGD([torch.zeros(1)], lr=self.args.peak_rate)
        warmup = self.args.warmup_steps or int(self.args.warmup_ratio * self.plan.total_steps)
        steps = max(1, self.plan.total_steps)  # a schedule of no step would be divided by
        return get_scheduler(self.args.lr_scheduler_type, carrier, warmup, steps), carrier

    def _step(self, step: int, epoch: int, numbers: list[list[int]]) -> None:
        scheduler, carrier = self._schedule
        learning_rate = scheduler.get_last_lr()[0]
        active = [run for run in self.runs if not run.stopped]
        for run in active:
            run.state.epoch = epoch
            self._fire(run, "on_step_begin")
        with self.clock.spending("data"):
            batches, names = self._gather(numbers)
        with self.clock.spending("gradiend"):
            for run in active:
                run.unread.append((step, run.engine.step(batches, learning_rate), names))
                run.learning_rates.append(learning_rate)
        carrier.step()
        scheduler.step()
        for run in active:
            self._after_step(run, step, epoch)

    def _gather(self, numbers: list[list[int]]) -> tuple[list[GradiendBatch], str]:
        """The GRADIEND batches of a step, and the names of their items for messages."""
        single = len(numbers) == 1 and len(numbers[0]) == 1
        batches, names = [], []
        for batch in numbers:
            sources, targets, labels = [], [], []
            for number in batch:
                item = self._item(number)
                names.append(f"item {number} ({item.name})")
                self._num_rows += len(item.rows)
                with self.clock.spending("base_gradient"):
                    source, target = self._source_and_target(number)
                # A vector that was not kept is overwritten by the next item's.
                sources.append(source if single or source is None else source.clone())
                targets.append(target if single or target is None else target.clone())
                labels.append([self._label(number)])
            batches.append(GradiendBatch(_stack(sources), _stack(targets), torch.tensor(labels)))
        return batches, "; ".join(names)

    def _from(self, number: int) -> list[Item]:
        """This item and those that are first visited after it, one for each rank."""
        place = self._visited.index(number)
        return [self._item(n) for n in self._visited[place : place + self.comm.world_size]]

    def _source_and_target(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        item = self._item(number)
        wants_source, wants_target = not self.args.supervised_decoder, not self.args.supervised_encoder
        kinds = self.args.trained_kinds
        if self._whole_items and not self.gradients.has(item, kinds):
            self.gradients.prepare(self._from(number), kinds)
        vectors = self.gradients.get(item, kinds, keep=self.keep or self._whole_items)
        return (
            vectors[self.args.source] if wants_source else None,
            vectors[self.args.target] if wants_target else None,
        )

    def _item(self, number: int) -> Item:
        if number not in self._items:
            self._items[number] = self.rows.item(self.plan.schedule.batches[number])
        return self._items[number]

    def _label(self, number: int) -> float:
        """The class of the token that the encoder sees, as +1, -1 or 0."""
        return self.args.seen_label(float(self.rows.labels[int(self.plan.schedule.batches[number][0])]))

    def _after_step(self, run: SeedRun, step: int, epoch: int) -> None:
        last = step == self.plan.total_steps
        run.state.global_step, run.state.epoch = step, epoch
        logs = step % self.args.logging_steps == 0 or last
        evaluates = self.evaluation is not None and (step % self.args.eval_steps == 0 or last)
        # On the CPU nothing is waited for by reading; elsewhere numbers are read when they are wanted.
        if logs or evaluates or run.unread[-1][1].device.type == "cpu":
            run.read_steps()
        if evaluates:
            self._evaluate(run, step, epoch)
        self._watch_loss(run, step, epoch, evaluates or last)
        if self.args.save_strategy == "steps" and step % self.args.save_steps == 0:
            self._save(run, run.step_path(step))
        if logs:
            self._log(run, step)
        self._fire(run, "on_step_end", metrics=None)
        self._obey(run, step, epoch, evaluated=evaluates)

    def _obey(self, run: SeedRun, step: int, epoch: int, *, evaluated: bool) -> None:
        """What a callback asked for."""
        control = run.control
        if control.should_evaluate and self.evaluation is not None and not evaluated:
            run.read_steps()
            self._evaluate(run, step, epoch)
            evaluated = True
        if control.should_save:
            self._save(run, run.step_path(step))
        control.should_evaluate = control.should_save = control.should_log = False
        if control.should_training_stop and not run.stopped:
            logger.info("seed %d stopped by a callback at step %d", run.seed, step)
            run.stopped = True
            run.read_steps()
            if self.evaluation is not None and not evaluated:
                self._evaluate(run, step, epoch)

    def _encoder(self, run: SeedRun) -> Encoder:
        return Encoder(run.engine.encoding_model(), self.comm, self.args.eval_batch_size)

    def _evaluate(self, run: SeedRun, step: int, epoch: int) -> None:
        """Evaluate, turn the encoding if it is upside down, remember the result, keep the checkpoint if it is best."""
        assert self.evaluation is not None
        with self.clock.spending("evaluation"):
            if self.args.evaluate_fn is not None:
                metrics = as_plain(dict(self.args.evaluate_fn(run.model)))
            else:
                metrics = self.evaluation.metrics(self._encoder(run))
            metrics = self.comm.decide(metrics)
        metrics = {**self._normalise(run, step, metrics), **self._measure_decoder(run)}
        self._remember(run, step, metrics)
        if not self.by_loss:
            self._compete(run, step, epoch, correlation=metrics["correlation"])
        logger.info(
            "seed %d step %d: correlation %.4f, class means %s",
            run.seed,
            step,
            metrics["correlation"],
            ", ".join(f"{k:+.0f}: {v:.3f}" for k, v in sorted(metrics.get("mean_by_class", {}).items())),
        )
        self._track_evaluation(run, step, metrics)
        self._tell_callbacks(run, metrics)

    def _track_evaluation(self, run: SeedRun, step: int, metrics: dict[str, Any]) -> None:
        names = metrics.get("label_value_to_class_name", {})
        means = {f"mean_encoding/{names.get(k, k)}": mean for k, mean in metrics.get("mean_by_class", {}).items()}
        shares = {name: metrics[name] for name in DECODER_FIELDS if metrics.get(name) is not None}
        self.tracking.row(run.seed, step, {"correlation": metrics["correlation"], **shares, **means})

    def _measure_decoder(self, run: SeedRun) -> dict[str, float | None]:
        if self.held_out is None:
            return {}
        with self.clock.spending("evaluation"):
            return self.held_out.measure(run.engine.weights())

    def _remember_decoder(self, run: SeedRun, step: int) -> None:
        """Where the encoder is not evaluated, or not trained: once, at the end."""
        shares = self._measure_decoder(run)
        keep_series(run, step, shares)
        if shares:
            self.tracking.row(run.seed, step, {n: shares[n] for n in DECODER_FIELDS if shares[n] is not None})

    def _tell_callbacks(self, run: SeedRun, metrics: dict[str, Any]) -> None:
        """Callbacks compare with the best value before this one; only then is it updated."""
        values = {f"eval_{name}": value for name, value in metrics.items()}
        if run.losses:
            values["eval_loss"] = self._recent_loss(run)
        self._fire(run, "on_evaluate", metrics=values)
        run.state.best_metric = run.best.loss if self.by_loss else run.best.correlation

    def _recent_loss(self, run: SeedRun) -> float:
        recent = run.losses[-self.args.eval_steps :]
        return sum(recent) / len(recent)

    def _normalise(self, run: SeedRun, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        behaviour = self.args.behaviour
        upside_down = metrics["correlation"] < behaviour.flip_below
        model = run.model.gradiend
        can_turn = model.latent_dim == 1 and (
            behaviour.flip_decoder_bias or model.activation_encoder in ODD_ACTIVATIONS
        )
        if not (self.args.normalize_gradiend and upside_down and can_turn):
            return metrics
        logger.info("seed %d step %d: encoding turned, correlation was %.4f", run.seed, step, metrics["correlation"])
        run.engine.flip(with_decoder_bias=behaviour.flip_decoder_bias)
        return flip(metrics)

    def _remember(self, run: SeedRun, step: int, metrics: dict[str, Any]) -> None:
        run.stats["global_step"] = step
        run.stats["correlation"] = metrics["correlation"]
        run.stats["scores"][step] = metrics["correlation"]
        keep_series(run, step, {name: value for name, value in metrics.items() if name != "correlation"})

    def _compete(self, run: SeedRun, step: int, epoch: int, *, correlation: float) -> None:
        if step == 0 and not (self.args.behaviour.step_zero_competes or self.args.starts_trained):
            return
        score = abs(correlation)
        if self.args.keeps_best and not self._is_better(run, step, score):
            return  # without checkpoints the last model is the one that stays
        run.best = Best(score, correlation=correlation, step=step, epoch=epoch, saved=run.best.saved)
        self._save_best(run)

    def _is_better(self, run: SeedRun, step: int, score: float) -> bool:
        """The larger correlation; while a closed form is refined, the smaller held-out loss among almost equal ones,
        and nothing whose held-out loss is larger than it was at the start."""
        best = run.best
        losses = run.stats.get("held_out_loss", {})
        if best.score is None or not (self.args.starts_trained and self.args.refines and 0 in losses):
            return best.score is None or score > best.score
        highest = max(abs(found) for found in run.stats["scores"].values() if found == found)
        if losses[step] > losses[0] or score < highest - SAME_CORRELATION:
            return False  # not below the last best alone: many small losses would add up
        return bool(score > best.score + SAME_CORRELATION or losses[step] < losses[best.step])

    def _watch_loss(self, run: SeedRun, step: int, epoch: int, boundary: bool) -> None:
        """The best checkpoint where there is no correlation to go by."""
        if self.by_loss and (boundary or self.args.behaviour.step_zero_competes):
            # Single losses jump with their items: away from the reference, the mean since the last look decides.
            loss = run.losses[-1] if self.args.behaviour.step_zero_competes else self._recent_loss(run)
            if run.best.score is None or -loss > run.best.score:
                run.best = Best(-loss, loss=loss, step=step, epoch=epoch, saved=run.best.saved)
                self._save_best(run)
        elif self.evaluation is None and step == 1 and self.args.behaviour.step_zero_competes:
            # Without a score the reference has -1.0: at step 0 if it tried to evaluate, else from the first step on.
            run.best = Best(1.0, correlation=-1.0, step=0 if self.args.do_eval else 1, epoch=0)
            if run.best.step:
                self._save_best(run)

    def _close_form(self, run: SeedRun) -> None:
        """A closed form that took no step has no loss of training to go by: that of its own items."""
        if self.by_loss and run.best.score is None and self.args.starts_trained and not run.losses:
            loss = run.stats["spectral"]["loss"]
            run.best = Best(None if loss is None else -loss, loss=loss, step=0, epoch=0)

    def _save_best(self, run: SeedRun) -> None:
        if not self.args.keeps_best or (run.best.step == 0 and not self.args.starts_trained):
            return
        self._save(run, run.best_path)
        run.best.saved = True

    def _save(self, run: SeedRun, path: Path) -> None:
        with self.clock.spending("save"):
            model = run.model.over(run.engine.weights())
            model.save_pretrained(path, training=self.record(run), with_tokenizer=False, comm=self.comm)

    def _log(self, run: SeedRun, step: int) -> None:
        recent = run.losses[-self.args.logging_steps :]
        logs = {
            "loss": sum(recent) / len(recent),
            "grad_norm": run.grad_norms[-1],
            "learning_rate": run.learning_rates[-1],
            "encoder_norm": run.stats["encoder_norms"][step],
            "decoder_norm": run.stats["decoder_norms"][step],
        }
        speed = self._look_at_speed(step)
        logs["gradients_per_second"] = speed["gradients_per_second"]
        run.state.log_history.append({**logs, "step": step})
        logger.info(
            "seed %d step %d/%d: %s",
            run.seed,
            step,
            self.plan.total_steps,
            ", ".join(f"{name} {value:.4g}" for name, value in logs.items()),
        )
        self.tracking.row(run.seed, step, {**logs, **speed})
        self._look_after(run, step, speed)
        self._fire(run, "on_log", logs=logs)

    def _seconds(self) -> dict[str, float]:
        return {"total": self.clock.total(), **self.clock.sections()}

    def _look_at_speed(self, step: int) -> dict[str, float]:
        """Means per step since the last look, and the fullest rank's memory; one look serves all seeds of a step."""
        if self._speed[0] == step:
            return self._speed[1]
        last_step, last_rows, before = self._since
        now = self._seconds()
        steps = max(1, step - last_step)
        spent = {name: (now[name] - before[name]) / steps for name in now}
        total = max(spent.pop("total"), 1e-9)
        rows = (self._num_rows - last_rows) / steps
        device = self.gradients.base.device
        utilisation = gpu_utilisation(device)
        memory, idle = self.comm.largest(peak_memory(device) / 2**30, 100.0 - (utilisation or 0.0))
        found = {
            "step_seconds": total,
            **{f"seconds/{name}": seconds for name, seconds in spent.items()},
            "gradients_per_second": self.plan.items_per_batch * self.plan.batches_per_step / total,
            "rows_per_second": rows / total,
            "memory_gib": memory,
        }
        if utilisation is not None:
            found["gpu_utilisation"] = 100.0 - idle  # of the least busy one
        self._since, self._speed = (step, self._num_rows, now), (step, found)
        return found

    def _look_after(self, run: SeedRun, step: int, speed: dict[str, float]) -> None:
        """Tell each kind of ill health once, with its remedy."""
        if "gpu_utilisation" in speed:
            run.utilisation.append(speed["gpu_utilisation"])
        history = History(
            run.losses,
            run.grad_norms,
            run.learning_rates,
            run.stats["scores"],
            self.plan.total_steps,
            window=self.args.logging_steps,
            threshold=self.args.convergent_score_threshold if not self.by_loss else None,
            utilisation=run.utilisation,
        )
        for signal in signals(history):
            if signal.kind not in run.alerts:
                run.alerts.append(signal.kind)
                logger.warning("seed %d step %d: %s", run.seed, step, signal.text)
                self.tracking.alert(run.seed, step, signal.kind, signal.text, len(run.alerts))

    def _begin(self, run: SeedRun) -> None:
        run.state.is_world_process_zero = run.state.is_local_process_zero = self.comm.is_first
        run.state.max_steps = self.plan.total_steps
        run.state.num_train_epochs = self.plan.num_epochs
        self._fire(run, "on_train_begin")

    def _turn_epoch(self, ended: int, begun: int | None) -> None:
        for run in self.runs:
            if ended >= 0 and run.state.epoch == ended:
                self._fire(run, "on_epoch_end")
                if not self.args.save_only_best and not self.args.delete_models and self.plan.num_epochs > 1:
                    run.read_steps()
                    self._save(run, run.epoch_path(ended))
            if begun is not None and not run.stopped:
                self._fire(run, "on_epoch_begin")

    def _fire(self, run: SeedRun, event: str, **values: Any) -> None:
        for callback in run.callbacks:
            getattr(callback, event)(self.args, run.state, run.control, model=run.model, **values)

    def record(self, run: SeedRun) -> dict[str, Any]:
        """What training.json says about a run so far."""
        stats = {"global_step": len(run.losses), **run.stats}
        stats["grad_norms"] = dict(enumerate(run.grad_norms, 1))
        stats["learning_rates"] = dict(enumerate(run.learning_rates, 1))
        return {
            "training_stats": stats,
            "best_score_checkpoint": run.best.as_dict(by_loss=self.by_loss),
            "training_args": {**self.args.to_dict(), "seed": self.args.seed},
            "time": self.clock.as_dict(),
            "losses": list(run.losses),
            "seed": run.seed,
        }


def keeps_whole_items(
    args: TrainingArguments,
    plan: Plan,
    gradients: GradientSource,
    evaluation: EncoderEvaluation | None,
    held_out: HeldOut | None,
) -> bool:
    """Will all gradients of the run be kept, and is any used twice? Then each rank computes whole items.

    Not decided item by item: an item whose rows are split over the ranks has the same gradient up to the order of its
    sums, and a run that goes on after a kill must compute it in the way that it was computed before.
    """
    twice = args.max_seeds > 1 or args.looks_at_items or plan.visits_items_again()
    count = len(args.trained_kinds) * len(plan.visited())
    if evaluation is not None:
        count += len(evaluation.unique)
    if held_out is not None:
        count += held_out.num_vectors
    if args.looks_at_items:
        count += len(args.trained_kinds) * args.spectral_items * args.max_seeds
    needed = 4 * gradients.base.largest_slices * count
    return twice and gradients.base.in_rounds and needed <= gradients.store.budget_bytes


def _stack(vectors: list[Tensor | None]) -> Tensor | None:
    present = [vector for vector in vectors if vector is not None]
    if not present:
        return None
    return present[0].unsqueeze(0) if len(present) == 1 else torch.stack(present)
