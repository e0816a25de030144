"""Our numbers and tables of an evaluation are those of the reference, bit for bit, from the same encodings."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

gradiend = pytest.importorskip("gradiend")

import torch  # noqa: E402
from gradiend.evaluator.encoder import _rows_to_encoder_df  # noqa: E402
from gradiend.evaluator.encoder_metrics import get_encoder_metrics_from_dataframe  # noqa: E402
from gradiend.trainer.core.callbacks import NormalizationCallback  # noqa: E402
from gradiend.trainer.text.common.dataset_base import TextBatchedDatasetBase  # noqa: E402
from gradiend.trainer.text.prediction.dataset import create_masked_pair_from_text  # noqa: E402
from gradiend.util.encoding_rows import encode_dataset_to_rows  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, GPT2Tokenizer, RobertaTokenizer  # noqa: E402

from gradiend_dist.data.neutral import neutral_dataset_rows, neutral_training_rows  # noqa: E402
from gradiend_dist.evaluation.metrics import (  # noqa: E402
    CSV_COLUMNS,
    SOURCES,
    encoder_metrics,
    encoding_rows,
    flip,
    join_encodings,
    neutral_encoding_rows,
)

PAIR = ("M", "F")
CLASSES = ("M", "F", "N")
WORDS = {"M": ["he", "him"], "F": ["she", "her"], "N": ["they", "them", "it"]}
SEED = 3


def ours(encoded: pd.DataFrame, source: str) -> dict[str, Any]:
    """Our metrics without the one number that the reference does not have."""
    result = encoder_metrics(encoded, target_classes=PAIR, all_classes=CLASSES, source=source)
    for scores in ("all_data", "training_only", "target_classes_only"):
        del result[scores]["accuracy_if_negated"]
    return result


def reference(encoded: pd.DataFrame, source: str) -> dict[str, Any]:
    """With class names the reference raises for differences, whose ids are directions: it is asked without them."""
    classes = None if source == "diff" else list(PAIR)
    return dict(get_encoder_metrics_from_dataframe(encoded, target_classes=classes))


# Random encodings


def random_table(
    source: str, *, identity: bool, neutral: bool, splits: tuple[str, ...], seed: int, others: bool = False
) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    directions = [("M", "F", 0)] * 9 + [("F", "M", 1)] * 6 + [("N", "N", 2)] * (5 if identity else 0)
    directions += [("N", "M", 3), ("M", "N", 4), ("F", "N", 5), ("N", "F", 6)] * (2 if others else 0)
    rows = pd.DataFrame(directions, columns=["factual_class", "alternative_class", "feature_class_id"])
    rows["masked"] = [f"text {i} has [MASK]" for i in range(len(rows))]
    rows["split"] = [splits[i % len(splits)] for i in range(len(rows))]
    rows["factual"] = [rng.choice(WORDS[name]) for name in rows["factual_class"]]
    rows["alternative"] = [rng.choice(WORDS[name]) for name in rows["alternative_class"]]
    rows["label"] = rows["factual_class"].map({"M": 1, "F": -1, "N": 0})
    values = rng.uniform(-1, 1, len(rows)).astype(np.float32)
    tables = [encoding_rows(rows, values, source=source, target_classes=PAIR, mask_placeholder="[MASK]")]
    for kind, count in (("neutral_training_masked", 4), ("neutral_dataset", 7)) if neutral else ():
        tables.append(neutral_encoding_rows(neutral_table(kind, count), rng.uniform(-1, 1, count)))
    return join_encodings(*tables).sample(frac=1, random_state=seed)


def neutral_table(kind: str, count: int) -> pd.DataFrame:
    texts = [f"neutral {i}" for i in range(count)]
    columns = ("masked", "factual", "alternative", "text", "input_text")
    constants = {"factual_class": "neutral", "alternative_class": "neutral", "split": "test", "feature_class_id": 0}
    return pd.DataFrame({**{name: texts for name in columns}, **constants, "type": kind})


CASES = list(itertools.product(SOURCES, (False, True), (False, True), range(3)))


@pytest.mark.parametrize(("source", "identity", "neutral", "seed"), CASES)
def test_encoder_metrics__equal_the_reference(source: str, identity: bool, neutral: bool, seed: int) -> None:
    encoded = random_table(source, identity=identity, neutral=neutral, splits=("test",), seed=seed)
    assert ours(encoded, source) == reference(encoded, source)


@pytest.mark.parametrize(
    ("splits", "compared"),
    [
        (("train", "test"), ["train", "test"]),
        (("test", "validation", "train"), ["train", "test"]),
        (("validation", "test", "test"), ["validation", "test"]),
        (("zoo", "test", "train"), ["train", "test"]),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_encoder_metrics__equal_the_reference_over_splits(
    source: str, splits: tuple[str, ...], compared: list[str]
) -> None:
    """Without class names the reference would take identity rows for a class that generalises."""
    encoded = random_table(source, identity=source != "diff", neutral=True, splits=splits, seed=7)
    result = ours(encoded, source)
    assert result == reference(encoded, source)
    assert result["split_generalization"]["splits_compared"] == compared


@pytest.mark.parametrize("source", SOURCES)
def test_encoder_metrics__equal_the_reference_with_transitions_of_other_classes(source: str) -> None:
    """Alternative gradients of N→M carry the class M but label 0: no row of the pair.

    The groups are left out: F→M and N→M have one name in the reference, so it reports one of them.
    """
    splits = ("test",) if source == "diff" else ("train", "test", "test")
    encoded = random_table(source, identity=True, neutral=True, splits=splits, seed=4, others=True)
    result, expected = ours(encoded, source), reference(encoded, source)
    for metrics in (result, expected):
        del metrics["mean_by_eval_group"], metrics["sample_counts"]["training_by_eval_group"]
    assert result == expected


@pytest.mark.parametrize("source", SOURCES)
def test_encoder_metrics__equal_the_reference_during_training(source: str) -> None:
    """Its evaluations during training have no groups."""
    encoded = random_table(source, identity=True, neutral=False, splits=("validation",), seed=1)
    encoded = encoded.assign(eval_group=None)
    result = ours(encoded, source)
    assert result == reference(encoded, source)
    assert "mean_by_eval_group" not in result


def test_flip__equals_the_reference_where_it_turns_numbers() -> None:
    encoded = random_table("factual", identity=True, neutral=True, splits=("test",), seed=2)
    encoded["encoded"] = -encoded["label"] * 0.9 + encoded["encoded"] * 0.05
    before = reference(encoded, "factual")
    assert before["correlation"] < -0.6
    turned = copy.deepcopy(before)
    model = SimpleNamespace(gradiend=SimpleNamespace(latent_dim=1), invert_encoding=lambda **_: None)
    NormalizationCallback().on_step_end(5, 0.0, model, {}, turned, {})
    changed = [name for name in before if turned[name] != before[name]]
    assert len(changed) == 11  # the correlation, two means, four extremes, four quartiles
    flipped = flip(encoder_metrics(encoded, target_classes=PAIR, all_classes=CLASSES, source="factual"))
    assert {name: flipped[name] for name in changed} == {name: turned[name] for name in changed}


# The reference's own evaluation of a tiny masked model


VOCABULARY = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "doctor", "said", "that", "he", "him", "she", "her", "they",
    "would", "win", "lose", ".", "walk", "##ing", "##s", "'", "t", "do", "not", "and", "then", "a", "dog", "ran",
    "home",
]  # fmt: skip
WHOLE_WORDS = [
    "a dog ran home and then the doctor ran .",
    "do not walk .",
    "then a dog ran home",
    "the dog ran and ran",
]
WITH_PIECES = [*WHOLE_WORDS, "dogs ran home walking", "walking dogs", "the dogs said dogs said dogs"]


def save_base_model(directory: Path) -> str:
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(VOCABULARY)})
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def data(tail: str) -> pd.DataFrame:
    """Uneven classes, so that the alternating order repeats rows; the third class gives identity rows."""
    rows = []
    for split, count in (("train", 6), ("validation", 3), ("test", 5)):
        for i, (name, other) in itertools.product(range(count), (("M", "F"), ("F", "M"), ("N", "M"))):
            if name == "F" and i == count - 1:
                continue
            end = "win" if i % 2 else "lose"
            rows.append((f"the doctor said that [MASK] would {end} {tail * (i % 3)}.", split, name, other, i % 2))
    frame = pd.DataFrame(rows, columns=["masked", "split", "label_class", "alternative_class", "word"])
    frame["label"] = [
        WORDS[c][0] if c == "N" else WORDS[c][i] for c, i in zip(frame.label_class, frame.word, strict=True)
    ]
    frame["alternative"] = [WORDS[c][i] for c, i in zip(frame.alternative_class, frame.word, strict=True)]
    return frame.drop(columns="word")


def train_reference(directory: Path, source: str, neutral: list[str], tail: str) -> Any:
    arguments = gradiend.TrainingArguments(
        experiment_dir=str(directory / "run"),
        source=source,
        add_identity_for_other_classes=True,
        train_batch_size=2,
        max_seeds=1,
        max_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        seed=SEED,
    )
    trainer = gradiend.TextPredictionTrainer(
        save_base_model(directory / "base"),
        data=data(tail),
        target_classes=list(PAIR),
        all_classes=list(CLASSES),
        eval_neutral_data=pd.DataFrame({"text": neutral}) if neutral else None,
        args=arguments,
    )
    trainer.train()
    return trainer


def evaluated_rows(trainer: Any, source: str, split: Any) -> tuple[Any, pd.DataFrame]:
    """The reference's evaluation dataset and its rows in the order of evaluation, as unified rows."""
    dataset = trainer.create_eval_data(trainer.get_model(), split=split, source=source)
    inner = dataset.training_data
    rows = pd.DataFrame([TextBatchedDatasetBase.__getitem__(inner, i) for i in range(len(inner))])
    names = {"factual_id": "factual_class", "alternative_id": "alternative_class"}
    return dataset, rows.rename(columns=names).reset_index(drop=True)


