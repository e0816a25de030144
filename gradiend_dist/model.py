"""The GRADIEND model: encoder n -> m and decoder m -> n over gradients; alone, over named weights, with a base model.

    h  = act_e(We.x + be)      We [m, n], be [m]
    y' = act_d(Wd.h + bd)      Wd [n, m], bd [n]

`GradiendModel` is the bare pair, `ParamMappedGradiendModel` knows which base weight each of the n entries is, and
`ModelWithGradiend` adds the base model itself: it encodes gradients and rewrites the base along the decoder's vector.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from gradiend_dist.arguments import ACTIVATIONS, GRADIENTS, PARTS, check_topk, require_choice
from gradiend_dist.devices import Placement, place
from gradiend_dist.errors import UserError
from gradiend_dist.gradients import BaseGradients, GradientSource, GradientStore, Item
from gradiend_dist.objectives import ClozeRow, Objective, choose_objective
from gradiend_dist.readers import as_local_path
from gradiend_dist.rewriting import (
    Change,
    VectorsInMemory,
    as_dtype,
    check_direction,
    check_output,
    direction,
    rewrite,
    save_rewritten,
    scaled_direction,
    scaling_without_texts,
)
from gradiend_dist.space import ParameterSpace, Part

logger = logging.getLogger(__name__)

ACTIVATION_MODULES: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leakyrelu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "sigmoid": nn.Sigmoid,
    "smht": nn.Hardtanh,
    "id": nn.Identity,
}

# Initial weights are drawn in blocks of this many.
DRAWN_TOGETHER = 2**22

# act(-x) = -act(x): only with these does a change of sign turn the encoding around and nothing else.
ODD_ACTIVATIONS = ("tanh", "smht", "id")


class Projection(nn.Module):
    """A linear map, its weights unset; this level gives tensors their names in files (`encoder.0.linear.weight`)."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear: nn.Linear = nn.utils.skip_init(nn.Linear, num_in, num_out, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        # The layer itself, not F.linear with its weights: ZeRO-3 fetches what a module owns when the module is called.
        found: Tensor = self.linear(x)
        return found


