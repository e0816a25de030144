"""rewrite_base_model of a trainer: by which step, and the changed model in memory or on disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.balance import BALANCE
from gradiend_dist.evaluation.curvature import ByCurvature, scaling_in_place, whole_curvature
from gradiend_dist.evaluation.decoder_evaluation import DecoderEvaluation
from gradiend_dist.evaluation.request import DecoderRequest
from gradiend_dist.evaluation.selection import BASE, WEAKEN
from gradiend_dist.evaluation.trained_run import TrainedRun
from gradiend_dist.model.base import load_base_config, load_base_model
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting.card import Change, as_dtype, save_rewritten
from gradiend_dist.rewriting.delta import Delta, load_delta, save_delta
from gradiend_dist.rewriting.move import ByTensor, InPlace, Scaling, Vectors, VectorsInFile, VectorsInMemory, rewrite
from gradiend_dist.rewriting.step import SCALINGS, Step
from gradiend_dist.space import Weight
from gradiend_dist.storage.layout import WEIGHTS
from gradiend_dist.storage.model_dir import load_gradiend, open_gradiend

# Dtypes with room for a step that is small beside the weight.
WIDE = ("float32", "float64")

# transformers' files of weights, and those that are written where there is no room for a copy of one.
DEFAULT_SHARDS, SMALL_FILES = "5GB", "200MB"


@dataclass(frozen=True)
class Target:
    """Where to move the base model, why, and what that was measured to do."""

    step: Step
    purpose: str | None
    effect: tuple[tuple[str, float, float], ...] = ()
    relative_change: float | None = None


@dataclass(frozen=True, kw_only=True)
class RewriteRequest:
    """Which change is asked for: that of a class, or a given step."""

    target_class: str | None = None
    strengthen: bool = True
    learning_rate: float | None = None
    feature_factor: float | None = None
    part: str | None = None
    scaling: str | None = None
    force: bool = False
    """Also where an evaluation says that the change is not worth having."""
    max_harm: float | None = None
    """As of `evaluate_decoder`, like the next three: how the step is found where no results and no rate are given."""
    split: str | None = None
    max_size: int | None = None
    neutral_blanks: pd.DataFrame | Sequence[str] | str | Path | None = None

    def searching(self) -> dict[str, Any]:
        """What is given of the arguments of the evaluation that finds the step."""
        names = ("max_harm", "split", "max_size", "neutral_blanks")
        return {name: vars(self)[name] for name in names if vars(self)[name] is not None}

    def require_search(self, given: str) -> None:
        """Refuse arguments of a search that is not made, since the step is `given`."""
        useless = ", ".join(self.searching())
        require(not useless, f"{useless} has no effect where {given} is given: leave one of them out.")

    @property
    def purpose(self) -> str | None:
        if self.target_class in (None, BALANCE):
            return None if self.target_class is None else "both classes balanced"
        return f"{self.target_class} {'strengthened' if self.strengthen else 'weakened'}"


def chosen_target(run: TrainedRun, asked: RewriteRequest, results: dict[str, Any] | None) -> Target:
    """The given step, or the one that an evaluation has selected. All ranks call this."""
    require_choice("scaling", asked.scaling or "plain", SCALINGS)
    name = asked.target_class
    if name not in (None, BALANCE):
        run.classes_asked_for(name)
    if asked.learning_rate is not None:
        asked.require_search("learning_rate")
        return Target(_given_step(run, asked), asked.purpose if asked.part in (None, "decoder") else None)
    require(
        asked.feature_factor is None,
        f"feature_factor={asked.feature_factor} needs a learning_rate: pass both, or neither.",
    )
    assert name is not None, "a step is selected for a class"
    if results is not None:
        asked.require_search("decoder_results")
    else:
        request = DecoderRequest(
            target_class=name, increase_target_probabilities=asked.strengthen, use_cache=True,
            part=asked.part or "decoder", scaling=asked.scaling, **asked.searching(),
        )  # fmt: skip
        results = DecoderEvaluation(run, request).results()
    metric = name if asked.strengthen or name == BALANCE else f"{name}{WEAKEN}"
    if metric not in results:
        found = ", ".join(key for key, entry in results.items() if isinstance(entry, dict) and "learning_rate" in entry)
        raise UserError(
            f"decoder_results have {found or 'no summary'} and not {metric!r}: pass those of "
            f"evaluate_decoder(increase_target_probabilities={asked.strengthen})."
        )
    return _selected_target(run, asked, results, metric)


def _selected_target(run: TrainedRun, asked: RewriteRequest, results: dict[str, Any], metric: str) -> Target:
    chosen = results[metric]
    step = Step.of_entry(chosen)
    for argument, value, known in (("part", asked.part, step.part), ("scaling", asked.scaling, step.scaling)):
        require(
            value in (None, known),
            f"{argument}={value} is not what decoder_results are about, which is {known}: leave it out.",
        )
    refusal = chosen.get("refusal")
    if refusal is not None and not run.args.behaviour.rewrites_at_any_cost:
        require(step.learning_rate != 0.0, f"Nothing is rewritten: {refusal}.")
        require(asked.force, f"Nothing is rewritten: {refusal}. Pass force to take it all the same.")
    point, grid = (step.feature_factor, step.learning_rate), results.get("grid", {})
    effect = _effect(run, grid[BASE], grid[point], chosen) if BASE in grid and point in grid else ()
    return Target(step, asked.purpose, effect, chosen.get("relative_change"))


def _given_step(run: TrainedRun, asked: RewriteRequest) -> Step:
    """All ranks call this."""
    rate, factor, part, scaling = asked.learning_rate, asked.feature_factor, asked.part or "decoder", asked.scaling
    assert rate is not None
    if part != "decoder":
        require(factor is None, f"feature_factor has no effect on part={part}, which is one vector: leave it out.")
        return Step(rate, 1.0, part, scaling or "plain")  # which class it strengthens was not measured
    name = asked.target_class
    require(name != BALANCE, f"target_class={BALANCE} finds its learning_rate by search: leave it out.")
    if name is None:
        assert factor is not None, "the caller has asked for one of them"
        return Step(rate, factor, part, scaling or "plain")
    factors = run.strengthening_factors()
    pushed = name if asked.strengthen else next(other for other in run.target_classes if other != name)
    factor = factors[pushed] if factor is None else factor
    require(
        factor * rate * factors[pushed] > 0,
        f"feature_factor={factor} with learning_rate={rate} does not make {asked.purpose}: change a sign, or leave "
        "target_class out.",
    )
    return Step(rate, factor, part, scaling or "plain")


def _effect(
    run: TrainedRun, before: dict[str, Any], after: dict[str, Any], chosen: dict[str, Any]
) -> tuple[tuple[str, float, float], ...]:
    rows = []
    for dataset in run.target_classes:
        for name in run.target_classes:
            what = f"P({name}) at blanks of {dataset}"
            rows.append((what, *(entry["probs_by_dataset"][dataset][name] for entry in (before, after))))
    if "indices" in chosen:
        for blanks, indices in chosen["indices"]["by_blanks"].items():
            rows.append(
                (f"BPI at blanks of {blanks}", chosen["base_indices"]["by_blanks"][blanks]["bpi"], indices["bpi"])
            )
    rows.append(("language-model score", before["lms"]["lms"], after["lms"]["lms"]))
    for name, what in (("held_out", "other neutral texts"), ("second", "the second neutral texts")):
        if name in chosen:
            rows.append((f"perplexity on {what}, relative", 1.0, 1.0 + chosen[name]["harm"]))
    return tuple(rows)


def rewritten_model(
    run: TrainedRun,
    target: Target,
    output_dir: str | Path | None,
    *,
    dtype: str | None,
    max_shard_size: str | int,
) -> nn.Module | None:
    """A changed copy of the trainer's base model, or, with `output_dir`, of what is on disk, saved there by rank 0."""
    comm, saved_at = run.comm, run.saved_at()
    if output_dir is None:
        return _changed_in_memory(run, target, dtype)
    if saved_at is None:
        model = run.get_model()
        change = _change_of(model, target, None)
        changed = _changed_in_memory(run, target, dtype)
        comm.first(
            f"saving {output_dir}",
            lambda: _save(changed, model.tokenizer, output_dir, change, max_shard_size),
        )
        return changed
    if _moves_the_loaded_model(run, dtype):
        _save_moved(run, target, saved_at, output_dir, max_shard_size)
        return None
    kept: list[nn.Module] = []
    curvature = _whole_curvature(run, target)

    def work() -> None:
        """On the host, in the dtype of the files: what is not moved stays as it is, to the byte.

        In a wider one if that is asked for, so that nothing of the step is rounded away.
        """
        model, vectors = _from_files(run, saved_at, dtype if dtype in WIDE else None)
        target.step.check(model.gradiend)
        weights = model.gradiend.space.active()
        rewrite(model.base_model, weights, vectors, target.step, _scaling_of(target, curvature, weights))
        changed = _converted(model.base_model, dtype)
        _save(changed, model.tokenizer, output_dir, _change_of(model, target, str(saved_at)), max_shard_size)
        kept.append(changed)

    comm.first(f"rewriting {run.base_model_name}", work)
    return kept[0] if kept else None