def our_table(rows: pd.DataFrame, theirs: pd.DataFrame, source: str, neutral: list[pd.DataFrame]) -> pd.DataFrame:
    """Our table from our rows and the reference's encodings."""
    encodings = theirs["encoded"].to_numpy()
    ends = np.cumsum([len(part) for part in (rows, *neutral)])
    assert ends[-1] == len(theirs)
    training = encoding_rows(
        rows, encodings[: len(rows)], source=source, target_classes=PAIR, mask_placeholder="[MASK]"
    )
    rest = [
        neutral_encoding_rows(part, encodings[start:end])
        for part, start, end in zip(neutral, ends[:-1], ends[1:], strict=True)
    ]
    return join_encodings(training, *rest)


def our_neutral_rows(trainer: Any, rows: pd.DataFrame, texts: list[str], as_reference: bool) -> list[pd.DataFrame]:
    options = {"seed": SEED, "causal": False, "mask_placeholder": "[MASK]", "as_reference": as_reference}
    tokenizer = trainer.get_model().tokenizer
    words = [*WORDS["M"], *WORDS["F"]]
    dataset = pd.DataFrame({"text": texts})
    return [
        neutral_training_rows(rows, tokenizer, target_words=words, **options),
        neutral_dataset_rows(dataset, tokenizer, excluded_words=words, **options),
    ]


