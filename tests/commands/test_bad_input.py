"""Wrong inputs of the training command: each is refused in one clear line and with exit code 2.

For every case: the line names the argument, file, column, class or row, its value and what to do; what stood in the
experiment directory stays byte for byte; and no weight of the base model is loaded, unless the weights are what is
wrong. A case fails if it ends in a traceback, trains all the same, or is found out too late.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from stage import LEFT_OUT, PREFIX, WORDS, Changes, Stage, assert_says, content, refusal

from gradiend_dist import (
    PostPruneConfig,
    TextPredictionTrainer,
    TrainingArguments,
    UserError,
    create_model_with_gradiend,
)
from gradiend_dist.commands import train
from gradiend_dist.storage import model_dir, weight_file

ROOT = Path(__file__).resolve().parents[2]


def test_stage__without_a_change_is_a_good_command(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """If this fails, every refusal below may have the wrong reason."""
    assert train.main(stage.command()) == 0, capsys.readouterr().err
    assert (stage.runs / "model" / "model.safetensors").stat().st_size > 1000


# --- arguments: name, changes to the configuration, what the sentence must say

ARGUMENTS: list[tuple[str, Changes, tuple[str, ...]]] = [
    ("misspelt key", {"learning_rat": 1}, ("run.yaml", "learning_rat is not", "did you mean learning_rate?")),
    ("unlike any key", {"zzz": 1}, ("zzz", "see --help")),
    ("key that is no word", {7: 1}, ("7 is not a known argument",)),
    ("reference only", {"lr_search_config": {}}, ("lr_search_config", "not supported", "pass a number")),
    ("reference only, device map", {"base_model_device_map": "auto"}, ("base_model_device_map", "device_base_model")),
    ("config in config", {"config": "x.yaml"}, ("config is not a known argument",)),
    ("Python only", {"evaluate_fn": "f"}, ("evaluate_fn is not a known argument",)),
    ("text for a number", {"max_seeds": "three"}, ("run.yaml", "max_seeds='three'", "see --help")),
    ("fraction for a count", {"max_steps": 1.5}, ("max_steps=1.5",)),
    ("list for a number", {"learning_rate": [1, 2]}, ("learning_rate=[1, 2]", "one value")),
    ("text for a list", {"params": "bert.*"}, ("params='bert.*'", "a list is expected")),
    ("text for a switch", {"do_eval": "maybe"}, ("do_eval='maybe'", "true/false")),
    ("text for an optional switch", {"seeds_in_parallel": "often"}, ("seeds_in_parallel='often'", "true or false")),
    ("nothing for a number", {"learning_rate": None}, ("learning_rate is empty", "leave the line out")),
    ("nothing for a switch", {"do_eval": None}, ("do_eval=None", "true or false")),
    ("list for metadata", {"metadata": [1]}, ("metadata=[1]", "dict")),
    ("text for dry_run", {"dry_run": "maybe"}, ("dry_run='maybe'",)),
    ("learning rate zero", {"learning_rate": 0}, ("learning_rate=0.0", "1e-5")),
    ("learning rate negative", {"learning_rate": -1e-3}, ("learning_rate=-0.001", "1e-5")),
    ("learning rate in words", {"learning_rate": "fast"}, ("learning_rate='fast'", "nor auto", "1e-5")),
    ("learning rate nan", {"learning_rate": float("nan")}, ("learning_rate=nan", "finite")),
    ("learning rate infinite", {"learning_rate": float("inf")}, ("learning_rate=inf", "finite")),
    *(
        (f"{name} zero", {name: 0}, (f"{name}=0", "positive"))
        for name in (
            "train_batch_size", "base_micro_batch_size", "gradiend_batch_size", "gradient_accumulation_steps",
            "train_max_size", "max_length", "num_train_epochs", "adam_epsilon", "save_steps", "logging_steps",
            "eval_steps", "eval_batch_size", "encoder_eval_max_size", "encoder_eval_train_max_size", "max_seeds",
            "seed_selection_eval_max_size", "min_convergent_seeds", "seed_stability_topk", "latent_dim",
        )
    ),
    *(
        (f"{name} negative", {name: -1}, (f"{name}=-1", "at least 0"))
        for name in ("weight_decay", "max_grad_norm", "warmup_steps", "gradient_store_gib")
    ),
    *(
        (f"{name} infinite", {name: float("inf")}, (f"{name}=inf", "finite number"))
        for name in ("weight_decay", "adam_epsilon", "gradient_store_gib", "convergent_score_threshold")
    ),
    ("max_steps zero", {"max_steps": 0, "initialization": "random"}, ("max_steps=0", "-1 to use num_train_epochs")),
    ("decay of auto", {"learning_rate": "auto", "weight_decay": 0.1}, ("weight_decay=0.1", "learning_rate=auto")),
    ("moments of 8 bits", {"optim": "adamw_8bit", "moments_dtype": "bfloat16"}, ("moments_dtype", "leave one of them")),
    ("epsilon of auto", {"learning_rate": "auto", "adam_epsilon": 1e-4}, ("adam_epsilon=0.0001", "leave adam_epsilon")),
    ("spectral items one", {"initialization": "spectral", "spectral_items": 1}, ("spectral_items=1", "at least 2")),
    ("spectral items few", {"initialization": "spectral", "spectral_items": 1, "latent_dim": 3}, ("spectral_items=1",)),
    ("initialization unknown", {"initialization": "spektral"}, ("initialization='spektral'", "random, spectral")),
    ("max_steps negative", {"max_steps": -5}, ("max_steps=-5", "-1 to use num_train_epochs")),
    ("beta1 one", {"adam_beta1": 1.0}, ("adam_beta1=1.0", "0.9")),
    ("beta2 negative", {"adam_beta2": -0.5}, ("adam_beta2=-0.5", "[0, 1)")),
    ("seed negative", {"seed": -1}, ("seed=-1", "[0, 2^32)")),
    ("seed too large", {"seed": 2**32}, ("seed=4294967296", "[0, 2^32)")),
    ("random_state negative", {"random_state": -1}, ("random_state=-1", "[0, 2^32)")),
    ("warm-up ratio", {"warmup_ratio": 1.5}, ("warmup_ratio=1.5", "0 to 1")),
    (
        "warm-up twice",
        {"warmup_steps": 1, "warmup_ratio": 0.1, "lr_scheduler_type": "linear"},
        ("warmup_steps", "warmup_ratio", "only one"),
    ),
    ("warm-up with constant", {"warmup_steps": 1}, ("lr_scheduler_type=constant", "constant_with_warmup")),
    ("scheduler", {"lr_scheduler_type": "linaer"}, ("lr_scheduler_type='linaer'", "linear, cosine")),
    ("optimizer", {"optim": "sgd"}, ("optim='sgd'", "adamw, adam")),
    ("source", {"source": "gradient"}, ("source='gradient'", "factual, alternative, diff")),
    ("target", {"target": "facual"}, ("target='facual'", "factual, alternative, diff")),
    ("save_strategy", {"save_strategy": "epoch"}, ("save_strategy='epoch'", "best, steps, no")),
    ("eval_strategy", {"eval_strategy": "epoch"}, ("eval_strategy='epoch'", "steps, no")),
    ("use_cache", {"use_cache": "sometimes"}, ("use_cache='sometimes'", "only_convergent")),
    ("saved_seed_runs", {"saved_seed_runs": "some"}, ("saved_seed_runs='some'", "best_only")),
    ("dtype", {"torch_dtype": "float64"}, ("torch_dtype='float64'", "float32, bfloat16")),
    ("activation", {"activation_encoder": "swish"}, ("activation_encoder='swish'", "tanh, relu")),
    ("objective", {"prediction_objective": "clm"}, ("prediction_objective='clm'", "clm_next_token")),
    ("compat", {"compat": "gradiend-0.1"}, ("compat='gradiend-0.1'", "gradiend-0.2")),
    ("metric", {"convergent_metric": "f1"}, ("convergent_metric='f1'", "correlation, loss")),
    ("loss without threshold", {"convergent_metric": "loss"}, ("convergent_metric=loss", "convergent_score_threshold")),
    ("placeholder empty", {"mask_placeholder": " "}, ("mask_placeholder is empty", "[MASK]")),
    ("image format", {"img_format": "docx"}, ("img_format='docx'", "png")),
    ("image resolution", {"img_dpi": 0}, ("img_dpi=0", "at least 1")),
    ("supervised twice", {"supervised_encoder": True, "supervised_decoder": True}, ("supervised_encoder", "only one")),
    ("supervised, wide", {"supervised_encoder": True, "latent_dim": 2}, ("latent_dim=2", "pass latent_dim=1")),
    ("half twice", {"bf16": True, "fp16": True}, ("bf16 and fp16", "only one")),
    ("more seeds than seeds", {"min_convergent_seeds": 2}, ("min_convergent_seeds=2", "max_seeds=1", "raise")),
    (
        "twins, batch size",
        {"train_batch_size": 2, "base_gradient_batch_size": 3},
        ("train_batch_size=2", "base_gradient_batch_size=3", "only one"),
    ),
    (
        "twins, metric",
        {"convergent_metric": "correlation", "convergence_metric": "loss"},
        ("convergent_metric=correlation", "convergence_metric=loss", "only one"),
    ),
    (
        "twins, threshold",
        {"convergent_score_threshold": 0.5, "convergence_threshold": 0.6},
        ("convergent_score_threshold=0.5", "convergence_threshold=0.6", "only one"),
    ),
    ("stability of one", {"analyze_seed_stability": True}, ("analyze_seed_stability", "min_convergent_seeds=1", "2")),
    (
        "stability of nothing",
        {"analyze_seed_stability": True, "seed_stability_topk": None},
        ("analyze_seed_stability", "seed_stability_topk is None", "pass a number"),
    ),
    (
        "bias that is not there",
        {"bias_decoder": False, "post_prune_config": {"part": "decoder-bias"}},
        ("post_prune_config.part=decoder-bias", "bias_decoder", "decoder-weight"),
    ),
    (
        "seeds that differ in space",
        {
            "seeds_in_parallel": True, "compat": "gradiend-0.2", "max_seeds": 2, "train_batch_size": 1,
            "pre_prune_config": {"n_samples": 2},
        },
        ("seeds_in_parallel", "compat", "pre_prune_config.seed"),
    ),
    ("device that is not there", {"device": "cuda:7"}, ("device=cuda:7", "GPUs", "another device")),
    ("device nonsense", {"device": "gnu"}, ("device=gnu", "cpu or cuda:0")),
    ("device of the decoder", {"device_decoder": "cuda:7"}, ("device_decoder=cuda:7", "GPUs")),
    ("device of another kind", {"device": "meta"}, ("device=meta", "cpu or a CUDA device")),
    ("params unmatched", {"params": ["nothing.*"]}, ("'nothing.*'", "bert.embeddings.word_embeddings.weight")),
    ("params empty", {"params": []}, ("params is empty", "leave it out")),
    ("pruning no mapping", {"pre_prune_config": 0.1}, ("pre_prune_config=0.1", "{topk: 0.01}")),
    ("pruning misspelt", {"pre_prune_config": {"topK": 1}}, ("pre_prune_config", "topK", "did you mean topk?")),
    ("pruning key no word", {"pre_prune_config": {1: 1}}, ("pre_prune_config: 1 is not",)),
    ("pruning to nothing", {"pre_prune_config": {"topk": 0}}, ("pre_prune_config.topk=0", "at least 1")),
    ("pruning to more", {"pre_prune_config": {"topk": 1.5}}, ("pre_prune_config.topk=1.5", "(0, 1]")),
    ("pruning to a word", {"pre_prune_config": {"topk": "x"}}, ("pre_prune_config.topk='x'", "not a number")),
    ("pruning by nothing", {"pre_prune_config": {"topk": None}}, ("neither topk nor threshold",)),
    ("pruning without samples", {"pre_prune_config": {"n_samples": 0}}, ("pre_prune_config.n_samples=0", "positive")),
    ("pruning by 1.5 samples", {"pre_prune_config": {"n_samples": 1.5}}, ("n_samples=1.5", "whole number")),
    ("pruning by a word", {"pre_prune_config": {"threshold": "x"}}, ("pre_prune_config.threshold='x'",)),
    ("pruning by which", {"pre_prune_config": {"source": "x"}}, ("pre_prune_config.source='x'", "factual")),
    ("pruning seed", {"pre_prune_config": {"seed": -1}}, ("pre_prune_config.seed=-1",)),
    ("post-pruning to nothing", {"post_prune_config": {"topk": 0}}, ("post_prune_config.topk=0", "at least 1")),
    ("post-pruning part", {"post_prune_config": {"part": "bias"}}, ("post_prune_config.part='bias'", "decoder-sum")),
    ("post-pruning mask", {"post_prune_config": {"mask": [1]}}, ("post_prune_config.mask=[1]", "in Python")),
    ("run_id leads out", {"run_id": "../other"}, ("run_id='../other'", "experiment_dir")),
    ("run_id absolute", {"run_id": "/other"}, ("run_id='/other'", "experiment_dir")),
    (
        "batch too large for compat",
        {"compat": "gradiend-0.2", "train_batch_size": 64},
        ("batch of 64", "lower train_batch_size"),
    ),
    ("same class twice", {"target_classes": ["M", "M"]}, ("target_classes=['M', 'M']", "different")),
    ("one target class", {"target_classes": ["M"]}, ("target_classes=['M']", "two")),
    ("three target classes", {"target_classes": ["M", "F", "N"]}, ("target_classes=['M', 'F', 'N']", "two")),
    ("three classes, none named", {"target_classes": LEFT_OUT}, ("target_classes is needed", "'F', 'M', 'N'")),
    ("class not in the data", {"target_classes": ["M", "X"]}, ("'X'", "'F', 'M', 'N'", "correct target_classes")),
    ("target not among all", {"all_classes": ["M", "N"]}, ("'F'", "all_classes=['M', 'N']", "add it")),
    ("all_classes unknown", {"all_classes": ["M", "F", "Z"]}, ("'Z'", "all_classes", "'F', 'M', 'N'")),
    (
        "class merged twice",
        {"class_merge_map": {"A": ["M"], "B": ["M", "F"]}, "target_classes": ["A", "B"]},
        ("class_merge_map", "'M' twice"),
    ),
    ("merged class empty", {"class_merge_map": {"A": []}}, ("class_merge_map={'A': []}", "without members")),
    ("merged into a text", {"class_merge_map": {"A": "MF"}}, ("class_merge_map={'A': 'MF'}", "list")),
    ("merging no mapping", {"class_merge_map": ["M"]}, ("class_merge_map=['M']",)),
    (
        "merged class absent",
        {"class_merge_map": {"A": ["M"], "B": ["Z"]}, "target_classes": ["A", "B"]},
        ("class_merge_map", "'Z'", "'F', 'M', 'N'"),
    ),
    ("groups of texts", {"class_merge_transition_groups": ["MF"]}, ("class_merge_transition_groups=['MF']",)),
    ("ratios", {"split_train_ratio": 0.9}, ("(0.9, 0.1, 0.1)", "add up to 1")),
    ("ratio nan", {"split_train_ratio": float("nan")}, ("split_train_ratio=nan",)),
    ("held-out words", {"split_col": "heldout"}, ("split_col='heldout'", "'F'", "add words")),
    ("held-out column", {"split_group_col": "masked"}, ("split_group_col", "split_col='heldout'")),
    ("model left out", {"model": LEFT_OUT}, ("model is missing", "--model")),
    ("data left out", {"data": LEFT_OUT}, ("data is missing", "--data")),
    ("data twice", {"hf_dataset": "owner/name"}, ("data and hf_dataset", "the one")),
    ("subset of nothing", {"hf_subset": ["a"]}, ("hf_subset=['a']", "hf_dataset")),
    ("no such model on the hub", {"model": "no-such-model"}, ("model='no-such-model' cannot be loaded",)),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS])
@pytest.mark.usefixtures("no_weights")
def test_argument__is_refused_in_one_line(
    stage: Stage, changes: Changes, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.changes = changes
    assert_says(refusal(stage, capsys), says)


# --- the command line and its configuration file


def _write(text: str | bytes, name: str = "run.yaml") -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        (stage.root / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return prepare


def _flags(*flags: str) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        stage.flags = [flag.format(root=stage.root) for flag in flags]

    return prepare


COMMANDS: list[tuple[str, Callable[[Stage], None], tuple[str, ...]]] = [
    ("no such file", _flags("--config", "{root}/rnu.yaml"), ("--config", "rnu.yaml", "does not exist")),
    ("file is a directory", _flags("--config", "{root}/data"), ("--config", "data", "YAML or JSON file")),
    ("file no YAML", _write("a: [1, 2\nb: }"), ("run.yaml cannot be read", "line 2")),
    ("file no text", _write(b"\xff\xfe\x00"), ("run.yaml cannot be read",)),
    ("file no mapping", _write("- model\n- data\n"), ("run.yaml holds no mapping", "name: value")),
    ("file empty", _write(""), ("run.yaml holds no mapping", "name: value")),
    ("flag misspelt", _flags("--learnig_rate", "1"), ("--learnig_rate", "did you mean learning_rate?")),
    ("flag misspelt with dashes", _flags("--max-sead=3"), ("max_sead", "did you mean max_seeds?")),
    ("flag of the reference", _flags("--runtime_monitor", "true"), ("runtime_monitor", "training.json")),
    ("flag without value", _flags("--max_seeds"), ("--max_seeds", "expected one argument", "--help")),
    ("flag of a wrong type", _flags("--max_seeds", "three"), ("--max_seeds", "'three'", "--help")),
    ("flag cut short", _flags("--max_see", "3"), ("max_see", "did you mean max_seeds?")),
    ("stray word", _flags("run.yaml"), ("'run.yaml' is no flag", "--help")),
    ("flag no YAML", _flags("--pre_prune_config", "{{topk: "), ("--pre_prune_config", "no valid YAML")),
    ("flag no mapping", _flags("--pre_prune_config", "0.1"), ("pre_prune_config=0.1", "{topk: 0.01}")),
]


@pytest.mark.parametrize(("prepare", "says"), [case[1:] for case in COMMANDS], ids=[case[0] for case in COMMANDS])
@pytest.mark.usefixtures("no_weights")
def test_command__is_refused_in_one_line(
    stage: Stage, prepare: Callable[[Stage], None], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(stage)
    assert_says(refusal(stage, capsys), says)


# --- data


def _class(name: str, edit: Callable[[pd.DataFrame], pd.DataFrame], **changes: Any) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        stage.edit_class(name, edit)
        stage.changes = changes

    return prepare


def _all_classes(edit: Callable[[pd.DataFrame], pd.DataFrame], **changes: Any) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        stage.edit_all(edit)
        stage.changes = changes

    return prepare


def _cell(row: int, column: str, value: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def edit(rows: pd.DataFrame) -> pd.DataFrame:
        rows.loc[row, column] = value
        return rows

    return edit


def _without(column: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows.drop(columns=column)


def _split(**names: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows.assign(split=rows["split"].replace(names))


def _only(*splits: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows[rows["split"].isin(splits)]


def _one_table(edit: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        parts = [pd.read_csv(stage.data / f"{name}.csv").assign(label_class=name) for name in WORDS]
        edit(pd.concat(parts, ignore_index=True)).to_csv(stage.root / "table.csv", index=False)
        stage.changes = {"data": str(stage.root / "table.csv")}

    return prepare


def _file(name: str, text: str | bytes) -> Callable[[Stage], None]:
    """Class M as another file."""

    def prepare(stage: Stage) -> None:
        (stage.data / "M.csv").unlink()
        _write(text, f"data/{name}")(stage)

    return prepare


def _remove(*names: str, **changes: Any) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        for name in names:
            (stage.data / f"{name}.csv").unlink()
        stage.changes = changes

    return prepare


def _path(argument: str, name: str) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        stage.changes = {argument: str(stage.root / name)}

    return prepare


def _neutral(text: str) -> Callable[[Stage], None]:
    def prepare(stage: Stage) -> None:
        _write(text, "neutral.csv")(stage)
        stage.changes = {"eval_neutral_data": str(stage.root / "neutral.csv")}

    return prepare


DATA: list[tuple[str, Callable[[Stage], None], tuple[str, ...]]] = [
    ("no such path", _path("data", "dta"), ("data=", "dta' does not exist")),
    ("no such file", _path("data", "training.cvs.csv"), ("training.cvs.csv' does not exist",)),
    ("unknown suffix", _path("data", "model/tokenizer.txt"), ("tokenizer.txt' does not exist",)),
    ("directory without tables", _path("data", "model/empty"), ("empty' holds neither training.csv",)),
    ("empty file", _file("M.csv", ""), ("M.csv' is not a csv file",)),
    ("file of bytes", _file("M.csv", bytes(range(256))), ("M.csv' is not a csv file",)),
    ("header alone", _file("M.csv", "masked,label,split\n"), ("no rows for class 'M'", "add rows")),
    ("broken line", _file("M.jsonl", '{"a": 1}\n{x\n'), ("M.jsonl', line 2 is not JSON", "one object per line")),
    ("line of bytes", _file("M.jsonl", b"\xff\xfe\n"), ("M.jsonl' cannot be read as UTF-8",)),
    ("no Parquet", _file("M.parquet", "masked"), ("M.parquet' is not a parquet file",)),
    ("no masked column", _class("M", _without("masked")), ("class 'M'", "no column 'masked'", "'label', 'split'")),
    ("no label column", _class("M", _without("label")), ("class 'M'", "'masked', 'split'", "'label'")),
    ("no class column", _one_table(_without("label_class")), ("no column 'label_class'", "'masked', 'label'")),
    ("no label in a table", _one_table(_without("label")), ("no column 'label'", "'masked'")),
    ("other masked_col", _all_classes(lambda rows: rows, masked_col="text"), ("no column 'text'", "'masked'")),
    ("other split_col", _all_classes(lambda rows: rows, split_col="fold"), ("no column 'fold'", "'split'")),
    ("class missing", _remove("F"), ("'F' is not in the data", "'M', 'N'")),
    ("one class", _remove("F", "N", target_classes=LEFT_OUT), ("target_classes", "'M'")),
    (
        "no blank",
        _class("M", _cell(3, "masked", "the man left .")),
        ("Row 3 of class 'M'", "mask_placeholder='[MASK]'", "'the man left .'", "correct the row"),
    ),
    ("empty token", _class("F", _cell(2, "label", None)), ("'label' is empty in row 2", "'F'", "remove the row")),
    ("empty text", _class("F", _cell(2, "masked", None)), ("'masked' is empty in row 2", "'F'", "remove the row")),
    ("empty split", _class("F", _cell(2, "split", None)), ("'split' is empty in row 2", "'F'")),
    ("no train", _all_classes(_only("validation", "test")), ("no rows of the split train", "validation, test")),
    ("misspelt train", _all_classes(_split(train="trian")), ("split train", "trian", "name one train")),
    (
        "nothing to evaluate on",
        _all_classes(_only("train")),
        ("do_eval", "validation or test", "the data has train", "do_eval=False"),
    ),
    ("no split column", _all_classes(_without("split")), ("do_eval", "validation or test", "split_col=None")),
    ("unknown splits", _all_classes(_split(validation="dev", test="x")), ("do_eval", "the data has train, dev, x")),
    ("split column of one class", _class("F", _without("split")), ("'F' has no column 'split'", "add it")),
    ("class not in train", _class("F", _only("validation", "test")), ("'F'", "'train'", "add rows")),
    ("neutral file missing", _path("eval_neutral_data", "neutral.csv"), ("eval_neutral_data=", "does not exist")),
    ("neutral file empty", _neutral("text\n"), ("eval_neutral_data has no rows",)),
    ("neutral cell empty", _neutral('text,n\nabc,1\n"",2\n'), ("eval_neutral_data has no text in row 1",)),
    ("neutral columns", _neutral("a,b\n1,2\n"), ("eval_neutral_data needs a column 'text'", "'a', 'b'")),
]  # fmt: skip


@pytest.mark.parametrize(("prepare", "says"), [case[1:] for case in DATA], ids=[case[0] for case in DATA])
@pytest.mark.usefixtures("no_weights")
def test_data__is_refused_in_one_line(
    stage: Stage, prepare: Callable[[Stage], None], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (stage.model / "empty").mkdir()
    prepare(stage)
    assert_says(refusal(stage, capsys), says)


# --- base models


def _cut_weights(stage: Stage) -> None:
    path = stage.model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _encoder_decoder(stage: Stage) -> None:
    sizes = {"d_model": 8, "num_layers": 1, "d_ff": 8, "num_heads": 1, "d_kv": 8}
    transformers.T5Config(**sizes, architectures=["T5ForConditionalGeneration"]).save_pretrained(stage.model)


def _no_language_model(stage: Stage) -> None:
    transformers.ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(stage.model)


def _no_tokenizer(stage: Stage) -> None:
    for path in stage.model.glob("tokenizer*"):
        path.unlink()


def _gradiend_without(key: str) -> Callable[[Stage], None]:
    """A saved GRADIEND model in the place of a base model, with a part of its configuration missing."""

    def prepare(stage: Stage) -> None:
        values = {"architecture": {"input_dim": 3}, "mapping": {}, "metadata": {"base_model": "/no/such/model"}}
        del values[key]
        _write(json.dumps(values), "model/config.json")(stage)

    return prepare


MODELS_BEFORE_LOADING: list[tuple[str, Callable[[Stage], None], tuple[str, ...]]] = [
    ("no such directory", _path("model", "modle"), ("modle' does not exist",)),
    ("a file", _path("model", "data/M.csv"), ("M.csv' holds no config.json", "directory of a saved model")),
    ("not a model", _path("model", "data"), ("data' holds no config.json", "directory of a saved model")),
    ("configuration damaged", _write("{", "model/config.json"), ("config.json is no valid JSON",)),
    ("configuration empty", _write("{}", "model/config.json"), ("model=", "model_type")),
    ("architecture unknown", _write('{"model_type": "x"}', "model/config.json"), ("model=", "`x`")),
    ("encoder-decoder", _encoder_decoder, ("model=", "encoder-decoder", "pass a masked or a causal one")),
    ("no language model", _no_language_model, ("model=", "no language model", "ViTConfig")),
    ("impossible sizes", lambda s: s.edit_json("config.json", lambda c: c.update(hidden_size=7)), ("model=", "(7)")),
    ("tokenizer missing", _no_tokenizer, ("model=", "no tokenizer", "save the tokenizer")),
    ("tokenizer damaged", _write("{", "model/tokenizer.json"), ("tokenizer of model=", "cannot be loaded")),
    ("tokenizer of nothing", _write("[]", "model/tokenizer.json"), ("tokenizer of model=", "cannot be loaded")),
    ("GRADIEND without base", _gradiend_without("metadata"), ("config.json does not name its base model",)),
    ("GRADIEND, base gone", _gradiend_without("mapping"), ("/no/such/model' does not exist",)),
]

MODELS: list[tuple[str, Callable[[Stage], None], tuple[str, ...]]] = [
    ("weights cut", _cut_weights, ("model=", "damaged", "copy or download it again")),
    ("weights empty", _write("", "model/model.safetensors"), ("model=", "damaged")),
    ("weights missing", lambda s: (s.model / "model.safetensors").unlink(), ("model=", "model.safetensors")),
    (
        "one weight missing",
        lambda s: s.edit_weights(lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.bias")),
        ("model=", "bert.encoder.layer.1.output.dense.bias", "complete language model"),
    ),
    (
        "weights of another shape",
        lambda s: s.edit_json("config.json", lambda config: config.update(intermediate_size=5)),
        ("model=", "bert.encoder.layer.0.intermediate.dense.bias", "config.json"),
    ),
]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [case[1:] for case in MODELS_BEFORE_LOADING],
    ids=[case[0] for case in MODELS_BEFORE_LOADING],
)
@pytest.mark.usefixtures("no_weights")
def test_model__is_refused_before_its_weights_are_loaded(
    stage: Stage, prepare: Callable[[Stage], None], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(stage)
    assert_says(refusal(stage, capsys), says)


@pytest.mark.parametrize(("prepare", "says"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
def test_model__with_unreadable_weights_is_refused_in_one_line(
    stage: Stage, prepare: Callable[[Stage], None], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(stage)
    assert_says(refusal(stage, capsys), says)


def _causal(stage: Stage, models: Path) -> None:
    shutil.rmtree(stage.model)
    shutil.copytree(models / "gpt2", stage.model)


def test_objective__causal_of_a_masked_model_is_refused(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.changes = {"prediction_objective": "clm_next_token"}
    assert_says(refusal(stage, capsys), ("prediction_objective=clm_next_token", "auto or mlm_mask_token"))


def test_objective__masked_of_a_causal_model_is_refused(
    stage: Stage, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _causal(stage, models)
    stage.changes = {"prediction_objective": "mlm_mask_token"}
    assert_says(refusal(stage, capsys), ("prediction_objective=mlm_mask_token", "auto or clm_next_token"))


@pytest.mark.parametrize("compat", [None, "gradiend-0.2"])
def test_objective__nothing_before_the_blank_is_told_before_the_first_step(
    stage: Stage, models: Path, capsys: pytest.CaptureFixture[str], compat: str | None
) -> None:
    """Also if the row's turn would come only in the last step; under `compat` it would be trained on zeros."""
    _causal(stage, models)
    stage.edit_class("M", _cell(3, "masked", "[MASK] said the man was tired ."))
    stage.changes = {"max_steps": LEFT_OUT, "num_train_epochs": 50, "train_batch_size": 1, "compat": compat}
    assert_says(refusal(stage, capsys), ("[MASK]", "before the blank", "remove the row"))


