"""How much of the target the decoder explains, on items that training does not see; and how much one latent could.

    explained          1 - loss / E[y^2]              0: as good as no decoder at all; below 0: worse
    explained_centred  1 - loss / E[(y - mean y)^2]   0: as good as a decoder that has learnt the mean alone
    their limits       the same for the best model of one latent that answers all items of a class alike

A high correlation says that the encoder tells the classes apart; only these say whether the decoder has learnt. One
latent reaches the points of a line: the means of two classes, and of those of a third, the identities, what is nearest.
Means are taken from the items that they are compared with, which are nearer to them than others would be: of g items
one degree of freedom is lost, and the limit makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradiend_dist.engines.chunks import affine, chunks, square
from gradiend_dist.engines.sliced import encode_slices
from gradiend_dist.evaluation.encoder import weigh
from gradiend_dist.gradients.items import Item
from gradiend_dist.gradients.sketch import Sketch
from gradiend_dist.gradients.store import GradientSource
from gradiend_dist.model.gradiend import GradiendModel


class HeldOut:
    """The held-out items; every number is the same on all ranks."""

    def __init__(
        self, gradients: GradientSource, items: Sequence[Item], labels: Sequence[float], source: str | None, target: str
    ) -> None:
        self.gradients, self.items, self.source, self.target = gradients, list(items), source, target
        self.labels = torch.tensor(labels, dtype=torch.float64)
        """What a decoder without encoder (`source` None) starts from; and the classes."""
        self.comm = gradients.base.comm
        self._products: Tensor | None = None

    @property
    def num_vectors(self) -> int:
        return len(self.items) * len({self.source, self.target} - {None})

    @torch.no_grad()
    def measure(self, model: GradiendModel) -> dict[str, float | None]:
        """The shares that a model, or all ranks' parts of one, explains; `held_out_loss` is the loss of training."""
        sketch = self._new_sketch() if self._products is None else None
        kinds = list(dict.fromkeys(kind for kind in (self.source, self.target) if kind is not None))
        if self.gradients.will_keep(self.items, kinds) or self._is_cut(model):
            errors = self._errors_of_vectors(model, kinds, sketch)
        else:
            errors = self._errors_by_weight(model, kinds, sketch)
        if sketch is not None:
            self._products = sketch.gram([item.name for item in self.items], self.target)
        total = float(errors if model.slices.is_whole else self.comm.total(errors))
        return {"held_out_loss": total / (len(self.items) * model.input_dim), **self._shares(total, model.latent_dim)}

    def _errors_of_vectors(self, model: GradiendModel, kinds: list[str], sketch: Sketch | None) -> Tensor:
        """What this rank's slices add to all |y' - y|^2, from gradients that are kept. All ranks call this."""
        errors = torch.zeros((), dtype=torch.float64, device=model.device_decoder)
        for number, item in enumerate(self.items):
            vectors = self.gradients.get(item, kinds, keep=True)
            if sketch is not None:
                sketch.put(number, vectors[self.target])
            errors += self._squared_error(model, vectors, self.labels[number])
        return errors

    def _errors_by_weight(self, model: GradiendModel, kinds: list[str], sketch: Sketch | None) -> Tensor:
        """The same without a vector: first the latents, then the errors of each weight as its gradient is complete.

        Without an activation |Wd h + bd - y|^2 is made of products that need no latent: one time through the items.
        All ranks call this.
        """
        products = _Products(model, len(self.items))

        def measure(number: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
            for kind, factor in into:
                if kind == self.source:
                    products.encode(number, where, entries, factor)
                if kind == self.target:
                    products.decode(number, where, entries, factor)
                    if sketch is not None:
                        sketch.add(number, where, entries, factor)

        self.gradients.hand_out(self.items, kinds, measure, complete=True)
        latent = self._latents(model, products)
        if isinstance(model.decoder[1], nn.Identity):
            return products.errors(latent)
        # What is not delivered is zero: first the errors as if all were, then what each weight changes of them.
        errors = _squares(model, latent, slice(0, model.slices.size), None)

        def correct(number: int, into: list[tuple[str, float]], where: slice, entries: Tensor) -> None:
            nonlocal errors
            ((_, factor),) = into
            one = latent[number : number + 1]
            errors += _squares(model, one, where, entries * factor) - _squares(model, one, where, None)

        self.gradients.hand_out(self.items, [self.target], correct, complete=True)
        return errors

    def _latents(self, model: GradiendModel, products: _Products) -> Tensor:
        """[items, m], everyone's. All ranks call this."""
        if self.source is None:
            return self.labels.reshape(-1, 1).to(model.decoder_weight)
        encoded = products.encoded if model.slices.is_whole else self.comm.total(products.encoded)
        latent: Tensor = model.encoder[1](encoded.to(model.encoder_bias) + model.encoder_bias)
        return latent.to(model.decoder_weight)

    def _new_sketch(self) -> Sketch:
        base = self.gradients.base
        return Sketch(len(self.items), base.slices, self.comm, base.device)

    def _squared_error(self, model: GradiendModel, vectors: dict[str, Tensor], label: Tensor) -> Tensor:
        """What this rank's slices add to |y' - y|^2; the latent is everyone's."""
        target = self._own(model, vectors[self.target]).to(model.device_decoder)
        if self.source is None:
            latent = label.reshape(1, 1).to(target)
        else:
            source = self._own(model, vectors[self.source]).unsqueeze(0)
            latent = encode_slices(model, source, self.comm)
        latent, bias = latent.to(target), model.decoder_bias_vector
        activation: nn.Module = model.decoder[1]
        found = torch.zeros((), dtype=torch.float64, device=target.device)
        for chunk in chunks(len(target), target.device):
            decoded = affine(latent, model.decoder_weight[chunk], None if bias is None else bias[chunk])
            found += square(activation(decoded)[0] - target[chunk])
        return found

    def _own(self, model: GradiendModel, vector: Tensor) -> Tensor:
        """DeepSpeed has whole gradients on every rank, and a model at rest is cut."""
        return model.slices.take(vector) if self._is_cut(model) else vector

    def _is_cut(self, model: GradiendModel) -> bool:
        return self.gradients.base.slices.is_whole and not model.slices.is_whole

    def _shares(self, error: float, latent_dim: int) -> dict[str, float | None]:
        assert self._products is not None, "made by the first measurement"
        size = float(self._products.trace())
        around_mean = size - float(self._products.sum()) / len(self._products)
        unexplained = unexplained_by_class_means(self._products, self.labels, latent_dim)
        found: dict[str, float | None] = {}
        for name, whole in (("explained", size), ("explained_centred", around_mean)):
            is_there = whole > 1e-12 * size
            found[name] = 1.0 - error / whole if is_there else None
            found[f"{name}_limit"] = 1.0 - unexplained / whole if is_there and unexplained is not None else None
        return found


class _Products:
    """Products of items' gradients, which come weight by weight, with a model's slices. No communication."""

    def __init__(self, model: GradiendModel, count: int) -> None:
        self.model = model
        self.encoded = torch.zeros(count, model.latent_dim, dtype=torch.float64, device=model.device_encoder)
        """We.x"""
        self._with_weight = torch.zeros(count, model.latent_dim, dtype=torch.float64, device=model.device_decoder)
        self._with_bias, self._squares = (self._with_weight.new_zeros(count) for _ in range(2))

    def encode(self, number: int, where: slice, entries: Tensor, factor: float) -> None:
        weight = self.model.encoder_weight[:, where]
        self.encoded[number] += weigh(weight, entries.to(weight.device)) * factor

    def decode(self, number: int, where: slice, entries: Tensor, factor: float) -> None:
        model, target = self.model, entries.to(self.model.device_decoder)
        self._with_weight[number] += _exactly(model.decoder_weight[where], target) * factor
        if model.decoder_bias_vector is not None:
            self._with_bias[number] += _exactly(model.decoder_bias_vector[where].unsqueeze(1), target)[0] * factor
        self._squares[number] += _exactly(target.unsqueeze(1), target)[0] * factor**2

    def errors(self, latent: Tensor) -> Tensor:
        """The sum of |Wd h + bd - y|^2 for the latents [items, m]."""
        h, weight, bias = latent.double(), self.model.decoder_weight, self.model.decoder_bias_vector
        found = self._squares.sum() - 2.0 * (h * self._with_weight).sum()
        products = torch.stack([_exactly(weight, column) for column in weight.T])
        found += ((h @ products) * h).sum()
        if bias is not None:
            found += len(h) * _exactly(bias.unsqueeze(1), bias)[0] - 2.0 * self._with_bias.sum()
            found += 2.0 * (h @ _exactly(weight, bias)).sum()
        return found


def _exactly(columns: Tensor, vector: Tensor) -> Tensor:
    """columns^T vector in float64 throughout: errors are small differences of such products."""
    found = torch.zeros(columns.shape[1], dtype=torch.float64, device=columns.device)
    for chunk in chunks(len(vector), vector.device):
        found += columns[chunk].double().T @ vector[chunk].double()
    return found


def _squares(model: GradiendModel, latent: Tensor, where: slice, target: Tensor | None) -> Tensor:
    """The sum of |y' - y|^2 over entries and latents [k, m]; without a target it is zero."""
    weight, bias = model.decoder_weight[where], model.decoder_bias_vector
    found = torch.zeros((), dtype=torch.float64, device=weight.device)
    for chunk in chunks(len(weight), weight.device):
        decoded = affine(latent, weight[chunk], None if bias is None else bias[where][chunk])
        decoded = model.decoder[1](decoded)
        found += square(decoded if target is None else decoded - target[chunk].to(weight.device))
    return found


def unexplained_by_class_means(products: Tensor, labels: Tensor, latent_dim: int) -> float | None:
    """What class means on a line (plane, ...) leave of the squares, for their true means; None with too few items."""
    classes = labels.unique()
    member = (labels.unsqueeze(0) == classes.unsqueeze(1)).to(products)
    counts = member.sum(1)
    means = member @ products @ member.T / (counts.unsqueeze(1) * counts)
    inside = torch.stack([(row * products.diagonal()).sum() for row in member]) - counts * means.diagonal()
    if ((counts == 1) & (means.diagonal() > 0)).any():
        return None
    spread = float((inside * counts / (counts - 1).clamp_min(1)).sum())
    noise = float(inside.sum() / (counts - 1).clamp_min(1).sum())
    # Between the classes: all but the leading components, less what the noise of the means adds to each.
    shares = (counts / counts.sum()).sqrt()
    middle = torch.eye(len(classes), dtype=products.dtype) - (shares.square()).unsqueeze(0)
    scatter = counts.sqrt().unsqueeze(1) * (middle @ means @ middle.T) * counts.sqrt()
    beyond = torch.linalg.eigvalsh(scatter).flip(0)[latent_dim : len(classes) - 1]
    return spread + float((beyond - noise).clamp_min(0.0).sum())
