"""The embedded example must be what its users take for granted: models that know the word, and data that is clean."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase

from gradiend_dist import demo
from gradiend_dist.errors import UserError

BUILDS = [demo.build_masked_lm, demo.build_causal_lm]


def masked_accuracy(directory: Path, frame: pd.DataFrame) -> float:
    """Share of the rows in which every piece of the label is the most likely token of the whole vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForMaskedLM.from_pretrained(directory).eval()
    (label,) = frame["label"].unique()
    ids = tokenizer(label, add_special_tokens=False)["input_ids"]
    texts = [text.replace(demo.MASK, " ".join([demo.MASK] * len(ids))) for text in frame["masked"]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        best = model(**batch).logits.argmax(-1)
    hidden = batch["input_ids"] == tokenizer.mask_token_id
    return (best[hidden].view(len(texts), len(ids)) == torch.tensor(ids)).all(1).float().mean().item()


def causal_accuracy(directory: Path, frame: pd.DataFrame) -> float:
    """Share of the rows in which the label's first piece is the most likely token after the words before it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    (label,) = frame["label"].unique()
    first, *_ = tokenizer(f" {label}")["input_ids"]
    prefixes = [text.split(f" {demo.MASK}")[0] for text in frame["masked"]]
    batch = tokenizer(prefixes, padding=True, return_tensors="pt")
    with torch.no_grad():
        best = model(**batch).logits.argmax(-1)
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    return (best.gather(1, last) == first).float().mean().item()


def test_rows(frames: dict[str, pd.DataFrame], label: str) -> pd.DataFrame:
    return frames[label][frames[label]["split"] == "test"]


test_rows.__test__ = False  # type: ignore[attr-defined]