class GradiendModel(nn.Module):
    """Encoder and decoder without any knowledge of a base model.

    With a `part`, the tensors hold that part of the n entries alone: what one of several ranks owns. A part encodes
    nothing by itself; the engines add up what the parts contribute.
    """

    def __init__(
        self,
        input_dim: int,
        latent_dim: int = 1,
        *,
        part: Part | None = None,
        activation_encoder: str = "tanh",
        activation_decoder: str = "id",
        bias_decoder: bool = True,
        torch_dtype: torch.dtype = torch.float32,
        device: Any = None,
        device_encoder: Any = None,
        device_decoder: Any = None,
        generator: torch.Generator | None = None,
        initialize: bool = True,
    ) -> None:
        super().__init__()
        require_choice("activation_encoder", activation_encoder, ACTIVATIONS)
        require_choice("activation_decoder", activation_decoder, ACTIVATIONS)
        self.input_dim, self.latent_dim = input_dim, latent_dim
        self.activation_encoder, self.activation_decoder = activation_encoder, activation_decoder
        self.bias_decoder = bias_decoder
        self.part = part or Part.whole(input_dim)
        assert self.part.total == input_dim, f"a part of {self.part.total} entries for n = {input_dim}"
        width = self.part.size
        encoder_at, decoder_at = device_encoder or device or "cpu", device_decoder or device or "cpu"
        self.encoder = nn.Sequential(
            Projection(width, latent_dim, bias=True, device=encoder_at, dtype=torch_dtype),
            ACTIVATION_MODULES[activation_encoder](),
        )
        self.decoder = nn.Sequential(
            Projection(latent_dim, width, bias=bias_decoder, device=decoder_at, dtype=torch_dtype),
            ACTIVATION_MODULES[activation_decoder](),
        )
        if initialize:
            self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The reference's start, draw for draw, so that a seed means the same model in both packages.

        Torch's default for the encoder; the decoder first takes torch's default draws, which are thrown away, and then
        uniform ones in (-x, x), x the largest encoder weight. Draws are made on the CPU, all of them on every rank, a
        block at a time: neither a device nor the number of ranks changes them.
        """
        n, m = self.input_dim, self.latent_dim
        bound = 1 / math.sqrt(n)
        kaiming_bound = math.sqrt(3.0) * (math.sqrt(2.0 / (1 + 5)) / math.sqrt(n))  # of a = sqrt(5), to the last bit
        largest = max(self._draw(self.encoder_weight[row], kaiming_bound, 1, generator) for row in range(m))
        self.encoder_bias.copy_(torch.empty(m).uniform_(-bound, bound, generator=generator))
        bias = self.decoder_bias_vector
        for draw_bound in (1.0, abs(largest)):  # of a handful of entries the largest may be negative
            self._draw(self.decoder_weight.view(-1), draw_bound, m, generator)
            if bias is not None:
                self._draw(bias, draw_bound, 1, generator)

    def _draw(self, into: Tensor, bound: float, width: int, generator: torch.Generator | None) -> float:
        """Draw n x width numbers in (-bound, bound), keep this part's; returns the largest of all."""
        largest = -math.inf
        pieces = [
            (slice(own.start * width, own.stop * width), there.start * width, there.stop * width)
            for own, there in self.part.pieces()
        ]
        for start in range(0, self.input_dim * width, DRAWN_TOGETHER):
            stop = min(start + DRAWN_TOGETHER, self.input_dim * width)
            block = torch.empty(stop - start).uniform_(-bound, bound, generator=generator)
            largest = max(largest, block.max().item())
            for own, first, last in pieces:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    offset = own.start - first
                    into[low + offset : high + offset].copy_(block[low - start : high - start])
        return largest

    @property
    def encoder_linear(self) -> nn.Linear:
        return cast(Projection, self.encoder[0]).linear

    @property
    def decoder_linear(self) -> nn.Linear:
        return cast(Projection, self.decoder[0]).linear

    @property
    def encoder_weight(self) -> Tensor:
        return self.encoder_linear.weight.data

    @property
    def encoder_bias(self) -> Tensor:
        return self.encoder_linear.bias.data

    @property
    def decoder_weight(self) -> Tensor:
        return self.decoder_linear.weight.data

    @property
    def decoder_bias_vector(self) -> Tensor | None:
        return self.decoder_linear.bias.data if self.bias_decoder else None

    @property
    def device_encoder(self) -> torch.device:
        return self.encoder_weight.device

    @property
    def device_decoder(self) -> torch.device:
        return self.decoder_weight.device

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.encoder_weight.dtype

    def forward_encoder(self, x: Tensor) -> Tensor:
        """Encodings [k, m] (or [m]) of gradients [k, n] (or [n])."""
        return self.encoder(x.to(self.device_encoder, self.torch_dtype))

    def forward_decoder(self, latent: Tensor) -> Tensor:
        return self.decoder(latent.to(self.device_decoder, self.torch_dtype))

    def forward(self, x: Tensor, return_encoded: bool = False) -> Any:
        latent = self.forward_encoder(x)
        decoded = self.forward_decoder(latent)
        return (decoded, latent) if return_encoded else decoded

    @torch.no_grad()
    def invert_encoding(self) -> None:
        """Turn the latent axis around; the decoder's output for a given gradient stays the same for odd activations."""
        self.encoder_weight.neg_()
        self.encoder_bias.neg_()
        self.decoder_weight.neg_()

    @torch.no_grad()
    def get_weight_importance(self, part: str = "decoder-weight") -> Tensor:
        """One non-negative number per entry of the space, on the CPU."""
        require_choice("part", part, PARTS)
        bias = self.decoder_bias_vector
        if part == "encoder-weight":
            return self.encoder_weight.abs().sum(0).cpu()
        if part == "decoder-weight":
            return self.decoder_weight.abs().sum(1).cpu()
        if bias is None:
            raise UserError(f"part={part} needs a decoder bias, this model has none: use decoder-weight.")
        if part == "decoder-bias":
            return bias.abs().cpu()
        return (self.decoder_weight.sum(1) + bias).abs().cpu()

    def architecture(self) -> dict[str, Any]:
        """What config.json says about the model."""
        return {
            "input_dim": self.input_dim,
            "latent_dim": self.latent_dim,
            "activation_encoder": self.activation_encoder,
            "activation_decoder": self.activation_decoder,
            "bias_decoder": self.bias_decoder,
            "torch_dtype": str(self.torch_dtype).removeprefix("torch."),
        }

    @torch.no_grad()
    def _keep_entries(self, keep: Tensor) -> None:
        """Shrink encoder columns, decoder rows and decoder bias to these entries (own positions, of a part)."""
        encoder, decoder = self.encoder_linear, self.decoder_linear
        encoder.weight = nn.Parameter(encoder.weight.data[:, keep.to(encoder.weight.device)].clone())
        at_decoder = keep.to(decoder.weight.device)
        decoder.weight = nn.Parameter(decoder.weight.data[at_decoder].clone())
        if self.bias_decoder:
            decoder.bias = nn.Parameter(decoder.bias.data[at_decoder].clone())
        encoder.in_features = decoder.out_features = keep.numel()


