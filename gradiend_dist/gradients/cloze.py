"""Masked and causal losses: from a row with a blank to the token ids a base model reads and is asked for.

A `Cloze` is one row with one word in mind: the input ids, the places whose logits are read, and the ids wanted there.
A row has two, for its factual and its alternative word. Where both have the same input, one forward pass serves both.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradiend_dist.distributed.interrupt import stop_if_told
from gradiend_dist.errors import UserError
from gradiend_dist.model.base import built_causal, is_causal, longest_input
from gradiend_dist.space import backbone_module


@dataclass(frozen=True)
class Cloze:
    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    labels: tuple[int, ...]

    def same_input(self, other: Cloze) -> bool:
        return self.input_ids == other.input_ids and self.positions == other.positions


@dataclass(frozen=True)
class ClozeRow:
    """The two questions of one row."""

    factual: Cloze
    alternative: Cloze

    @property
    def shares_input(self) -> bool:
        return self.factual.same_input(self.alternative)

    @property
    def is_identity(self) -> bool:
        return self.factual == self.alternative


class MaskedObjective:
    """The word behind the mask token, as masked language models are trained."""

    name = "mlm_mask_token"

    def __init__(self, tokenizer: Any, max_length: int, mask_placeholder: str, *, as_reference: bool = False) -> None:
        if tokenizer.mask_token is None:
            raise UserError(
                "prediction_objective=mlm_mask_token needs a tokenizer with a mask token, this one has none: "
                "use clm_next_token or another model."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.mask_placeholder = mask_placeholder
        self.as_reference = as_reference

    def cloze(self, template: str, word: str) -> Cloze:
        """One mask becomes as many as the word has pieces; piece i is wanted at mask i."""
        tokenizer = self.tokenizer
        # Tokenizers that mark word starts write a word after a space as another token (`Ġhe`) than the word alone.
        before = template.split(self.mask_placeholder, 1)[0]
        spaced = word if self.as_reference or not before[-1:].isspace() else f" {word}"
        wanted = tokenizer(spaced, add_special_tokens=False)["input_ids"]
        require_known(tokenizer, word, wanted, as_reference=self.as_reference)
        text = template.replace(self.mask_placeholder, tokenizer.mask_token)
        if text.count(tokenizer.mask_token) == 1:
            text = text.replace(tokenizer.mask_token, " ".join([tokenizer.mask_token] * len(wanted)))
        encoded = tokenizer(text, return_special_tokens_mask=True)
        if tokenizer.mask_token_id not in encoded["input_ids"]:
            raise UserError(f"The text {template[:60]!r} has no mask after tokenization: check mask_placeholder.")
        ids = self._window(encoded["input_ids"], encoded["special_tokens_mask"])
        positions = [i for i, token in enumerate(ids) if token == tokenizer.mask_token_id]
        if not positions:
            raise UserError(f"max_length={self.max_length} has no room for the blank of {template[:60]!r}: raise it.")
        labels = [wanted[min(i, len(wanted) - 1)] for i in range(len(positions))]
        return Cloze(tuple(ids), tuple(positions), tuple(labels))

    def whole_word(self, template: str, word: str) -> Cloze:
        """All pieces of the word, to score it: the same as what is trained on."""
        return self.cloze(template, word)

    def _window(self, ids: list[int], special: list[int]) -> list[int]:
        """A row that is too long keeps its special tokens at both ends and the words around the blank."""
        if len(ids) <= self.max_length:
            return ids
        mask = self.tokenizer.mask_token_id
        masks = [i for i, token in enumerate(ids) if token == mask]
        head = next((i for i, flag in enumerate(special) if not flag), 0)
        tail = next((i for i, flag in enumerate(reversed(special)) if not flag), 0)
        room = self.max_length - head - tail
        body_start, body_stop = head, len(ids) - tail
        if masks and masks[-1] < self.max_length - tail:
            start = body_start  # plain truncation keeps the blank
        else:
            middle = (masks[0] + masks[-1]) // 2 if masks else body_start
            start = max(body_start, min(middle - room // 2, body_stop - room))
        return ids[:head] + ids[start : start + room] + ids[len(ids) - tail :]


class CausalObjective:
    """The word that follows a prefix, as causal language models are trained; its first piece where it has several."""

    name = "clm_next_token"

    def __init__(self, tokenizer: Any, max_length: int, mask_placeholder: str, *, as_reference: bool) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.mask_placeholder = mask_placeholder
        self.as_reference = as_reference

    def cloze(self, template: str, word: str) -> Cloze:
        prefix = template.split(self.mask_placeholder, 1)[0]
        alone = self.tokenizer(word, add_special_tokens=False)["input_ids"] if word.strip() else []
        if not alone:
            raise UserError(f"The word {word!r} has no token in this tokenizer: remove its rows.")
        if self.as_reference:
            return self._early(prefix, word, template)
        context, pieces = self._following(prefix, word, template)
        require_known(self.tokenizer, word, pieces[:1], as_reference=False)
        return self._cloze(context, pieces[:1])

    def whole_word(self, template: str, word: str) -> Cloze:
        """All pieces of the word, each after those before it, to score it: also where only the first is trained on."""
        context, pieces = self._following(template.split(self.mask_placeholder, 1)[0], word, template)
        require_known(self.tokenizer, word, pieces, as_reference=False)
        return self._cloze(context, pieces)

    def _cloze(self, context: list[int], pieces: list[int]) -> Cloze:
        read = [*context, *pieces[:-1]]
        start = max(0, len(read) - self.max_length)  # the words next to the blank matter most
        first = len(context) - start - 1
        if first < 0:
            raise UserError(f"max_length={self.max_length} has no room for a word of {len(pieces)} tokens: raise it.")
        return Cloze(tuple(read[start:]), tuple(range(first, first + len(pieces))), tuple(pieces))

    def _following(self, prefix: str, word: str, template: str) -> tuple[list[int], list[int]]:
        """Tokenize prefix and word together: the tokenizer decides how a word start looks (`Ġ`, `▁`, none)."""
        stem = prefix.rstrip()
        context = self.tokenizer(stem)["input_ids"]
        whole = self.tokenizer(prefix + word)["input_ids"]
        split = 0
        while split < min(len(context), len(whole) - 1) and context[split] == whole[split]:
            split += 1
        # A line break or a lone space mark before the word is context: as a label it would be the same for all words.
        while split < len(whole) - 1 and not self.tokenizer.decode([whole[split]]).strip():
            split += 1
        if split == 0:
            raise UserError(
                f"The text {template[:60]!r} has nothing before the blank for a causal model to read: remove the row, "
                "or use a masked model."
            )
        pieces = whole[split:]
        while len(pieces) > 1 and pieces[-1] in self._ending:
            pieces = pieces[:-1]
        return whole[:split], pieces

    @functools.cached_property
    def _ending(self) -> set[int]:
        """What the tokenizer may put behind every text: no piece of a word."""
        return set(self.tokenizer("")["input_ids"]) | {self.tokenizer.eos_token_id}

    def _early(self, prefix: str, word: str, template: str) -> Cloze:
        """The reference: logits of the second-last prefix token are asked for the word."""
        ids = self.tokenizer(prefix, truncation=True, max_length=self.max_length)["input_ids"]
        vocabulary = self.tokenizer.get_vocab()
        wanted = (
            vocabulary[word] if word in vocabulary else self.tokenizer(word, add_special_tokens=False)["input_ids"][0]
        )
        if len(ids) < 2:
            raise UserError(
                f"The text {template[:60]!r} has fewer than two tokens before the blank, for which the reference "
                "trains on zeros: remove the row, or leave compat out."
            )
        return Cloze(tuple(ids), (len(ids) - 2,), (wanted,))


def require_known(tokenizer: Any, word: str, tokens: list[int], *, as_reference: bool) -> None:
    """A word that the tokenizer cannot spell would be trained on as [UNK], as every other such word."""
    unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens and not as_reference
    if not tokens or (unknown and tokenizer.unk_token_id != tokenizer.eos_token_id):
        raise UserError(f"The word {word!r} has no token in this tokenizer: remove its rows.")


Objective = MaskedObjective | CausalObjective


def choose_objective(
    name: str, model: nn.Module, tokenizer: Any, *, max_length: int, mask_placeholder: str, as_reference: bool
) -> Objective:
    """`auto` follows the model: what it was built for decides, a mask token only where that is unknown."""
    fitting = "clm_next_token" if is_causal(model.config, tokenizer) else "mlm_mask_token"
    if name not in ("auto", fitting) and built_causal(model.config) is not None:
        raise UserError(f"prediction_objective={name} does not fit this base model: pass auto or {fitting}.")
    name = fitting if name == "auto" else name
    max_length = min(max_length, longest_input(model, tokenizer))
    if name == "mlm_mask_token":
        return MaskedObjective(tokenizer, max_length, mask_placeholder, as_reference=as_reference)
    return CausalObjective(tokenizer, max_length, mask_placeholder, as_reference=as_reference)


@dataclass
class ClozeBatch:
    """Padded inputs and the places to read; always padded on the right, whatever the tokenizer prefers."""

    input_ids: Tensor
    attention_mask: Tensor
    rows: Tensor
    positions: Tensor

    @staticmethod
    def of(clozes: Sequence[Cloze], pad_id: int, device: torch.device) -> ClozeBatch:
        width = max(len(cloze.input_ids) for cloze in clozes)
        ids = torch.full((len(clozes), width), pad_id, dtype=torch.int64)
        attention = torch.zeros((len(clozes), width), dtype=torch.int64)
        for i, cloze in enumerate(clozes):
            ids[i, : len(cloze.input_ids)] = torch.tensor(cloze.input_ids)
            attention[i, : len(cloze.input_ids)] = 1
        rows = torch.tensor([i for i, cloze in enumerate(clozes) for _ in cloze.positions])
        positions = torch.tensor([p for cloze in clozes for p in cloze.positions])
        return ClozeBatch(*(t.to(device, non_blocking=True) for t in (ids, attention, rows, positions)))


class LogitsAt:
    """Logits of a few positions only: the head runs on the hidden states that are read, not on every token.

    Vocabulary times tokens is most of a small model's work and memory. A forward hook hands the head the hidden states
    of the wanted places as one row; heads act on each place alone, which `check` proves on the first batch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.backbone = backbone_module(model)
        self._narrow: bool | None = False if self.backbone is model else None
        # Nothing is generated: a cache of keys and values costs memory, and a wait for a GPU in every layer.
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}

    def __call__(self, batch: ClozeBatch) -> Tensor:
        """Logits [places, vocabulary] of the wanted places."""
        stop_if_told()  # whatever takes long asks the base model
        self.prepare(batch)
        if self._narrow:
            return self._forward_narrow(batch)
        return self._forward(batch)[batch.rows, batch.positions]

    def prepare(self, batch: ClozeBatch) -> None:
        """Find out, once, whether the head may read the wanted places alone."""
        if self._narrow is None:
            self._narrow = self.check(batch)

    def _forward(self, batch: ClozeBatch) -> Tensor:
        logits: Tensor = self.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, **self._options
        ).logits
        return logits

    def _forward_narrow(self, batch: ClozeBatch) -> Tensor:
        def keep_places(_module: nn.Module, _args: Any, output: Any) -> Any:
            places = output[0][batch.rows, batch.positions].unsqueeze(0)
            if isinstance(output, tuple):
                return (places, *output[1:])
            output.last_hidden_state = places
            return output

        hook = self.backbone.register_forward_hook(keep_places)
        try:
            logits = self._forward(batch)
        finally:
            hook.remove()
        return logits.reshape(len(batch.rows), -1)

    @torch.no_grad()
    def check(self, batch: ClozeBatch) -> bool:
        """Does the head give the same logits for the places alone? One extra pass, once per model."""
        full = self._forward(batch)[batch.rows, batch.positions]
        try:
            narrow = self._forward_narrow(batch)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the head, and what follows would need more
        except (RuntimeError, IndexError, ValueError, AttributeError):
            return False  # a head that wants the whole sequence: it gets it
        if narrow.shape != full.shape:
            return False
        rounded = full.dtype != torch.float32 or torch.is_autocast_enabled(full.device.type)
        # Relative to the largest logit: those of an untrained model are small, and so are the differences.
        return bool((narrow - full).abs().max() <= (2e-2 if rounded else 1e-3) * full.abs().max())