@pytest.mark.parametrize(
    ("source", "texts", "tail", "as_reference"),
    [
        ("alternative", WITH_PIECES, "and then walking ", True),
        ("factual", WHOLE_WORDS, "and then a dog ran ", False),
    ],
)
def test_tables__equal_the_file_of_the_reference(
    tmp_path: Path, source: str, texts: list[str], tail: str, as_reference: bool
) -> None:
    """Training rows and both kinds of neutral rows, character by character; so also the same places are hidden.

    With pieces of words the reference's rows need its own spelling; with whole words ours are the same without.
    """
    trainer = train_reference(tmp_path, source, texts, tail)
    result = trainer.evaluate_encoder(split="test")
    file = tmp_path / "run" / "encoded_values_split_test.csv"
    theirs = pd.read_csv(file, float_precision="round_trip")
    assert tuple(theirs.columns) == CSV_COLUMNS
    assert set(theirs["type"]) == {"training", "neutral_training_masked", "neutral_dataset"}
    _, rows = evaluated_rows(trainer, source, "test")
    table = our_table(rows, theirs, source, our_neutral_rows(trainer, rows, texts, as_reference))
    assert table.to_csv(index=False) == file.read_text()
    assert ours(table, source) == result


def test_tables__equal_the_reference_without_neutral_rows_and_over_splits(tmp_path: Path) -> None:
    trainer = train_reference(tmp_path, "alternative", [], "")
    result = trainer.evaluate_encoder(split=["train", "validation"])
    [file] = (tmp_path / "run").glob("encoded_values*split_*.csv")
    theirs = pd.read_csv(file, float_precision="round_trip")
    _, rows = evaluated_rows(trainer, "alternative", ["train", "validation"])
    table = our_table(rows, theirs, "alternative", [])
    assert table.to_csv(index=False) == file.read_text()
    assert ours(table, "alternative") == result
    assert "split_generalization" in result


