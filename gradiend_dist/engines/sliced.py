"""Encoder and decoder in slices of n, one on each rank; a single process owns all of n, each half on its device.

What costs time in a step are its passes over n: see `halves`. Between them are K x m numbers, latents, dloss/dh and
dloss/da: these alone cross from one device to the other.

Every sum over n is this rank's, then everyone's (`Comm.total`): a few numbers, and nothing to add in a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, EngineState, GradiendBatch, StepOptions
from gradiend_dist.engines.chunks import chunks, dot, square
from gradiend_dist.engines.fused import decoder_half, encoder_half
from gradiend_dist.engines.items import Shares, StepItems
from gradiend_dist.engines.optimizer import make_optimizer
from gradiend_dist.engines.rounding import Rounding
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel


class SlicedEngine(Engine):
    """Trains this rank's slices of a model, which all ranks together hold; without `comm` a model of one process."""

    def __init__(self, model: ParamMappedGradiendModel, options: StepOptions, comm: Comm | None = None) -> None:
        self.model, self.slices, self.options, self.comm = model, model.slices, options, comm or Comm()
        self.decoder_bias = model.decoder_bias_vector
        for_encoder, for_decoder = (
            replace(options, epsilon=epsilon)
            for epsilon in (options.rates.encoder_epsilon, options.rates.decoder_epsilon)
        )
        # Rows of We [m, n] are weights of their own, so that each is one dense range of n.
        encoder = [*model.encoder_weight, model.encoder_bias]
        self.encoder_optimizer = make_optimizer(for_encoder, encoder, Rounding(0, self.slices, model.latent_dim))
        decoder = [model.decoder_weight] if self.decoder_bias is None else [model.decoder_weight, self.decoder_bias]
        self.decoder_optimizer = make_optimizer(for_decoder, decoder, Rounding(1, self.slices))
        self.encoder = encoder_half(model, self.encoder_optimizer)
        self.decoder = decoder_half(model, self.decoder_optimizer)
        self.shares = Shares(model.device_decoder)
        self.trains_encoder = options.supervised != "decoder"
        self.trains_decoder = options.supervised != "encoder"

    @torch.no_grad()
    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        items = StepItems.of(batches, self.model, self.shares)
        at_encoder, at_decoder = self.model.device_encoder, self.model.device_decoder
        latent, back_through, source_square = self._encode(items)
        if self.trains_decoder:
            loss, d_latent, decoder_square = self._reduce_decoder(items, latent.to(at_decoder))
        else:
            loss, d_latent = items.compare_with_labels(latent, at_decoder)
            decoder_square = torch.zeros_like(loss)
        d_encoder = back_through(d_latent.to(at_encoder)) if self.trains_encoder else None
        norm = (decoder_square + self._encoder_square(items, d_encoder, source_square).to(at_decoder)).sqrt().float()
        loss = loss.float()
        scale, not_finite = clip(loss, norm, self.options.max_grad_norm)
        rates = self.options.rates
        self.encoder_optimizer.begin(learning_rate * rates.encoder, not_finite.to(at_encoder))
        self.decoder_optimizer.begin(learning_rate * rates.decoder, not_finite.to(at_decoder))
        if d_encoder is None:
            encoder_square = self.encoder.weight_square()
        else:
            encoder_square = self.encoder.update(items, d_encoder * scale.to(at_encoder))
        if self.trains_decoder:
            decoder_square = self.decoder.update(items, latent.to(at_decoder), items.factors * scale)
        else:
            decoder_square = self.decoder.weight_square()
        squares = self.comm.total(torch.cat([encoder_square.to(at_decoder), decoder_square]))
        return torch.cat([torch.stack([loss, norm]), squares.sqrt().float()])

    def _encode(self, items: StepItems) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """The latent [K, m], the map from dloss/dh to dloss/da, and, of a single item, |x|^2. All ranks call this.

        The map is autograd over K x m numbers: it holds for any activation.
        """
        if not self.trains_encoder:
            label = items.label_on(self.model.device_decoder).to(self.model.torch_dtype)
            return label, lambda d_latent: d_latent, label.new_zeros(())
        sums = self.comm.total(self.encoder.products(items))
        size = len(items) * self.model.latent_dim
        pre = sums[:size].view(len(items), -1).to(self.model.torch_dtype) + self.model.encoder_bias
        pre.requires_grad_(True)
        with torch.enable_grad():
            latent = self.model.encoder[1](pre)

        def back_through(d_latent: Tensor) -> Tensor:
            return torch.autograd.grad(latent, pre, d_latent)[0]

        return latent.detach(), back_through, sums[-1]

    def _reduce_decoder(self, items: StepItems, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, dloss/dh [K, m], and the square of the norm of the decoder's gradients. All ranks call this."""
        sums = self.comm.total(self.decoder.sums(items, latent))
        d_latent, (loss, bias_square, weight_square) = sums[:-3].view_as(latent), sums[-3:]
        decoder_square = weight_square if self.decoder_bias is None else weight_square + bias_square
        return loss, d_latent.to(latent.dtype), decoder_square

    def _encoder_square(self, items: StepItems, d_encoder: Tensor | None, source_square: Tensor) -> Tensor:
        """Square of the norm of the encoder's gradients, d^T x and sum d; of one item |d|^2 (|x|^2 + 1).

        All ranks call this.
        """
        if d_encoder is None:
            return torch.zeros((), dtype=torch.float64, device=self.model.device_decoder)
        if len(items) == 1:
            return d_encoder.double().square().sum() * (source_square + 1.0)
        return self.comm.total(self.encoder.gradient_square(items, d_encoder))[0] + square(d_encoder.sum(0))

    def flip(self, *, with_decoder_bias: bool) -> None:
        self.model.invert_encoding()
        if with_decoder_bias:
            if self.decoder_bias is not None:
                self.decoder_bias.neg_()
            return
        self.encoder_optimizer.negate_momentum(list(range(self.model.latent_dim + 1)))
        self.decoder_optimizer.negate_momentum([0])

    def state(self) -> EngineState | None:
        cut: dict[str, Tensor] = {}
        same: dict[str, Tensor] = {}
        encoder_bias = f"{self.model.latent_dim}."  # behind the rows of We
        for side, optimizer in (("encoder", self.encoder_optimizer), ("decoder", self.decoder_optimizer)):
            for name, tensor in optimizer.state().items():
                is_same = tensor.ndim == 0 or (side == "encoder" and name.startswith(encoder_bias))
                (same if is_same else cut)[f"{side}.{name}"] = tensor
        return EngineState(cut, same)


def clip(loss: Tensor, norm: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """What gradients are multiplied by (limit 0: not clipped), and 1.0 where nothing may be updated.

    Both stay on the device: reading them would wait for it.
    """
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
    return scale, 1.0 - (loss.isfinite() & norm.isfinite()).float()


def encode_slices(model: GradiendModel, source: Tensor, comm: Comm) -> Tensor:
    """Encodings [k, m] of gradients [k, n] of which each rank has its slices, as of the model.

    All ranks call this, unless the model is whole; on one rank it is the model's own encoding.
    """
    weight = model.encoder_weight
    source = source.to(weight.device, weight.dtype)
    products = torch.zeros(len(source), len(weight), dtype=torch.float64, device=weight.device)
    for chunk in chunks(source.shape[1], weight.device):
        products += dot(source[:, chunk], weight[:, chunk])
    if not model.slices.is_whole:
        products = comm.total(products)
    encoded: Tensor = model.encoder[1](products.to(weight.dtype) + model.encoder_bias)
    return encoded
