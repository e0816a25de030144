"""Model directories in the reference's format.

model.safetensors            the four tensors of encoder and decoder
config.json                  architecture, parameter map, base model
mapping_indices.safetensors  selected entries of sparsely pruned weights (key L<i>, i the place in the map)
mapping_masks.safetensors    the same for densely pruned ones, as 0/1 masks
gradiend_context.json        source, target, which class is encoded as +1
training.json                how it was trained
tokenizer/                   the tokenizer it was trained with (ours; the reference does not read it)
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradiend_dist.config.checks import require, require_choice, shown
from gradiend_dist.config.choices import ACTIVATIONS, GRADIENTS
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import MissingFile, UserError, first_line
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.space import INT32_MAX, ParameterSpace, Slices
from gradiend_dist.storage.files import (
    explained,
    link_tree,
    make_partial,
    new_directory,
    read_json,
    read_object,
    replace_directory,
    write_json,
)
from gradiend_dist.storage.layout import CONTEXT, INDICES, MASKS, MODEL_CONFIG, TOKENIZER, TRAINING, WEIGHTS
from gradiend_dist.storage.records import find_training
from gradiend_dist.storage.visibility import everyone_sees
from gradiend_dist.storage.weight_file import ENCODER_BIAS, read_weights, write_weights

DECODER_BIAS = "decoder.0.linear.bias"


def is_model_directory(path: str | Path) -> bool:
    """Is this a saved GRADIEND model, and not a base model or nothing?"""
    config = Path(path) / MODEL_CONFIG
    if not config.is_file():
        return False
    values = read_json(config)
    return isinstance(values, dict) and "architecture" in values


def base_model_of(path: str | Path) -> str:
    """The base model that a saved GRADIEND model names."""
    metadata = read_object(Path(path) / MODEL_CONFIG).get("metadata")
    name = metadata.get("base_model") if isinstance(metadata, dict) else None
    if name is None:
        raise UserError(f"{Path(path) / MODEL_CONFIG} does not name its base model: pass the base model itself.")
    return str(name)


def check_replaceable(path: Path) -> None:
    """A model directory is replaced as a whole: what stands there must be one, its records, or nothing."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (is_model_directory(path) or (path / TRAINING).is_file()):
        raise UserError(
            f"{path} would be replaced by the trained model and holds something else: pass another output_dir or "
            "experiment_dir, or remove it."
        )


@dataclass(frozen=True)
class Description:
    """What a model directory says of a model besides its weights."""

    base_model: str
    objective: str
    mask_placeholder: str
    max_length: int
    reference_labels: bool
    source: str
    target: str
    directions: dict[str, int]
    """Which class is encoded as +1, which as -1."""


def save_model(
    gradiend: ParamMappedGradiendModel,
    about: Description,
    path: str | Path,
    *,
    training: dict[str, Any] | None = None,
    tokenizer: Any = None,
    comm: Comm | None = None,
) -> None:
    """Write a model directory; what stood there before stays until the new one is complete.

    With `comm`, all ranks call this together, each with its slices of the weights.
    """
    comm, path = comm or Comm(), Path(path)
    partial = comm.first(f"preparing {path}", lambda: _prepare(path))
    try:
        with explained(path):
            write_weights(gradiend, partial / WEIGHTS, comm)
        comm.first(f"completing {path}", lambda: _complete(gradiend, about, partial, path, training, tokenizer))
    finally:
        if comm.is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _prepare(path: Path) -> Path:
    check_replaceable(path)
    with explained(path):
        return make_partial(path)


def _complete(
    gradiend: ParamMappedGradiendModel,
    about: Description,
    partial: Path,
    path: Path,
    training: dict[str, Any] | None,
    tokenizer: Any,
) -> None:
    with explained(path):
        write_json(partial / MODEL_CONFIG, _config(gradiend, about, _save_mapping(gradiend.space, partial)))
        context: dict[str, Any] = {"source": about.source, "target": about.target}
        if about.directions:
            context["feature_class_encoding_direction"] = about.directions
        write_json(partial / CONTEXT, context)
        if training is not None:
            write_json(partial / TRAINING, training, private=_may_hold_secrets(training))
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial / TOKENIZER)
        replace_directory(partial, path)


def link_model(source: Path, path: Path, *, training: dict[str, Any], tokenizer: Any = None) -> None:
    """A model directory with the weights of another, which stays, and a record of its own. Rank 0 alone.

    The files are shared where the file system can: no weight is read or written.
    """
    check_replaceable(path)
    with new_directory(path) as directory:
        directory.rmdir()
        link_tree(source, directory)
        write_json(directory / TRAINING, training, private=_may_hold_secrets(training))
        if tokenizer is not None:
            _save_tokenizer(tokenizer, directory / TOKENIZER)


def _may_hold_secrets(training: dict[str, Any]) -> bool:
    """Where a user writes what he likes there may be one that does not look like one."""
    return bool(training.get("training_args", {}).get("metadata"))


def _save_tokenizer(tokenizer: Any, path: Path) -> None:
    """Through a temporary directory: the tokenizers library tells a full disk by a bare Exception, a copy does not."""
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        shutil.copytree(temporary, path)


