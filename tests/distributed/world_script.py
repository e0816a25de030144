"""Trains every case, one after another, on however many ranks it was started: see test_world_size.py.

Started by together_script.py. MODELS holds the base models that `save_models` writes; results go to RESULTS/<case>.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import tiny

from gradiend_dist import PostPruneConfig, PrePruneConfig, TextPredictionTrainer, TrainingArguments
from gradiend_dist.distributed.launch import Launch
from gradiend_dist.engines import chunks
from gradiend_dist.gradients import base as gradients
from gradiend_dist.gradients import sketch
from gradiend_dist.gradients.buckets import Buckets
from gradiend_dist.gradients.sketch import SKETCH

TIMEOUT = 60
"""Seconds after which ranks that wait for each other in vain give up."""
# So that vectors of a few thousand entries travel in several buckets and are worked on in several chunks.
BUCKET, CHUNK = 700, 1000
FOLDED = 512

PRUNE = PrePruneConfig(n_samples=7, topk=0.1, source="diff")
DEFAULTS: dict[str, Any] = {
    "train_batch_size": 5,
    "train_max_size": 15,
    "encoder_eval_max_size": 5,
    "max_steps": 8,
    "eval_steps": 4,
    "initialization": "random",  # what is learnt shows
    "learning_rate": 2e-3,
    "adam_epsilon": 1e-5,  # above gradients that are nothing but rounding, see test_world_size.py
    "max_seeds": 1,
    "min_convergent_seeds": None,
    "keep_seed_runs": True,
    "ddp_timeout": TIMEOUT,
}
BERT_SIZE = 4575
"""Odd, so that no two ranks have parts of the same size."""
PRONOUNS = {"M": "he", "F": "she", "N": "they"}
REFLEXIVES = {"M": "himself", "F": "herself", "N": "themselves"}


@dataclass(frozen=True)
class Case:
    base: str = "bert"
    args: dict[str, Any] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=lambda: PRONOUNS)
    classes: tuple[str, str] = ("M", "F")
    like: str | None = None
    """The case whose result this one must have: it is only computed in another way."""


def case(base: str = "bert", *, like: str | None = None, **args: Any) -> Case:
    return Case(base, args, like=like)


def for_some_vectors(count: int, ranks: int) -> float:
    """GiB for so many vectors of the largest part, less one number: parts that differ by one must decide alike."""
    return 4 * (count * -(-BERT_SIZE // ranks) - 1) / 2**30


SEEDS: dict[str, Any] = {"max_seeds": 3, "pre_prune_config": PRUNE}
EASY: dict[str, Any] = {"convergent_score_threshold": 0.0, "convergent_mean_by_class_threshold": None}
SPECTRAL: dict[str, Any] = {"initialization": "spectral", "spectral_items": 6}
# Weights that gradients do not see are kept still by pruning: an epsilon of its own has none.
REFINED: dict[str, Any] = {"learning_rate": "auto", "adam_epsilon": 1e-8, "pre_prune_config": PRUNE}
CASES: dict[str, Case] = {
    "plain": case(),
    "causal": case("gpt2"),
    "causal_untied": case("llama"),
    "pruned": case(pre_prune_config=PRUNE),
    "plain_adam": case(pre_prune_config=PRUNE, adam_epsilon=1e-8, optim="adam"),
    "pruned_causal": case("gpt2", pre_prune_config=PRUNE),
    "pruned_by_threshold": case(pre_prune_config=PrePruneConfig(n_samples=3, threshold=0.05, source="alternative")),
    "batch_of_3": case(gradiend_batch_size=3),
    "accumulation": case(gradiend_batch_size=2, gradient_accumulation_steps=2, pre_prune_config=PRUNE),
    "seeds_in_lockstep": case(**SEEDS, seeds_in_parallel=True),
    "seeds_in_sequence": case(**SEEDS, seeds_in_parallel=False, like="seeds_in_lockstep"),
    "enough_seeds": case(**{**SEEDS, **EASY, "min_convergent_seeds": 2}, seed_stability_topk=20),
    "seeds_pruned_each": case(**{**SEEDS, "max_seeds": 2}, compat="gradiend-0.2"),
    "post_pruned": case(pre_prune_config=PRUNE, post_prune_config=PostPruneConfig(topk=37, part="decoder-sum")),
    "identity_rows": case(add_identity_for_other_classes=True),
    "supervised_encoder": case(supervised_encoder=True, adam_epsilon=1e-3),
    "supervised_decoder": case(supervised_decoder=True, pre_prune_config=PRUNE),
    "factual": case(source="factual", target="factual"),
    "from_diff": case("gpt2", source="diff", target="alternative", pre_prune_config=PRUNE),
    "nothing_kept": case(gradient_store_gib=0.0, like="plain"),
    "nothing_kept_causal": case("gpt2", gradient_store_gib=0.0, like="causal"),
    "clipped": case(max_grad_norm=1e-3, adam_epsilon=1e-4, gradiend_batch_size=2),
    "latent_dim_2": case(latent_dim=2, activation_encoder="gelu", gradiend_batch_size=2),
    "no_decoder_bias": case(bias_decoder=False, activation_decoder="tanh", pre_prune_config=PRUNE),
    "kept_on_disk": case(use_cached_gradients=True, gradient_store_gib=0.0, like="plain"),
    "two_rows": case(train_batch_size=2, max_steps=7),
    "micro_batches": case(base_micro_batch_size=1, like="plain"),
    "two_entries": case(pre_prune_config=PrePruneConfig(n_samples=4, topk=2), learning_rate=1e-1),
    "one_weight": case(params=["*.layer.1.output.LayerNorm.bias"], learning_rate=1e-1),
    "words_of_several_tokens": Case("bert", {"gradiend_batch_size": 2}, REFLEXIVES, ("M", "N")),
    "partly_kept": case(max_seeds=2, seeds_in_parallel=False),
    "spectral": case(**SPECTRAL),
    "closed_form": case("gpt2", **{**SPECTRAL, "max_steps": 0}, add_identity_for_other_classes=True),
    "refined": case(**SPECTRAL, **REFINED),
    "refined_in_two_passes": case(**SPECTRAL, **REFINED, gradient_store_gib=0.0, like="refined"),
    "spectral_folded": case(**SPECTRAL, params=["*.layer.1.*"]),
    "spectral_supervised": case(**SPECTRAL, supervised_encoder=True, adam_epsilon=1e-3),
}  # fmt: skip


def save_models(directory: Path) -> None:
    """The base models of all cases."""
    tokenizers = {
        "bert": tiny.wordpiece_tokenizer(),
        "gpt2": tiny.byte_level_tokenizer(),
        "llama": tiny.metaspace_tokenizer(),
    }
    for number, (family, tokenizer) in enumerate(tokenizers.items()):
        odd = {"num_hidden_layers": 3} if family == "bert" else {}
        model = tiny.base_model(family, len(tokenizer), seed=number, **odd)
        model.save_pretrained(directory / family)  # type: ignore[operator]
        tokenizer.save_pretrained(str(directory / family))


def frames(words: dict[str, str]) -> dict[str, pd.DataFrame]:
    """Rows of each class, with words that every tokenizer of `tiny` knows."""
    subjects, endings = ("the man", "the woman", "the nurse", "the doctor"), ("was tired", "left home early", "was old")
    found = {}
    for number, (name, word) in enumerate(words.items()):
        rows = [
            {"masked": f"{subject} said that [MASK] {ending}{close}", "label": word}
            for subject, ending, close in itertools.product(subjects, endings, (" today .", " .", ", and left ."))
        ]
        rows = rows[number:] + rows[:number]
        for place, row in enumerate(rows):
            row["split"] = ("train", "train", "validation", "train", "test")[place % 5]
        found[name] = pd.DataFrame(rows)
    return found


def train(case: Case, models: Path, results: Path) -> dict[str, Any]:
    args = TrainingArguments(**{**DEFAULTS, **case.args, "experiment_dir": str(results)})
    trainer = TextPredictionTrainer(
        str(models / case.base), data=frames(case.words), target_classes=list(case.classes), args=args
    )
    trainer.train()
    assert case.base != "bert" or case.args.get("params") or trainer.session.space.size == BERT_SIZE
    stats = trainer.session.gradients(trainer.get_model().gradiend.space).store
    evaluated = trainer.evaluate_encoder("test", neutral=True)
    # What rank 0 finds is what all ranks take, or those that do not would wait for it in vain.
    again = trainer.evaluate_encoder("test", neutral=True, use_cache=True)
    assert again["correlation"] == evaluated["correlation"]
    return {"evaluated": evaluated, "kept": [stats.hits, stats.misses]}


@patch.object(gradients, "Buckets", functools.partial(Buckets, size=BUCKET))
@patch.object(chunks, "CHUNK", CHUNK)
def work(launch: Launch, models: Path, results: Path, *cases: str) -> None:
    """All ranks call this."""
    found: dict[str, Any] = {"launch": {"engine": launch.engine, "ranks": launch.comm.world_size,
                                        "shards_base": launch.shards_base}, "seconds": {}}  # fmt: skip
    for name in cases or CASES:
        chosen = CASES[name]
        if name == "partly_kept":
            chosen = case(**chosen.args, gradient_store_gib=for_some_vectors(4, launch.comm.world_size))
        start = time.monotonic()
        with patch.object(sketch, "SKETCH", FOLDED if name == "spectral_folded" else SKETCH):
            found[name] = train(chosen, models, results / name)
        found["seconds"][name] = round(time.monotonic() - start, 2)
        if launch.comm.is_first:
            print(f"{name}: {found['seconds'][name]} s", flush=True)
    if launch.comm.is_first:
        (results / "found.json").write_text(json.dumps(found, default=float))
    launch.comm.meet("writing results")
