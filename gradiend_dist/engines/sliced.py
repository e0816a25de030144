"""Encoder and decoder in slices of n, one on each rank; a single process owns all of n, each half on its device.

The step never forms the gradients of the 3n weights. With f the weight of an item in the loss, r = f dloss/dz [K, n] of
the decoder's pre-activation and d = dloss/da [K, m] of the encoder's,

    dWd = r^T h      dbd = sum_K r      dWe = d^T x      dbe = sum_K d

are outer products, formed for one chunk of n at a time while it is in the cache and used there by the fused AdamW.
Memory traffic per weight and step: 8 bytes for h, 12 for loss and d, 80 for the update. It needs no memory of size n
besides weights, moments, x and y. Only h and d cross from one device to the other: K x m numbers each.

Every sum over n is this rank's, then everyone's (`Comm.total`): a few numbers, and nothing to add in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, EngineState, GradiendBatch, StepOptions
from gradiend_dist.engines.chunks import Sums, affine, chunks, dot, outer, square
from gradiend_dist.engines.optimizer import make_optimizer
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel


class SlicedEngine(Engine):
    """Trains this rank's slices of a model, which all ranks together hold; without `comm` a model of one process."""

    def __init__(self, model: ParamMappedGradiendModel, options: StepOptions, comm: Comm | None = None) -> None:
        self.model, self.slices, self.options, self.comm = model, model.slices, options, comm or Comm()
        self.encoder_weight, self.encoder_bias = model.encoder_weight, model.encoder_bias
        self.decoder_weight, self.decoder_bias = model.decoder_weight, model.decoder_bias_vector
        for_encoder, for_decoder = (
            replace(options, epsilon=epsilon)
            for epsilon in (options.rates.encoder_epsilon, options.rates.decoder_epsilon)
        )
        # Rows of We [m, n] are weights of their own, so that each is one dense range of n.
        self.encoder_optimizer = make_optimizer(for_encoder, [*self.encoder_weight, self.encoder_bias])
        decoder = [self.decoder_weight] if self.decoder_bias is None else [self.decoder_weight, self.decoder_bias]
        self.decoder_optimizer = make_optimizer(for_decoder, decoder)
        self.decoder_activation = None if isinstance(model.decoder[1], nn.Identity) else model.decoder[1]
        self.trains_encoder = options.supervised != "decoder"
        self.trains_decoder = options.supervised != "encoder"

    @torch.no_grad()
    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        items = StepItems.of(batches, self.model)
        at_encoder, at_decoder = self.model.device_encoder, self.model.device_decoder
        latent, back_through, source_square = self._encode(items)
        if self.trains_decoder:
            loss, d_latent, decoder_square = self._reduce_decoder(items, latent.to(at_decoder))
        else:
            loss, d_latent = items.compare_with_labels(latent, at_decoder)
            decoder_square = torch.zeros_like(loss)
        d_encoder = back_through(d_latent.to(at_encoder)) if self.trains_encoder else None
        norm = (decoder_square + self._encoder_square(items, d_encoder, source_square).to(loss.device)).sqrt().float()
        loss = loss.float()
        scale, not_finite = clip(loss, norm, self.options.max_grad_norm)
        rates = self.options.rates
        self.encoder_optimizer.begin(learning_rate * rates.encoder, not_finite.to(at_encoder))
        self.decoder_optimizer.begin(learning_rate * rates.decoder, not_finite.to(at_decoder))
        d_encoder = None if d_encoder is None else d_encoder * scale.to(at_encoder)
        encoder_square = self._update_encoder(items, d_encoder)
        decoder_square = self._update_decoder(items, latent.to(at_decoder), items.factors * scale)
        squares = self.comm.total(torch.cat([encoder_square.to(at_decoder), decoder_square]))
        return torch.cat([torch.stack([loss, norm]), squares.sqrt().float()])

    def _encode(self, items: StepItems) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """The latent [K, m], the map from dloss/dh to dloss/da, and, of a single item, |x|^2. All ranks call this.

        The map is autograd over K x m numbers: it holds for any activation.
        """
        if not self.trains_encoder:
            label = items.label.to(self.model.device_decoder, self.model.torch_dtype)
            return label, lambda d_latent: d_latent, torch.zeros((), dtype=torch.float64)
        weight, single = self.encoder_weight, len(items) == 1
        size = len(items) * len(weight)
        own = Sums(size + single, weight.device)
        for chunk in self.chunks(weight.device):
            source = items.source(chunk)
            product = dot(source, weight[:, chunk])
            own.add(*((product, square(source)) if single else (product,)))
        sums = self.comm.total(own.values)
        pre = sums[:size].view(len(items), -1).to(weight.dtype) + self.encoder_bias
        pre.requires_grad_(True)
        with torch.enable_grad():
            latent = self.model.encoder[1](pre)

        def back_through(d_latent: Tensor) -> Tensor:
            return torch.autograd.grad(latent, pre, d_latent)[0]

        return latent.detach(), back_through, sums[-1]

    def _reduce_decoder(self, items: StepItems, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over n the loss, dloss/dh [K, m], and the squares of the decoder's gradients. All ranks call this."""
        weighted, single = latent * items.factors, len(items) == 1
        size = latent.numel()
        own = Sums(size + 3 - single, latent.device)
        for chunk in self.chunks(latent.device):
            error, r = self._errors(items, latent, chunk)
            d_latent = dot(r, self.decoder_weight[chunk].T)
            if single:  # factors are applied to sums: |f r h| = f |r| |h|
                loss = square(error)
                own.add(d_latent, loss, loss if r is error else square(r))
            else:
                loss = items.factors[:, 0] @ error.square().sum(1)
                own.add(d_latent, loss, square(items.factors[:, 0] @ r), square(outer(r, weighted)))
        sums = self.comm.total(own.values)
        d_latent, loss, bias_square = sums[:size].view_as(latent) * items.factors, sums[size], sums[size + 1]
        if single:
            factor = items.factors.double().squeeze()
            loss, bias_square = loss * factor, bias_square * factor.square()
        weight_square = bias_square * latent.double().square().sum() if single else sums[size + 2]
        decoder_square = weight_square if self.decoder_bias is None else weight_square + bias_square
        return loss / 2.0, d_latent.to(latent.dtype), decoder_square

    def _errors(self, items: StepItems, latent: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Of one chunk of n: y' - y [K, chunk], and the same passed back through the decoder's activation."""
        bias = None if self.decoder_bias is None else self.decoder_bias[chunk]
        pre = affine(latent, self.decoder_weight[chunk], bias)
        target = items.target(chunk)
        if self.decoder_activation is None:
            error = pre.sub_(target)
            return error, error
        pre.requires_grad_(True)
        with torch.enable_grad():
            decoded = self.decoder_activation(pre)
        error = decoded.detach() - target
        return error, torch.autograd.grad(decoded, pre, error)[0]

    def _encoder_square(self, items: StepItems, d_encoder: Tensor | None, source_square: Tensor) -> Tensor:
        """Square of the norm of the encoder's gradients, d^T x and sum d; of one item |d|^2 (|x|^2 + 1).

        All ranks call this.
        """
        if d_encoder is None:
            return torch.zeros((), dtype=torch.float64)
        if len(items) == 1:
            return d_encoder.double().square().sum() * (source_square + 1.0)
        own = Sums(1, d_encoder.device)
        for chunk in self.chunks(d_encoder.device):
            own.add(square(outer(d_encoder, items.source(chunk))))
        return self.comm.total(own.values)[0] + square(d_encoder.sum(0))

    def _update_encoder(self, items: StepItems, d_encoder: Tensor | None) -> Tensor:
        """Update this rank's slices, unless they are not trained; returns the sum [1] of their squares afterwards."""
        squares = Sums(1, self.model.device_encoder)
        if d_encoder is not None:
            # The bias first: an optimizer that cannot be cut steps with its last weight, and norms are of after it.
            self.encoder_optimizer.update(self.model.latent_dim, slice(None), d_encoder.sum(0))
        for chunk in self.chunks(self.model.device_encoder):
            if d_encoder is not None:
                for row, gradient in enumerate(outer(d_encoder, items.source(chunk))):
                    self.encoder_optimizer.update(row, chunk, gradient)
            squares.add(square(self.encoder_weight[:, chunk]))
        return squares.values

    def _update_decoder(self, items: StepItems, latent: Tensor, factors: Tensor) -> Tensor:
        """The same of the decoder."""
        squares = Sums(1, self.model.device_decoder)
        for chunk in self.chunks(self.model.device_decoder):
            if self.trains_decoder:
                _, r = self._errors(items, latent, chunk)
                r *= factors
                if self.decoder_bias is not None:
                    self.decoder_optimizer.update(1, chunk, r[0] if len(r) == 1 else r.sum(0))
                self.decoder_optimizer.update(0, chunk, outer(r, latent))
            squares.add(square(self.decoder_weight[chunk]))
        return squares.values

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Ranges of this rank's slices of n; all at once where the optimizer cannot be cut. No communication."""
        if self.encoder_optimizer.can_be_cut:
            yield from chunks(self.slices.size, device)
        elif self.slices.size:
            yield slice(0, self.slices.size)

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


@dataclass(frozen=True)
class StepItems:
    """The K items of one optimizer step, over all its batches: only their weights in the loss differ."""

    sources: list[Tensor]
    """[k, n] of each batch, where the encoder is."""
    targets: list[Tensor]
    """[k, n] of each batch, where the decoder is."""
    label: Tensor
    factors: Tensor
    """[K, 1]: d loss / d error = factor * error for the mean squared error over a batch and over n."""
    label_factors: Tensor
    """The same for the error in the label."""

    @staticmethod
    def of(batches: list[GradiendBatch], model: GradiendModel) -> StepItems:
        counts = [len(batch.label) for batch in batches]
        shares = [2.0 / (len(batches) * count) for count in counts for _ in range(count)]
        label_factors = torch.tensor(shares, device=model.device_decoder).unsqueeze(1)
        return StepItems(
            [batch.source.to(model.device_encoder) for batch in batches if batch.source is not None],
            [batch.target.to(model.device_decoder) for batch in batches if batch.target is not None],
            torch.cat([batch.label for batch in batches]),
            label_factors / model.input_dim,
            label_factors,
        )

    def source(self, chunk: slice) -> Tensor:
        return _rows(self.sources, chunk)

    def target(self, chunk: slice) -> Tensor:
        return _rows(self.targets, chunk)

    def compare_with_labels(self, latent: Tensor, at: torch.device) -> tuple[Tensor, Tensor]:
        """The loss, on device `at`, and dloss/dh of an encoder that is trained on the labels. No communication."""
        difference = latent - self.label.to(latent)
        loss = (difference.double().square() * self.label_factors.to(latent.device)).sum() / 2.0
        return loss.to(at), difference * self.label_factors.to(latent)

    def __len__(self) -> int:
        return len(self.label)


def _rows(batches: list[Tensor], chunk: slice) -> Tensor:
    """[K, chunk]: a view of a single batch, a copy in the cache of several."""
    return batches[0][:, chunk] if len(batches) == 1 else torch.cat([batch[:, chunk] for batch in batches])


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