def _config(gradiend: ParamMappedGradiendModel, about: Description, mapping: dict[str, Any]) -> dict[str, Any]:
    return {
        "format_version": 0,
        "architecture": gradiend.architecture(),
        "mapping": mapping,
        # The reference passes these on to its constructor: no key of ours may be added here.
        "metadata": {"base_model": about.base_model, "prediction_objective": about.objective},
        "gradiend_dist": {
            "mask_placeholder": about.mask_placeholder,
            "max_length": about.max_length,
            "reference_labels": about.reference_labels,
        },
    }


def _save_mapping(space: ParameterSpace, directory: Path) -> dict[str, Any]:
    indices: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    entries = []
    for i, weight in enumerate(space.weights):
        kind = weight.representation()
        entry: dict[str, Any] = {
            "name": weight.name,
            "shape": list(weight.shape),
            "repr": kind,
            "num_selected": weight.num_selected,
        }
        if kind != "all":
            entry["key"] = f"L{i}"
        if kind == "indices":
            dtype = torch.int32 if weight.numel <= INT32_MAX else torch.int64
            indices[f"L{i}"] = weight.flat_indices().to(dtype)
        elif kind == "mask":
            mask = torch.zeros(weight.numel, dtype=torch.uint8)
            mask[weight.flat_indices()] = 1
            masks[f"L{i}"] = mask.view(weight.shape)
        entries.append(entry)
    kinds = {entry["repr"] for entry in entries}
    mapping: dict[str, Any] = {"mode": kinds.pop() if len(kinds) == 1 else "mixed", "param_map": entries}
    for tensors, name, key in ((indices, INDICES, "indices_file"), (masks, MASKS, "masks_file")):
        if tensors:
            save_file(tensors, str(directory / name))
            mapping[key] = name
    return mapping


def read_context(path: Path) -> dict[str, Any]:
    """Source and target; where training.json disagrees it is right, as in the reference."""
    context: dict[str, Any] = {"source": "factual", "target": "diff"}
    if (path / CONTEXT).exists():
        context = read_object(path / CONTEXT)
    trained = find_training(path).get("training_args")
    if isinstance(trained, dict) and "source" in trained:
        context["source"] = trained["source"]
    directions = context.get("feature_class_encoding_direction", {})
    signs = directions.values() if isinstance(directions, dict) else [None]
    kinds = (context.get("source"), context.get("target"))
    if not all(kind in GRADIENTS for kind in kinds) or not all(sign in (1, -1) for sign in signs):
        raise UserError(
            f"{path / CONTEXT} or {TRAINING} is damaged: source={shown(kinds[0])}, target={shown(kinds[1])} and the "
            f"directions {shown(directions)} are not what a model has; copy it again."
        )
    return context


def load_gradiend(
    path: str | Path,
    *,
    comm: Comm | None = None,
    slices: Callable[[ParameterSpace], Slices] | None = None,
    mapped: bool = False,
    **devices: Any,
) -> ParamMappedGradiendModel:
    """Encoder, decoder and parameter space of a model directory, without its base model.

    With `comm`, all ranks call this together; with `slices`, each reads only what that gives of the space. `mapped`: on
    the host the weights stay in their file until they are asked for, and are not copied.
    """
    comm, path = comm or Comm(), Path(path)
    all_see_it = everyone_sees(path / MODEL_CONFIG, comm)
    read_here = all_see_it or comm.is_first
    architecture, space = _read_architecture(path) if read_here else ({}, ParameterSpace([]))
    if read_here and "bias_decoder" not in architecture and find_weights(path) is not None:
        architecture["bias_decoder"] = DECODER_BIAS in _names_in(path)
    if not all_see_it:
        architecture, space = comm.decide((architecture, space))
    if mapped:
        devices = {"device": "meta"}
    model = _empty_gradiend(architecture, space, slices=None if slices is None else slices(space), **devices)
    if not model.slices.is_whole:
        restore_weights(model, path, comm)
        return model
    tensors = _load_tensors(path)
    # Models of the reference's next version may have no encoder bias, which is a bias of zero.
    tensors.setdefault(ENCODER_BIAS, torch.zeros(model.latent_dim, dtype=model.torch_dtype))
    if any(name.startswith("encoder.1.") for name in tensors):
        raise UserError(
            f"{path} was trained with the reference's activation_encoder=id, which encodes every input as 0."
        )
    try:
        model.load_state_dict(tensors, assign=mapped)
    except RuntimeError as error:
        raise UserError(
            f"{path / WEIGHTS} does not fit {MODEL_CONFIG}: {' '.join(str(error).split())[:200]}."
        ) from error
    return model


def open_gradiend(path: Path) -> ParamMappedGradiendModel:
    """A model directory without its weights, for who reads these from the file as they are wanted."""
    return _empty_gradiend(*_read_architecture(path), device="meta")


