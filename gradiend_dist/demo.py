"""The embedded example: two small language models that know who is "he", "she" and "they", and data to train on.

    python -m gradiend_dist.demo DIR [--kind masked|causal] [--seed 0]

Everything is generated from demo_sentences.yaml, nothing is downloaded. A sentence is

    opener + subject + middle + target word + ending          "Last night | the king | knew | he | would win."

where the subject alone decides the word: it stands before the word, so that a causal model can know, and no verb agrees
with its number. Subjects and endings are dealt to train, validation and test. A row of a split takes both from that
split; pre-training sees every subject and every ending, but never a held-out subject with an ending of its own split.
So the models know all words of the test sentences and none of the sentences.

The same seed gives the same bytes of `model.safetensors` on one machine with one number of threads (with another number
torch sums in another order). The caller's random state is left as it was.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import re
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gradiend_dist.errors import UserError, exit_code

logger = logging.getLogger(__name__)

Kind = Literal["masked", "causal"]

Split = Literal["pretraining", "train", "validation", "test"]

Batch = dict[str, torch.Tensor]

MASK = "[MASK]"

MAX_POSITIONS = 256  # the reference package pads every row to 256 tokens and fails on shorter models

END_OF_TEXT = "<|endoftext|>"

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

TURNS: tuple[Split, ...] = ("train", "train", "train", "validation", "test")  # dealing subjects, endings and rows


@dataclass(frozen=True)
class Family:
    """A family of sentences: subjects and target words by class, and what may stand between and after them."""

    subjects: dict[str, list[str]]
    words: dict[str, str]
    middles: list[str]
    endings: list[str]


_TEXTS = yaml.safe_load(Path(__file__).with_name("demo_sentences.yaml").read_text(encoding="utf-8"))

OPENERS: list[str] = _TEXTS["openers"]

SUBJECTS: dict[str, list[str]] = _TEXTS["people"]

PRONOUNS, REFLEXIVES, NEUTRALS = (Family(**_TEXTS[name]) for name in ("pronouns", "reflexives", "neutrals"))

DATA_ROWS = 400

NEUTRAL_ROWS = 300

CORPUS_ROWS = {"pronouns": 1500, "reflexives": 500, "neutrals": 1500}  # sentences of each class for pre-training

WORD_PIECES = ("him", "##self", "hers", "##el", "them", "##selves")

BPE_VOCAB_SIZE = 1000

NUM_HEADS = 4

BATCH_SIZE = 32

PRETRAIN_LEARNING_RATE = 3e-3

# Enough to know the word, and no more: longer training makes the model only surer. Then the gradients of "he" and of
# "she" no longer point opposite ways (masked: cosine about -0.7 at 500 steps, -0.2 at 800), and a GRADIEND that starts
# from random weights often ends with both classes on one side.
PRETRAIN_STEPS: dict[Kind, int] = {"masked": 500, "causal": 300}

HIDE_TARGET = 0.8  # share of the rows in whose pre-training the target word is masked

HIDE_ANY = 0.15  # share of the tokens masked in the other rows

IGNORED = -100  # the label that no loss counts

# The run that run.yaml describes: the closed form, then refined. One seed is enough: no weight of the start is random.
RUN: dict[str, Any] = {
    "target_classes": ["M", "F"],
    "add_identity_for_other_classes": True,
    "learning_rate": "auto",
    "train_batch_size": 8,
    "max_steps": 100,
    "eval_steps": 10,
    "max_seeds": 1,
    "pre_prune_config": {"n_samples": 16, "topk": 0.1, "source": "diff"},
}


# Sentences


def _split_of(position: int) -> str:
    return TURNS[position % len(TURNS)]


def _belongs(subject_split: str, ending_split: str, part: Split) -> bool:
    """Whether a sentence with such a subject and such an ending is of this part."""
    if part == "pretraining":
        return subject_split != ending_split or subject_split == "train"
    return subject_split == ending_split == part


def _templates(family: Family, label: str, part: Split, count: int, rng: random.Random) -> list[str]:
    """Draw `count` different templates of one class and part."""
    pairs = [
        (subject, ending)
        for i, subject in enumerate(family.subjects[label])
        for j, ending in enumerate(family.endings)
        if _belongs(_split_of(i), _split_of(j), part)
    ]
    shape = (len(pairs), len(family.middles), len(OPENERS))
    total = math.prod(shape)
    if count > total:
        raise UserError(f"rows_per_class asks for {count} {part} rows where only {total} exist: choose fewer.")
    slot = MASK if family.words[label] else ""
    templates = []
    for index in rng.sample(range(total), count):
        index, opener = divmod(index, len(OPENERS))
        pair, middle = divmod(index, len(family.middles))
        subject, ending = pairs[pair]
        templates.append(_sentence(OPENERS[opener], subject, family.middles[middle], slot, ending))
    return templates


def _sentence(*parts: str) -> str:
    text = " ".join(part for part in parts if part) + "."
    return text[0].upper() + text[1:]


def _corpus(family: Family, rows_per_class: int, seed: int) -> Iterator[str]:
    """Whole sentences for pre-training, none of which is a validation or test sentence."""
    for label, word in family.words.items():
        rng = random.Random(f"corpus {label} {word} {seed}")
        for template in _templates(family, label, "pretraining", rows_per_class, rng):
            yield template.replace(MASK, word)


# Data


def feature_data(seed: int = 0, rows_per_class: int | None = None) -> dict[str, pd.DataFrame]:
    """Give the rows of the classes "M" (he), "F" (she) and "N" (they): columns masked, label and split."""
    return {label: _class_frame(PRONOUNS, label, rows_per_class, seed) for label in PRONOUNS.words}


def reflexive_data(
    seed: int = 0, rows_per_class: int | None = None, classes: Sequence[str] = ("M", "F")
) -> dict[str, pd.DataFrame]:
    """Give rows like those of `feature_data` with labels of several tokens: himself, herself, on demand themselves.

    The masked tokenizer cuts "himself" (M) and "themselves" (N) in two and "herself" (F) in three pieces.
    """
    for label in classes:
        if label not in REFLEXIVES.words:
            raise UserError(f"classes names {label!r}: choose from {', '.join(REFLEXIVES.words)}.")
    return {label: _class_frame(REFLEXIVES, label, rows_per_class, seed) for label in classes}


def neutral_data(seed: int = 0) -> pd.DataFrame:
    """Give sentences about things only, in the column text; pre-training saw their words but none of them."""
    rng = random.Random(f"neutral {seed}")
    return pd.DataFrame({"text": _templates(NEUTRALS, "", "test", NEUTRAL_ROWS, rng)})


def _class_frame(family: Family, label: str, rows: int | None, seed: int) -> pd.DataFrame:
    """Make the rows of one class: three fifths for training, one fifth each for validation and test."""
    rows = DATA_ROWS if rows is None else rows
    if rows < len(TURNS):
        raise UserError(f"rows_per_class is {rows}: at least {len(TURNS)} are needed to fill every split.")
    word = family.words[label]
    rng = random.Random(f"data {label} {word} {seed}")
    frames = []
    for split in SPLITS:
        count = sum(_split_of(i) == split for i in range(rows))
        masked = _templates(family, label, split, count, rng)
        frames.append(pd.DataFrame({"masked": masked, "label": word, "split": split}))
    return pd.concat(frames, ignore_index=True)


# Tokenizers


def _masked_tokenizer() -> PreTrainedTokenizerFast:
    """Make an uncased WordPiece tokenizer that knows every word of the sentences except the reflexives."""
    specials = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": MASK}
    letters = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    words = sorted(_words(PRONOUNS) | _words(NEUTRALS) | _words(REFLEXIVES) - set(REFLEXIVES.words.values()))
    # Order of first appearance, each entry once: "a" is both a letter and a word.
    entries = dict.fromkeys([*specials.values(), ".", *letters, *WORD_PIECES, *words])
    vocab = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    names = {f"{name}_token": token for name, token in specials.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_POSITIONS, **names)


def _words(family: Family) -> set[str]:
    texts = (*OPENERS, *family.middles, *family.endings, *family.words.values(), *sum(family.subjects.values(), []))
    return {word for text in texts for word in text.lower().split()}


def _causal_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: a word after a space begins with `Ġ`, as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_causal_tokenizer_text(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_POSITIONS,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


def _causal_tokenizer_text(seed: int) -> Iterator[str]:
    """All sentences, but with the reflexives left out, which so stay in pieces, and then the bare pronouns.

    Like GPT-2's, the vocabulary then has "she" beside "Ġshe": a trap for whoever looks a label up without its space.
    """
    reflexives = "|".join(REFLEXIVES.words.values())
    for text in _pretraining_text(seed):
        yield re.sub(rf" ({reflexives})\b", "", text)
    for word in PRONOUNS.words.values():
        yield from [word] * CORPUS_ROWS["pronouns"]


# Models


def build_masked_lm(
    directory: str | Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2, steps: int | None = None
) -> Path:
    """Pre-train a BERT that predicts he, she and they from the subject; write it and its tokenizer to `directory`."""
    _check_sizes(hidden_size, num_layers, steps)
    tokenizer = _masked_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,  # with BERT's 0.02 so narrow a model takes thousands of steps to find the subject
    )
    rows = _encode(tokenizer, _pretraining_text(seed))
    targets = torch.tensor(_target_ids(tokenizer))
    with _seeded(seed):
        model = BertForMaskedLM(config)
        _pretrain(model, rows, lambda batch: _hide(batch, tokenizer, targets), steps or PRETRAIN_STEPS["masked"])
    return _save(model, tokenizer, directory)


def build_causal_lm(
    directory: str | Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 2, steps: int | None = None
) -> Path:
    """Pre-train a GPT-2 that predicts he, she and they from the words before; write it and its tokenizer."""
    _check_sizes(hidden_size, num_layers, steps)
    tokenizer = _causal_tokenizer(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=NUM_HEADS,
        n_positions=MAX_POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
    )
    rows = _encode(tokenizer, [text + END_OF_TEXT for text in _pretraining_text(seed)])
    with _seeded(seed):
        model = GPT2LMHeadModel(config)
        _pretrain(model, rows, _shift, steps or PRETRAIN_STEPS["causal"])
    return _save(model, tokenizer, directory)


def _check_sizes(hidden_size: int, num_layers: int, steps: int | None) -> None:
    if hidden_size < NUM_HEADS or hidden_size % NUM_HEADS:
        raise UserError(f"hidden_size is {hidden_size}: choose a multiple of {NUM_HEADS}, the number of heads.")
    if num_layers < 1:
        raise UserError(f"num_layers is {num_layers}: choose 1 or more.")
    if steps is not None and steps < 1:
        raise UserError(f"steps is {steps}: choose 1 or more, or None for the default.")


def _pretraining_text(seed: int) -> list[str]:
    return [
        *_corpus(PRONOUNS, CORPUS_ROWS["pronouns"], seed),
        *_corpus(REFLEXIVES, CORPUS_ROWS["reflexives"], seed),
        *_corpus(NEUTRALS, CORPUS_ROWS["neutrals"], seed),
    ]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from this seed inside and give the caller's random state back; CUDA's state is not touched at all."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Batch:
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _target_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of all pieces of the target words; no other word of the sentences has such a piece."""
    words = [*PRONOUNS.words.values(), *REFLEXIVES.words.values()]
    return sorted({i for word in words for i in tokenizer(word, add_special_tokens=False)["input_ids"]})


