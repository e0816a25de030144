"""The GRADIEND model: encoder n -> m and decoder m -> n over gradients; alone, over named weights, with a base model.

    h  = act_e(We.x + be)      We [m, n], be [m]
    y' = act_d(Wd.h + bd)      Wd [n, m], bd [n]

`GradiendModel` is the bare pair, `ParamMappedGradiendModel` knows which base weight each of the n entries is, and
`ModelWithGradiend` adds the base model itself: it encodes gradients and rewrites the base along the decoder's vector.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.config.choices import ACTIVATIONS, PARTS
from gradiend_dist.errors import UserError
from gradiend_dist.model.entries import count_to_keep, select_entries_to_keep
from gradiend_dist.space import ParameterSpace, Slices

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

    With `slices`, the tensors hold those of the n entries alone: what one of several ranks owns. Slices encode nothing
    by themselves; the engines add up what they contribute. No method communicates.
    """

    def __init__(
        self,
        input_dim: int,
        latent_dim: int = 1,
        *,
        slices: Slices | None = None,
        activation_encoder: str = "tanh",
        activation_decoder: str = "id",
        bias_decoder: bool = True,
        torch_dtype: torch.dtype = torch.float32,
        device: Any = None,
        device_encoder: Any = None,
        device_decoder: Any = None,
        generator: torch.Generator | None = None,
        initialize: bool = True,
        new_weights: Callable[[int], Tensor] | None = None,
    ) -> None:
        """`new_weights` makes room for so many numbers of each tensor of size n; None: memory of its device."""
        super().__init__()
        require_choice("activation_encoder", activation_encoder, ACTIVATIONS)
        require_choice("activation_decoder", activation_decoder, ACTIVATIONS)
        self.input_dim, self.latent_dim = input_dim, latent_dim
        self.activation_encoder, self.activation_decoder = activation_encoder, activation_decoder
        self.bias_decoder = bias_decoder
        self.slices = slices or Slices.whole(input_dim)
        assert self.slices.total == input_dim, f"slices of {self.slices.total} entries for n = {input_dim}"
        width = self.slices.size
        encoder_at, decoder_at = device_encoder or device or "cpu", device_decoder or device or "cpu"
        if new_weights is not None:
            encoder_at = decoder_at = "meta"
        self.encoder = nn.Sequential(
            Projection(width, latent_dim, bias=True, device=encoder_at, dtype=torch_dtype),
            ACTIVATION_MODULES[activation_encoder](),
        )
        self.decoder = nn.Sequential(
            Projection(latent_dim, width, bias=bias_decoder, device=decoder_at, dtype=torch_dtype),
            ACTIVATION_MODULES[activation_decoder](),
        )
        if new_weights is not None:
            self._lay_out(new_weights)
        if initialize:
            self.reset_parameters(generator)

    def _lay_out(self, new_weights: Callable[[int], Tensor]) -> None:
        """On the host: tensors of size n where `new_weights` puts them."""

        def of_shape(unset: Tensor) -> nn.Parameter:
            return nn.Parameter(new_weights(unset.numel()).view(unset.shape))

        encoder, decoder = self.encoder_linear, self.decoder_linear
        encoder.weight, encoder.bias = of_shape(encoder.weight), nn.Parameter(torch.zeros(self.latent_dim))
        decoder.weight = of_shape(decoder.weight)
        if self.bias_decoder:
            decoder.bias = of_shape(decoder.bias)

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
        """Draw n x width numbers in (-bound, bound), keep those of the slices; returns the largest of all."""
        largest = -math.inf
        pieces = [
            (slice(own.start * width, own.stop * width), there.start * width, there.stop * width)
            for own, there in self.slices.range_pairs()
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
        """Shrink encoder columns, decoder rows and decoder bias to these entries (positions among the rank's own)."""
        encoder, decoder = self.encoder_linear, self.decoder_linear
        encoder.weight = nn.Parameter(encoder.weight.data[:, keep.to(encoder.weight.device)].clone())
        at_decoder = keep.to(decoder.weight.device)
        decoder.weight = nn.Parameter(decoder.weight.data[at_decoder].clone())
        if self.bias_decoder:
            decoder.bias = nn.Parameter(decoder.bias.data[at_decoder].clone())
        encoder.in_features = decoder.out_features = keep.numel()


class ParamMappedGradiendModel(GradiendModel):
    """A GRADIEND model whose entries are named: it knows its parameter space. No method communicates."""

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
        keep_idx: Tensor | None = None,
        inplace: bool = False,
        return_mask: bool = False,
    ) -> Any:
        """Keep the entries that mask, threshold and topk select, in this order, or those at `keep_idx`; returns a
        pruned copy, or this model (`inplace`), and the mask where it is asked for."""
        if keep_idx is not None:
            require(
                topk is None and threshold is None and mask is None,
                "prune(keep_idx=...) says which entries are kept: leave topk, threshold and mask out.",
            )
            mask = _mask_of(keep_idx, self.input_dim)
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
        self._keep_entries(keep if self.slices.is_whole else self.slices.local(keep))
        self.slices = self.slices.after(keep)
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


def _mask_of(keep_idx: Tensor, size: int) -> Tensor:
    keep = torch.as_tensor(keep_idx, dtype=torch.long).cpu()
    if not len(keep) or int(keep.min()) < 0 or int(keep.max()) >= size:
        raise UserError(f"prune(keep_idx=...) needs positions from 0 to {size - 1}: pass at least one, and no others.")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[keep] = True
    return mask
