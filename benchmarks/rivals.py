"""Other ways to make a language model say one word rather than another, and the ruler that all of them are judged by.

    steering      add the mean difference of the classes' hidden states to those of a layer, at every token
    contrastive   fine-tune the model to say one word, and another copy to say the other; add their difference
    swapped       fine-tune the model on one class's rows with the other's word, and stop in time

They need torch and transformers alone. How far to go is found as for this package's own direction, by the same search
on the same rows and texts; a choice that each has (layer, learning rate) is the best one by these rows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradiend_dist import TextPredictionTrainer
from gradiend_dist.evaluation.decoder import ModelScores, scored_rows
from gradiend_dist.evaluation.harm import Harm, TextLosses, TextScores, kept_losses
from gradiend_dist.evaluation.search import StrengthSearch, Trial
from gradiend_dist.evaluation.texts import Texts
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch, LogitsAt

LEARNING_RATES = (1e-6, 1e-5, 1e-4, 1e-3)
BATCH_SIZE = 32
# Of the hidden states' norm. Weights are moved by thousandths of theirs, hidden states by tenths.
FIRST_STEERING = 1e-2
# Steps of a fine-tuning at which its harm is measured.
LOOKS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64)
HALVINGS = 4
# Evaluations of a layer or a learning rate, before the best one is searched.
SHORT_SEARCH = 5


# The ruler


class Ruler:
    """What the model of a trainer's session says in the rows of a split, and its harm on texts, in the state it is in.

    The package's own functions measure both, for every contestant.
    """

    def __init__(self, trainer: TextPredictionTrainer, split: str, texts: Sequence[str]) -> None:
        session = trainer.session
        self.scores = ModelScores(
            session,
            trainer.config,
            scored_rows(session, split, None),
            Texts(tuple(texts)),
            batch_size=trainer.args.eval_batch_size,
            by_search=True,
        )
        base = self.scores.measure_base()
        self.base: Mapping[str, float] = base["probs"]
        """Of each class's word in the rows of the other."""
        self.losses = kept_losses(base["text_losses"])

    def trial(self, name: str, change: float, limit: float | None = None) -> Trial:
        """What a change of this size, which the model has now, does for a class."""
        entry = self.scores.measure(self.losses, limit)
        return Trial(change, entry["harm"], entry["harm_error"], entry["probs"][name] if "probs" in entry else None)


class SecondTexts:
    """Harm alone, on texts of another kind."""

    def __init__(self, ruler: Ruler, texts: Sequence[str]) -> None:
        self.scores = TextScores(ruler.scores.asker, Texts(tuple(texts)), by_search=True)
        self.base: TextLosses = self.scores.measure().losses

    def harm(self) -> Harm:
        return self.scores.measure().losses.harm_against(self.base)


# Changes of a model


class Change(Protocol):
    unit: float
    """The strength at which the change is as large as what it changes."""

    def at(self, strength: float) -> contextlib.AbstractContextManager[None]:
        """The model is changed inside, and to the bit what it was afterwards."""
        ...


class WeightChange:
    """A vector that is added to weights."""

    def __init__(self, model: nn.Module, delta: Mapping[str, Tensor]) -> None:
        self.delta = delta
        self.parameters = {name: weight for name, weight in model.named_parameters() if name in delta}
        length = norm(delta.values())
        self.unit = norm(self.parameters.values()) / length if length else 0.0

    @contextlib.contextmanager
    def at(self, strength: float) -> Iterator[None]:
        before = copied(self.parameters)
        with torch.no_grad():
            for name, weight in self.parameters.items():
                weight.add_(self.delta[name], alpha=strength)
        try:
            yield
        finally:
            put_back(self.parameters, before)


class Steering:
    """A vector that is added to what a layer says, at every token."""

    def __init__(self, layer: nn.Module, vector: Tensor, typical_norm: float) -> None:
        self.layer, self.vector = layer, vector
        self.unit = typical_norm / vector.norm().item()

    @contextlib.contextmanager
    def at(self, strength: float) -> Iterator[None]:
        handle = self.layer.register_forward_hook(lambda _module, _inputs, output: self._moved(output, strength))
        try:
            yield
        finally:
            handle.remove()

    def _moved(self, output: Tensor | tuple[Tensor, ...], strength: float) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, tuple):
            return (output[0] + strength * self.vector, *output[1:])
        return output + strength * self.vector