def test_max_length__without_room_for_the_blank_is_refused(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.changes = {"max_length": 2}
    assert_says(refusal(stage, capsys), ("max_length=2", "'the ", "raise it"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ("gradient of", "F→M, rows 0", "not finite", "weights")),
        ({"do_eval": False}, ("not finite at step 1", "item ", "rows ")),
        ({"pre_prune_config": {"n_samples": 2}}, ("pre-prune", "not finite", "rows ", "weights")),
    ],
    ids=["evaluation", "step", "pre-pruning"],
)
def test_weights__not_finite_name_the_item_and_save_nothing(
    stage: Stage, capsys: pytest.CaptureFixture[str], changes: Changes, says: tuple[str, ...]
) -> None:
    """A NaN in the base model must not reach a weight that is saved."""
    stage.edit_weights(lambda tensors: tensors["bert.embeddings.LayerNorm.bias"].fill_(float("nan")))
    stage.changes = changes
    before = content(stage.runs)
    assert train.main(stage.command()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert_says(lines[0], (PREFIX, *says))
    after = content(stage.runs)
    # A run that has begun, in one of the three cases, has left what it was and the alert that it ended with.
    after["run_config.yaml"] = before["run_config.yaml"]
    alert = after.pop("metrics.jsonl", None)
    assert after == before, "something was saved"
    assert (alert is not None and b'"alert": "not_finite"' in alert) is ("do_eval" in changes)


# --- where results go


@pytest.mark.usefixtures("no_weights")
def test_8bit__without_bitsandbytes_names_the_extra(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    stage.changes = {"optim": "adamw_8bit"}
    assert_says(refusal(stage, capsys), ("optim=adamw_8bit", "bitsandbytes", "pip install"))


@pytest.mark.parametrize("argument", ["experiment_dir", "output_dir", "seed_runs_dir"])
@pytest.mark.parametrize("below", ["", "/deeper"])
@pytest.mark.usefixtures("no_weights")
def test_output__at_a_file_is_refused(
    stage: Stage, capsys: pytest.CaptureFixture[str], argument: str, below: str
) -> None:
    """A file of the user must not be replaced by a directory."""
    target = stage.data / "M.csv"
    stage.changes = {argument: f"{target}{below}", "max_seeds": 2}
    before = target.read_bytes()
    assert_says(refusal(stage, capsys), (f"{target}{below}", "pass another"))
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["model", "data"])
@pytest.mark.usefixtures("no_weights")
def test_output__never_replaces_what_is_no_result(stage: Stage, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """output_dir at the base model or the data: they would be gone. The same for `experiment_dir/model`."""
    before = content(stage.root / name)
    stage.changes = {"output_dir": str(stage.root / name)}
    assert_says(refusal(stage, capsys), (str(stage.root / name), "would be replaced", "pass another output_dir"))
    assert content(stage.root / name) == before


@pytest.mark.usefixtures("no_weights")
def test_output__base_model_below_the_experiment_is_not_replaced(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(stage.model)
    stage.changes = {"experiment_dir": str(stage.root)}
    assert_says(refusal(stage, capsys), (str(stage.model), "would be replaced"))
    assert content(stage.model) == before


@pytest.mark.parametrize("argument", ["experiment_dir", "output_dir", "seed_runs_dir"])
@pytest.mark.usefixtures("no_weights")
def test_output__without_permission_is_refused(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    """Permissions do not bind a superuser, so the answer of the system is put in its mouth."""
    locked = stage.root / "locked"
    locked.mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and allowed(path, mode))
    stage.changes = {argument: str(locked / "runs"), "max_seeds": 2}
    assert_says(refusal(stage, capsys), (f"{argument}={locked / 'runs'}", f"{locked} cannot be written to", "permis"))


@pytest.mark.usefixtures("no_weights")
def test_output__on_a_disk_without_room_is_refused(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 10**12 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert_says(refusal(stage, capsys), (f"experiment_dir={stage.runs}", "0.0 MiB are free", "pre_prune_config"))


@pytest.mark.parametrize("at", ["model_best", "model"])
def test_disk_full__in_the_middle_is_one_line_and_costs_no_model(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """While a checkpoint is written, or the promoted model. What was promoted before stays, and so does the best
    checkpoint of this run; half-written directories do not."""

    write = weight_file.write_pieces

    def fail(path: Path, *rest: Any) -> None:
        if path.parent.name.startswith(f".{at}.partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *rest)

    def fail_json(path: Path, *rest: Any, **options: Any) -> None:
        if path.parent.name.startswith(f".{at}.partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, *rest, **options)

    write_json = model_dir.write_json
    monkeypatch.setattr(weight_file, "write_pieces", fail)
    monkeypatch.setattr(model_dir, "write_json", fail_json)  # a promoted model's weights are linked, not written
    before = content(stage.runs / "model")
    assert train.main(stage.command()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert_says(lines[0], (str(stage.runs), "cannot be written", "No space left on device", "free space"))
    assert content(stage.runs / "model") == before, "the model promoted before was lost"
    left = [path.name for path in stage.runs.iterdir()]
    assert not [name for name in left if name.startswith(".")], left
    if at == "model":
        load_file(stage.runs / "model_best" / "model.safetensors")


def test_disk_full__of_cached_gradients_is_one_line(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_tensors: dict[str, torch.Tensor], path: str, **_options: Any) -> None:
        Path(path).write_bytes(b"half a fi")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("gradiend_dist.gradients.store.save_file", save)
    stage.changes = {"use_cached_gradients": True}
    assert train.main(stage.command()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert_says(lines[0], ("cache", "cannot be written", "No space left on device"))
    assert not list(stage.runs.rglob("*.partial"))


# --- what can be known only at the end


def test_convergence__that_is_required_and_missing_ends_with_2_and_the_model(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.changes = {"fail_on_non_convergence": True, "convergent_score_threshold": 1.1}
    assert train.main(stage.command()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert_says(error, (PREFIX, "0 of 1 seeds converged", "seed 0", "below 1.1", "learning_rate"))
    load_file(stage.runs / "model" / "model.safetensors")


def test_stability__of_too_few_converged_seeds_ends_with_2_and_the_model(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison is asked for by name; that it cannot be made must not cost the trained model."""
    stage.changes = {
        "analyze_seed_stability": True, "max_seeds": 2, "min_convergent_seeds": 2, "convergent_score_threshold": 1.1,
    }  # fmt: skip
    assert train.main(stage.command()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert_says(error, (PREFIX, "analyze_seed_stability", "0 of 2 converged", "max_seeds"))
    load_file(stage.runs / "model" / "model.safetensors")


def test_post_pruning__to_nothing_keeps_the_trained_weights(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.changes = {"post_prune_config": {"threshold": 1e9}}
    before = content(stage.runs / "model")
    assert train.main(stage.command()) == 2
    assert_says(capsys.readouterr().err.splitlines()[-1], (PREFIX, "threshold=1000000000.0", "largest", "lower it"))
    assert content(stage.runs / "model") == before
    load_file(stage.runs / "model_best" / "model.safetensors")


# --- from Python


def test_mask__over_another_space_is_refused_before_the_first_step(stage: Stage) -> None:
    """Its length can only be checked against the trained space, but not only after training."""
    args = TrainingArguments(
        experiment_dir=str(stage.runs),
        max_seeds=1,
        post_prune_config=PostPruneConfig(topk=None, mask=torch.ones(3, dtype=torch.bool)),
    )
    trainer = TextPredictionTrainer(str(stage.model), data=str(stage.data), target_classes=["M", "F"], args=args)
    before = content(stage.runs)
    with pytest.raises(UserError, match="post_prune_config.mask has 3 entries and the trained space [0-9]+: pass as"):
        trainer.train()
    assert content(stage.runs) == before


def test_save_pretrained__never_replaces_what_is_no_model(stage: Stage) -> None:
    """A model directory is replaced as a whole: the files of a directory with something else would be gone."""
    model = create_model_with_gradiend(str(stage.model))
    before = content(stage.data)
    with pytest.raises(UserError, match="would be replaced"):
        model.save_pretrained(stage.data)
    assert content(stage.data) == before
    for _ in range(2):  # into a new place, and over itself
        model.save_pretrained(stage.root / "saved")
    load_file(stage.root / "saved" / "model.safetensors")


# --- several processes, and the command as a process of its own


PROCESSES: list[tuple[str, Callable[[Stage], None], tuple[str, ...]]] = [
    ("argument", lambda stage: stage.changes.update(learning_rate=0), ("learning_rate=0.0", "1e-5")),
    ("flag", _flags("--learnig_rate", "1"), ("--learnig_rate", "did you mean")),
    ("data", _class("M", _without("masked")), ("class 'M'", "'masked'")),
    ("weights", _cut_weights, ("model=", "damaged")),
]


# All of them are refused in one line above, in this process. A process of its own can still fail before the first check
# (the flag) or with the model half loaded (the weights); the two between would only show what these show.
@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        pytest.param(*case, id=name, marks=() if name in ("flag", "weights") else pytest.mark.slow)
        for name, *case in PROCESSES
    ],
)
def test_process__ends_with_2_and_one_line(
    stage: Stage, prepare: Callable[[Stage], None], says: tuple[str, ...]
) -> None:
    prepare(stage)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "gradiend_dist.train", *stage.command()]
    before = content(stage.runs)
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert lines[-1].startswith(PREFIX) and result.stderr.count(PREFIX) == 1, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert_says(lines[-1], says)
    assert content(stage.runs) == before


def test_message__of_several_lines_becomes_one(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences quote other libraries, which write what they like."""

    def run(_command: Any, _interrupt: Any) -> int:
        raise UserError("the library says:\n\n  something\n  over several lines")

    monkeypatch.setattr(train, "run", run)
    assert refusal(stage, capsys) == "the library says: something over several lines"


def test_table__has_at_least_forty_wrong_inputs() -> None:
    tables = [ARGUMENTS, COMMANDS, DATA, MODELS_BEFORE_LOADING, MODELS]
    names = [case[0] for table in tables for case in table]
    assert len(names) >= 40
    for table in tables:
        assert len({case[0] for case in table}) == len(table), "two cases have one name"
