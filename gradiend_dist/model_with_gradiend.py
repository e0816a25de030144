"""A base model and the GRADIEND model over its gradients: encode, rewrite, save, load."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradiend_dist.config.checks import require_choice
from gradiend_dist.config.choices import GRADIENTS
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import Placement, place
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import ClozeRow, Objective, choose_objective
from gradiend_dist.gradients.items import Item
from gradiend_dist.gradients.store import GradientSource, GradientStore
from gradiend_dist.model.base import check_space_fits, load_base_model
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.rewriting.card import Change, as_dtype, check_output, save_rewritten
from gradiend_dist.rewriting.move import (
    VectorsInMemory,
    direction,
    rewrite,
    scaled_direction,
    scaling_without_texts,
)
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import read_json
from gradiend_dist.storage.layout import MODEL_CONFIG, TOKENIZER
from gradiend_dist.storage.model_dir import Description, is_model_directory, load_gradiend, read_context, save_model


class ModelWithGradiend:
    """A base model and the GRADIEND model over its gradients.

    No method communicates but `save_pretrained` of slices, which all ranks call, and what asks a base model in shards
    (`encode` of a text, `create_gradients`), which all ranks do together as well.
    """

    def __init__(
        self,
        base_model: nn.Module,
        gradiend: ParamMappedGradiendModel,
        tokenizer: Any,
        *,
        source: str = "alternative",
        target: str = "diff",
        objective: str = "auto",
        mask_placeholder: str = "[MASK]",
        max_length: int = 256,
        reference_labels: bool = False,
    ) -> None:
        require_choice("source", source, GRADIENTS)
        require_choice("target", target, GRADIENTS)
        check_space_fits(gradiend.space, base_model)
        self.base_model = base_model.eval()
        self.gradiend = gradiend
        self.tokenizer = tokenizer
        self.source, self.target = source, target
        self.feature_class_encoding_direction: dict[str, int] = {}
        self.objective: Objective = choose_objective(
            objective,
            base_model,
            tokenizer,
            max_length=max_length,
            mask_placeholder=mask_placeholder,
            as_reference=reference_labels,
        )
        self._gradients: GradientSource | None = None

    @classmethod
    def from_pretrained(cls, load_directory: str | Path, **options: Any) -> ModelWithGradiend:
        """Load a saved GRADIEND model with its base model, or put a new one over a plain base model.

        Options: `device`, `device_encoder`, `device_decoder`, `device_base_model` (or, as the reference has it,
        `base_model_device`), `encoder_decoder_same_device`,
        `torch_dtype`, `trust_remote_code`, `base_model` (a model or path to use instead of the recorded one), and, for
        a plain base model, those of `create_model_with_gradiend`.
        """

        if options.get("base_model_device") is not None:
            options["device_base_model"] = options["base_model_device"]
        options.pop("base_model_device", None)
        if is_model_directory(load_directory):
            return load_model(load_directory, cls, **options)
        return create_model_with_gradiend(str(load_directory), model_class=cls, **options)

    def to(self, *args: Any, **kwargs: Any) -> ModelWithGradiend:
        """Base model and GRADIEND to a device or dtype, as torch's modules; returns self."""
        self.base_model.to(*args, **kwargs)
        self.gradiend.to(*args, **kwargs)
        self._gradients = None  # it knows the device
        return self

    def cpu(self) -> ModelWithGradiend:
        return self.to("cpu")

    def cuda(self, device: int | str | None = None) -> ModelWithGradiend:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def save_pretrained(
        self,
        save_directory: str | Path,
        training: dict[str, Any] | None = None,
        *,
        with_tokenizer: bool = True,
        comm: Comm | None = None,
    ) -> None:
        """Write the directory that `from_pretrained`, here and in the reference, reads; `training` is its record.

        With `comm`, all ranks call this together, each with its slices of the weights.
        """
        about = Description(
            base_model=self.name_or_path,
            objective=self.objective.name,
            mask_placeholder=self.objective.mask_placeholder,
            max_length=self.objective.max_length,
            reference_labels=self.objective.as_reference,
            source=self.source,
            target=self.target,
            directions=self.feature_class_encoding_direction,
        )
        tokenizer = self.tokenizer if with_tokenizer else None
        save_model(self.gradiend, about, save_directory, training=training, tokenizer=tokenizer, comm=comm)

    @property
    def name_or_path(self) -> str:
        return str(self.base_model.name_or_path)

    def __len__(self) -> int:
        return len(self.gradiend)

    def over(self, gradiend: ParamMappedGradiendModel) -> ModelWithGradiend:
        """The same, with another GRADIEND model over the same base model."""
        other = copy.copy(self)
        other.gradiend = gradiend
        return other

    def gradient_source(self) -> GradientSource:
        """Gradients over the current space, uncached; the trainer brings its own with a store."""
        if self._gradients is None or self._gradients.base.space is not self.gradiend.space:
            base = BaseGradients(self.base_model, self.tokenizer, self.objective, self.gradiend.space)
            self._gradients = GradientSource(base, GradientStore(budget_bytes=0))
        return self._gradients

    def create_gradients(self, text: str, label: str) -> Tensor:
        """The gradient of predicting `label` at the blank of `text`, over the current space."""
        cloze = self.objective.cloze(text, label)
        item = Item((ClozeRow(cloze, cloze),))
        return self.gradient_source().get(item, ["factual"], keep=False)["factual"].clone()

    @torch.no_grad()
    def encode(self, input: Any, label: str | None = None, return_float: bool = False) -> Any:
        """The encoding of a gradient vector or dict, or of `label` at the blank of a text."""
        gradient = self.create_gradients(input, self._need_label(label)) if isinstance(input, str) else input
        encoded = self.gradiend.forward_encoder(gradient)
        if not return_float:
            return encoded
        values = encoded.flatten().tolist()
        return values[0] if len(values) == 1 else values

    @staticmethod
    def _need_label(label: str | None) -> str:
        if label is None:
            raise UserError("encode() of a text needs the word at its blank: pass label=...")
        return label

    def rewrite_base_model(
        self,
        learning_rate: float,
        feature_factor: float | Sequence[float] = 1.0,
        part: str = "decoder",
        *,
        scaling: str = "plain",
        output_dir: str | Path | None = None,
        dtype: str | None = None,
        max_shard_size: str | int = "5GB",
    ) -> nn.Module:
        """A copy of the base model, moved by `learning_rate` along the decoder's vector for `feature_factor`.

        `scaling` is plain or tensor (see `gradiend_dist.rewriting`). With `output_dir` the copy is saved there as well,
        with tokenizer and model card; `dtype` converts it.
        """
        step, gradiend = self._step(learning_rate, feature_factor, part, scaling), self.gradiend
        scaled = scaling_without_texts(scaling)
        if not gradiend.slices.is_whole:
            raise UserError("This rank has only a slice of the model: rewrite in one process, or use the trainer's.")
        converted = as_dtype(dtype)
        if output_dir is not None:
            check_output(output_dir, dtype, max_shard_size)
        changed = copy.deepcopy(self.base_model)
        rewrite(changed, gradiend.space.active(), VectorsInMemory(gradiend), step, scaled)
        changed = changed if converted is None else changed.to(converted)
        if output_dir is not None:
            save_rewritten(changed, self.tokenizer, output_dir, self.change(step).card(), max_shard_size=max_shard_size)
        return changed

    def _step(self, learning_rate: float, feature_factor: float | Sequence[float], part: str, scaling: str) -> Step:
        factor = feature_factor if isinstance(feature_factor, int | float) else tuple(feature_factor)
        step = Step(learning_rate, factor, part, scaling)
        step.check(self.gradiend)
        return step

    def change(self, step: Step, **facts: Any) -> Change:
        """What such a step does, for the card of the rewritten model."""
        num_weights = sum(parameter.numel() for parameter in self.base_model.parameters())
        return Change(self.name_or_path, len(self), num_weights, step, **facts)

    def rewrite_vector(
        self, feature_factor: float | Sequence[float], part: str = "decoder", *, scaling: str = "plain"
    ) -> Tensor:
        """The direction of a rewrite, one number per entry of the space."""
        step, vectors = self._step(1.0, feature_factor, part, scaling), VectorsInMemory(self.gradiend)
        scaled = scaling_without_texts(scaling)
        if scaled is None:
            return direction(vectors, slice(0, len(self)), step)
        return scaled_direction(self.base_model, self.gradiend.space.active(), vectors, step, scaled)

    def prune_gradiend(self, *, inplace: bool = True, return_mask: bool = False, **selection: Any) -> Any:
        """`ParamMappedGradiendModel.prune` on the model as a whole."""
        pruned, mask = self.gradiend.prune(inplace=inplace, return_mask=True, **selection)
        model = self if inplace else self.over(pruned)
        return (model, mask) if return_mask else model

    def get_weight_importance(self, part: str = "decoder-weight") -> Tensor:
        return self.gradiend.get_weight_importance(part)

    def get_topk_weights(self, part: str = "decoder-weight", topk: int | float = 1000) -> list[int]:
        return self.gradiend.get_topk_weights(part, topk)

    def get_enhancer_mask(self, topk: int | float, part: str = "decoder-weight") -> Tensor:
        return self.gradiend.get_enhancer_mask(topk, part)

    def invert_encoding(self, *, update_direction: bool = True) -> None:
        """Turn the latent axis around, and with it what is recorded of which class is positive."""
        self.gradiend.invert_encoding()
        if update_direction:
            signs = self.feature_class_encoding_direction
            self.feature_class_encoding_direction = {name: -sign for name, sign in signs.items()}


