"""One process: encoder and decoder whole, each on its device.

The step never forms the gradients of the 3n weights. With r = dloss/dz [k, n] of the decoder's pre-activation and
d = dloss/da [k, m] of the encoder's,

    dWd = r^T h      dbd = sum_k r      dWe = d^T x      dbe = sum_k d

are outer products, formed for one chunk of n at a time while it is in the cache and eaten there by the fused AdamW.
Memory traffic per weight and step: 8 bytes for h, 12 for loss and d, 80 for the update. It needs no
memory of size n besides weights, moments, x and y. Measured at n = 3e7 on two cores: 0.28 s, half the speed at which
this traffic could be copied; the errors are computed twice, once for d and once for the update. Only h and d cross
from one device to the other: k x m numbers each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from gradiend_dist.engines import Engine, GradiendBatch, StepOptions
from gradiend_dist.engines.optimizer import make_optimizer
from gradiend_dist.model import GradiendModel

# Entries of n that are worked on together, so that a handful of fp32 vectors stay in the cache. The update alone on two
# cores: fastest at 2^17 and 2^18, at 2^15 twice as slow, at 2^20 by a sixth.
CHUNK = 2**18
# A GPU's cache is no reason to cut; fewer, larger kernels are.
CHUNK_ON_GPU = 2**26


class PlacedEngine(Engine):
    def __init__(self, model: GradiendModel, options: StepOptions) -> None:
        self.model = model
        self.options = options
        # Rows of We [m, n] are weights of their own, so that each is one dense range of n.
        self.encoder_optimizer = make_optimizer(options, [*model.encoder_weight, model.encoder_bias])
        decoder = [model.decoder_weight]
        if model.decoder_bias_vector is not None:
            decoder.append(model.decoder_bias_vector)
        self.decoder_optimizer = make_optimizer(options, decoder)
        self._encoder_activation = model.encoder[1]
        self.decoder_activation = None if isinstance(model.decoder[1], nn.Identity) else model.decoder[1]

    @torch.no_grad()
    def encode(self, source: Tensor) -> Tensor:
        encoded: Tensor = self.model.forward_encoder(source)
        return encoded

    @property
    def whole(self) -> GradiendModel:
        return self.model

    def flip(self, *, with_decoder_bias: bool) -> None:
        self.model.invert_encoding()
        bias = self.model.decoder_bias_vector
        if with_decoder_bias:
            if bias is not None:
                bias.neg_()
            return
        self.encoder_optimizer.negate_momentum(list(range(self.model.latent_dim + 1)))
        self.decoder_optimizer.negate_momentum([0])

    @torch.no_grad()
    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        backward = {None: self._backward, "encoder": self._backward_encoder, "decoder": self._backward_decoder}
        sides = [backward[self.options.supervised](batch, 1.0 / len(batches)) for batch in batches]
        loss = torch.stack([side.loss for side in sides]).sum()
        norm = self._gradient_norm(sides)
        scale, not_finite = self._gate(loss, norm)
        at_encoder, at_decoder = self.model.device_encoder, self.model.device_decoder
        encoder_square = torch.zeros((), dtype=torch.float64, device=at_encoder)
        decoder_square = torch.zeros((), dtype=torch.float64, device=at_decoder)
        trains_encoder, trains_decoder = (self.options.supervised != side for side in ("decoder", "encoder"))
        self.encoder_optimizer.begin(learning_rate, scale.to(at_encoder), not_finite.to(at_encoder))
        self.decoder_optimizer.begin(learning_rate, scale.to(at_decoder), not_finite.to(at_decoder))
        if trains_encoder:
            # Biases first: an optimizer that cannot be cut steps with its last weight, and norms are of after the step.
            self.encoder_optimizer.update(
                self.model.latent_dim, slice(None), sum_of(side.encoder_bias() for side in sides)
            )
        for chunk in self.chunks(at_encoder):
            if trains_encoder:
                for row, gradient in enumerate(sum_of(side.encoder_weight(chunk) for side in sides)):
                    self.encoder_optimizer.update(row, chunk, gradient)
            encoder_square += square(self.model.encoder_weight[:, chunk])
        for chunk in self.chunks(at_decoder):
            if trains_decoder:
                self._update_decoder(chunk, sides)
            decoder_square += square(self.model.decoder_weight[chunk])
        norms = [value.sqrt().float().to(at_decoder) for value in (encoder_square, decoder_square)]
        return torch.stack([loss, norm, *norms])

    def _update_decoder(self, chunk: slice, sides: list[Backward]) -> None:
        weight, bias = self._decoder_gradients(chunk, sides)
        if bias is not None:
            self.decoder_optimizer.update(1, chunk, bias)
        self.decoder_optimizer.update(0, chunk, weight)

    def _decoder_gradients(self, chunk: slice, sides: list[Backward]) -> tuple[Tensor, Tensor | None]:
        parts = [(side, side.errors(chunk)[1]) for side in sides]
        weight = sum_of(side.decoder_weight(r) for side, r in parts)
        if self.model.decoder_bias_vector is None:
            return weight, None
        return weight, sum_of(side.decoder_bias(r) for side, r in parts)

    def chunks(self, device: torch.device) -> Iterator[slice]:
        """Ranges of n; the whole of it where the optimizer cannot be cut."""
        size = CHUNK_ON_GPU if device.type == "cuda" else CHUNK
        if not self.encoder_optimizer.can_be_cut:
            size = self.model.input_dim
        for start in range(0, self.model.input_dim, size):
            yield slice(start, min(start + size, self.model.input_dim))

    def _backward(self, batch: GradiendBatch, share: float) -> Backward:
        assert batch.source is not None and batch.target is not None
        latent, back_through = self._encode_with_graph(batch.source)
        at_decoder = self.model.device_decoder
        side = Backward(self, batch.source, batch.target, latent.to(at_decoder), share)
        d_latent = side.reduce_decoder()
        side.d_encoder = back_through(d_latent.to(self.model.device_encoder))
        return side

    def _backward_encoder(self, batch: GradiendBatch, share: float) -> Backward:
        assert batch.source is not None
        latent, back_through = self._encode_with_graph(batch.source)
        difference = latent - batch.label.to(latent)
        side = Backward(self, batch.source, None, latent, share)
        side.loss = (difference.square().mean() * share).to(self.model.device_decoder)
        side.d_encoder = back_through(difference * (2.0 * share / difference.numel()))
        return side

    def _backward_decoder(self, batch: GradiendBatch, share: float) -> Backward:
        assert batch.target is not None
        label = batch.label.to(self.model.device_decoder, self.model.torch_dtype)
        side = Backward(self, None, batch.target, label, share)
        side.reduce_decoder()
        return side

    def _encode_with_graph(self, source: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The latent [k, m], and the map from dloss/dh to dloss/da: autograd over k x m numbers, any activation."""
        weight = self.model.encoder_weight
        pre = dot(source.to(weight.device), weight) + self.model.encoder_bias
        pre.requires_grad_(True)
        with torch.enable_grad():
            latent = self._encoder_activation(pre)

        def back_through(d_latent: Tensor) -> Tensor:
            return torch.autograd.grad(latent, pre, d_latent)[0]

        return latent.detach(), back_through

    def _gradient_norm(self, sides: list[Backward]) -> Tensor:
        """Norm of the gradient of all trained weights.

        One batch: from sums that were reduced anyway, |r^T h|, |sum r| and |d^T x| (k = 1: |r||h|, |r|, |d||x|).
        """
        at = self.model.device_decoder
        if len(sides) == 1:
            return sides[0].gradient_square().sqrt().float().to(at)
        total = torch.zeros((), dtype=torch.float64, device=at)
        if self.options.supervised != "decoder":
            for chunk in self.chunks(self.model.device_encoder):
                total += square(sum_of(side.encoder_weight(chunk) for side in sides)).to(at)
            total += square(sum_of(side.encoder_bias() for side in sides)).to(at)
        if self.options.supervised != "encoder":
            for chunk in self.chunks(at):
                total += sum_of(square(g) for g in self._decoder_gradients(chunk, sides) if g is not None)
        return total.sqrt().float()

    def _gate(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The clipping factor, and 1.0 where nothing may be updated; both stay on the device."""
        limit = self.options.max_grad_norm
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
        return scale, 1.0 - (loss.isfinite() & norm.isfinite()).float()


class Backward:
    """What one batch contributes to the gradients, as the few numbers from which any chunk can be formed."""

    def __init__(
        self, engine: PlacedEngine, source: Tensor | None, target: Tensor | None, latent: Tensor, share: float
    ) -> None:
        self.engine, self.model = engine, engine.model
        self.source = None if source is None else source.to(self.model.device_encoder)
        self.target = None if target is None else target.to(self.model.device_decoder)
        self.latent = latent
        self.share = share
        # d loss / d error = factor * error for the mean squared error. It is applied to sums and to h, not to each
        # error: 2 / n times a gradient's size comes close to the smallest float32 for large n.
        self.factor = 0.0 if target is None else 2.0 * share / target.numel()
        self.loss = torch.zeros((), device=self.model.device_decoder)
        self.d_encoder: Tensor | None = None
        self._decoder_square = torch.zeros((), dtype=torch.float64, device=self.model.device_decoder)

    def errors(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Of one chunk of n: y' - y [k, chunk], and the same passed back through the decoder's activation."""
        assert self.target is not None
        pre = outer(self.latent.T, self.model.decoder_weight[chunk].T)
        if self.model.decoder_bias_vector is not None:
            pre += self.model.decoder_bias_vector[chunk]
        activation = self.engine.decoder_activation
        if activation is None:
            error = pre.sub_(self.target[:, chunk])
            return error, error
        pre.requires_grad_(True)
        with torch.enable_grad():
            decoded = activation(pre)
        error = decoded.detach() - self.target[:, chunk]
        return error, torch.autograd.grad(decoded, pre, error)[0]

    def reduce_decoder(self) -> Tensor:
        """Sum the loss and dloss/dh [k, m] over n; the squares for the gradient's norm come along."""
        assert self.target is not None
        d_latent = torch.zeros_like(self.latent, dtype=torch.float64)
        error_square = torch.zeros((), dtype=torch.float64, device=self.latent.device)
        weight_square, bias_square = error_square.clone(), error_square.clone()
        for chunk in self.engine.chunks(self.latent.device):
            error, r = self.errors(chunk)
            d_latent += dot(r, self.model.decoder_weight[chunk].T)
            chunk_square = square(error)
            error_square += chunk_square
            if len(r) > 1:
                weight_square += square(outer(r, self.latent))
                bias_square += square(r.sum(0))
            elif r is error:
                bias_square += chunk_square
            else:
                bias_square += square(r)
        if len(self.latent) == 1:
            weight_square = bias_square * self.latent.double().square().sum()
        if self.model.decoder_bias_vector is None:
            bias_square = torch.zeros_like(bias_square)
        self.loss = (error_square * (self.factor / 2.0)).float()
        self._decoder_square = (weight_square + bias_square) * self.factor**2
        return (d_latent * self.factor).to(self.latent.dtype)

    def decoder_weight(self, r: Tensor) -> Tensor:
        return outer(r, self.latent * self.factor)

    def decoder_bias(self, r: Tensor) -> Tensor:
        return (r.sum(0) if len(r) > 1 else r[0]) * self.factor

    def encoder_weight(self, chunk: slice) -> Tensor:
        assert self.source is not None and self.d_encoder is not None
        return outer(self.d_encoder, self.source[:, chunk])

    def encoder_bias(self) -> Tensor:
        assert self.d_encoder is not None
        return self.d_encoder.sum(0)

    def gradient_square(self) -> Tensor:
        """Squared norm of this batch's gradient over all trained weights."""
        total = self._decoder_square
        if self.d_encoder is None:
            return total
        assert self.source is not None
        if len(self.source) == 1:
            encoder_square = self.d_encoder.double().square().sum() * (square(self.source) + 1.0)
        else:
            encoder_square = square(self.encoder_bias())
            for chunk in self.engine.chunks(self.model.device_encoder):
                encoder_square = encoder_square + square(self.encoder_weight(chunk))
        return total + encoder_square.to(total.device)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b for a [k, p] and b [k, q]; a broadcast product when k = 1, which no matrix kernel does as fast."""
    return a.T * b if len(a) == 1 else a.T @ b


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a b^T for a [k, n] and b [m, n]; the plain dot product when k = m = 1."""
    if len(a) == 1 and len(b) == 1:
        return torch.dot(a[0], b[0]).reshape(1, 1)
    return a @ b.T


def square(a: Tensor) -> Tensor:
    """Sum of squares; chunks are summed in float32, what is added up from them in float64."""
    flat = a.reshape(-1)
    return torch.dot(flat, flat).double()


def sum_of(terms: Iterator[Tensor]) -> Tensor:
    total = next(terms)
    for term in terms:
        total = total + term
    return total
