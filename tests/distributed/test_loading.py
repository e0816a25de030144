"""A base model that ranks read by rows is the one that they read whole and then cut: to the bit, in every family."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tiny
import torch
from launching import FSDP, HERE, torchrun
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, NomicBertConfig, NomicBertForMaskedLM

SIZES: dict[str, Any] = {
    "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 21,
    "num_key_value_heads": 1, "max_position_embeddings": 40, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Directories: what is special about the model, and the dtype that it is loaded in.
BY_ROWS = (
    "bert-float32",  # tied, masked, buffers that no file has
    "gpt2-float32",  # tied, causal
    "llama-float32",  # not tied, rotary buffers
    "files-float32",  # several files
    "half-bfloat16",  # stored in float32, used in bfloat16
    "stored-auto",  # stored and used in bfloat16
    "legacy-float32",  # gamma and beta, as BERT's files have it
    "head-float32",  # the tied weight is in the file as the head's
    "bin-float32",  # no safetensors
    "experts-float32",  # one weight for each expert in the files, one for all of them in the model
)
RANKS = (pytest.param(2, marks=pytest.mark.slow), 3)
WHOLE = ("chunked-float32",)  # q, k and v are one weight in the files


@cache
def models() -> Path:
    """Sizes do not divide by 2 or 3."""
    root = Path(mkdtemp(prefix="loading_"))
    made = {
        "bert": (tiny.wordpiece_tokenizer(), {}), "gpt2": (tiny.byte_level_tokenizer(), {}),
        "llama": (tiny.metaspace_tokenizer(), {"tie_word_embeddings": False}),
    }  # fmt: skip
    for family, (tokenizer, options) in made.items():
        model = tiny.base_model(family, len(tokenizer), **options)
        model.save_pretrained(root / f"{family}-float32")  # type: ignore[operator]
        tokenizer.save_pretrained(str(root / f"{family}-float32"))
    llama, tokenizer = tiny.base_model("llama", 120), tiny.metaspace_tokenizer()
    for name in ("files-float32", "half-bfloat16", "bin-float32", "stored-auto"):
        saved = llama.to(torch.bfloat16) if name == "stored-auto" else llama
        saved.save_pretrained(root / name, max_shard_size="4KB" if name == "files-float32" else "1GB")  # type: ignore[operator]
        tokenizer.save_pretrained(str(root / name))
    as_bin(root / "bin-float32")
    of_bert(root / "legacy-float32", legacy)
    of_bert(root / "head-float32", from_head)
    of_bert(root / "broken-vocabulary", one_row_less)
    mixtral = MixtralForCausalLM(
        MixtralConfig(**{**SIZES, "intermediate_size": 20}, vocab_size=120, num_local_experts=5, num_experts_per_tok=2)
    )
    nomic = NomicBertForMaskedLM(NomicBertConfig(**{**SIZES, "vocab_size": len(tiny.wordpiece_tokenizer())}))
    for name, model, tokenizer in (
        ("experts", mixtral, tiny.metaspace_tokenizer()), ("chunked", nomic, tiny.wordpiece_tokenizer()),
    ):  # fmt: skip
        model.save_pretrained(root / f"{name}-float32")
        tokenizer.save_pretrained(str(root / f"{name}-float32"))
    return root


def as_bin(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def of_bert(path: Path, change: Any) -> None:
    """A directory as BERT's, with other names in its file."""
    tokenizer = tiny.wordpiece_tokenizer()
    tiny.base_model("bert", len(tokenizer)).save_pretrained(path)  # type: ignore[operator]
    tokenizer.save_pretrained(str(path))
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})


def legacy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in weights.items()
    }


def from_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {"bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight"}
    return {names.get(name, name): weight for name, weight in weights.items()}


def one_row_less(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Only the last rank is short of a row."""
    name = "bert.embeddings.word_embeddings.weight"
    return {**weights, name: weights[name][:-1].contiguous()}


@cache
def found(ranks: int) -> dict[str, list[Any]]:
    results = Path(mkdtemp(prefix="loading_"))
    environment = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    script = HERE / "loading_script.py"
    torchrun(script, models(), results, ranks=ranks, limit=150, environment=environment).require_success()
    return json.loads((results / "found.json").read_text())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*BY_ROWS, *WHOLE])
def test_load_base_model__by_rows_is_as_whole(name, ranks):
    """Fails if a rank reads other rows, another dtype, a buffer that is not set, or weights that are not tied."""
    for rank in found(ranks)[name]:
        assert rank["by_rows"] == (name in BY_ROWS)
        assert rank["differences"] == []
        assert rank["same_config"] and rank["same_class"] and rank["shared"]
        assert (rank["num_shared"] > 0) == (name.split("-")[0] in ("bert", "gpt2", "legacy", "head", "chunked"))
        assert rank["gradient"] and rank["recomputed"] and rank["norm"] > 0


@pytest.mark.parametrize("ranks", RANKS)
def test_row_products__are_those_of_the_gradients(ranks):
    """Fails if a weight that FSDP leaves whole after a pass does not move in the next one, or ranks' rows are mixed."""
    encoded = {name: [rank["encodings"] for rank in mine] for name, mine in found(ranks).items() if "float32" in name}
    measured = {name: values for name, values in encoded.items() if values[0] is not None}
    assert len(measured) >= 2
    assert all(value < 1e-4 for values in measured.values() for value in values), measured


@pytest.mark.parametrize("ranks", RANKS)
def test_load_base_model__tells_a_wrong_size_that_a_part_of_the_ranks_sees(ranks):
    """Fails if a shard is compared with nothing but its own size on rank 0."""
    assert any(told is not None and "word_embeddings" in told for told in found(ranks)["broken-vocabulary"])


def test_shard_model__adds_up_gradients_in_float32():
    """Fails if the ranks' gradients are added in the weights' bfloat16: 256 + 0.75 - 256 is 0 or 1 in most orders."""
    assert all(sums == [0.75] for sums in found(3)["sums"])


@pytest.mark.parametrize("ranks", RANKS)
def test_shard_model__waits_for_no_rank_that_uses_other_experts(ranks):
    """Fails, or hangs until its limit, if a rank sends nothing for the experts that its own rows do not go to."""
    assert all(sums == [float(1 + rank) for rank in range(ranks)] for sums in found(ranks)["experts"])
