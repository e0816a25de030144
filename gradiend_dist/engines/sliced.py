"""One process: encoder and decoder whole, each on its device.

The step never forms the gradients of the 3n weights. With f the weight of an item in the loss, r = f dloss/dz [K, n] of
the decoder's pre-activation and d = dloss/da [K, m] of the encoder's,

    dWd = r^T h      dbd = sum_K r      dWe = d^T x      dbe = sum_K d

are outer products, formed for one chunk of n at a time while it is in the cache and eaten there by the fused AdamW.
Memory traffic per weight and step: 8 bytes for h, 12 for loss and d, 80 for the update. It needs no memory of size n
besides weights, moments, x and y. Only h and d cross from one device to the other: K x m numbers each.

Sums over n go through `total`: here they are complete, in `sliced.py` every rank adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, EngineState, GradiendBatch, StepOptions
from gradiend_dist.engines.optimizer import make_optimizer
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel

# Entries of n that are worked on together, so that a handful of fp32 vectors stay in the cache. With one
# thread 2^17 and 2^18 are equal, with two 2^18 is faster by a tenth; at 2^15 calls cost a third more, with two twice.
CHUNK = 2**18

# A GPU's cache is no reason to cut; fewer, larger kernels are.
CHUNK_ON_GPU = 2**26


class PlacedEngine(Engine):
    def __init__(self, model: ParamMappedGradiendModel, options: StepOptions) -> None:
        self.model = model
        self.slices = model.slices
        self.options = options
        self.encoder_weight, self.encoder_bias = model.encoder_weight, model.encoder_bias
        self.decoder_weight, self.decoder_bias = model.decoder_weight, model.decoder_bias_vector
        # Rows of We [m, n] are weights of their own, so that each is one dense range of n.
        for_encoder, for_decoder = (
            replace(options, epsilon=epsilon)
            for epsilon in (options.rates.encoder_epsilon, options.rates.decoder_epsilon)
        )
        self.encoder_optimizer = make_optimizer(for_encoder, [*self.encoder_weight, self.encoder_bias])
        decoder = [self.decoder_weight] if self.decoder_bias is None else [self.decoder_weight, self.decoder_bias]
        self.decoder_optimizer = make_optimizer(for_decoder, decoder)
        self.decoder_activation = None if isinstance(model.decoder[1], nn.Identity) else model.decoder[1]
        self.trains_encoder = options.supervised != "decoder"
        self.trains_decoder = options.supervised != "encoder"

    def total(self, partial: Tensor) -> Tensor:
        """The sum over everyone who owns a part of n; in a single process, what it is."""
        return partial

    @torch.no_grad()
    def encode(self, source: Tensor) -> Tensor:
        return encode_slices(self.model, source, self.total)

    def encoding_model(self) -> GradiendModel:
        return self.model

    def weights(self) -> ParamMappedGradiendModel:
        return self.model

    def state(self) -> EngineState | None:
        cut: dict[str, Tensor] = {}
        same: dict[str, Tensor] = {}
        biases = {f"encoder.{self.model.latent_dim}"}
        for side, optimizer in (("encoder", self.encoder_optimizer), ("decoder", self.decoder_optimizer)):
            for name, tensor in optimizer.state().items():
                of_bias = f"{side}.{name.split('.')[0]}" in biases
                (same if of_bias or tensor.ndim == 0 else cut)[f"{side}.{name}"] = tensor
        return EngineState(cut, same)

    def flip(self, *, with_decoder_bias: bool) -> None:
        self.model.invert_encoding()
        if with_decoder_bias:
            if self.decoder_bias is not None:
                self.decoder_bias.neg_()
            return
        self.encoder_optimizer.negate_momentum(list(range(self.model.latent_dim + 1)))
        self.decoder_optimizer.negate_momentum([0])

    @torch.no_grad()
    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        items = StepItems.of(batches, self.model)
        latent, back_through, source_square = self._encode(items)
        if self.trains_decoder:
            loss, d_latent, decoder_square = self._reduce_decoder(items, latent.to(self.model.device_decoder))
        else:
            loss, d_latent = self._compare_with_labels(items, latent)
            decoder_square = torch.zeros_like(loss)
        d_encoder = back_through(d_latent.to(self.model.device_encoder)) if self.trains_encoder else None
        norm = (decoder_square + self._encoder_square(items, d_encoder, source_square).to(loss.device)).sqrt()
        return self._update(items, latent, d_encoder, loss.float(), norm.float(), learning_rate)

    def _encode(self, items: StepItems) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """The latent [K, m], the map from dloss/dh to dloss/da, and, of a single item, |x|^2.

        The map is autograd over K x m numbers: it holds for any activation.
        """
        if not self.trains_encoder:
            label = items.label.to(self.model.device_decoder, self.model.torch_dtype)
            return label, lambda d_latent: d_latent, torch.zeros((), dtype=torch.float64)
        weight, single = self.encoder_weight, len(items) == 1
        size = len(items) * len(weight)
        found = Sums(size + single, weight.device)
        for chunk in self.chunks(weight.device):
            source = items.source(chunk)
            product = dot(source, weight[:, chunk])
            found.add(*((product, square(source)) if single else (product,)))
        sums = self.total(found.values)
        pre = sums[:size].view(len(items), -1).to(weight.dtype) + self.encoder_bias
        pre.requires_grad_(True)
        with torch.enable_grad():
            latent = self.model.encoder[1](pre)

        def back_through(d_latent: Tensor) -> Tensor:
            return torch.autograd.grad(latent, pre, d_latent)[0]

        return latent.detach(), back_through, sums[-1]

    def _reduce_decoder(self, items: StepItems, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over n the loss, dloss/dh [K, m], and the squares of the decoder's gradients."""
        weighted, single = latent * items.factors, len(items) == 1
        size = latent.numel()
        found = Sums(size + 3 - single, latent.device)
        for chunk in self.chunks(latent.device):
            error, r = self._errors(items, latent, chunk)
            d_latent = dot(r, self.decoder_weight[chunk].T)
            if single:  # factors are applied to sums: |f r h| = f |r| |h|
                loss = square(error)
                found.add(d_latent, loss, loss if r is error else square(r))
            else:
                loss = items.factors[:, 0] @ error.square().sum(1)
                found.add(d_latent, loss, square(items.factors[:, 0] @ r), square(outer(r, weighted)))
        sums = self.total(found.values)
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

    def _compare_with_labels(self, items: StepItems, latent: Tensor) -> tuple[Tensor, Tensor]:
        difference = latent - items.label.to(latent)
        loss = (difference.double().square() * items.label_factors.to(latent.device)).sum() / 2.0
        return loss.to(self.model.device_decoder), difference * items.label_factors.to(latent)

    def _encoder_square(self, items: StepItems, d_encoder: Tensor | None, source_square: Tensor) -> Tensor:
        """Square of the norm of the encoder's gradients, d^T x and sum d; of one item |d|^2 (|x|^2 + 1)."""
        if d_encoder is None:
            return torch.zeros((), dtype=torch.float64)
        if len(items) == 1:
            return d_encoder.double().square().sum() * (source_square + 1.0)
        at = d_encoder.device
        found = Sums(1, at)
        for chunk in self.chunks(at):
            found.add(square(outer(d_encoder, items.source(chunk))))
        return self.total(found.values)[0] + square(d_encoder.sum(0))

    def _update(
        self,
        items: StepItems,
        latent: Tensor,
        d_encoder: Tensor | None,
        loss: Tensor,
        norm: Tensor,
        learning_rate: float,
    ) -> Tensor:
        """Clip, update and return what `step` does."""
        scale, not_finite = self._gate(loss, norm)
        at_encoder, at_decoder = self.model.device_encoder, self.model.device_decoder
        encoder_squares, decoder_squares = Sums(1, at_encoder), Sums(1, at_decoder)
        rates = self.options.rates
        self.encoder_optimizer.begin(learning_rate * rates.encoder, not_finite.to(at_encoder))
        self.decoder_optimizer.begin(learning_rate * rates.decoder, not_finite.to(at_decoder))
        if d_encoder is not None:
            d_encoder = d_encoder * scale.to(at_encoder)
            # Biases first: an optimizer that cannot be cut steps with its last weight, and norms are of after the step.
            self.encoder_optimizer.update(self.model.latent_dim, slice(None), d_encoder.sum(0))
        for chunk in self.chunks(at_encoder):
            if d_encoder is not None:
                for row, gradient in enumerate(outer(d_encoder, items.source(chunk))):
                    self.encoder_optimizer.update(row, chunk, gradient)
            encoder_squares.add(square(self.encoder_weight[:, chunk]))
        latent, factors = latent.to(at_decoder), items.factors * scale
        for chunk in self.chunks(at_decoder):
            if self.trains_decoder:
                self._update_decoder(items, latent, factors, chunk)
            decoder_squares.add(square(self.decoder_weight[chunk]))
        squares = self.total(torch.cat([encoder_squares.values.to(at_decoder), decoder_squares.values]))
        return torch.cat([torch.stack([loss, norm]), squares.sqrt().float()])

    def _update_decoder(self, items: StepItems, latent: Tensor, factors: Tensor, chunk: slice) -> None:
        _, r = self._errors(items, latent, chunk)
        r *= factors
        if self.decoder_bias is not None:
            self.decoder_optimizer.update(1, chunk, r[0] if len(r) == 1 else r.sum(0))
        self.decoder_optimizer.update(0, chunk, outer(r, latent))

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Ranges of this process's part of n; the whole of it where the optimizer cannot be cut."""
        size = CHUNK_ON_GPU if device.type == "cuda" else CHUNK
        stop = self.slices.size
        if not self.encoder_optimizer.can_be_cut:
            size = max(1, stop)
        for start in range(0, stop, size):
            yield slice(start, min(start + size, stop))

    def _gate(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The clipping factor, and 1.0 where nothing may be updated; both stay on the device."""
        limit = self.options.max_grad_norm
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
        return scale, 1.0 - (loss.isfinite() & norm.isfinite()).float()


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

    def __len__(self) -> int:
        return len(self.label)


def _rows(batches: list[Tensor], chunk: slice) -> Tensor:
    """[K, chunk]: a view of a single batch, a copy in the cache of several."""
    return batches[0][:, chunk] if len(batches) == 1 else torch.cat([batch[:, chunk] for batch in batches])


def encode_slices(model: GradiendModel, source: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Encodings [k, m] of gradients [k, n], where everyone has a part of n and `total` adds up."""
    weight = model.encoder_weight
    source = source.to(weight.device, weight.dtype)
    products = torch.zeros(len(source), len(weight), dtype=torch.float64, device=weight.device)
    size = CHUNK_ON_GPU if weight.device.type == "cuda" else CHUNK
    for start in range(0, source.shape[1], size):
        products += dot(source[:, start : start + size], weight[:, start : start + size])
    encoded: Tensor = model.encoder[1](total(products).to(weight.dtype) + model.encoder_bias)
    return encoded


def affine(latent: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """latent weight^T + bias for latent [k, m] and weight [q, m]; in one pass over the memory."""
    if bias is None:
        return outer(latent.T, weight.T)
    if latent.shape[1] == 1:
        return torch.addcmul(bias, latent, weight.T)
    return torch.addmm(bias, latent, weight.T)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b for a [k, p] and b [k, q]; a broadcast product when k = 1, which no matrix kernel does as fast."""
    return a.T * b if len(a) == 1 else a.T @ b


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a b^T for a [k, n] and b [m, n]; when k = m = 1 the plain dot product, without dimensions."""
    if len(a) == 1 and len(b) == 1:
        return torch.dot(a.reshape(-1), b.reshape(-1))
    return a @ b.T


def square(a: Tensor) -> Tensor:
    """Sum of squares of a chunk, in its own precision; what is added up from them in float64."""
    flat = a.reshape(-1)
    return torch.dot(flat, flat)


class Sums:
    """Sums over the chunks, in float64, of what is found in each.

    They are added at once: small tensors that stay behind between the large ones of each chunk would keep malloc from
    using those again, and a step would take 8 bytes per weight more.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, *found: Tensor) -> None:
        self.values += found[0].view(-1) if len(found) == 1 else torch.cat([each.view(-1) for each in found])


class SlicedEngine(PlacedEngine):
    def __init__(self, model: ParamMappedGradiendModel, options: StepOptions, comm: Comm) -> None:
        super().__init__(model, options)
        self.comm = comm

    def total(self, partial: Tensor) -> Tensor:
        return self.comm.total(partial)
