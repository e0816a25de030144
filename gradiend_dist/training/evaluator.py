"""Evaluation of a seed while it trains: the encoder's correlation, and the share that the decoder explains."""

from __future__ import annotations

import logging
from typing import Any

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.clock import Clock
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.evaluation.encoder import Encoder, EncoderEvaluation
from gradiend_dist.evaluation.explained import HeldOut
from gradiend_dist.evaluation.metrics import flip
from gradiend_dist.model.gradiend import ODD_ACTIVATIONS
from gradiend_dist.tracking.tracking import Tracking
from gradiend_dist.training.checkpoints import Checkpoints
from gradiend_dist.training.history import SeedRun
from gradiend_dist.training.plain_values import as_plain

logger = logging.getLogger(__name__)

# Of the numbers that the decoder is measured by, those that are tracked.
DECODER_FIELDS = ("explained", "explained_centred", "explained_limit", "held_out_loss")


class SeedEvaluator:
    """All ranks call every method."""

    def __init__(
        self,
        args: TrainingArguments,
        evaluation: EncoderEvaluation | None,
        held_out: HeldOut | None,
        checkpoints: Checkpoints,
        tracking: Tracking,
        comm: Comm,
        clock: Clock,
    ) -> None:
        self.args, self.evaluation, self.held_out = args, evaluation, held_out
        self.checkpoints, self.tracking, self.comm, self.clock = checkpoints, tracking, comm, clock

    @property
    def is_on(self) -> bool:
        """Is the encoder evaluated in this training?"""
        return self.evaluation is not None

    def start(self, runs: list[SeedRun], steps_done: int) -> None:
        """Evaluate the untrained seeds; or, in a run that goes on, compute the evaluation's gradients first, as then.

        The store keeps what comes first: a run that goes on must keep the same gradients.
        """
        if self.evaluation is None:
            return
        if not steps_done:
            for run in runs:
                self.evaluate(run, step=0, epoch=0)
        elif self.args.evaluate_fn is None:
            self.evaluation.encode(self._encoder(runs[0]))
            self._measure_decoder(runs[0])

    def evaluate(self, run: SeedRun, step: int, epoch: int) -> None:
        """Evaluate, flip the encoding if its sign is wrong, record the result, save the checkpoint if it is best."""
        assert self.evaluation is not None, "this training is not evaluated"
        with self.clock.spending("evaluation"):
            if self.args.evaluate_fn is not None:
                metrics = as_plain(dict(self.args.evaluate_fn(run.model)))
            else:
                metrics = self.evaluation.metrics(self._encoder(run))
            metrics = self.comm.decide(metrics)
        metrics = {**self._normalise(run, step, metrics), **self._measure_decoder(run)}
        self._record(run, step, metrics)
        self.checkpoints.offer_correlation(run, step, epoch, metrics["correlation"])
        logger.info(
            "seed %d step %d: correlation %.4f, class means %s",
            run.seed,
            step,
            metrics["correlation"],
            ", ".join(f"{k:+.0f}: {v:.3f}" for k, v in sorted(metrics.get("mean_by_class", {}).items())),
        )
        names = metrics.get("label_value_to_class_name", {})
        means = {f"mean_encoding/{names.get(k, k)}": mean for k, mean in metrics.get("mean_by_class", {}).items()}
        row = {"correlation": metrics["correlation"], **_tracked(metrics), **means}
        self.tracking.row(run.seed, step, row)
        self._call_callbacks(run, metrics)

    def measure_decoder_at_end(self, run: SeedRun) -> None:
        """Where the encoder is not evaluated, or not trained: once."""
        if self.evaluation is None:
            step, shares = len(run.losses), self._measure_decoder(run)
            run.add_metrics(step, shares)
            if shares:
                self.tracking.row(run.seed, step, _tracked(shares))

    def _encoder(self, run: SeedRun) -> Encoder:
        return Encoder(run.engine.encoding_model(), self.comm, self.args.eval_batch_size)

    def _measure_decoder(self, run: SeedRun) -> dict[str, float | None]:
        if self.held_out is None:
            return {}
        with self.clock.spending("evaluation"):
            return self.held_out.measure(run.engine.weights())

    def _normalise(self, run: SeedRun, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Flip the latent axis where the first class is encoded as negative; returns the metrics after that."""
        behaviour, model = self.args.behaviour, run.model.gradiend
        wrong_sign = metrics["correlation"] < behaviour.flip_below
        can_flip = model.latent_dim == 1 and (
            behaviour.flip_decoder_bias or model.activation_encoder in ODD_ACTIVATIONS
        )
        if not (self.args.normalize_gradiend and wrong_sign and can_flip):
            return metrics
        logger.info("seed %d step %d: encoding turned, correlation was %.4f", run.seed, step, metrics["correlation"])
        run.engine.flip(with_decoder_bias=behaviour.flip_decoder_bias)
        return flip(metrics)

    def _record(self, run: SeedRun, step: int, metrics: dict[str, Any]) -> None:
        run.stats["global_step"] = step
        run.stats["correlation"] = metrics["correlation"]
        run.stats["scores"][step] = metrics["correlation"]
        run.add_metrics(step, {name: value for name, value in metrics.items() if name != "correlation"})

    def _call_callbacks(self, run: SeedRun, metrics: dict[str, Any]) -> None:
        """Callbacks compare with the best value before this one; only then is it updated."""
        values = {f"eval_{name}": value for name, value in metrics.items()}
        if run.losses:
            values["eval_loss"] = run.recent_loss(self.args.eval_steps)
        run.callbacks.call("on_evaluate", metrics=values)
        run.callbacks.state.best_metric = run.best.loss if self.checkpoints.by_loss else run.best.correlation


def _tracked(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in DECODER_FIELDS if metrics.get(name) is not None}
