"""rewrite_base_model of a trainer: at which point, and the changed model in memory or on disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.errors import UserError
from gradiend_dist.evaluation.curvature import ByCurvature, scaling_in_place, whole_curvature
from gradiend_dist.evaluation.selection import BASE, WEAKEN
from gradiend_dist.model.base import load_base_model
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting.card import Change, as_dtype, save_rewritten
from gradiend_dist.rewriting.move import (
    SCALINGS,
    ByTensor,
    Scaling,
    Vectors,
    VectorsInFile,
    VectorsInMemory,
    check_direction,
    rewrite,
)
from gradiend_dist.storage.layout import WEIGHTS
from gradiend_dist.storage.model_dir import load_gradiend, open_gradiend

if TYPE_CHECKING:
    from gradiend_dist.trainer import TextPredictionTrainer


@dataclass(frozen=True)
class Target:
    """Where to move the base model, why, and what that was measured to do."""

    learning_rate: float
    feature_factor: float
    part: str
    scaling: str
    purpose: str | None
    effect: tuple[tuple[str, float, float], ...] = ()


def chosen_point(
    trainer: TextPredictionTrainer,
    results: dict[str, Any] | None,
    name: str | None,
    strengthen: bool,
    learning_rate: float | None,
    feature_factor: float | None,
    part: str | None,
    scaling: str | None,
) -> Target:
    """The given point, or the one that an evaluation has selected for a class."""
    require_choice("scaling", scaling or "plain", SCALINGS)
    if name is not None:
        trainer.classes_asked_for(name)
    purpose = None if name is None else f"{name} {'strengthened' if strengthen else 'weakened'}"
    if learning_rate is not None:
        given = (learning_rate, feature_factor, part or "decoder", scaling or "plain", purpose)
        return _given_point(trainer, name, strengthen, *given)
    require(feature_factor is None, f"feature_factor={feature_factor} needs a learning_rate: pass both, or neither.")
    assert name is not None, "a point is selected for a class"
    if results is None:
        results = trainer.evaluate_decoder(
            target_class=name,
            increase_target_probabilities=strengthen,
            use_cache=True,
            part=part or "decoder",
            scaling=scaling or "plain",
        )
    metric = name if strengthen else f"{name}{WEAKEN}"
    if metric not in results:
        found = ", ".join(key for key in results if key not in ("grid", "plot_path"))
        raise UserError(
            f"decoder_results have {found or 'no summary'} and not {metric!r}: pass those of "
            f"evaluate_decoder(increase_target_probabilities={strengthen})."
        )
    chosen = results[metric]
    scored, scaled = chosen.get("part", "decoder"), chosen.get("scaling", "plain")
    for argument, value, known in (("part", part, scored), ("scaling", scaling, scaled)):
        require(
            value in (None, known),
            f"{argument}={value} is not what decoder_results are about, which is {known}: leave it out.",
        )
    point = chosen["feature_factor"], chosen["learning_rate"]
    grid = results.get("grid", {})
    effect = _effect(trainer, grid[BASE], grid[point]) if BASE in grid and point in grid else ()
    return Target(chosen["learning_rate"], chosen["feature_factor"], scored, scaled, purpose, effect)


def _given_point(
    trainer: TextPredictionTrainer,
    name: str | None,
    strengthen: bool,
    learning_rate: float,
    feature_factor: float | None,
    part: str,
    scaling: str,
    purpose: str | None,
) -> Target:
    if part != "decoder":
        require(
            feature_factor is None, f"feature_factor has no effect on part={part}, which is one vector: leave it out."
        )
        return Target(learning_rate, 1.0, part, scaling, None)  # which class it strengthens was not measured
    if name is None:
        assert feature_factor is not None, "the caller has asked for one of them"
        return Target(learning_rate, feature_factor, part, scaling, None)
    factors = trainer.strengthening_factors()
    pushed = name if strengthen else next(other for other in trainer.target_classes if other != name)
    factor = factors[pushed] if feature_factor is None else feature_factor
    require(
        factor * learning_rate * factors[pushed] > 0,
        f"feature_factor={factor} with learning_rate={learning_rate} does not make {purpose}: change a sign, or leave "
        "target_class out.",
    )
    return Target(learning_rate, factor, part, scaling, purpose)


def _effect(
    trainer: TextPredictionTrainer, before: dict[str, Any], after: dict[str, Any]
) -> tuple[tuple[str, float, float], ...]:
    rows = []
    for dataset in trainer.target_classes:
        for name in trainer.target_classes:
            what = f"P({name}) at blanks of {dataset}"
            rows.append((what, *(entry["probs_by_dataset"][dataset][name] for entry in (before, after))))
    rows.append(("language-model score", before["lms"]["lms"], after["lms"]["lms"]))
    return tuple(rows)


def rewritten_model(
    trainer: TextPredictionTrainer,
    target: Target,
    output_dir: str | Path | None,
    *,
    dtype: str | None,
    max_shard_size: str | int,
) -> nn.Module | None:
    """A changed copy of the trainer's base model, or, with `output_dir`, of what is on disk, saved there by rank 0."""
    comm, saved_at = trainer.comm, trainer.saved_at()
    if output_dir is None:
        return _changed_in_memory(trainer, target, dtype)
    if saved_at is None:
        model = trainer.get_model()
        change = _change_of(model, target, run=None)
        changed = _changed_in_memory(trainer, target, dtype)
        comm.first(
            f"saving {output_dir}",
            lambda: _save(changed, model.tokenizer, output_dir, change, max_shard_size),
        )
        return changed
    kept: list[nn.Module] = []
    curvature = _whole_curvature(trainer, target)

    def work() -> None:
        """On the host, in the dtype of the files: what is not moved stays as it is, to the byte."""
        gradiend, vectors = _whole_vectors(trainer, saved_at)
        check_direction(target.feature_factor, target.part, latent_dim=gradiend.latent_dim, bias=gradiend.bias_decoder)
        base_model, tokenizer = load_base_model(
            trainer.base_model_name, torch_dtype="auto", trust_remote_code=trainer.args.trust_remote_code
        )
        model = ModelWithGradiend(base_model, gradiend, tokenizer)
        scaling = ByTensor() if target.scaling == "tensor" else None if curvature is None else ByCurvature(curvature)
        _move(base_model, model, vectors, target, scaling)
        base_model = _converted(base_model, dtype)
        change = _change_of(model, target, run=str(saved_at))
        _save(base_model, tokenizer, output_dir, change, max_shard_size)
        kept.append(base_model)

    comm.first(f"rewriting {trainer.base_model_name}", work)
    return kept[0] if kept else None


