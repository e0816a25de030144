"""The same run in both packages: tiny models, small data, and what is compared of the two results.

Both compute the same numbers in another order of float32 sums: the reference pads every row to 256 tokens and reads
factual and alternative word in two passes, here rows are padded to the longest and may share a pass. That is about 1e-7
of a gradient. AdamW keeps it small as long as gradients are well above their rounding errors or well below epsilon;
the tolerances leave a factor of ten or more above what was measured, and a wrong rule anywhere shows as a whole
learning rate, 3e-3 per step.

One group of weights has no gradient but rounding errors: a bias added to all keys does not change attention, so the
gradient of key biases is zero in exact arithmetic. Adam blows these errors up; such entries are compared loosely.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradiend
import pandas as pd
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import gradiend_dist

PAIR = ["M", "F"]
CLASSES = ["M", "F", "N"]
FIELDS = {"target_classes": PAIR, "all_classes": CLASSES}
WORDS = {"M": ["he", "him", "king"], "F": ["she", "her", "queen"], "N": ["they", "them", "it"]}
NAMES = ["doctor", "nurse", "teacher", "lawyer", "farmer", "writer"]
ENDS = ["win", "lose", "run home", "walk away and sing", "not come back to the old town"]
OTHERS = "the said that would now and then a dog ran home walk away sing not come back to old town win lose run".split()
PIECES = ["##ess", "##s", "prin", "##c", "##e", "act", "##or", "##ress"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {
    word: number
    for number, word in enumerate([*SPECIAL, *OTHERS, ".", *NAMES, *itertools.chain(*WORDS.values()), *PIECES])
}

LOSS_RTOL = 1e-4
SCORE_ATOL = 1e-4
WEIGHT_ATOL = 1e-4
NOISE_ATOL = 2e-3


def save_masked_model(directory: Path) -> str:
    """BERT with the 256 positions that the reference needs; weights large enough for rows to differ."""
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    transformers.BertTokenizer(vocab=VOCABULARY).save_pretrained(directory)
    return str(directory)


def save_causal_model(directory: Path) -> str:
    config = transformers.GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=256,
        initializer_range=0.3,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    return str(directory)


def rows(words: dict[str, list[str]] = WORDS) -> pd.DataFrame:
    """A table with written alternatives: uneven directions, rows of different lengths, a third class for identities."""
    found = []
    for split, count in (("train", 14), ("validation", 7), ("test", 7)):
        for i, (name, other) in itertools.product(range(count), (("M", "F"), ("F", "M"), ("N", "M"))):
            if (name == "F" and i % 4 == 3) or (name == "N" and i % 2):
                continue
            shift = len(split) + i
            text = f"the {NAMES[shift % 6]} said that [MASK] would {ENDS[(2 * shift + len(name)) % 5]} ."
            found.append((text, split, name, words[name][shift % 3], other, words[other][(shift // 2) % 3]))
    return pd.DataFrame(found, columns=["masked", "split", "label_class", "label", "alternative_class", "alternative"])


@dataclass
class Result:
    """One model directory."""

    path: Path

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    @property
    def record(self) -> dict[str, Any]:
        return read(self.path / "training.json")

    @property
    def mapping(self) -> dict[str, Any]:
        return read(self.path / "config.json")["mapping"]

    def selected(self) -> dict[str, torch.Tensor]:
        """The index and mask tensors of the map; the reference leaves files of an earlier map beside the named ones."""
        names = [self.mapping[kind] for kind in ("indices_file", "masks_file") if kind in self.mapping]
        return {key: tensor for name in names for key, tensor in load_file(self.path / name).items()}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def reference_trainer(base: str, root: Path, table: Any, fields: dict[str, Any], **args: Any) -> Any:
    arguments = gradiend.TrainingArguments(experiment_dir=str(root), **args)
    trainer = gradiend.TextPredictionTrainer(base, data=table, args=arguments, **{**FIELDS, **fields})
    trainer.plot_training_convergence = lambda **_: None  # it would be drawn after every run: a fifth of the time
    return trainer


def our_trainer(base: str, root: Path, table: Any, fields: dict[str, Any], **args: Any) -> Any:
    arguments = gradiend_dist.TrainingArguments(experiment_dir=str(root), **args)
    return gradiend_dist.TextPredictionTrainer(base, data=table, args=arguments, **{**FIELDS, **fields})


def assert_same_run(theirs: Path, ours: Path) -> dict[str, float]:
    """Everything that a run leaves in its model directory; returns the largest differences."""
    one, two = Result(theirs), Result(ours)
    found = {**compare_records(one.record, two.record), **compare_models(one, two)}
    print("largest differences:", ", ".join(f"{name} {value:.1e}" for name, value in found.items()))
    context, other = (read(path / "gradiend_context.json") for path in (theirs, ours))
    # The reference loses the directions where it prunes a single seed: it makes the model before it reads the data.
    assert context.items() <= other.items()
    assert other["feature_class_encoding_direction"] == {"M": 1, "F": -1}
    assert found["losses"] < LOSS_RTOL and found["norms"] < LOSS_RTOL
    assert found["scores"] < SCORE_ATOL and found["class numbers"] < SCORE_ATOL
    assert found["weights"] < WEIGHT_ATOL and found["noise weights"] < NOISE_ATOL
    return found


def compare_records(one: dict[str, Any], two: dict[str, Any]) -> dict[str, float]:
    stats, other = one["training_stats"], two["training_stats"]
    assert len(one["losses"]) == len(two["losses"])
    assert list(stats["scores"]) == list(other["scores"]), "evaluated at other steps"
    best, other_best = one["best_score_checkpoint"], two["best_score_checkpoint"]
    same_numbers(best, other_best)
    # Without required seeds a seed's own record has no verdict and leaves the means out; ours has them all the same.
    info, other_info = one["convergence_info"], two["convergence_info"]
    unsaid = ("convergent_min_target_class_abs_mean",) if info["convergent_count"] is None else ()
    same_numbers(info, other_info, ignored=unsaid)
    if stats["scores"]:
        assert stats["label_value_to_class_name"] == other["label_value_to_class_name"]
    norms = [relative(stats[name], other[name]) for name in ("encoder_norms", "decoder_norms")]
    by_class = [f"{what}_by_{group}" for group in ("class", "feature_class")
                for what in ("mean", "min", "max", "q1", "q3", "std", "n")]  # fmt: skip
    return {
        "losses": relative(dict(enumerate(one["losses"])), dict(enumerate(two["losses"]))),
        "norms": max(norms),
        "scores": largest(stats["scores"], other["scores"]),
        "class numbers": max(largest(stats.get(name, {}), other.get(name, {})) for name in by_class),
    }


def compare_models(one: Result, two: Result) -> dict[str, float]:
    assert one.mapping == two.mapping
    selected, other = one.selected(), two.selected()
    assert selected.keys() == other.keys()
    assert all(torch.equal(selected[name], other[name]) for name in selected), "other weights are selected"
    noise = noise_entries(one)
    found = {"weights": 0.0, "noise weights": 0.0}
    for name, tensor in one.weights.items():
        assert tensor.dtype == two.weights[name].dtype
        difference = (tensor - two.weights[name]).abs().reshape(-1)
        if difference.numel() == 1:
            found["weights"] = max(found["weights"], difference.item())
            continue
        found["weights"] = max(found["weights"], difference[~noise].max().item())
        if noise.any():
            found["noise weights"] = max(found["noise weights"], difference[noise].max().item())
    return found


def noise_entries(result: Result) -> torch.Tensor:
    """Which entries of the space are biases of keys."""
    selected = result.selected()
    parts = []
    for entry in result.mapping["param_map"]:
        full = torch.zeros(torch.Size(entry["shape"]), dtype=torch.bool).reshape(-1)
        if entry["name"].endswith("key.bias"):
            full[:] = True
        elif entry["name"].endswith("c_attn.bias"):
            full[len(full) // 3 : 2 * len(full) // 3] = True  # queries, keys, values
        if entry["repr"] == "indices":
            full = full[selected[entry["key"]].long()]
        elif entry["repr"] == "mask":
            full = full[selected[entry["key"]].reshape(-1).bool()]
        parts.append(full)
    return torch.cat(parts)


def largest(one: Any, two: Any) -> float:
    """The largest difference of two nested dicts of numbers with the same keys."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        return max((largest(one[key], two[key]) for key in one), default=0.0)
    return abs(one - two)


def relative(one: dict[Any, float], two: dict[Any, float]) -> float:
    assert one.keys() == two.keys()
    return max(abs(one[key] - two[key]) / abs(one[key]) for key in one)


def same_numbers(one: dict[str, Any], two: dict[str, Any], *, ignored: tuple[str, ...] = ()) -> None:
    """Equal values, floats up to the tolerance of scores; `two` may say more."""
    for key in one:
        if key in ignored:
            continue
        if isinstance(one[key], float) and isinstance(two[key], float):
            assert abs(one[key] - two[key]) < SCORE_ATOL, (key, one[key], two[key])
        else:
            assert one[key] == two[key], (key, one[key], two[key])
