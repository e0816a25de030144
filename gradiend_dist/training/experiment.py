"""An experiment: where its results are, and what it is made of (data, base model, trained model), each loaded once."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import require
from gradiend_dist.data.config import TextPredictionConfig
from gradiend_dist.data.table import FeatureData, load_feature_data
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.launch import launched
from gradiend_dist.evaluation.selection import strengthening_factor
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.session import Session
from gradiend_dist.storage.layout import MODEL_DIR, SEEDS_DIR
from gradiend_dist.storage.model_dir import base_model_of, is_model_directory, read_context
from gradiend_dist.training.inputs import TrainingInputs, TrainingRows
from gradiend_dist.training.places import Places


class ExperimentPaths:
    """Paths are properties that communicate with nobody: one rank alone may ask for them."""

    def __init__(self, args: TrainingArguments, config: TextPredictionConfig) -> None:
        """All ranks call this: without `experiment_dir` they agree on a temporary directory here."""
        self.args, self.config = args, config
        self._temporary: Path | None = None
        self._choose_temporary_directory()

    def _choose_temporary_directory(self) -> None:
        """All ranks call this. The directory is made when there is something to write."""
        if self.args.experiment_dir is None and self._temporary is None:
            name = f"gradiend_dist_{secrets.token_hex(8)}"
            self._temporary = self.comm.decide(Path(tempfile.gettempdir()) / name)

    @property
    def comm(self) -> Comm:
        """The ranks that were launched; a single process is one of one. The first use joins them: that of all ranks."""
        return launched(float(self.args.ddp_timeout)).comm

    @property
    def training_args(self) -> TrainingArguments:
        return self.args

    @property
    def run_id(self) -> str | None:
        return self.config.run_id

    @property
    def experiment_dir(self) -> Path | None:
        if self.args.experiment_dir is None:
            return None
        root = Path(self.args.experiment_dir)
        return root / self.run_id if self.run_id else root

    @property
    def _root(self) -> Path:
        """The experiment's directory; a temporary one where none was given."""
        root = self.experiment_dir or self._temporary
        assert root is not None, "chosen by the constructor"
        return root

    @property
    def model_path(self) -> Path:
        """Where the promoted model is, or will be."""
        return Path(self.args.output_dir) if self.args.output_dir is not None else self._root / MODEL_DIR

    @property
    def seed_runs_dir(self) -> Path:
        return Path(self.args.seed_runs_dir) if self.args.seed_runs_dir else self._root / SEEDS_DIR

    @property
    def places(self) -> Places:
        return Places(self.model_path, self.seed_runs_dir, self.experiment_dir)


class Experiment(ExperimentPaths):
    """One feature of one base model."""

    def __init__(
        self, model: str | Path | ModelWithGradiend, args: TrainingArguments, config: TextPredictionConfig
    ) -> None:
        super().__init__(args, config)
        self.model = model if isinstance(model, ModelWithGradiend) else str(model)
        self._trained: ModelWithGradiend | None = None
        self._has_trained = False
        self._forget()

    def _forget(self) -> None:
        """What was loaded is loaded again: arguments have changed."""
        self._is_checked = False
        self._data: FeatureData | None = None
        self._session: Session | None = None
        self._inputs: TrainingInputs | None = None
        self._training_rows: TrainingRows | None = None

    @property
    def base_model_name(self) -> str:
        if isinstance(self.model, ModelWithGradiend):
            return self.model.name_or_path
        return base_model_of(self.model) if is_model_directory(self.model) else self.model

    @property
    def data(self) -> FeatureData:
        """The unified table of the feature, read once."""
        if self._data is None:
            self._data = load_feature_data(
                self.config,
                seed=self.args.data_seed,
                add_identity_for_other_classes=self.args.add_identity_for_other_classes,
                reference=self.args.behaviour.reference_data,
            )
        return self._data

    @property
    def target_classes(self) -> tuple[str, str]:
        return self.data.target_classes

    @property
    def pair(self) -> tuple[str, str]:
        return self.data.target_classes

    @property
    def all_classes(self) -> tuple[str, ...]:
        return self.data.all_classes

    @property
    def session(self) -> Session:
        """Base model, tokenizer and gradients, loaded once. All ranks ask for it first together."""
        if self._session is None:
            model = self.model
            if isinstance(model, str) and is_model_directory(model):
                model = ModelWithGradiend.from_pretrained(model)
            self._session = Session.open(self.args, self.data, model, self._root)
        return self._session

    @property
    def training_rows(self) -> TrainingRows:
        """The rows of training and their order, made once. No communication."""
        if self._training_rows is None:
            self._training_rows = TrainingRows.of(self.args, self.data)
        return self._training_rows

    @property
    def inputs(self) -> TrainingInputs:
        """What training takes from the session."""
        if self._inputs is None:
            self._inputs = TrainingInputs(self.session, self.training_rows)
        return self._inputs