def _empty_gradiend(architecture: dict[str, Any], space: ParameterSpace, **options: Any) -> ParamMappedGradiendModel:
    return ParamMappedGradiendModel(
        space,
        architecture.get("latent_dim", 1),
        activation_encoder=architecture.get("activation_encoder", "tanh"),
        activation_decoder=architecture.get("activation_decoder", "id"),
        bias_decoder=architecture.get("bias_decoder", True),
        torch_dtype=getattr(torch, architecture.get("torch_dtype", "float32").removeprefix("torch.")),
        initialize=False,
        **options,
    )


def _read_architecture(path: Path) -> tuple[dict[str, Any], ParameterSpace]:
    config = read_object(path / MODEL_CONFIG)
    if not config.keys() >= {"architecture", "mapping"}:
        raise UserError(f"{path / MODEL_CONFIG} has no architecture and mapping: it is damaged or no GRADIEND model.")
    architecture = config["architecture"]
    try:
        input_dim, space = architecture["input_dim"], _load_space(path, config["mapping"])
        _check_architecture(architecture)
    except KeyError as error:
        raise UserError(f"{path / MODEL_CONFIG} or its mapping lacks {error}: the directory is damaged.") from error
    except (TypeError, AttributeError, IndexError, RuntimeError) as error:  # a list where a mapping belongs, and so on
        raise UserError(f"{path / MODEL_CONFIG} cannot be used ({first_line(error)}): it is damaged.") from error
    if space.size != input_dim:
        raise UserError(
            f"{path / MODEL_CONFIG} says input_dim={input_dim} but maps {space.size} weights: the directory is damaged."
        )
    return architecture, space


def _check_architecture(architecture: dict[str, Any]) -> None:
    """The values that a model is made with, where they are there."""
    latent_dim = architecture.get("latent_dim", 1)
    require(isinstance(latent_dim, int) and latent_dim > 0, f"latent_dim={shown(latent_dim)} is no width: correct it.")
    for name in ("activation_encoder", "activation_decoder"):
        require_choice(name, architecture.get(name, ACTIVATIONS[0]), ACTIVATIONS)
    dtype = str(architecture.get("torch_dtype", "float32")).removeprefix("torch.")
    require_choice("torch_dtype", dtype, ("float32", "bfloat16", "float16", "float64"))


def restore_weights(gradiend: GradiendModel, path: Path, comm: Comm | None = None) -> None:
    """Read the weights of a model directory of ours into a model of the same space, or into slices of it.

    With `comm`, all ranks call this together.
    """
    try:
        read_weights(gradiend, path / WEIGHTS, comm or Comm())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path / WEIGHTS} cannot be read ({error}): it is damaged or incomplete.") from error


def _load_tensors(path: Path) -> dict[str, Tensor]:
    for directory in (path, path / "model"):
        if (directory / WEIGHTS).exists():
            return _load_file(directory / WEIGHTS)
        if (directory / "pytorch_model.bin").exists():
            return _load_pickle(directory / "pytorch_model.bin")
    raise MissingFile(f"{path} holds no {WEIGHTS}: only its records were kept, or it is incomplete.")


def find_weights(path: Path) -> Path | None:
    """The file of tensors of a model directory, where it has one that can be looked into."""
    return next((found for found in (path / WEIGHTS, path / "model" / WEIGHTS) if found.exists()), None)


def _names_in(path: Path) -> list[str]:
    found = find_weights(path)
    assert found is not None, "asked before"
    try:
        with safe_open(str(found), framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{found} cannot be read ({error}): it is damaged or incomplete.") from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """What the reference writes where it has no safetensors; anything but tensors is refused."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}): it is damaged, or holds more than tensors."
        ) from error
    require(isinstance(tensors, dict), f"{path} holds no mapping of tensors: it is no model.")
    return tensors


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): it is damaged or incomplete.") from error


def _load_space(path: Path, mapping: dict[str, Any]) -> ParameterSpace:
    files = {key: _mapping_file(path, mapping[key]) for key in ("indices_file", "masks_file") if mapping.get(key)}
    weights: list[tuple[str, tuple[int, ...], Tensor | None]] = []
    for entry in mapping["param_map"]:
        shape = tuple(entry["shape"])
        selected: Tensor | None = None
        if entry["repr"] == "indices":
            selected = files["indices_file"][entry["key"]].long()
        elif entry["repr"] == "mask":
            selected = files["masks_file"][entry["key"]].reshape(-1).nonzero().squeeze(1)
        if selected is not None and selected.numel():
            _check_selected(selected, prod(shape), f"{path}: the map of {entry['name']}")
        weights.append((entry["name"], shape, selected))
    return ParameterSpace(weights)


def _check_selected(selected: Tensor, numel: int, what: str) -> None:
    if not bool((selected[1:] > selected[:-1]).all()):
        raise UserError(f"{what} is not ascending: the directory is damaged.")
    if not 0 <= int(selected[0]) <= int(selected[-1]) < numel:
        raise UserError(f"{what} points outside the weight: the directory is damaged.")


def _mapping_file(path: Path, name: str) -> dict[str, Tensor]:
    if Path(name).name != name:
        raise UserError(
            f"{path / MODEL_CONFIG} names the mapping file {name!r} outside its directory: do not trust it."
        )
    return _load_file(path / name)