def _hide(batch: Batch, tokenizer: PreTrainedTokenizerFast, targets: torch.Tensor) -> Batch:
    """Mask in each row either the whole target word or some of all tokens; what is hidden is the label.

    Not both in one row: a hidden subject beside a hidden target teaches that the target cannot be known.
    """
    ids = batch["input_ids"]
    is_target = torch.isin(ids, targets)
    is_special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    hides_target = is_target.any(dim=1, keepdim=True) & (torch.rand(len(ids), 1) < HIDE_TARGET)
    hides_any = ~is_special & (torch.rand(ids.shape) < HIDE_ANY)
    hidden = torch.where(hides_target, is_target, hides_any)
    return {
        **batch,
        "input_ids": ids.masked_fill(hidden, tokenizer.mask_token_id),
        "labels": ids.masked_fill(~hidden, IGNORED),
    }


def _shift(batch: Batch) -> Batch:
    """Label every token with the next one; the attention mask tells where rows end, as padding shares an id with it."""
    following = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)[:, 1:]
    return {**batch, "labels": torch.nn.functional.pad(following, (0, 1), value=IGNORED)}


def _pretrain(model: PreTrainedModel, rows: Batch, to_labelled: Callable[[Batch], Batch], steps: int) -> None:
    # Dropout stays in the saved config, so that a user who forgets eval mode notices; here it would only cost steps.
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAIN_LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PRETRAIN_LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(rows["input_ids"]), (BATCH_SIZE,))
        batch = to_labelled({name: values[chosen] for name, values in rows.items()})
        labels = batch.pop("labels").flatten()
        loss = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels, ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    logger.info("pre-trained %s for %d steps, last loss %.3f", type(model).__name__, steps, loss.item())


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: str | Path) -> Path:
    directory = _make_directory(directory)
    disabled_before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # saving imports DeepSpeed where it is installed, which warns if there is no GPU
    try:
        model.save_pretrained(directory)
    finally:
        logging.disable(disabled_before)
    tokenizer.save_pretrained(directory)
    return directory