def norm(tensors: Iterator[Tensor] | Sequence[Tensor] | object) -> float:
    return torch.stack([tensor.detach().norm() for tensor in tensors]).norm().item()  # type: ignore[attr-defined]


def copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in parameters.items()}


@torch.no_grad()
def put_back(parameters: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]) -> None:
    for name, weight in parameters.items():
        weight.copy_(before[name])


@torch.no_grad()
def difference(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach() - before[name] for name, weight in model.named_parameters()}


@dataclass(frozen=True)
class Chosen:
    """A change and its strength, with the value that it was chosen for."""

    what: str
    change: Change
    strength: float
    value: float


def strongest(ruler: Ruler, name: str, change: Change, what: str, *, max_harm: float, **how: Any) -> Chosen:
    """The best strength within the allowed harm; 0 where nothing is gained."""
    search = StrengthSearch(ruler.base[name], max_harm, levels=(max_harm,), **how)
    while (step := search.next()) is not None:
        with change.at(step * change.unit):
            search.record(ruler.trial(name, step, search.ceiling))
    best = search.best()
    if best is None or best.value is None or best.value <= ruler.base[name]:
        return Chosen(what, change, 0.0, ruler.base[name])
    return Chosen(what, change, best.change * change.unit, best.value)


def strongest_of(ruler: Ruler, name: str, changes: Mapping[str, Change], **how: Any) -> Chosen:
    """Changes are compared by short searches; the best one gets a whole one."""
    short = {
        what: strongest(ruler, name, change, what, most_evaluations=SHORT_SEARCH, **how)
        for what, change in changes.items()
    }
    best = best_of(list(short.values()))
    return best_of([best, strongest(ruler, name, changes[best.what], best.what, **how)])


def best_of(candidates: Sequence[Chosen]) -> Chosen:
    return max(candidates, key=lambda chosen: chosen.value)


# The rivals


