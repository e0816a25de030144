"""TextPredictionTrainer: the public object. It learns one feature of one base model and keeps the result."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback

from gradiend_dist import cache, seeds
from gradiend_dist.arguments import PostPruneConfig, PrePruneConfig, TrainingArguments, from_mapping, require
from gradiend_dist.checkpoint import (
    TRAINING,
    base_model_of,
    check_replaceable,
    is_model_directory,
    load_gradiend,
    save_model,
)
from gradiend_dist.data import FeatureData, TextPredictionConfig, load_feature_data
from gradiend_dist.devices import placement_of
from gradiend_dist.engines import StepOptions
from gradiend_dist.engines.optimizer import import_bitsandbytes
from gradiend_dist.engines.placed import PlacedEngine
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.encoder import EncoderEvaluation, encode_items
from gradiend_dist.evaluation.metrics import encoder_metrics, join_encodings, neutral_encoding_rows
from gradiend_dist.evaluation.neutral import neutral_dataset_rows, neutral_training_rows
from gradiend_dist.files import explained, read_json, write_json
from gradiend_dist.gradients import ItemRows
from gradiend_dist.loop import Plan, SeedRun, TrainingLoop, own_copies
from gradiend_dist.model import ModelWithGradiend
from gradiend_dist.schedule import cap_per_group, make_schedule
from gradiend_dist.seeds import SeedResult
from gradiend_dist.space import ParameterSpace
from gradiend_dist.workbench import Workbench

logger = logging.getLogger(__name__)

STATS = "training_stats.json"


class TextPredictionTrainer:
    """Trains GRADIEND models for one feature of a text-prediction model.

    `model` is a path or hub id of a base model, a saved GRADIEND model, or a `ModelWithGradiend`; the feature is given
    by `data` and `target_classes`, or by a `TextPredictionConfig`; the rest are its fields by name.
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
        self.args = args or training_args or TrainingArguments()
        self.model = model if isinstance(model, ModelWithGradiend) else str(model)
        given = {"run_id": run_id, "data": data, "target_classes": list(target_classes) if target_classes else None}
        given = {name: value for name, value in {**given, **fields}.items() if value is not None or name in fields}
        if config is None:
            config = from_mapping(TextPredictionConfig, given, "TextPredictionTrainer")
        elif given:
            config = dataclasses.replace(config, **given)
        self.config = self._joined_config(config)
        self._data: FeatureData | None = None
        self._workbench: Workbench | None = None
        self._trained: ModelWithGradiend | None = None
        self._temporary: Path | None = None

    def _joined_config(self, config: TextPredictionConfig) -> TextPredictionConfig:
        """Arguments that are documented in both places become one."""
        joined = {}
        for name, default in (
            ("class_merge_map", None),
            ("class_merge_transition_groups", None),
            ("mask_placeholder", "[MASK]"),
        ):
            ours, theirs = getattr(self.args, name), getattr(config, name)
            require(
                default in (ours, theirs) or ours == theirs,
                f"{name} is {ours!r} in TrainingArguments and {theirs!r} in the configuration: pass it once.",
            )
            joined[name] = theirs if ours == default else ours
        self.args = dataclasses.replace(self.args, mask_placeholder=joined["mask_placeholder"])
        return dataclasses.replace(config, **joined)

    # --- where things are

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
    def model_path(self) -> Path:
        """Where the promoted model is, or will be."""
        if self.args.output_dir is not None:
            return Path(self.args.output_dir)
        return self._root() / "model"

    def _root(self) -> Path:
        """The experiment's directory; a temporary one where none was given."""
        if self.experiment_dir is not None:
            return self.experiment_dir
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="gradiend_dist_"))
            logger.warning("experiment_dir is not set: results go to %s", self._temporary)
        return self._temporary

    @property
    def seed_runs_dir(self) -> Path:
        return Path(self.args.seed_runs_dir) if self.args.seed_runs_dir else self._root() / "seeds"

    @property
    def base_model_name(self) -> str:
        if isinstance(self.model, ModelWithGradiend):
            return self.model.name_or_path
        return base_model_of(self.model) if is_model_directory(self.model) else self.model

    # --- what is learnt

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
    def workbench(self) -> Workbench:
        """Base model, tokenizer and gradients, loaded once."""
        if self._workbench is None:
            cache_dir = self._root() / "cache" / "gradients" if self.args.use_cached_gradients else None
            model = self.model
            if isinstance(model, str) and is_model_directory(model):
                model = ModelWithGradiend.from_pretrained(model)
            self._workbench = Workbench.open(self.args, self.data, model, cache_dir)
        return self._workbench

    # --- training

    def train(
        self,
        output_dir: str | None = None,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        **overrides: Any,
    ) -> TextPredictionTrainer:
        """Train up to `max_seeds` seeds, promote the best to `model_path`, and write reports; returns self."""
        if output_dir is not None:
            overrides["output_dir"] = output_dir
        if overrides:
            self._override(overrides)
        self.check()
        self._trained = None
        wanted = cache.fingerprint(self.args, self.data.fingerprint(), self.base_model_name)
        if cache.reusable(self.model_path, wanted, self.args.use_cache):
            logger.info("%s is reused: it was trained with the same arguments, model and data", self.model_path)
            return self
        results, early_stop_reason = self._train_seeds(wanted, callbacks)
        self._finish(results, early_stop_reason)
        seeds.check_convergence(results, self.args)
        return self

    def check(self) -> None:
        """Raise for all that is wrong and can be known before a weight is loaded; nothing is written."""
        check_before_training(self.args, self.data)
        seed_paths = [self._seed_path(self.args.first_seed + i) for i in range(self.args.max_seeds)]
        for path in (self.model_path, *seed_paths):
            check_replaceable(path)

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
        self._data = self._workbench = None

    def _train_seeds(
        self, wanted: dict[str, Any], callbacks: Sequence[TrainerCallback]
    ) -> tuple[list[SeedResult], str | None]:
        """Seeds in order, each judged before the next, until enough have converged.

        Seeds that ride on one stream of gradients end together; they are judged in the same order, and those after the
        last needed one are dropped, so that the result does not depend on how the seeds were trained.
        """
        args = self.args
        all_seeds = [args.first_seed + i for i in range(args.max_seeds)]
        cached = [s for s in all_seeds if cache.reusable(self._seed_path(s), wanted, args.use_cache, of_one_seed=True)]
        to_train = [s for s in all_seeds if s not in cached]
        together = self._in_parallel(to_train)
        records: dict[int, dict[str, Any]] = {}
        results: list[SeedResult] = []
        for seed in all_seeds:
            if seed in to_train and seed not in records:
                group = to_train if together else [seed]
                later = [s for s in to_train if s > group[-1]]
                records.update(self._train_group(group, wanted, callbacks, more_follow=bool(later)))
            results.append(self._result(seed, records.get(seed), results))
            logger.info("seed %d: %s (%s)", seed, *_verdict_words(results[-1]))
            reason = seeds.enough(results, args)
            if reason is not None:
                self._drop(s for s in records if s > seed)
                return results, reason if args.max_seeds > 1 else None
        return results, None

    def _in_parallel(self, to_train: list[int]) -> bool:
        """Should all seeds ride on one stream of gradients?

        If every gradient can be kept, training one after another costs no more and may stop early. If not, the base
        model's work would be done once per seed: then together, where memory allows.
        """
        args = self.args
        if args.seeds_in_parallel is False or len(to_train) < 2:
            return False
        differ = args.pre_prune_config is not None and args.pre_prune_config.seed is None
        if args.behaviour.pre_prune_by_row_number and differ:
            require(
                not args.seeds_in_parallel,
                "seeds_in_parallel needs one pruned space for all seeds, but compat draws another for each: "
                "pass pre_prune_config.seed.",
            )
            return False
        if args.seeds_in_parallel:
            return True
        space = self._space(to_train[0])
        fits = self.workbench.seeds_fit_together(space, len(to_train))
        return fits and not self._gradients_fit(space)

    def _gradients_fit(self, space: ParameterSpace) -> bool:
        plan = self._plan()
        kinds = len({self.args.source, self.args.target})
        return 4 * space.size * kinds * len(plan.schedule.batches) <= self.workbench.store_bytes()

    def _plan(self) -> Plan:
        schedule = make_schedule(
            self.workbench.training_rows(),
            self.args.train_batch_size,
            seed=self.args.data_seed,
            reference=self.args.behaviour.reference_data,
        )
        return Plan.of(self.args, schedule)

    def _space(self, seed: int) -> ParameterSpace:
        """The space a seed is trained in: one for all seeds, unless the reference's sampling is asked for."""
        config = self.args.pre_prune_config
        if config is None:
            return self.workbench.space
        draws_anew = self.args.behaviour.pre_prune_by_row_number and config.seed is None
        sample_seed = seed if draws_anew else config.seed if config.seed is not None else self.args.data_seed
        key = (sample_seed, repr(config))
        if self._pruned is None or self._pruned[0] != key:
            self._pruned = (key, self.workbench.pre_pruned(config, sample_seed))
        return self._pruned[1]

    _pruned: tuple[Any, ParameterSpace] | None = None

    def _seed_path(self, seed: int) -> Path:
        return self.seed_runs_dir / f"seed_{seed}" if self.args.max_seeds > 1 else self.model_path

    def _train_group(
        self, group: list[int], wanted: dict[str, Any], callbacks: Sequence[TrainerCallback], *, more_follow: bool
    ) -> dict[int, dict[str, Any]]:
        """Train these seeds on one stream of gradients; their outputs are complete afterwards."""
        bench, args = self.workbench, self.args
        space = self._space(group[0])
        if args.post_prune_config is not None:
            check_mask(args.post_prune_config, space)
        evaluation = None
        if args.evaluates:
            max_size = args.encoder_eval_train_max_size or args.encoder_eval_max_size
            evaluation = bench.evaluation(space, self.data.evaluation_split(), max_size, repeated=True)
        runs = []
        for seed in group:
            model = bench.new_model(space, seed)
            engine = PlacedEngine(model.gradiend, StepOptions.of(args))
            runs.append(SeedRun(seed, model, engine, self._seed_path(seed), own_copies(callbacks)))
        loop = TrainingLoop(
            args,
            runs,
            self._plan(),
            ItemRows(bench.training_rows(), bench.objective),
            bench.gradients(space),
            evaluation,
            more_seeds_follow=more_follow,
        )
        loop.run()
        return {run.seed: self._complete(run, loop, wanted) for run in runs}

    def _complete(self, run: SeedRun, loop: TrainingLoop, wanted: dict[str, Any]) -> dict[str, Any]:
        """Bring a finished run's output into its final form: best or last weights, post-pruned, with its record."""
        record = {**loop.record(run), "cache_fingerprint": {**wanted, "gradiend_input_dim": len(run.model)}}
        verdict = seeds.judge(record, self.args, among_seeds=False)
        record["convergence_info"] = seeds.convergence_info([verdict], self.args, verdict)
        model = run.model
        if self.args.save_only_best and run.best.saved:
            model = self.workbench.wrap(load_gradiend(run.best_path, **self._devices()))
        if self.args.post_prune_config is not None:
            post_prune(model, self.args.post_prune_config)
            record["cache_fingerprint"]["gradiend_input_dim"] = len(model)
        save_model(model, run.output, training=record)
        if self.args.save_only_best and run.best.saved:  # only now: a full disk must not cost the trained weights
            with explained(run.best_path):
                shutil.rmtree(run.best_path)
        if self.args.delete_models:
            self._delete_intermediate(run.output)
        self._trained = model
        return record

    def _devices(self) -> dict[str, torch.device]:
        placement = self.workbench.placement
        return {"device_encoder": placement.encoder, "device_decoder": placement.decoder}

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
            record = read_json(path / TRAINING)
        verdict = seeds.judge(record, self.args, among_seeds=self.args.max_seeds > 1)
        result = SeedResult(seed, path, record, trained, verdict)
        if (
            self.args.max_seeds > 1
            and self.args.evaluates
            and seeds.wants_selection_evaluation(result, earlier, self.args)
        ):
            max_size = self.args.seed_selection_eval_max_size or self.args.encoder_eval_max_size
            model = load_gradiend(path, **self._devices())
            evaluation = self.workbench.evaluation(model.space, self.data.evaluation_split(), max_size, repeated=False)
            with torch.no_grad():
                result.eval_correlation = evaluation.metrics(self.workbench.encoder(model))["correlation"]
        return result

    def _drop(self, surplus: Any) -> None:
        for seed in surplus:
            logger.info("seed %d is dropped: enough seeds before it converged", seed)
            with explained(self._seed_path(seed)):
                shutil.rmtree(self._seed_path(seed))

    def _finish(self, results: list[SeedResult], early_stop_reason: str | None) -> None:
        """Promote the best seed and write the reports; the promoted model is complete before anything is deleted."""
        args = self.args
        best, _, _ = seeds.select_best(results, args)
        info = seeds.convergence_info([result.verdict for result in results], args, best.verdict)
        if args.max_seeds > 1:
            report = seeds.seed_report(results, args, early_stop_reason)
            stability = seeds.topk_stability(results, args)
            if stability is not None:
                report["topk_stability"] = info["topk_stability"] = stability
            seeds.promote(best.output, self.model_path)
            write_json(self.model_path / TRAINING, {**best.record, "convergence_info": info})
            write_json(self.seed_runs_dir / seeds.REPORT, report)
            seeds.strip_models(results, args)
        if self.experiment_dir is not None:
            write_json(self.experiment_dir / STATS, _all_stats(results, best), indent=None)
        self._trained = None

    # --- results

    def get_model(self) -> ModelWithGradiend:
        """The trained model (loaded once), or a fresh one where nothing was trained yet."""
        if self._trained is None:
            if isinstance(self.model, ModelWithGradiend):
                self._trained = self.model
            elif is_model_directory(self.model_path):
                self._trained = self._load(self.model_path)
            elif is_model_directory(self.model):
                self._trained = self._load(Path(self.model))
            else:
                self._trained = self.workbench.new_model(self.workbench.space, self.args.first_seed)
        return self._trained

    def load_model(self, load_directory: str | Path) -> ModelWithGradiend:
        """A saved model over the trainer's base model."""
        return self._load(Path(load_directory))

    def _load(self, path: Path) -> ModelWithGradiend:
        return self.workbench.wrap(load_gradiend(path, **self._devices()))

    def pre_prune(self, config: PrePruneConfig | None = None, *, inplace: bool = True) -> ModelWithGradiend:
        """Prune the untrained model now; with `inplace` the next `train()` uses the pruned space."""
        config = config or self.args.pre_prune_config
        if config is None:
            raise UserError("pre_prune() has no configuration: pass one, or set pre_prune_config.")
        space = self.workbench.pre_pruned(config, self.args.data_seed)
        model = self.workbench.new_model(space, self.args.first_seed)
        if inplace:
            self.model = self._trained = model
            self.workbench.space = space
            self.args = dataclasses.replace(self.args, pre_prune_config=None)
            self.workbench.args = self.args
        return model

    def post_prune(self, config: PostPruneConfig | None = None) -> ModelWithGradiend:
        """Prune the trained model now and write it back."""
        config = config or self.args.post_prune_config
        if config is None:
            raise UserError("post_prune() has no configuration: pass one, or set post_prune_config.")
        if not is_model_directory(self.model_path):
            raise UserError(f"post_prune() finds no trained model at {self.model_path}: call train() first.")
        model = self._load(self.model_path)
        record = read_json(self.model_path / TRAINING)
        post_prune(model, config)
        save_model(model, self.model_path, training=record)
        self._trained = model
        return model

    def get_training_stats(self, model_path: str | Path | None = None) -> dict[str, Any]:
        """The record of a training run: `training_stats`, `losses`, `best_score_checkpoint` and the rest."""
        path = Path(model_path) if model_path is not None else self.model_path
        record: dict[str, Any] = read_json(path / TRAINING)
        return record

    def get_seed_report(self) -> dict[str, Any]:
        report: dict[str, Any] = read_json(self.seed_runs_dir / seeds.REPORT)
        return report

    def evaluate_encoder(
        self,
        split: str = "test",
        max_size: int | None = None,
        *,
        neutral: bool = True,
        use_cache: bool | None = None,
        return_df: bool = False,
    ) -> dict[str, Any]:
        """Encode a split (and, for the test split, neutral texts) and describe the encodings.

        With `experiment_dir`, the table and the result are written beside the model, and read again with `use_cache`
        while model, data and arguments are the same.
        """
        max_size = max_size or self.args.encoder_eval_max_size
        use_cache = bool(self.args.use_cache) if use_cache is None else use_cache
        depends_on = self._evaluation_fingerprint(split, max_size, neutral)
        name = f"encoded_values{f'_max_size_{max_size}' if max_size else ''}_split_{split}"
        stored = self.experiment_dir / name if self.experiment_dir is not None else None
        if (
            use_cache
            and stored is not None
            and (result := _stored_evaluation(stored, depends_on, return_df)) is not None
        ):
            return result
        table = self._encoded_table(split, max_size, neutral)
        result = encoder_metrics(
            table, target_classes=self.target_classes, all_classes=self.all_classes, source=self.get_model().source
        )
        if stored is not None:
            with explained(stored):
                stored.parent.mkdir(parents=True, exist_ok=True)
                table.to_csv(stored.with_suffix(".csv"), index=False)
            write_json(stored.with_suffix(".json"), {**result, "depends_on": depends_on})
        return {**result, "encoder_df": table} if return_df else result

    def _encoded_table(self, split: str, max_size: int | None, neutral: bool) -> pd.DataFrame:
        model, bench = self.get_model(), self.workbench
        evaluation = bench.evaluation(model.gradiend.space, split, max_size, repeated=False)
        encoder = bench.encoder(model.gradiend)
        with torch.no_grad():
            tables = [evaluation.table(encoder)]
            for rows in self._neutral_rows(evaluation, split, max_size) if neutral else ():
                items = ItemRows(rows, bench.objective)
                single = [items.item([position]) for position in range(len(rows))]
                encoded = encode_items(evaluation.gradients, single, "factual", encoder, keep=False)
                tables.append(neutral_encoding_rows(rows, encoded))
        return join_encodings(*tables)

    def _neutral_rows(self, evaluation: EncoderEvaluation, split: str, max_size: int | None) -> list[pd.DataFrame]:
        """The texts of the test split with another token hidden, and the neutral texts."""
        bench, as_reference = self.workbench, self.args.behaviour.reference_neutral
        shared: dict[str, Any] = {
            "seed": self.args.data_seed,
            "causal": bench.objective.name == "clm_next_token",
            "mask_placeholder": self.args.mask_placeholder,
            "as_reference": as_reference,
        }
        words, made = self._words_left_alone(), []
        if split == "test":
            rows, cap = (evaluation.visited, max_size) if as_reference else (evaluation.items.rows, None)
            left_alone = [*words, *rows["factual"].str.strip(), *rows["alternative"].str.strip()]
            made.append(neutral_training_rows(rows[:cap], bench.tokenizer, target_words=left_alone, **shared))
        if self.data.neutral is not None and (split == "test" or as_reference):
            cap = max_size if as_reference else None
            texts = self.data.neutral
            made.append(neutral_dataset_rows(texts, bench.tokenizer, excluded_words=words, max_rows=cap, **shared))
        return [table for table in made if len(table)]

    def _words_left_alone(self) -> list[str]:
        """Words that no neutral row hides: those of the feature and those that the configuration names."""
        table, words = self.data.table, set()
        for side in ("factual", "alternative"):
            of_targets = table[f"{side}_class"].isin(self.target_classes)
            words |= set(table.loc[of_targets, side] if self.args.behaviour.reference_neutral else table[side])
        return [*sorted(words), *(self.config.eval_neutral_additional_excluded_words or [])]

    def _evaluation_fingerprint(self, split: str, max_size: int | None, neutral: bool) -> dict[str, Any]:
        digest = hashlib.sha256()
        for tensor in self.get_model().gradiend.state_dict().values():
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        texts = self.data.neutral["text"].tolist() if self.data.neutral is not None else None
        return {
            "model": digest.hexdigest()[:32],
            "space": self.get_model().gradiend.space.fingerprint(),
            "base_model": self.base_model_name,
            "base_model_files": cache.model_files_hash(self.base_model_name),
            "data": self.data.fingerprint(),
            "neutral": hashlib.sha256(repr(texts).encode()).hexdigest()[:32] if neutral else None,
            "split": split,
            "max_size": max_size,
            "compat": self.args.compat,
            "encoder_eval_balance": self.args.encoder_eval_balance,
            "include_other_classes": self.args.include_other_classes,
        }

    def plot_training_convergence(
        self,
        output: str | Path | None = None,
        *,
        show: bool = False,
        label_name_mapping: dict[str, str] | None = None,
        img_format: str | None = None,
        **options: Any,
    ) -> Path:
        """Draw loss, correlation and class means over the steps; returns the file."""
        from gradiend_dist.plots import plot_training_convergence

        img_format = img_format or self.config.img_format
        output = output or self._root() / f"training_convergence.{img_format}"
        return plot_training_convergence(
            self.get_training_stats(),
            output,
            show=show,
            label_name_mapping=label_name_mapping,
            img_format=img_format,
            img_dpi=options.pop("img_dpi", self.config.img_dpi),
            **options,
        )


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
    rows = cap_per_group(data.rows("train"), args.train_max_size, column="feature_class_id", seed=args.data_seed)
    make_schedule(rows, args.train_batch_size, seed=args.data_seed, reference=args.behaviour.reference_data)