def create_model_with_gradiend(
    model: str | nn.Module,
    *,
    tokenizer: Any = None,
    param_map: Sequence[str] | None = None,
    latent_dim: int = 1,
    activation_encoder: str = "tanh",
    activation_decoder: str = "id",
    bias_decoder: bool = True,
    torch_dtype: str = "float32",
    trust_remote_code: bool = False,
    source: str = "alternative",
    target: str = "diff",
    seed: int | None = None,
    placement: Placement | None = None,
    device: str | None = None,
    device_encoder: str | None = None,
    device_decoder: str | None = None,
    device_base_model: str | None = None,
    encoder_decoder_same_device: bool = False,
    model_class: type[ModelWithGradiend] = ModelWithGradiend,
    **options: Any,
) -> ModelWithGradiend:
    """A fresh GRADIEND model over a base model (a path, a hub id or a loaded model with its tokenizer).

    Each process makes one of its own: nothing is cut, no other rank is asked.
    `param_map` restricts the weights by name or wildcard; `seed` fixes the start; further options go to `model_class`,
    `ModelWithGradiend` or one of its subclasses.
    """
    if isinstance(model, str):
        model, tokenizer = load_base_model(model, torch_dtype=torch_dtype, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise UserError("create_model_with_gradiend() of a loaded model needs its tokenizer: pass tokenizer=...")
    placement = placement or place(
        torch.cuda.device_count(),
        device=device,
        device_encoder=device_encoder,
        device_decoder=device_decoder,
        device_base_model=device_base_model,
        encoder_decoder_same_device=encoder_decoder_same_device,
    )
    gradiend = ParamMappedGradiendModel(
        ParameterSpace.of_model(model, param_map),
        latent_dim,
        activation_encoder=activation_encoder,
        activation_decoder=activation_decoder,
        bias_decoder=bias_decoder,
        device_encoder=placement.encoder,
        device_decoder=placement.decoder,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )
    return model_class(model.to(placement.base_model), gradiend, tokenizer, source=source, target=target, **options)


def load_model(path: str | Path, cls: type[ModelWithGradiend], **options: Any) -> ModelWithGradiend:
    """Load a directory that we or the reference wrote; see `ModelWithGradiend.from_pretrained` for the options.

    Each process loads a whole one: no other rank is asked.
    """

    path = Path(path)
    config = read_json(path / MODEL_CONFIG)
    placement_options = {
        name: options.pop(name)
        for name in ("device", "device_encoder", "device_decoder", "device_base_model", "encoder_decoder_same_device")
        if name in options
    }
    placement = place(torch.cuda.device_count(), **placement_options)
    gradiend = load_gradiend(path, device_encoder=placement.encoder, device_decoder=placement.decoder)
    base = options.pop("base_model", None) or config.get("metadata", {}).get("base_model")
    tokenizer = options.pop("tokenizer", None)
    trust = options.pop("trust_remote_code", False)
    dtype = str(options.pop("torch_dtype", "float32")).removeprefix("torch.")
    if options:
        raise UserError(f"from_pretrained() of a saved GRADIEND model does not take {sorted(options)[0]}: remove it.")
    if base is None:
        raise UserError(f"{path / MODEL_CONFIG} does not name its base model: pass base_model=...")
    if isinstance(base, str):
        base, own_tokenizer = load_base_model(base, torch_dtype=dtype, trust_remote_code=trust)
        tokenizer = tokenizer or _saved_tokenizer(path, trust) or own_tokenizer
    tokenizer = tokenizer or _saved_tokenizer(path, trust)
    if tokenizer is None:
        raise UserError(f"{path} holds no tokenizer and base_model is a loaded model: pass tokenizer=...")
    context = read_context(path)
    ours = config.get("gradiend_dist", {})
    model = cls(
        base.to(placement.base_model),
        gradiend,
        tokenizer,
        source=context["source"],
        target=context["target"],
        objective=config.get("metadata", {}).get("prediction_objective", "auto"),
        mask_placeholder=ours.get("mask_placeholder", "[MASK]"),
        max_length=ours.get("max_length", 256),
        # A model of the reference was trained with its labels; encodings are only equal with the same ones.
        reference_labels=ours.get("reference_labels", not ours),
    )
    model.feature_class_encoding_direction = context.get("feature_class_encoding_direction", {})
    return model


def _saved_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if not (path / TOKENIZER).is_dir():
        return None
    return AutoTokenizer.from_pretrained(str(path / TOKENIZER), trust_remote_code=trust_remote_code)