def test_tables__of_differences_equal_the_rows_of_the_reference(tmp_path: Path) -> None:
    """The reference encodes differences, but then cannot evaluate them; its rows are taken before that."""
    trainer = train_reference(tmp_path, "diff", [], "and then a dog ran ")
    with pytest.raises(ValueError, match="split_generalization"):
        trainer.evaluate_encoder(split="test")
    dataset, rows = evaluated_rows(trainer, "diff", "test")
    theirs = _rows_to_encoder_df(encode_dataset_to_rows(trainer.get_model(), dataset))
    table = our_table(rows, theirs, "diff", [])
    shared = [name for name in table.columns if name in theirs.columns and name != "eval_group"]
    assert set(table.columns) - set(shared) == {"eval_group", "source_token"}
    pd.testing.assert_frame_equal(table[shared], theirs[shared])


# Neutral rows of other tokenizers


def byte_pieces(kind: Any) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WITH_PIECES * 5, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return kind(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


@pytest.mark.parametrize(("kind", "causal"), [(RobertaTokenizer, False), (GPT2Tokenizer, True)])
def test_neutral_rows__hide_what_the_reference_hides(kind: Any, causal: bool) -> None:
    """Character by character, sampling included; texts too short for a prefix are left out by both."""
    tokenizer = byte_pieces(kind)
    texts = pd.DataFrame({"text": [f"{one} {two}" for one in WITH_PIECES for two in (*WITH_PIECES, "", "# ##")]})
    random.seed(SEED)
    pairs = [
        create_masked_pair_from_text(
            text,
            tokenizer,
            causal,
            excluded_tokens=["Dog"],
            mask_token=None if causal else "<mask>",
            mask_placeholder="__",
        )
        for text in texts.sample(n=40, random_state=SEED)["text"]
    ]
    rows = neutral_dataset_rows(
        texts,
        tokenizer,
        excluded_words=["Dog"],
        seed=SEED,
        causal=causal,
        mask_placeholder="__",
        max_rows=40,
        as_reference=True,
    )
    assert list(zip(rows["masked"], rows["factual"], strict=True)) == [pair for pair in pairs if pair is not None]