def select_entries_to_keep(
    num_entries: int,
    *,
    mask: Tensor | None = None,
    threshold: float | None = None,
    topk: int | float | None = None,
    importance: Tensor | None = None,
    in_float32: bool = False,
) -> Tensor:
    """Positions to keep, ascending: first the mask, then the threshold, then the top k of what is left.

    Ties at the k-th place go to the lowest positions. `in_float32` rounds k as the reference does.
    """
    check_topk("topk", topk)
    if importance is not None and importance.shape != (num_entries,):
        raise UserError(f"importance has shape {tuple(importance.shape)}: pass one of shape ({num_entries},).")
    keep = torch.arange(num_entries)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != (num_entries,):
            raise UserError(
                f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}: pass a torch.bool mask of shape "
                f"({num_entries},)."
            )
        keep = mask.cpu().nonzero().squeeze(1)
    if threshold is not None:
        assert importance is not None, "a threshold compares importances"
        keep = keep[importance[keep] >= threshold]
    if topk is not None and not (isinstance(topk, float) and topk == 1.0):
        assert importance is not None, "top k compares importances"
        keep = _largest(importance, keep, count_to_keep(topk, keep.numel(), in_float32=in_float32))
    if not keep.numel():
        found = "the mask is empty" if importance is None else f"the largest importance is {importance.max():.3g}"
        raise UserError(f"Pruning with threshold={threshold} keeps nothing, {found}: lower it, or widen the mask.")
    return keep


def count_to_keep(topk: int | float, remaining: int, *, in_float32: bool = False) -> int:
    if isinstance(topk, int):
        return min(topk, remaining)
    if in_float32:
        return max(1, int(torch.ceil(torch.tensor(topk * remaining)).item()))
    return min(remaining, math.ceil(topk * remaining))


def _largest(importance: Tensor, keep: Tensor, k: int) -> Tensor:
    """The k positions of `keep` with the largest importance, ascending, ties to the lowest position."""
    if k >= keep.numel():
        return keep
    values = importance if keep.numel() == importance.numel() else importance[keep]
    smallest_kept = torch.topk(values, k, sorted=False).values.min()
    above = (values > smallest_kept).nonzero().squeeze(1)
    tied = (values == smallest_kept).nonzero().squeeze(1)[: k - above.numel()]
    return keep[torch.cat([above, tied]).sort().values]


