"""Neutral rows: texts in which another token than a target word is hidden, to see that the encoder leaves them alone.

They look like unified rows, with label 0, class "neutral" on both sides and the hidden token as factual and
alternative, and are encoded from their factual gradient. Beyond the unified columns they carry what their line in the
table of encodings needs: `type`, `text` and `input_text`.

With the same seed the reference draws the same places. But it writes the hidden token in the tokenizer's spelling
(`##ing`, `Ġsaw`), which a masked model's tokenizer then reads as other tokens, and it may hide a piece of a target
word. `as_reference=True` does all that too. Otherwise a place is drawn again until hiding it takes exactly one token
out of the text, and the token is written as it stands there.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from gradiend_dist.errors import UserError

logger = logging.getLogger(__name__)

NEUTRAL_CLASS = "neutral"

NEUTRAL_SPLIT = "test"  # the reference's label for all of them, wherever the texts come from

NEUTRAL_COLUMNS = (
    "masked", "split", "factual_class", "alternative_class", "factual", "alternative", "transition",
    "feature_class_id", "label", "type", "text", "input_text",
)  # fmt: skip

MIN_PREFIX_TOKENS = 5  # a causal model reads at least these before the hidden token


class Blank(NamedTuple):
    """A text with one token hidden."""

    masked: str
    token: str


def neutral_training_rows(
    rows: pd.DataFrame,
    tokenizer: Any,
    *,
    target_words: Sequence[str],
    seed: int,
    causal: bool,
    mask_placeholder: str,
    as_reference: bool = False,
) -> pd.DataFrame:
    """Unified rows with their factual word filled in and another token hidden (`neutral_training_masked`).

    Neither `target_words` nor the words of the rows are hidden. A text without any other token gives no row.
    """
    words = [*target_words, *rows["factual"].str.strip(), *rows["alternative"].str.strip()]
    hider = _Hider(tokenizer, words, seed, causal, mask_placeholder, as_reference)
    slots = (mask_placeholder,) if as_reference or causal else (mask_placeholder, tokenizer.mask_token)
    texts = [_fill(template, slots, word) for template, word in zip(rows["masked"], rows["factual"], strict=True)]
    return _neutral_rows(texts, hider, "neutral_training_masked")


def neutral_dataset_rows(
    neutral: pd.DataFrame,
    tokenizer: Any,
    *,
    excluded_words: Sequence[str],
    seed: int,
    causal: bool,
    mask_placeholder: str,
    max_rows: int | None = None,
    as_reference: bool = False,
) -> pd.DataFrame:
    """Neutral texts (column `text`) with one token hidden (`neutral_dataset`), at most `max_rows` of them, sampled."""
    if "text" not in neutral.columns:
        raise UserError(f"The neutral data has the columns {list(neutral.columns)}: it needs one named 'text'.")
    if max_rows is not None:
        neutral = neutral.sample(n=min(max_rows, len(neutral)), random_state=seed)
    hider = _Hider(tokenizer, excluded_words, seed, causal, mask_placeholder, as_reference)
    result = _neutral_rows([str(text) for text in neutral["text"]], hider, "neutral_dataset")
    if len(neutral) and not len(result):
        raise UserError(
            f"None of the {len(neutral)} neutral texts has a token that can be hidden: give longer texts or exclude "
            "fewer words."
        )
    return result


def _fill(template: str, slots: tuple[str, ...], word: str) -> str:
    for slot in slots:
        template = template.replace(slot, word)
    return template


def _neutral_rows(texts: Sequence[str], hider: _Hider, kind: str) -> pd.DataFrame:
    blanks = [blank for text in texts if (blank := hider.hide(text)) is not None]
    if len(blanks) < len(texts):
        logger.warning("%s: %d of %d texts have no token to hide", kind, len(texts) - len(blanks), len(texts))
    tokens = [blank.token for blank in blanks]
    columns = {
        "masked": [blank.masked for blank in blanks],
        "split": NEUTRAL_SPLIT,
        "factual_class": NEUTRAL_CLASS,
        "alternative_class": NEUTRAL_CLASS,
        "factual": tokens,
        "alternative": tokens,
        "transition": f"{NEUTRAL_CLASS}→{NEUTRAL_CLASS}",
        "feature_class_id": 0,
        "label": 0,
        "type": kind,
        "text": [blank.masked.replace(hider.placeholder, blank.token) for blank in blanks],
        "input_text": [hider.model_input(blank.masked) for blank in blanks],
    }
    return pd.DataFrame(columns, columns=list(NEUTRAL_COLUMNS))


@dataclass
class _Hider:
    """Hides one random token per text, from one stream of random numbers for all texts."""

    tokenizer: Any
    excluded_words: Iterable[str]
    seed: int
    causal: bool
    placeholder: str
    as_reference: bool

    def __post_init__(self) -> None:
        assert self.causal or self.tokenizer.mask_token is not None, "a masked model's tokenizer has a mask token"
        self._random = random.Random(self.seed)
        words = [word if self.as_reference else word.strip() for word in dict.fromkeys(self.excluded_words)]
        self._excluded_parts = list(dict.fromkeys(word.lower() for word in words if word))
        self._excluded_tokens = frozenset() if self.as_reference else self._tokens_of(words)
        # Remembered per token: texts repeat their tokens, and a comparison with every excluded word is slow.
        self._is_allowed = cache(self._may_hide)

    def hide(self, text: str) -> Blank | None:
        tokens = self.tokenizer.tokenize(text)
        first = MIN_PREFIX_TOKENS if self.causal else 0
        places = [place for place in range(first, len(tokens)) if self._is_allowed(tokens[place])]
        while places:
            place = self._random.choice(places)
            blank = self._reference_blank(tokens, place) if self.as_reference else self._blank(tokens, place)
            if blank is not None:
                return blank
            places.remove(place)
        return None

    def model_input(self, masked: str) -> str:
        """What the model reads, for the table of encodings."""
        if self.causal:
            return masked.split(self.placeholder)[0]
        return masked.replace(self.placeholder, self.tokenizer.mask_token)

    def _tokens_of(self, words: list[str]) -> frozenset[str]:
        """Every token of the words and all special ones; a word's tokens may not contain the word's letters."""
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        tokens = [token for spelling in spellings for token in self.tokenizer.tokenize(spelling)]
        return frozenset([*tokens, *self.tokenizer.all_special_tokens])

    def _may_hide(self, token: str) -> bool:
        letters = token.strip().lstrip("#").lstrip("Ġ").lstrip("▁").strip()
        if not letters or (token.startswith("[") and token.endswith("]")) or token in self._excluded_tokens:
            return False
        return not any(part in token.lower() for part in self._excluded_parts)

    def _reference_blank(self, tokens: list[str], place: int) -> Blank:
        spaced = self._text([tokens[place]]).startswith((" ", "\t", "▁"))
        return Blank(self._masked(tokens, place, " " if self.causal and spaced else ""), tokens[place])

    def _blank(self, tokens: list[str], place: int) -> Blank | None:
        """Where tokens carry their space, it belongs to the hidden word (masked) or before the blank (causal)."""
        word = self._text([tokens[place]])
        forms = [("", word), (" ", word.lstrip())]
        for gap, spelling in reversed(forms) if self.causal else forms:
            blank = Blank(self._masked(tokens, place, gap), spelling)
            if self._hides_only(blank, tokens[place]):
                return blank
        return None

    def _masked(self, tokens: list[str], place: int, gap: str) -> str:
        if self.causal:
            return self._text(tokens[:place]) + gap + self.placeholder
        return self._text([*tokens[:place], gap + self.placeholder, *tokens[place + 1 :]])

    def _text(self, tokens: list[str]) -> str:
        return str(self.tokenizer.convert_tokens_to_string(tokens))

    def _hides_only(self, blank: Blank, token: str) -> bool:
        """Is the text with the word the text with the blank, but for this one token?"""
        whole = self.tokenizer.tokenize(blank.masked.replace(self.placeholder, blank.token))
        if self.causal:
            prefix = self.model_input(blank.masked).rstrip()
            return bool(whole == [*self.tokenizer.tokenize(prefix), token])
        mask = self.tokenizer.mask_token
        hidden = self.tokenizer.tokenize(self.model_input(blank.masked))
        if hidden.count(mask) != 1 or self.tokenizer.tokenize(blank.token) != [token]:
            return False
        place = hidden.index(mask)
        return bool(whole == [*hidden[:place], token, *hidden[place + 1 :]])
