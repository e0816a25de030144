"""Neutral rows with the four spellings of tokens that matter: WordPiece, byte-level BPE (masked, causal), Unigram."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, RobertaTokenizer, XLMRobertaTokenizer

from gradiend_dist.data.neutral import MIN_PREFIX_TOKENS, NEUTRAL_COLUMNS, neutral_dataset_rows, neutral_training_rows
from gradiend_dist.errors import UserError

WORDS = [
    "the", "doctor", "said", "that", "he", "she", "they", "would", "win", "lose", "walk", "fire", "do", "not", "and",
    "then", "a", "dog", "ran", "home", "at", "night",
]  # fmt: skip
TEXTS = [
    "the doctor said that walking home at night would not do",
    "a dog ran home and then the doctor ran and then a dog ran",
    "do not walk at night and do not win or lose firefighters",
    "then the dog said that the dog ran",
    "win lose win lose win lose win lose walking walking walking",
]


def word_pieces() -> Any:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS, "##ing", "##fighter", "##s", "or"]
    return BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)})


def byte_pieces(kind: Callable[..., Any]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return kind(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def unigrams() -> Any:
    specials = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces = [(f"▁{word}", -2.0) for word in WORDS] + [("ing", -3.0), ("fighter", -3.0)]
    letters = [(letter, -10.0) for letter in "▁abcdefghijklmnopqrstuvwxyz."]
    return XLMRobertaTokenizer(vocab=[*specials, *pieces, *letters, ("<mask>", 0.0)])


@pytest.fixture(scope="module", params=["wordpiece", "byte", "unigram", "causal"])
def family(request: pytest.FixtureRequest) -> tuple[Any, bool]:
    """A tokenizer, and whether its model is causal."""
    make: dict[str, Callable[[], tuple[Any, bool]]] = {
        "wordpiece": lambda: (word_pieces(), False),
        "byte": lambda: (byte_pieces(RobertaTokenizer), False),
        "unigram": lambda: (unigrams(), False),
        "causal": lambda: (byte_pieces(GPT2Tokenizer), True),
    }
    return make[request.param]()


def neutral_rows(
    tokenizer: Any, texts: list[str], *, excluded: list[str], causal: bool = False, **options: Any
) -> pd.DataFrame:
    options = {"seed": 0, "mask_placeholder": "[MASK]", **options}
    return neutral_dataset_rows(
        pd.DataFrame({"text": texts}), tokenizer, excluded_words=excluded, causal=causal, **options
    )


def unified(*rows: tuple[str, str, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["masked", "factual", "alternative"])


def test_neutral_rows__filling_the_blank_changes_one_token(family: tuple[Any, bool]) -> None:
    """A hidden `##ing` or `Ġsaid`, written as such, is read back as other tokens, and a lost space joins two words."""
    tokenizer, causal = family
    rows = neutral_rows(tokenizer, TEXTS * 20, excluded=["he"], causal=causal, mask_placeholder="___")
    assert len(rows) == len(TEXTS) * 20
    for row in rows.itertuples():
        whole = tokenizer.tokenize(row.text)
        if causal:
            assert row.input_text == row.masked.removesuffix("___")
            assert whole[:-1] == tokenizer.tokenize(row.input_text.rstrip())
            assert row.factual == row.factual.strip(), "the space belongs before the blank, as in training templates"
            assert len(whole) > MIN_PREFIX_TOKENS
            continue
        hidden = tokenizer.tokenize(row.input_text)
        [place] = [i for i, token in enumerate(hidden) if token == tokenizer.mask_token]
        assert hidden == [*whole[:place], tokenizer.mask_token, *whole[place + 1 :]]
        assert tokenizer.tokenize(row.factual) == [whole[place]]
        assert row.masked.replace("___", tokenizer.mask_token) == row.input_text


def test_neutral_rows__keep_the_text(family: tuple[Any, bool]) -> None:
    """The filled text is the given one (a causal row's is its beginning)."""
    tokenizer, causal = family
    rows = neutral_rows(tokenizer, TEXTS, excluded=[], causal=causal)
    for text, filled in zip(TEXTS, rows["text"], strict=True):
        assert text.startswith(filled) if causal else text == filled


def test_neutral_rows__are_unified_rows_with_label_zero() -> None:
    rows = neutral_rows(word_pieces(), TEXTS, excluded=["he"])
    assert tuple(rows.columns) == NEUTRAL_COLUMNS
    assert rows["alternative"].equals(rows["factual"])
    constants = {
        "split": "test",
        "factual_class": "neutral",
        "alternative_class": "neutral",
        "transition": "neutral→neutral",
        "feature_class_id": 0,
        "label": 0,
        "type": "neutral_dataset",
    }
    for name, value in constants.items():
        assert rows[name].tolist() == [value] * len(TEXTS)


def test_neutral_rows__never_hide_an_excluded_word(family: tuple[Any, bool]) -> None:
    """Words that contain it are safe as well (`the` for "He"), as are the pieces of a word of several tokens."""
    tokenizer, causal = family
    texts = ["a dog ran home and then the firefighter said she would win"] * 200
    excluded = ["He", "firefighter", " Dog ", ""]
    rows = neutral_rows(tokenizer, texts, excluded=excluded, causal=causal)
    hidden = set(rows["factual"].str.strip())
    pieces = {tokenizer.convert_tokens_to_string([t]).strip() for t in tokenizer.tokenize(" firefighter")}
    assert not hidden & {"she", "the", "then", "dog", "##fighter", *pieces}
    assert {"said", "win"} <= hidden


def test_neutral_training_rows__fill_the_factual_word_and_leave_it() -> None:
    rows = unified(("the doctor said that [MASK] would win", "he", "she"), ("a dog and [MASK] ran", "she", "he"))
    seen: set[str] = set()
    for seed in range(30):
        result = neutral_training_rows(
            rows, word_pieces(), target_words=["ran"], seed=seed, causal=False, mask_placeholder="[MASK]"
        )
        assert result["text"].tolist() == ["the doctor said that he would win", "a dog and she ran"]
        assert set(result["type"]) == {"neutral_training_masked"}
        seen.update(result["factual"])
    assert seen == {"doctor", "said", "that", "would", "win", "a", "dog", "and"}


def test_neutral_training_rows__fill_the_tokenizers_mask_too() -> None:
    """Templates may carry the mask token itself; left in, the row would have two blanks."""
    rows = unified(("the doctor said that [MASK] would win", "he", "she"))
    result = neutral_training_rows(
        rows, word_pieces(), target_words=[], seed=0, causal=False, mask_placeholder="[PRONOUN]"
    )
    assert result.loc[0, "masked"].count("[PRONOUN]") == 1
    assert "[MASK]" not in result.loc[0, "masked"]


def test_neutral_rows__depend_on_the_seed_alone() -> None:
    """Not on the global random state, nor on the order in which words are excluded."""
    tokenizer = word_pieces()
    first = neutral_rows(tokenizer, TEXTS, excluded=["he", "dog"], seed=5)
    state = random.getstate()
    random.seed(99)
    second = neutral_rows(tokenizer, TEXTS, excluded=["dog", "he"], seed=5)
    assert random.random() == random.Random(99).random()
    random.setstate(state)
    pd.testing.assert_frame_equal(first, second)
    assert not first.equals(neutral_rows(tokenizer, TEXTS, excluded=["he", "dog"], seed=6))


def test_neutral_dataset_rows__max_rows_samples_and_may_exceed_the_texts() -> None:
    """The reference fails where it asks for more rows than there are."""
    tokenizer = word_pieces()
    few = neutral_rows(tokenizer, TEXTS, excluded=[], max_rows=2)
    sampled = pd.DataFrame({"text": TEXTS}).sample(n=2, random_state=0)["text"].tolist()
    assert few["text"].tolist() == sampled
    assert sorted(neutral_rows(tokenizer, TEXTS, excluded=[], max_rows=99)["text"]) == sorted(TEXTS)


def test_neutral_rows__texts_without_a_free_token_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rows = neutral_rows(word_pieces(), ["the dog ran", "she", "", "zebra"], excluded=["he"])
    assert rows["text"].tolist() == ["the dog ran"]
    assert "3 of 4 texts" in caplog.text


def test_neutral_dataset_rows__no_usable_text_is_an_error() -> None:
    with pytest.raises(UserError, match="None of the 1 neutral texts"):
        neutral_rows(byte_pieces(GPT2Tokenizer), ["a dog ran home"], excluded=[], causal=True)
    with pytest.raises(UserError, match="columns.*'masked'.*'text'"):
        neutral_dataset_rows(
            pd.DataFrame({"masked": TEXTS}),
            word_pieces(),
            excluded_words=[],
            seed=0,
            causal=False,
            mask_placeholder="[MASK]",
        )


def test_neutral_training_rows__nothing_to_hide_is_an_empty_table() -> None:
    result = neutral_training_rows(
        unified(("[MASK]", "he", "she")),
        word_pieces(),
        target_words=[],
        seed=0,
        causal=False,
        mask_placeholder="[MASK]",
    )
    assert tuple(result.columns) == NEUTRAL_COLUMNS
    assert len(result) == 0


def test_as_reference__writes_tokens_in_the_tokenizers_spelling() -> None:
    texts = ["walking walking walking walking walking"] * 10
    pieces = neutral_rows(word_pieces(), texts, excluded=["walk"], as_reference=True)
    assert set(pieces["factual"]) == {"##ing"}
    causal = byte_pieces(GPT2Tokenizer)
    rows = neutral_rows(causal, [TEXTS[1]] * 10, excluded=[], causal=True, as_reference=True)
    assert set(rows["factual"]) <= set(causal.get_vocab())
    assert any(token.startswith("Ġ") for token in rows["factual"])