def _whole_vectors(trainer: TextPredictionTrainer, saved_at: Path) -> tuple[ParamMappedGradiendModel, Vectors]:
    """From the model in memory where it is whole; else read from its file as they are wanted."""
    loaded = trainer._trained
    if loaded is not None and loaded.gradiend.slices.is_whole:
        return loaded.gradiend, VectorsInMemory(loaded.gradiend)
    if (saved_at / WEIGHTS).is_file():
        gradiend = open_gradiend(saved_at)
        return gradiend, VectorsInFile(saved_at / WEIGHTS, gradiend)
    gradiend = load_gradiend(saved_at)
    return gradiend, VectorsInMemory(gradiend)


def _changed_in_memory(trainer: TextPredictionTrainer, target: Target, dtype: str | None) -> nn.Module:
    session, model = trainer.session, trainer.get_model()
    if session.spread.shards:
        raise UserError("The base model is in shards, and no rank has all of it: save the model, and pass output_dir.")
    gradiend, saved_at = model.gradiend, trainer.saved_at()
    check_direction(target.feature_factor, target.part, latent_dim=gradiend.latent_dim, bias=gradiend.bias_decoder)
    vectors: Vectors = VectorsInMemory(gradiend)
    if not gradiend.slices.is_whole:
        if saved_at is None:
            raise UserError("Each rank has a part of an unsaved model: save it first, or launch one process.")
        vectors = VectorsInFile(saved_at / WEIGHTS, gradiend)
    changed = copy.deepcopy(session.base_model)
    scaling = scaling_in_place(target.scaling, session, trainer.config, gradiend.space)
    _move(changed, model, vectors, target, scaling)
    return _converted(changed, dtype)


def _converted(changed: nn.Module, dtype: str | None) -> nn.Module:
    """After the move: a step added in half precision would be rounded away where it is small."""
    wanted = as_dtype(dtype)
    return changed if wanted is None else changed.to(wanted)


def _whole_curvature(trainer: TextPredictionTrainer, target: Target) -> Tensor | None:
    """As the grid has measured it, in the precision of the evaluation; on rank 0, which moves the files' weights."""
    if target.scaling != "curvature":
        return None
    return whole_curvature(trainer.session, trainer.config, trainer.get_model().gradiend.space)


def _move(
    base_model: nn.Module, model: ModelWithGradiend, vectors: Vectors, target: Target, scaling: Scaling | None
) -> None:
    weights = model.gradiend.space.active()
    rewrite(base_model, weights, vectors, target.learning_rate, target.feature_factor, target.part, scaling)


def _change_of(model: ModelWithGradiend, target: Target, run: str | None) -> Change:
    facts: dict[str, Any] = {"scaling": target.scaling, "purpose": target.purpose, "effect": target.effect}
    return model.change(target.learning_rate, target.feature_factor, target.part, run=run, **facts)


def _save(
    changed: nn.Module, tokenizer: Any, output_dir: str | Path, change: Change, max_shard_size: str | int
) -> None:
    save_rewritten(changed, tokenizer, output_dir, change.card(), max_shard_size=max_shard_size)
