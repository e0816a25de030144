"""The passes of a step over one half of the model, encoder or decoder: everything in a step whose cost grows with n.

The step never forms the gradients of the 3n weights. With f the weight of an item in the loss, r = f dloss/dz [K, n] of
the decoder's pre-activation and d = dloss/da [K, m] of the encoder's,

    dWd = r^T h      dbd = sum_K r      dWe = d^T x      dbe = sum_K d

are outer products, formed for one chunk of n at a time while it is in the cache and used there by the fused AdamW.
Memory traffic per weight and step: 8 bytes for h, 12 for loss and d, 80 for the update. It needs no memory of size n
besides weights, moments, x and y.

Every sum is over the entries that this rank owns, in float64; who calls adds up those of all ranks. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradiend_dist.engines.chunks import Sums, affine, chunks, dot, outer, square
from gradiend_dist.engines.items import StepItems
from gradiend_dist.engines.optimizer import Optimizer
from gradiend_dist.model.gradiend import GradiendModel


class EncoderHalf:
    """We [m, n] and be [m], in chunks of n that stay in a CPU's cache."""

    def __init__(self, model: GradiendModel, optimizer: Optimizer) -> None:
        self.weight, self.optimizer = model.encoder_weight, optimizer

    def products(self, items: StepItems) -> Tensor:
        """x We^T of each item [K m], and, of a single item, |x|^2 [1] behind it."""
        single = len(items) == 1
        own = Sums(len(items) * len(self.weight) + single, self.weight.device)
        for chunk in self._chunks():
            source = items.source(chunk)
            product = dot(source, self.weight[:, chunk])
            own.add(*((product, square(source)) if single else (product,)))
        return own.values

    def gradient_square(self, items: StepItems, d_encoder: Tensor) -> Tensor:
        """Sum [1] of the squares of the weight's gradient d^T x."""
        own = Sums(1, self.weight.device)
        for chunk in self._chunks():
            own.add(square(outer(d_encoder, items.source(chunk))))
        return own.values

    def update(self, items: StepItems, d_encoder: Tensor) -> Tensor:
        """Step along d^T x and sum d; returns the sum [1] of We's squares afterwards."""
        # The bias first: an optimizer that cannot be cut steps with its last weight, and norms are of after it.
        self.optimizer.update(len(self.weight), slice(None), d_encoder.sum(0))
        return self._update_weight(items, d_encoder)

    def _update_weight(self, items: StepItems, d_encoder: Tensor) -> Tensor:
        squares = Sums(1, self.weight.device)
        for chunk in self._chunks():
            for row, gradient in enumerate(outer(d_encoder, items.source(chunk))):
                self.optimizer.update(row, chunk, gradient)
            squares.add(square(self.weight[:, chunk]))
        return squares.values

    def weight_square(self) -> Tensor:
        """Sum [1] of We's squares."""
        squares = Sums(1, self.weight.device)
        for chunk in self._chunks():
            squares.add(square(self.weight[:, chunk]))
        return squares.values

    def _chunks(self) -> Iterator[slice]:
        return ranges_of(self.optimizer, self.weight.shape[1], self.weight.device)


class DecoderHalf:
    """Wd [n, m] and bd [n], or no bias, in chunks of n that stay in a CPU's cache."""

    def __init__(self, model: GradiendModel, optimizer: Optimizer) -> None:
        self.weight, self.bias, self.optimizer = model.decoder_weight, model.decoder_bias_vector, optimizer
        self.activation = None if isinstance(model.decoder[1], nn.Identity) else model.decoder[1]

    def sums(self, items: StepItems, latent: Tensor) -> Tensor:
        """dloss/dh [K m], the loss, and the sums of the squares of the gradients of bd and of Wd, one behind the other.

        The bias's is there also for a decoder without one.
        """
        single, size = len(items) == 1, latent.numel()
        own = Sums(size + 3 - single, latent.device)
        weighted = latent * items.factors
        for chunk in self._chunks():
            error, r = self._errors(items, latent, chunk)
            d_latent = dot(r, self.weight[chunk].T)
            if single:  # factors are applied to sums: |f r h| = |f r| |h|
                loss = square(error)
                own.add(d_latent, loss, loss if r is error else square(r))
            else:
                loss = items.factors[:, 0] @ error.square().sum(1)
                own.add(d_latent, loss, square(items.factors[:, 0] @ r), square(outer(r, weighted)))
        d_latent, rest = (own.values[:size].view_as(latent) * items.factors).view(-1), own.values[size:]
        if not single:
            return torch.cat([d_latent, rest[:1] / 2.0, rest[1:]])
        factor = items.factors.double().view(1)
        bias_square = rest[1:] * factor.square()
        return torch.cat([d_latent, rest[:1] * factor / 2.0, bias_square, bias_square * latent.double().square().sum()])

    def _errors(self, items: StepItems, latent: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Of one chunk of n: y' - y [K, chunk], and the same passed back through the decoder's activation."""
        bias = None if self.bias is None else self.bias[chunk]
        pre = affine(latent, self.weight[chunk], bias)
        target = items.target(chunk)
        if self.activation is None:
            error = pre.sub_(target)
            return error, error
        pre.requires_grad_(True)
        with torch.enable_grad():
            decoded = self.activation(pre)
        error = decoded.detach() - target
        return error, torch.autograd.grad(decoded, pre, error)[0]

    def update(self, items: StepItems, latent: Tensor, factors: Tensor) -> Tensor:
        """Step along (factors r)^T h and its sum over the items; returns the sum [1] of Wd's squares afterwards."""
        squares = Sums(1, self.weight.device)
        for chunk in self._chunks():
            _, r = self._errors(items, latent, chunk)
            r *= factors
            if self.bias is not None:
                self.optimizer.update(1, chunk, r[0] if len(r) == 1 else r.sum(0))
            self.optimizer.update(0, chunk, outer(r, latent))
            squares.add(square(self.weight[chunk]))
        return squares.values

    def weight_square(self) -> Tensor:
        """Sum [1] of Wd's squares."""
        squares = Sums(1, self.weight.device)
        for chunk in self._chunks():
            squares.add(square(self.weight[chunk]))
        return squares.values

    def _chunks(self) -> Iterator[slice]:
        return ranges_of(self.optimizer, len(self.weight), self.weight.device)


def ranges_of(optimizer: Optimizer, size: int, device: torch.device) -> Iterator[slice]:
    """The ranges of n that are worked on together; all at once where the optimizer cannot be cut."""
    if optimizer.can_be_cut:
        yield from chunks(size, device)
    elif size:
        yield slice(0, size)
