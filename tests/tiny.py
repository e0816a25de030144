"""Tokenizers and random base models of a few thousand weights, in the families that users bring.

Sizes are odd where the architecture allows, and weights are large enough for logits to differ clearly.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

WORDS = "the a man woman nurse doctor said that he she they it was tired old and left home early today ( ) . ,".split()
PIECES = ["them", "##sel", "##ves", "her", "##self", "him"]

CORPUS = [
    "The man said he was tired. The woman said she was old, and they left home early today.",
    "the nurse said that she left (he was old) and the doctor said he and she were tired",
    " he he he he she she she she they they said said said said said man man woman woman The The The The",
]


def wordpiece_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """BERT's kind: [CLS] and [SEP] around the text, `themselves` in three pieces."""
    specials = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    vocab = {entry: index for index, entry in enumerate([*specials.values(), *WORDS, *PIECES])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    names = {f"{name}_token": token for name, token in specials.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def byte_level_tokenizer(*, adds_end: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """GPT-2's kind: a word after a space begins with `Ġ`; both `he` and `Ġhe` are entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, "he", "he", "she", "she", "they", "they"], trainer)
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <end>", special_tokens=[("<end>", tokenizer.token_to_id("<end>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>", **options)


def metaspace_tokenizer(*, adds_end: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Llama's kind: `▁` before words, the text's first included, and <s> before it all."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=["▁", "\n"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if adds_end else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


_SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 21}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", _SIZES),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_SIZES, "pad_token_id": 1}),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM", {"dim": 12, "n_layers": 2, "n_heads": 2, "hidden_dim": 21}
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_SIZES, "embedding_size": 9}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**_SIZES, "embedding_size": 9}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 12, "n_layer": 2, "n_head": 2, "n_inner": 21, **_NO_ENDS}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_SIZES, "num_key_value_heads": 1, "head_dim": 6}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_SIZES, "num_key_value_heads": 1}),
}  # fmt: skip


def base_model(family: str, vocab_size: int, *, seed: int = 0, **options: Any) -> nn.Module:
    """A random model in evaluation mode; the same seed gives the same weights."""
    config_name, model_name, sizes = _CONFIGS[family]
    fixed = {"vocab_size": vocab_size, "max_position_embeddings": 40, "initializer_range": 0.3}
    config = getattr(transformers, config_name)(**{**fixed, **sizes, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        with torch.no_grad():  # biases and norms start at 0 and 1, where a swap of two would not show
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.config.architectures = [model_name]
    return model.eval()


def without_onednn() -> Any:
    """Decorates tests in half precision: some virtual machines announce matrix instructions that they do not have, and
    oneDNN's kernels for them then crash."""
    return torch.backends.mkldnn.flags(enabled=False)


def sentence(num_words: int, seed: int = 0) -> str:
    """So many words, each one token for the WordPiece tokenizer."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS[:18]) for _ in range(num_words))