def _moves_the_loaded_model(run: TrainedRun, dtype: str | None) -> bool:
    """Is the loaded base model to be moved in place? With `offload` there is no room for another, and it is the same
    where its dtype is that of its files."""
    session = run.session
    if not session.args.offload or dtype is not None:
        return False
    stored = load_base_config(run.base_model_name, trust_remote_code=run.args.trust_remote_code).dtype
    return bool(next(session.base_model.parameters()).dtype == (stored or torch.float32))


def _save_moved(
    run: TrainedRun, target: Target, saved_at: Path, output_dir: str | Path, max_shard_size: str | int
) -> None:
    """Save the base model of the session from where the step brings it; it is itself again afterwards.

    In small files, since each is copied while it is written. There is one process: no other rank is asked.
    """
    session, model = run.session, run.get_model()
    target.step.check(model.gradiend)
    weights, vectors = model.gradiend.space.active(), VectorsInMemory(model.gradiend)
    scaling = scaling_in_place(target.step.scaling, session, run.config, model.gradiend.space)
    with InPlace(session.base_model, weights, vectors, scaling, session.vectors) as moved:
        moved.move(target.step)
        shard_size = SMALL_FILES if max_shard_size == DEFAULT_SHARDS else max_shard_size
        _save(session.base_model, model.tokenizer, output_dir, _change_of(model, target, str(saved_at)), shard_size)