def check_mask(config: PostPruneConfig, space: ParameterSpace) -> None:
    """A mask over another space would be found out only when training is over."""
    mask = config.mask
    require(
        mask is None or len(mask) == space.size,
        f"post_prune_config.mask has {0 if mask is None else len(mask)} entries and the trained space {space.size}: "
        "pass as many.",
    )


def post_prune(model: ModelWithGradiend, config: PostPruneConfig) -> None:
    before = len(model)
    model.prune_gradiend(topk=config.topk, threshold=config.threshold, mask=config.mask, part=config.part)
    logger.info("post-prune: kept %s of %s weights by %s", f"{len(model):,}", f"{before:,}", config.part)


def _verdict_words(result: SeedResult) -> tuple[str, str]:
    return ("converged" if result.verdict.converged else "did not converge"), result.verdict.reason


def _all_stats(results: list[SeedResult], best: SeedResult) -> dict[str, Any]:
    """The documented training_stats.json: the promoted run's statistics, and those of every seed."""
    kept = ("training_stats", "losses", "best_score_checkpoint", "convergence_info", "time")
    per_seed = {result.seed: {name: result.record[name] for name in kept} for result in results}
    return {"best_seed": best.seed, **per_seed[best.seed], "seeds": per_seed}


def _stored_evaluation(stored: Path, depends_on: dict[str, Any], return_df: bool) -> dict[str, Any] | None:
    path = stored.with_suffix(".json")
    if not path.exists() or not stored.with_suffix(".csv").exists():
        return None
    result: dict[str, Any] = read_json(path)
    found = result.pop("depends_on", {})
    changed = [name for name, value in depends_on.items() if found.get(name) != value]
    if changed:
        logger.info("%s is not reused: %s changed", path, changed[0])
        return None
    for name, value in result.items():
        if name.endswith("_by_class") or name == "label_value_to_class_name":
            result[name] = {float(key): item for key, item in value.items()}
    return {**result, "encoder_df": pd.read_csv(stored.with_suffix(".csv"))} if return_df else result
