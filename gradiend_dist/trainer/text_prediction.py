"""TextPredictionTrainer: the public object. It learns one feature of one base model and keeps the result."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.config.mapping import from_mapping
from gradiend_dist.config.pruning import PostPruneConfig, PrePruneConfig
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.data.table import FeatureData
from gradiend_dist.distributed.devices import placement_of
from gradiend_dist.distributed.interrupt import Interrupt
from gradiend_dist.engines.optimizer import import_bitsandbytes
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.rewritten import RewriteRequest, chosen_target, rewritten_model, saved_delta
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.report.plots import check_format
from gradiend_dist.rewriting.card import as_dtype, check_output, check_saving
from gradiend_dist.storage import provenance
from gradiend_dist.storage.fingerprint import reusable, training_fingerprint
from gradiend_dist.storage.model_dir import check_replaceable
from gradiend_dist.storage.records import find_training
from gradiend_dist.storage.run_lock import RunLock
from gradiend_dist.trainer.evaluations import Evaluations
from gradiend_dist.training import seeds
from gradiend_dist.training.experiment import joined_arguments
from gradiend_dist.training.pruning import post_prune
from gradiend_dist.training.seed_training import SeedTraining

logger = logging.getLogger(__name__)


class TextPredictionTrainer(Evaluations):
    """Trains GRADIEND models for one feature of a text-prediction model.

    `model` is a path or hub id of a base model, a saved GRADIEND model, or a `ModelWithGradiend`; the feature is given
    by `data` and `target_classes`, or by a `TextPredictionConfig`; the rest are its fields by name.

    All ranks make the trainer and call its methods together, unless a method says otherwise.
    """

    def __init__(
        self,
        model: str | Path | ModelWithGradiend,
        run_id: str | None = None,
        data: Any = None,
        target_classes: Sequence[str] | None = None,
        *,
        config: TextPredictionConfig | None = None,
        args: TrainingArguments | None = None,
        training_args: TrainingArguments | None = None,
        **fields: Any,
    ) -> None:
        require(args is None or training_args is None, "args and training_args are the same argument: pass only one.")
        values = {"run_id": run_id, "data": data, "target_classes": list(target_classes) if target_classes else None}
        values = {name: value for name, value in {**values, **fields}.items() if value is not None or name in fields}
        if config is None:
            config = from_mapping(TextPredictionConfig, values, "TextPredictionTrainer")
        elif values:
            config = dataclasses.replace(config, **values)
        super().__init__(model, *joined_arguments(args or training_args or TrainingArguments(), config))
        self.interrupt = Interrupt()
        """Requests to stop; `gradiend_dist.train` lets it listen to signals."""
        self.plot_path: Path | None = None
        """Of the training that was just made, where it was drawn."""

    def train(
        self,
        output_dir: str | None = None,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        resume_from_checkpoint: bool | str | Path | None = None,
        **overrides: Any,
    ) -> TextPredictionTrainer:
        """Train up to `max_seeds` seeds, promote the best to `model_path`, and write reports; returns self.

        With `experiment_dir` the convergence is plotted there as well, where matplotlib is installed. An unfinished run
        in `experiment_dir` goes on by itself: `resume_from_checkpoint` is Hugging Face's name for `resume`.
        All ranks call this.
        """
        if resume_from_checkpoint is not None:
            overrides["resume"] = self._resumes(resume_from_checkpoint)
        if output_dir is not None:
            overrides["output_dir"] = output_dir
        if overrides:
            self._override(overrides)
        if not self._is_checked:
            self.check()
        self._is_checked, self._trained, self.plot_path = False, None, None  # files may change until the next training
        wanted = training_fingerprint(self.args, self.data.fingerprint(), self.base_model_name)
        path = self.model_path
        if self.comm.first(f"looking at {path}", lambda: reusable(path, wanted, self.args.reuses)):
            logger.info("%s is reused: it was trained with the same arguments, model and data", path)
            self._has_trained = True
            return self
        self._make_temporary_directory()
        with self._owning_the_directory():
            training = SeedTraining(self.args, self.inputs, self.places, wanted, callbacks, self.interrupt, self._facts)
            results = training.run()
        if self.args.only_seed is None:
            self._has_trained = True
            if self.experiment_dir is not None and self.comm.decide(_can_draw()):
                self.plot_path = self.plot_training_convergence(show=False)
            seeds.check_convergence(results, self.args)
        return self

    def _resumes(self, checkpoint: bool | str | Path) -> bool:
        """A path has to be where this run's state is: it is the run that goes on, not a model that is trained more."""
        if isinstance(checkpoint, bool):
            return checkpoint
        place = Path(checkpoint).resolve()
        own = [path.resolve() for path in (self._root, self.places.state(self.args)) if path is not None]
        require(
            place in own or any(parent in own for parent in place.parents),
            f"resume_from_checkpoint={str(checkpoint)!r} is not in experiment_dir={self._root}: pass that directory as "
            "experiment_dir, and resume_from_checkpoint=True.",
        )
        return True

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """The current model with its tokenizer, in `output_dir` or where the run's model is. All ranks call this."""
        path = self.model_path if output_dir is None else Path(output_dir)
        saved_at = self.saved_at()
        require(
            saved_at is not None or self._has_trained or isinstance(self.model, ModelWithGradiend),
            "save_model() finds no trained model: call train() first.",
        )
        if self._trained is not None or saved_at is None or path.resolve() != saved_at.resolve():
            model = self.get_model()
            record = (
                None if saved_at is None else self.comm.first("reading the record", lambda: find_training(saved_at))
            )
            model.save_pretrained(path, training=record or None, comm=self.comm)
        return path

    @contextlib.contextmanager
    def _owning_the_directory(self) -> Iterator[None]:
        """All ranks call this; rank 0 owns it for all. A temporary directory is nobody else's."""
        if self.experiment_dir is None:
            yield
            return
        lock = RunLock(self.experiment_dir, self.args.only_seed)
        self.comm.first(f"taking {self.experiment_dir}", lock.take)
        try:
            yield
        finally:
            if self.comm.is_first:
                lock.release()

    def _make_temporary_directory(self) -> None:
        """All ranks call this. The directory is for this user alone, as results may be private."""
        root, given = self._temporary, (self.args.output_dir, self.args.seed_runs_dir)
        if root is None or self.experiment_dir is not None or None not in given:
            return
        self.comm.first("making a temporary directory", lambda: root.mkdir(mode=0o700, exist_ok=True))
        logger.warning("experiment_dir is not set: results go to %s", root)

    def _facts(self) -> dict[str, Any]:
        """What trackers show of the run besides its numbers. No communication."""
        feature = {item.name: getattr(self.config, item.name) for item in dataclasses.fields(self.config)}
        plain = {name: value for name, value in feature.items() if not isinstance(value, pd.DataFrame | dict)}
        return {
            **plain,
            **self.args.to_dict(),
            "model": self.base_model_name,
            "target_classes": list(self.target_classes),
            "versions": provenance.versions(),
            "git": provenance.git_hash(),
            "hardware": provenance.hardware(),
            **provenance.job(),
        }

    def check(self) -> None:
        """Raise for all that is wrong and can be known before a weight is loaded; nothing is written.

        No communication.
        """
        check_before_training(self.args, self.data)
        if self.experiment_dir is not None and _can_draw():
            check_format(self.config.img_format)
        _ = self.training_rows  # too few rows for an item are reported here
        if self.experiment_dir is None and None in (self.args.output_dir, self.args.seed_runs_dir):
            self._is_checked = True
            return  # a new temporary directory will hold nothing yet
        seed_paths = [self.places.seed(self.args.first_seed + i, self.args) for i in range(self.args.max_seeds)]
        for path in (self.model_path, *seed_paths):
            check_replaceable(path)
        self._is_checked = True

    def _override(self, overrides: dict[str, Any]) -> None:
        names = [item.name for item in dataclasses.fields(self.args)]
        for name in overrides:
            require(name in names, f"train(): {name} is not a known argument: see TrainingArguments.")
        # The two spellings of an argument hold the same value by now: overriding one must not conflict with the other.
        twins = {
            "train_batch_size": "base_gradient_batch_size",
            "convergent_metric": "convergence_metric",
            "convergent_score_threshold": "convergence_threshold",
        }
        for one, other in [*twins.items(), *((b, a) for a, b in twins.items())]:
            if one in overrides:
                overrides.setdefault(other, overrides[one])
        self.args = dataclasses.replace(self.args, **overrides)
        self._choose_temporary_directory()
        self._forget()

    def rewrite_base_model(
        self,
        decoder_results: dict[str, Any] | None = None,
        target_class: str | Sequence[str] | None = None,
        increase_target_probabilities: bool = True,
        output_dir: str | Path | None = None,
        *,
        dtype: str | None = None,
        max_shard_size: str | int = "5GB",
        save_as: str = "model",
        **step: Any,
    ) -> Any:
        """The base model, changed to make a class more probable (or less), by the selected or a given step.

        The step is that of `decoder_results`, by default of `evaluate_decoder` (whose kept points are used), unless
        `learning_rate` is given; `feature_factor` then defaults to the one that pushes the right way, `part` to the
        decoder's vector and `scaling` to plain. `max_harm`, `split`, `max_size` and `neutral_blanks` are for the
        evaluation that is made. A step that it calls of no use is not taken, unless with `force`. With `output_dir` the
        changed model is saved there, in the dtype of the base model's files or in `dtype`, with tokenizer and model
        card; on several ranks, rank 0 does that and returns the model, the others None, as does a run that offloads,
        which has no room for a second model. `save_as="delta"` saves the change alone, and returns it as a `Delta`. A
        list of classes gives a list of models, saved in directories of their names. All ranks call this.
        """
        if not isinstance(target_class, str) and target_class is not None:
            return [
                self.rewrite_base_model(
                    decoder_results,
                    name,
                    increase_target_probabilities,
                    None if output_dir is None else Path(output_dir) / name,
                    dtype=dtype,
                    max_shard_size=max_shard_size,
                    save_as=save_as,
                    **step,
                )
                for name in self.classes_asked_for(target_class)
            ]
        known = {item.name for item in dataclasses.fields(RewriteRequest)} - {"target_class", "strengthen"}
        unknown = ", ".join(sorted(step.keys() - known))
        require(not unknown, f"rewrite_base_model(): {unknown} is not a known argument.")
        asked = RewriteRequest(target_class=target_class, strengthen=increase_target_probabilities, **step)
        require(
            target_class is not None or asked.feature_factor is not None,
            f"target_class is missing: choose {' or '.join(self.target_classes)}.",
        )
        as_dtype(dtype)
        check_saving(save_as, output_dir, dtype)
        if output_dir is not None:
            require(
                Path(output_dir).resolve() != Path(self.base_model_name).resolve(),
                f"output_dir={str(output_dir)!r} is the base model itself: pass another directory.",
            )
            self.comm.first(f"looking at {output_dir}", lambda: check_output(output_dir, dtype, max_shard_size))
        target = chosen_target(self, asked, decoder_results)
        if save_as == "delta":
            assert output_dir is not None, "checked above"
            return saved_delta(self, target, output_dir)
        return rewritten_model(self, target, output_dir, dtype=dtype, max_shard_size=max_shard_size)

    def to(self, device: Any) -> TextPredictionTrainer:
        """The current model, with its base model, to a device, to encode and rewrite there; returns self.

        Evaluations and trainings compute on the device of the base model, and keep their own vectors where the
        arguments say. No communication.
        """
        self.get_model().to(device)
        self.session.forget_gradients()
        self._inputs = None
        return self

    def cpu(self) -> TextPredictionTrainer:
        return self.to("cpu")

    def cuda(self, device: int | str | None = None) -> TextPredictionTrainer:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def pre_prune(
        self, pre_cfg: PrePruneConfig | None = None, *, inplace: bool = True
    ) -> TextPredictionTrainer | ModelWithGradiend:
        """Prune the untrained model now, in memory: the next `train()` uses the pruned space. Returns self, or, with
        `inplace=False`, a pruned model and leaves the trainer as it is.

        All ranks call this.
        """
        config = pre_cfg or self.args.pre_prune_config
        if config is None:
            raise UserError("pre_prune() has no configuration: pass one, or set pre_prune_config.")
        inputs = self.inputs
        by_items = inputs.prunes_by_items(config)
        space = inputs.pruned_by_items(config) if by_items else inputs.pre_pruned(config, self.args.data_seed)
        model = self.session.new_model(space, self.args.first_seed)
        if not inplace:
            return model
        self._work_on(model)
        self.session.space = space
        self.args = dataclasses.replace(self.args, pre_prune_config=None)
        self.session.args = self.args
        return self

    def post_prune(self, post_cfg: PostPruneConfig | None = None) -> TextPredictionTrainer:
        """Prune the trained model now, in memory; returns self. What was saved stays as it is: `save_pretrained` of
        `get_model()` saves the pruned one.

        All ranks call this.
        """
        config = post_cfg or self.args.post_prune_config
        if config is None:
            raise UserError("post_prune() has no configuration: pass one, or set post_prune_config.")
        model = self._trained
        if model is None:
            if self.saved_at() is None:
                raise UserError(f"post_prune() finds no trained model at {self.model_path}: call train() first.")
            model = self.get_model()
        post_prune(model, config, self.comm)
        self._work_on(model)
        return self

    def _work_on(self, model: ModelWithGradiend) -> None:
        """Evaluations and the next training are about this model, and not about one that was saved."""
        self.model = self._trained = model
        self._has_trained = False


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_before_training(args: TrainingArguments, data: FeatureData) -> None:
    """What can be known before any weight is loaded."""
    splits = ", ".join(data.splits())
    require("train" in data.splits(), f"The data has no rows of the split train, it has {splits}: name one train.")
    if args.evaluates and args.evaluate_fn is None and data.evaluation_split() == "train":
        raise UserError(
            f"do_eval needs rows of the split validation or test and the data has {splits}: add them, set "
            "split_col=None for a random split, or pass do_eval=False."
        )
    placement_of(args)
    if args.optim == "adamw_8bit":
        import_bitsandbytes()