# The share of tokens that are hidden to score a masked model, and the seed that chooses them: the reference's.
HIDDEN_SHARE = 0.15

HIDDEN_SEED = 42


# --- neutral text


def tokens_of(tokenizer: Any, words: Sequence[str]) -> set[int]:
    """All tokens of these words, at the start of a text and behind a space."""
    spelt = [spelling for word in words for spelling in (word.strip(), f" {word.strip()}")]
    return {token for text in spelt for token in tokenizer(text, add_special_tokens=False)["input_ids"]}


def masked_text_questions(
    tokenizer: Any, texts: Sequence[str], max_length: int, ignored: set[int], *, hide_special: bool
) -> list[tuple[int, Cloze]]:
    """(number of the text, the text with some of its tokens hidden), the same ones for every model; texts with nothing
    to ask for are left out. `hide_special` as the reference does."""
    rng, found = random.Random(HIDDEN_SEED), []
    for number, text in enumerate(texts):
        encoded = tokenizer(text, truncation=True, max_length=max_length, return_special_tokens_mask=True)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        places = [place for place in range(len(ids)) if hide_special or not special[place]]
        if not places:
            continue
        hidden = rng.sample(places, max(1, int(HIDDEN_SHARE * len(places))))
        read = list(ids)
        for place in hidden:
            read[place] = tokenizer.mask_token_id
        counted = [place for place in hidden if ids[place] not in ignored]
        if counted:
            found.append((number, Cloze(tuple(read), tuple(counted), tuple(ids[place] for place in counted))))
    return found


def causal_text_questions(
    tokenizer: Any, texts: Sequence[str], max_length: int, ignored: set[int], *, hide_special: bool
) -> list[tuple[int, Cloze]]:
    """(number of the text, every token of it after its first), read from those before it."""
    left_out = ignored if hide_special else ignored | set(tokenizer.all_special_ids)
    found = []
    for number, text in enumerate(texts):
        ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        places = [place for place in range(len(ids) - 1) if ids[place + 1] not in left_out]
        if places:
            found.append((number, Cloze(tuple(ids), tuple(places), tuple(ids[place + 1] for place in places))))
    return found