class Rivals:
    """All of them on the rows for training of one trainer, which is itself never trained."""

    def __init__(self, trainer: TextPredictionTrainer, ruler: Ruler, *, max_harm: float, steps: int, seed: int) -> None:
        self.session, self.ruler, self.max_harm, self.steps, self.seed = trainer.session, ruler, max_harm, steps, seed
        self.model: nn.Module = trainer.session.base_model
        self.classes = trainer.target_classes
        rows = trainer.session.data.rows("train")
        self.rows = rows[rows["factual_class"].isin(self.classes)]
        base = trainer.session.base_gradients(trainer.session.space)
        self.pad_id, self.device = base.pad_id, base.device

    def steering(self) -> dict[str, Chosen]:
        layers = layers_of(self.model)
        first, second = (self._hidden(name, layers) for name in self.classes)
        orders = {self.classes[0]: (first, second), self.classes[1]: (second, first)}
        return {name: self._steered(name, layers, *states) for name, states in orders.items()}

    def _steered(
        self, name: str, layers: Sequence[nn.Module], towards: Sequence[Tensor], away: Sequence[Tensor]
    ) -> Chosen:
        states = zip(layers, towards, away, strict=True)
        changes = {
            f"layer {place}": Steering(layer, mine.mean(0) - others.mean(0), mine.norm(dim=-1).mean().item())
            for place, (layer, mine, others) in enumerate(states, 1)
        }
        return strongest_of(self.ruler, name, changes, max_harm=self.max_harm, first_change=FIRST_STEERING)

    @torch.no_grad()
    def _hidden(self, name: str, layers: Sequence[nn.Module]) -> list[Tensor]:
        """[rows, width] for each layer: its hidden states where the word of a class is to be said."""
        found: list[list[Tensor]] = [[] for _ in layers]
        clozes = self._clozes(name, name)
        with contextlib.ExitStack() as hooks:
            for layer, states in zip(layers, found, strict=True):
                handle = layer.register_forward_hook(lambda _m, _i, output, states=states: states.append(first(output)))
                hooks.callback(handle.remove)
            for start in range(0, len(clozes), BATCH_SIZE):
                batch = ClozeBatch.of(clozes[start : start + BATCH_SIZE], self.pad_id, self.device)
                self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
                for states in found:
                    states[-1] = states[-1][batch.rows, batch.positions]
        return [torch.cat(states) for states in found]

    def contrastive(self) -> dict[str, Chosen]:
        """One word in the rows of both classes, against the other word in the same rows."""
        first, second = self.classes
        changes: dict[str, dict[str, Change]] = {name: {} for name in self.classes}
        for rate in LEARNING_RATES:
            one, other = (self._fine_tuned_on_all(name, rate) for name in (first, second))
            for name, towards, away in ((first, one, other), (second, other, one)):
                delta = {key: towards[key] - away[key] for key in towards}
                changes[name][f"rate {rate:g}"] = WeightChange(self.model, delta)
        return {name: strongest_of(self.ruler, name, changes[name], max_harm=self.max_harm) for name in self.classes}

    def _fine_tuned_on_all(self, name: str, rate: float) -> dict[str, Tensor]:
        clozes = [cloze for rows_of in self.classes for cloze in self._clozes(rows_of, name)]
        parameters = dict(self.model.named_parameters())
        before = copied(parameters)
        for _ in self._fine_tune(clozes, rate):
            pass
        found = difference(self.model, before)
        put_back(parameters, before)
        return found

    def swapped(self) -> dict[str, Chosen]:
        return {name: best_of([self._stopped(name, rate) for rate in LEARNING_RATES]) for name in self.classes}

    def _stopped(self, name: str, rate: float) -> Chosen:
        """The best model on the way of a fine-tuning up to the allowed harm, and between the last two looks at it."""
        other = next(found for found in self.classes if found != name)
        parameters = dict(self.model.named_parameters())
        before = copied(parameters)
        low: dict[str, Tensor] = {key: torch.zeros_like(values) for key, values in before.items()}
        what = f"rate {rate:g}"
        best = Chosen(what, WeightChange(self.model, low), 0.0, self.ruler.base[name])
        too_far = None
        for step in self._fine_tune(self._clozes(other, name), rate):
            if step not in LOOKS and step != self.steps:
                continue
            trial, here = self.ruler.trial(name, step, self.max_harm), difference(self.model, before)
            if trial.harm > self.max_harm:
                too_far = here
                break
            low = here
            if trial.value is not None and trial.value > best.value:
                best = Chosen(what, WeightChange(self.model, here), 1.0, trial.value)
        put_back(parameters, before)
        return best if too_far is None else best_of([best, *self._between(name, what, low, too_far)])

    def _between(self, name: str, what: str, low: dict[str, Tensor], high: dict[str, Tensor]) -> Iterator[Chosen]:
        for _ in range(HALVINGS):
            middle = {key: (low[key] + high[key]) / 2 for key in low}
            change = WeightChange(self.model, middle)
            with change.at(1.0):
                trial = self.ruler.trial(name, 1.0, self.max_harm)
            if trial.harm > self.max_harm:
                high = middle
                continue
            low = middle
            if trial.value is not None:
                yield Chosen(what, change, 1.0, trial.value)

    def _clozes(self, rows_of: str, word_of: str) -> list[Cloze]:
        """The rows of a class, with the word of the same or of the other one."""
        rows = self.rows[self.rows["factual_class"] == rows_of]
        words = rows["factual"] if rows_of == word_of else rows["alternative"]
        return [self.session.objective.cloze(text, word) for text, word in zip(rows["masked"], words, strict=True)]

    def _fine_tune(self, clozes: Sequence[Cloze], rate: float) -> Iterator[int]:
        """Adam on the loss of the word, a step at a time: yields the number of steps that were made."""
        logits_at = LogitsAt(self.model)
        frozen = {weight: weight.requires_grad for weight in self.model.parameters()}
        self.model.requires_grad_(True)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        try:
            for step, some in enumerate(itertools.islice(batches_of(clozes, self.seed), self.steps), 1):
                batch = ClozeBatch.of(some, self.pad_id, self.device)
                labels = torch.tensor([label for cloze in some for label in cloze.labels], device=self.device)
                with torch.enable_grad():
                    nn.functional.cross_entropy(logits_at(batch), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield step
        finally:
            for weight, wanted in frozen.items():
                weight.requires_grad_(wanted)


def batches_of(clozes: Sequence[Cloze], seed: int) -> Iterator[list[Cloze]]:
    """Epoch after epoch, each in an order of its own."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(list(clozes), len(clozes))
        yield from (order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer's blocks, first to last."""
    depth: int = model.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    lists = [found for found in model.modules() if isinstance(found, nn.ModuleList) and len(found) == depth]
    return list(lists[0])


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