class ModelOfExperiment(Experiment):
    """The trained model of an experiment, wherever it is."""

    @property
    def loaded_model(self) -> ModelWithGradiend | None:
        """The trained model, if it was loaded. No communication."""
        return self._trained

    def get_model(self, use_cache: bool = True, *, load_directory: str | Path | None = None) -> ModelWithGradiend:
        """The trained model (loaded once, or again without `use_cache`), or a fresh one where nothing was trained yet;
        of `load_directory`, a saved one, which the trainer does not keep. All ranks call this."""
        if load_directory is not None:
            return self.load_model(load_directory)
        if self._trained is None or not use_cache:
            self._trained = self._find_model()
        return self._trained

    def unload_model(self) -> None:
        """Let go of the trained model; it is loaded again when it is asked for. A model that was never saved stays.

        All ranks call this.
        """
        if self._trained is not self.model and self.saved_at() is not None:
            self._trained = None

    def _find_model(self) -> ModelWithGradiend:
        """All ranks call this."""
        if isinstance(self.model, ModelWithGradiend) and not self._has_trained:
            return self.model
        for path in (self.model_path, self.model):
            if isinstance(path, str | Path) and is_model_directory(path):
                return self.session.load(Path(path))
        return self.session.new_model(self.session.space, self.args.first_seed)

    def load_model(self, load_directory: str | Path) -> ModelWithGradiend:
        """A saved model over the trainer's base model. All ranks call this."""
        return self.session.load(Path(load_directory))

    def saved_at(self) -> Path | None:
        """The directory that the current model is read from, if it is: as rank 0 sees it. All ranks call this."""
        if isinstance(self.model, ModelWithGradiend) and not self._has_trained:
            return None
        places = [Path(path) for path in (self.model_path, self.model) if isinstance(path, str | Path)]
        return self.comm.decide(next((path for path in places if is_model_directory(path)), None))

    def strengthening_factors(self) -> dict[str, float]:
        """The feature factor that makes each target class more probable. All ranks call this."""
        first, second = self.data.target_classes
        saved_at = self.saved_at()
        if self._trained is None and saved_at is not None:  # no weight needs to be loaded for it
            context = self.comm.first(f"reading {saved_at}", lambda: read_context(saved_at))
            source, saved = context["source"], context.get("feature_class_encoding_direction", {})
        else:
            model = self.get_model()
            source, saved = model.source, model.feature_class_encoding_direction
        directions = {first: 1, second: -1, **saved}
        return {name: strengthening_factor(directions, source, name) for name in (first, second)}

    def classes_asked_for(self, target_class: str | Sequence[str] | None) -> list[str]:
        """Both target classes, or those that are named. No communication."""
        if target_class is None:
            return list(self.target_classes)
        wanted = [target_class] if isinstance(target_class, str) else list(target_class)
        for name in wanted:
            require(
                name in self.target_classes,
                f"target_class={name!r} is not a target class: choose {' or '.join(self.target_classes)}.",
            )
        require(len(wanted) > 0, f"target_class is empty: choose {' or '.join(self.target_classes)}.")
        return wanted


def joined_arguments(
    args: TrainingArguments, config: TextPredictionConfig
) -> tuple[TrainingArguments, TextPredictionConfig]:
    """Arguments that are documented in both places become one; what has them already is not made again."""
    joined = {}
    for name, default in (
        ("class_merge_map", None),
        ("class_merge_transition_groups", None),
        ("mask_placeholder", "[MASK]"),
    ):
        ours, theirs = getattr(args, name), getattr(config, name)
        require(
            default in (ours, theirs) or ours == theirs,
            f"{name} is {ours!r} in TrainingArguments and {theirs!r} in the configuration: pass it once.",
        )
        joined[name] = theirs if ours == default else ours
    if args.mask_placeholder != joined["mask_placeholder"]:
        args = dataclasses.replace(args, mask_placeholder=joined["mask_placeholder"])
    if any(getattr(config, name) != value for name, value in joined.items()):
        config = dataclasses.replace(config, **joined)
    return args, config
