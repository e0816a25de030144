"""The same run in both packages: tiny models and data, and what is compared of the two results."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradiend
import pandas as pd
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import gradiend_dist

PAIR = ["M", "F"]
CLASSES = ["M", "F", "N"]
WORDS = {"M": ["he", "him", "king"], "F": ["she", "her", "queen"], "N": ["they", "them", "it"]}
NAMES = ["doctor", "nurse", "teacher", "lawyer", "farmer", "writer"]
ENDS = ["win", "lose", "run home", "walk away and sing", "not come back to the old town"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OTHERS = "the said that would now and then a dog ran home walk away sing not come back to old town win lose run . ".split()
PIECES = ["##ess", "##s", "prin", "##c", "##e", "act", "##or", "##ress"]
VOCABULARY = [*SPECIAL, *OTHERS, *NAMES, *itertools.chain(*WORDS.values()), *PIECES]


def save_masked_model(directory: Path, seed: int = 0) -> str:
    """BERT with 256 positions, which the reference needs; weights larger than usual, so that rows differ."""
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    BertForMaskedLM(config).save_pretrained(directory)
    BertTokenizer(vocab={word: i for i, word in enumerate(VOCABULARY)}).save_pretrained(directory)
    return str(directory)


def save_causal_model(directory: Path, seed: int = 0) -> str:
    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=256,
        initializer_range=0.3,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(seed)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[SEP]")
    fast.save_pretrained(directory)
    return str(directory)


def rows(words: dict[str, list[str]] = WORDS, *, train: int = 14, held_out: int = 7) -> pd.DataFrame:
    """A table with written alternatives: uneven directions, rows of different lengths, a third class for identities."""
    found = []
    for split, count in (("train", train), ("validation", held_out), ("test", held_out)):
        for i, (name, other) in itertools.product(range(count), (("M", "F"), ("F", "M"), ("N", "M"))):
            if (name == "F" and i % 4 == 3) or (name == "N" and i % 2):
                continue
            shift = len(split) + i
            text = f"the {NAMES[shift % 6]} said that [MASK] would {ENDS[(2 * shift + len(name)) % 5]} ."
            found.append((text, split, name, words[name][shift % 3], other, words[other][(shift // 2) % 3]))
    return pd.DataFrame(found, columns=["masked", "split", "label_class", "label", "alternative_class", "alternative"])


@dataclass
class Result:
    """What a run has left on disk."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.model / "model.safetensors")

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.model / "training.json").read_text())

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.root / "seeds" / "seed_report.json").read_text())

    @property
    def param_map(self) -> list[dict[str, Any]]:
        return json.loads((self.model / "config.json").read_text())["mapping"]["param_map"]

    def selected(self) -> dict[str, torch.Tensor]:
        """All index and mask tensors of the parameter map."""
        files = [self.model / f"mapping_{kind}.safetensors" for kind in ("indices", "masks")]
        return {name: tensor for file in files if file.exists() for name, tensor in load_file(file).items()}


def reference_trainer(base: str, root: Path, table: Any, fields: dict[str, Any], **args: Any) -> Any:
    arguments = gradiend.TrainingArguments(experiment_dir=str(root), **args)
    return gradiend.TextPredictionTrainer(base, data=table, args=arguments, **fields)


def our_trainer(
    base: str, root: Path, table: Any, fields: dict[str, Any], **args: Any
) -> gradiend_dist.TextPredictionTrainer:
    arguments = gradiend_dist.TrainingArguments(experiment_dir=str(root), **args)
    return gradiend_dist.TextPredictionTrainer(base, data=table, args=arguments, **fields)