def _make_directory(directory: str | Path) -> Path:
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"directory {str(directory)!r} is or lies under a file: choose another one.") from None
    return directory


# The whole example


def write_demo(directory: str | Path, *, kind: Kind = "masked", seed: int = 0) -> Path:
    """Write base model, data/<class>.csv, neutral.csv and run.yaml, and return the path of run.yaml.

    The paths in run.yaml are absolute, so that the run can be started from anywhere.
    """
    if kind not in BUILDERS:
        raise UserError(f"kind is {kind!r}: choose from {', '.join(BUILDERS)}.")
    directory = _make_directory(directory).resolve()
    name, build = BUILDERS[kind]
    model = build(directory / name, seed=seed)
    data = _make_directory(directory / "data")
    for label, frame in feature_data(seed).items():
        frame.to_csv(data / f"{label}.csv", index=False)
    neutral = directory / "neutral.csv"
    neutral_data(seed).to_csv(neutral, index=False)
    results = directory / f"results_{kind}"
    paths = {"model": model, "data": data, "eval_neutral_data": neutral, "experiment_dir": results}
    settings = {**{key: str(path) for key, path in paths.items()}, **RUN, "seed": seed}
    run = directory / "run.yaml"
    run.write_text(yaml.safe_dump(settings, sort_keys=False))
    return run


BUILDERS: dict[str, tuple[str, Callable[..., Path]]] = {
    "masked": ("base_model", build_masked_lm),
    "causal": ("base_model_causal", build_causal_lm),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the example to a directory, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m gradiend_dist.demo", description="Write the embedded example.")
    parser.add_argument("directory", help="where to write base model, data and run.yaml")
    parser.add_argument("--kind", choices=list(BUILDERS), default="masked", help="kind of language model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of the data")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def work() -> int:
        logger.info("wrote %s", write_demo(options.directory, kind=options.kind, seed=options.seed))
        return 0

    return exit_code("gradiend-dist demo", work)


if __name__ == "__main__":
    sys.exit(main())