class ParamMappedGradiendModel(GradiendModel):
    """A GRADIEND model whose entries are named: it knows its parameter space."""

    def __init__(self, space: ParameterSpace, latent_dim: int = 1, **options: Any) -> None:
        super().__init__(space.size, latent_dim, **options)
        self.space = space

    @property
    def param_map(self) -> list[str]:
        return [weight.name for weight in self.space.weights]

    def unpruned_length(self) -> int:
        return self.space.full_size

    def __len__(self) -> int:
        return self.space.size

    def flatten_gradient_dict(self, gradients: dict[str, Tensor]) -> Tensor:
        """The vector of a {weight name: gradient} mapping."""
        missing = [w.name for w in self.space.active() if w.name not in gradients]
        if missing:
            raise UserError(f"The gradient dict lacks {missing[0]!r} ({len(missing)} in all): pass all mapped weights.")
        return torch.cat(
            [gradients[w.name].reshape(-1)[w.flat_indices().to(gradients[w.name].device)] for w in self.space.active()]
        )

    def forward_encoder(self, x: Tensor | dict[str, Tensor]) -> Tensor:
        return super().forward_encoder(self.flatten_gradient_dict(x) if isinstance(x, dict) else x)

    def prune(
        self,
        *,
        topk: int | float | None = None,
        threshold: float | None = None,
        mask: Tensor | None = None,
        importance: Tensor | None = None,
        part: str = "decoder-weight",
        inplace: bool = True,
        return_mask: bool = False,
    ) -> Any:
        """Keep the entries that mask, threshold and topk select, in this order; returns the model (and the mask)."""
        if importance is None and (topk is not None or threshold is not None):
            importance = self.get_weight_importance(part)
        combined = torch.zeros(self.input_dim, dtype=torch.bool)
        keep = select_entries_to_keep(self.input_dim, mask=mask, threshold=threshold, topk=topk, importance=importance)
        combined[keep] = True
        model = self
        if inplace:
            self.keep_entries(keep)
        else:
            model = self._copy_of(keep)
        return (model, combined) if return_mask else model

    def keep_entries(self, keep: Tensor) -> None:
        """Shrink weights and space to these positions of the space."""
        own = keep
        if not self.part.is_whole:
            owned = [keep[slice(*torch.searchsorted(keep, torch.tensor(ends)).tolist())] for ends in self.part.ranges]
            own = torch.cat(
                [mine - there.start + here.start for mine, (here, there) in zip(owned, self.part.pieces(), strict=True)]
            )
        self._keep_entries(own)
        self.part = self.part.after(keep)
        self.space = self.space.select(keep)
        self.input_dim = keep.numel()

    def _copy_of(self, keep: Tensor) -> ParamMappedGradiendModel:
        """A pruned copy; never a copy of the unpruned weights."""
        pruned = ParamMappedGradiendModel(
            self.space.select(keep),
            self.latent_dim,
            activation_encoder=self.activation_encoder,
            activation_decoder=self.activation_decoder,
            bias_decoder=self.bias_decoder,
            torch_dtype=self.torch_dtype,
            device_encoder=self.device_encoder,
            device_decoder=self.device_decoder,
            initialize=False,
        )
        pruned.encoder_weight.copy_(self.encoder_weight[:, keep.to(self.device_encoder)])
        pruned.encoder_bias.copy_(self.encoder_bias)
        pruned.decoder_weight.copy_(self.decoder_weight[keep.to(self.device_decoder)])
        bias, mine = pruned.decoder_bias_vector, self.decoder_bias_vector
        if bias is not None and mine is not None:
            bias.copy_(mine[keep.to(self.device_decoder)])
        return pruned

    def get_topk_weights(self, part: str = "decoder-weight", topk: int | float = 1000) -> list[int]:
        """Base-global positions of the most important entries, most important first."""
        importance = self.get_weight_importance(part)
        k = count_to_keep(topk, self.input_dim)
        local = torch.sort(importance, descending=True, stable=True).indices[:k]
        return self.space.base_global(local).tolist()

    def get_enhancer_mask(self, topk: int | float, part: str = "decoder-weight") -> Tensor:
        """A mask over the current space of its most important entries, to pass to `prune`."""
        keep = select_entries_to_keep(self.input_dim, topk=topk, importance=self.get_weight_importance(part))
        mask = torch.zeros(self.input_dim, dtype=torch.bool)
        mask[keep] = True
        return mask