def saved_delta(run: TrainedRun, target: Target, output_dir: str | Path) -> Delta | None:
    """The change alone, written by rank 0, which returns it. All ranks call this."""
    comm, saved_at = run.comm, run.saved_at()
    if saved_at is None and (run.session.spread.shards or not run.get_model().gradiend.slices.is_whole):
        raise UserError("Each rank has a slice of an unsaved model: save it first, or launch one process.")
    curvature = _whole_curvature(run, target)

    def work() -> None:
        model, vectors = _in_memory(run.get_model()) if saved_at is None else _from_files(run, saved_at)
        target.step.check(model.gradiend)
        weights, origin = model.gradiend.space.active(), None if saved_at is None else str(saved_at)
        scaling = _scaling_of(target, curvature, weights)
        save_delta(output_dir, model.base_model, weights, vectors, _change_of(model, target, origin), scaling)

    comm.first(f"writing {output_dir}", work)
    return load_delta(output_dir) if comm.is_first else None


def _in_memory(model: ModelWithGradiend) -> tuple[ModelWithGradiend, Vectors]:
    return model, VectorsInMemory(model.gradiend)


def _from_files(run: TrainedRun, saved_at: Path, dtype: str | None = None) -> tuple[ModelWithGradiend, Vectors]:
    """The base model as it is on disk, or in `dtype`, under the trained model. Rank 0 alone."""
    gradiend, vectors = _whole_vectors(run, saved_at)
    base_model, tokenizer = load_base_model(
        run.base_model_name, torch_dtype=dtype or "auto", trust_remote_code=run.args.trust_remote_code
    )
    return ModelWithGradiend(base_model, gradiend, tokenizer), vectors


def _scaling_of(target: Target, curvature: Tensor | None, weights: Sequence[Weight]) -> Scaling | None:
    if curvature is not None:
        return ByCurvature(curvature, weights)
    return ByTensor() if target.step.scaling == "tensor" else None


def _whole_vectors(run: TrainedRun, saved_at: Path) -> tuple[ParamMappedGradiendModel, Vectors]:
    """From the model in memory where it is whole; else read from its file as they are wanted. Rank 0 alone."""
    loaded = run.loaded_model
    if loaded is not None and loaded.gradiend.slices.is_whole:
        return loaded.gradiend, VectorsInMemory(loaded.gradiend)
    if (saved_at / WEIGHTS).is_file():
        gradiend = open_gradiend(saved_at)
        return gradiend, VectorsInFile(saved_at / WEIGHTS, gradiend)
    gradiend = load_gradiend(saved_at)
    return gradiend, VectorsInMemory(gradiend)


def _changed_in_memory(run: TrainedRun, target: Target, dtype: str | None) -> nn.Module:
    """All ranks call this: each changes a copy of its own."""
    session, model = run.session, run.get_model()
    if session.spread.shards:
        raise UserError("The base model is in shards, and no rank has all of it: save the model, and pass output_dir.")
    gradiend, saved_at = model.gradiend, run.saved_at()
    target.step.check(gradiend)
    vectors: Vectors = VectorsInMemory(gradiend)
    if not gradiend.slices.is_whole:
        if saved_at is None:
            raise UserError("Each rank has a slice of an unsaved model: save it first, or launch one process.")
        vectors = VectorsInFile(saved_at / WEIGHTS, gradiend)
    changed = copy.deepcopy(session.base_model)
    scaling = scaling_in_place(target.step.scaling, session, run.config, gradiend.space)
    rewrite(changed, gradiend.space.active(), vectors, target.step, scaling)
    return _converted(changed, dtype)


def _converted(changed: nn.Module, dtype: str | None) -> nn.Module:
    """After the move, since a step added in half precision is rounded."""
    wanted = as_dtype(dtype)
    return changed if wanted is None else changed.to(wanted)


def _whole_curvature(run: TrainedRun, target: Target) -> Tensor | None:
    """As the grid has measured it, in the precision of the evaluation; on rank 0, which moves the files' weights."""
    if target.step.scaling != "curvature":
        return None
    return whole_curvature(run.session, run.config, run.get_model().gradiend.space)


def _change_of(model: ModelWithGradiend, target: Target, origin: str | None) -> Change:
    return model.change(
        target.step,
        run=origin,
        purpose=target.purpose,
        effect=target.effect,
        relative_change=target.relative_change,
    )


def _save(
    changed: nn.Module, tokenizer: Any, output_dir: str | Path, change: Change, max_shard_size: str | int
) -> None:
    save_rewritten(changed, tokenizer, output_dir, change.card(), max_shard_size=max_shard_size)