class ModelWithGradiend:
    """A base model and the GRADIEND model over its gradients."""

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

        Options: `device`, `device_encoder`, `device_decoder`, `device_base_model`, `encoder_decoder_same_device`,
        `torch_dtype`, `trust_remote_code`, `base_model` (a model or path to use instead of the recorded one), and, for
        a plain base model, those of `create_model_with_gradiend`.
        """
        from gradiend_dist.checkpoint import is_model_directory, load_model

        if is_model_directory(load_directory):
            return load_model(load_directory, cls, **options)
        return create_model_with_gradiend(str(load_directory), **options)

    def save_pretrained(self, save_directory: str | Path, training: dict[str, Any] | None = None) -> None:
        """Write the directory that `from_pretrained`, here and in the reference, reads."""
        from gradiend_dist.checkpoint import save_model

        save_model(self, save_directory, training=training)

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
        scaled = scaling_without_texts(scaling)
        gradiend = self.gradiend
        if not gradiend.part.is_whole:
            raise UserError("This rank has only a part of the model: rewrite in one process, or use the trainer's.")
        check_direction(feature_factor, part, latent_dim=gradiend.latent_dim, bias=gradiend.bias_decoder)
        converted = as_dtype(dtype)
        if output_dir is not None:
            check_output(output_dir, dtype, max_shard_size)
        changed = copy.deepcopy(self.base_model)
        weights, vectors = gradiend.space.active(), VectorsInMemory(gradiend)
        rewrite(changed, weights, vectors, learning_rate, feature_factor, part, scaled)
        changed = changed if converted is None else changed.to(converted)
        if output_dir is not None:
            change = self.change(learning_rate, feature_factor, part, scaling=scaling)
            save_rewritten(changed, self.tokenizer, output_dir, change.card(), max_shard_size=max_shard_size)
        return changed

    def change(self, learning_rate: float, feature_factor: float | Sequence[float], part: str, **facts: Any) -> Change:
        """What such a rewrite does, for the card of the rewritten model."""
        num_weights = sum(parameter.numel() for parameter in self.base_model.parameters())
        return Change(self.name_or_path, len(self), num_weights, learning_rate, feature_factor, part, **facts)

    def rewrite_vector(
        self, feature_factor: float | Sequence[float], part: str = "decoder", *, scaling: str = "plain"
    ) -> Tensor:
        """The direction of a rewrite, one number per entry of the space."""
        scaled, vectors = scaling_without_texts(scaling), VectorsInMemory(self.gradiend)
        check_direction(feature_factor, part, latent_dim=self.gradiend.latent_dim, bias=self.gradiend.bias_decoder)
        if scaled is None:
            return direction(vectors, slice(0, len(self)), feature_factor, part)
        return scaled_direction(self.base_model, self.gradiend.space.active(), vectors, feature_factor, part, scaled)

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


def check_space_fits(space: ParameterSpace, base_model: nn.Module) -> None:
    """A GRADIEND model belongs to the base model whose weights it names."""
    parameters = dict(base_model.named_parameters())
    for weight in space.weights:
        found = parameters.get(weight.name)
        if found is None or tuple(found.shape) != weight.shape:
            shape = "no such weight" if found is None else f"shape {tuple(found.shape)}"
            raise UserError(
                f"The GRADIEND model names {weight.name} of shape {weight.shape}, the base model has {shape}: "
                "pass the base model that it was trained on."
            )


def load_base_model(
    path: str, *, torch_dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """The base model with the head it was built for, and its tokenizer; `auto` is the dtype that it is stored in."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from gradiend_dist.objectives import is_causal

    if trust_remote_code:
        logger.warning("trust_remote_code=true: code that comes with %s runs on this machine with your rights", path)
    config = load_base_config(path, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(path, trust_remote_code)
    kind = AutoModelForCausalLM if is_causal(config, tokenizer) else AutoModelForMaskedLM
    try:
        loaded: Any = kind.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype if torch_dtype == "auto" else getattr(torch, torch_dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    except SafetensorError as error:
        raise UserError(f"A weight file of model={path!r} is damaged ({error}): copy or download it again.") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"model={path!r} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    _require_all_weights(path, [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])])
    num_known = model.get_input_embeddings().num_embeddings
    if max(tokenizer.get_vocab().values()) >= num_known:
        raise UserError(
            f"The tokenizer of model={path!r} has {len(tokenizer)} tokens and the model embeddings for {num_known}: "
            "save them together, or resize the model's embeddings."
        )
    return model.eval(), tokenizer


def load_base_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a base model that can be trained on."""
    from transformers import AutoConfig

    local = as_local_path(path, "model")
    if local is not None and not (local / "config.json").is_file():
        raise UserError(f"model={path!r} holds no config.json: pass the directory of a saved model, or a hub id.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model={path!r} cannot be loaded: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UserError(f"model={path!r} is an encoder-decoder model: pass a masked or a causal one.")
    return config


def _load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError) as error:  # a damaged tokenizer.json gives any of them
        raise UserError(f"The tokenizer of model={path!r} cannot be loaded: {first_line(error)}") from error
    # Without any file of a tokenizer, transformers makes one that knows its special tokens and nothing else.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"model={path!r} has no tokenizer beside it: save the tokenizer in the same directory.")
    return tokenizer


def _require_all_weights(path: str, unset: list[str]) -> None:
    """What a checkpoint lacks would be drawn at random, and its gradients would mean nothing."""
    if unset:
        raise UserError(
            f"model={path!r} has no weight that fits {min(unset)} ({len(unset)} in all): pass a complete language "
            "model whose config.json is its own."
        )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


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
    **options: Any,
) -> ModelWithGradiend:
    """A fresh GRADIEND model over a base model (a path, a hub id or a loaded model with its tokenizer).

    `param_map` restricts the weights by name or wildcard; `seed` fixes the start; further options go to
    `ModelWithGradiend`.
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
    return ModelWithGradiend(
        model.to(placement.base_model), gradiend, tokenizer, source=source, target=target, **options
    )
