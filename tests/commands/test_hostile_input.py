"""Inputs that nobody writes by mistake, and some that everybody might: refused in one line, or told in a warning.

A case fails if it ends in a traceback, waits for a pipe, fills the memory, or is taken without a word.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from stage import Stage, assert_says, refusal

from gradiend_dist.commands import plan, train
from gradiend_dist.model import config_check

Prepare = Callable[[Stage], None]

LONG = "x" * 300


def config(text: str) -> Prepare:
    return lambda stage: stage.config.write_text(text) and None


def changed(**changes: Any) -> Prepare:
    return lambda stage: stage.changes.update(changes)


def class_file(name: str, text: str) -> Prepare:
    """Class M as another file."""

    def prepare(stage: Stage) -> None:
        (stage.data / "M.csv").unlink()
        (stage.data / name).write_text(text)

    return prepare


def pipe(*argument: str) -> Prepare:
    """A pipe that nobody writes into: as a class, or in the place of an argument's file."""

    def prepare(stage: Stage) -> None:
        (stage.data / "M.csv").unlink()
        os.mkfifo(stage.data / "M.csv")
        stage.changes.update({name: str(stage.data / "M.csv") for name in argument})

    return prepare


def line(**cells: Any) -> str:
    return json.dumps({"masked": "the man said that [MASK] was tired .", "label": "he", "split": "train", **cells})


INPUTS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("alias in itself", config("metadata: &a {x: *a}"), ("run.yaml cannot be read", "inside of what it names")),
    ("deep nesting", config("metadata: " + "{a: " * 3000), ("run.yaml cannot be read", "levels deep")),
    ("key twice", config("model: a\nmodel: b"), ("run.yaml cannot be read", "'model' stands twice")),
    ("huge integer", config("max_steps: " + "9" * 5000), ("run.yaml cannot be read",)),
    ("integer beyond floats", config("model: a\ndata: b\nseed: 1" + "0" * 400), ("seed=1000", "whole number")),
    ("half a character", config('metadata: {a: "\\ud800"}'), ("run.yaml cannot be read", "written")),
    ("config is a pipe", lambda s: os.mkfifo(s.config), ("--config", "does not exist as a file")),
    ("config of a long name", lambda s: s.flags.extend(["--config", LONG]), ("--config=", "too long")),
    ("flag with NUL", lambda s: s.flags.extend(["--run_name", "a\0b"]), ("a\\x00b", "cannot be written")),
    ("flag of other bytes", lambda s: s.flags.extend(["--run_name", "\udcff"]), ("cannot be written",)),
    ("null in a list", changed(params=["bert.*", None]), ("params=", "null is none of its items")),
    ("null in target classes", changed(target_classes=["M", None]), ("target_classes=", "null")),
    ("null among words", changed(decoder_eval_targets={"M": [None]}), ("decoder_eval_targets", "lists of words")),
    ("null among lists", changed(class_merge_map={"A": ["M", None]}), ("class_merge_map", "list")),
    ("data is a pipe", pipe("data"), ("data=", "pipe or a device")),
    ("data is a device", changed(data="/dev/zero"), ("data=", "pipe or a device")),
    ("data of a long name", changed(data=f"/{LONG}.csv"), ("data=", "too long")),
    ("home of nobody", changed(data="~nobody_at_all/x.csv"), ("data=", "does not exist")),
    ("class is a pipe", pipe(), ("M.csv", "is no file")),
    ("neutral is a device", changed(eval_neutral_data="/dev/zero"), ("eval_neutral_data=", "pipe or a device")),
    ("deep JSONL", class_file("M.jsonl", "[" * 100_000), ("M.jsonl', line 1", "levels deep")),
    ("half a character in JSONL", class_file("M.jsonl", line(label="\ud800")), ("line 1", "cannot be written")),
    ("list as a cell", class_file("M.jsonl", line(label=["he"])), ("'label' has a list", "row 0")),
    ("mapping as a cell", class_file("M.jsonl", line(masked={"a": 1})), ("'masked' has a dict", "row 0")),
    ("experiment_dir with NUL", changed(experiment_dir="a\0b"), ("run.yaml", "cannot be written")),
    ("experiment_dir of a long name", changed(experiment_dir=LONG), ("experiment_dir=", "too long")),
    ("experiment_dir empty", changed(experiment_dir=""), ("experiment_dir is empty",)),
    ("output_dir of a long name", changed(output_dir="x" * 250), ("output_dir=", "too long")),
    ("seed_runs_dir empty", changed(seed_runs_dir=" "), ("seed_runs_dir is empty",)),
    ("run_id of a long name", changed(run_id=LONG), ("run_id=", "too long")),
    ("model of a long name", changed(model=f"/{LONG}"), ("model=", "too long")),
    ("model empty", changed(model=" "), ("model is empty",)),
    (
        "experiment in the data",
        lambda s: s.changes.update(experiment_dir=str(s.data)),
        ("experiment_dir=", "directory of the data"),
    ),
    (
        "experiment in the base model",
        lambda s: s.changes.update(experiment_dir=str(s.model / "..") + "/model"),
        ("experiment_dir=", "directory of the base model"),
    ),
    ("resolution beyond any", changed(img_dpi=100_000), ("img_dpi=100000", "at most")),
    *(
        (f"{name} zero", changed(**{name: 0}), (f"{name}=0", "positive"))
        for name in ("decoder_eval_max_size_training_like", "decoder_eval_max_size_neutral")
    ),
    ("decoder_eval_lrs zero", changed(decoder_eval_lrs=[0.1, 0]), ("decoder_eval_lrs=[0.1, 0.0]", "positive")),
    ("the same word", lambda s: s.edit_all(lambda rows: rows.assign(label="he")), ("the same word", "'he'")),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("prepare", "says"), [case[1:] for case in INPUTS], ids=[case[0] for case in INPUTS])
@pytest.mark.usefixtures("no_weights")
def test_input__is_refused_in_one_line(
    stage: Stage, prepare: Prepare, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(stage)
    assert_says(refusal(stage, capsys), says)


def set_config(**values: Any) -> Prepare:
    return lambda stage: stage.edit_json("config.json", lambda found: found.update(values))


def write_config(text: str) -> Prepare:
    return lambda stage: (stage.model / "config.json").write_text(text) and None


MODELS: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("no object", write_config("[]"), ("no JSON object",)),
    ("deep", write_config('{"a":' * 5000), ("config.json", "recursion")),
    ("deeper than any", write_config('{"a":' * 60 + "1" + "}" * 60), ("config.json", "levels deep")),
    ("type is a list", set_config(model_type=["bert"]), ("model_type=['bert']", "a text")),
    ("architectures is a number", set_config(architectures=5), ("architectures=5", "list of names")),
    ("a million layers", set_config(num_hidden_layers=10**6), ("num_hidden_layers=1000000", "at most")),
    ("layers without end", set_config(num_hidden_layers=10**12), ("num_hidden_layers=", "at most")),
    ("negative size", set_config(hidden_size=-1), ("hidden_size=-1", "above 0")),
    ("no heads", set_config(num_attention_heads=0), ("num_attention_heads=0", "above 0")),
    ("negative heads", set_config(num_attention_heads=-2), ("num_attention_heads=-2", "above 0")),
    ("no vocabulary", set_config(vocab_size=0), ("vocab_size=0", "above 0")),
    ("no positions", set_config(max_position_embeddings=0), ("max_position_embeddings=0", "above 0")),
    ("text for a size", set_config(hidden_size="x"), ("hidden_size", "'x'")),
    ("list for a size", set_config(hidden_size=[1]), ("hidden_size",)),
    ("null for a size", set_config(vocab_size=None), ("vocab_size",)),
    ("activation of no name", set_config(hidden_act="no_act"), ("no_act",)),
    ("activation is a number", set_config(hidden_act=1), ("hidden_act", "value: 1")),
    ("dtype of no name", set_config(dtype="x"), ("model=",)),
    ("dtype is a list", set_config(dtype=[1]), ("model=",)),
    ("larger than its files", set_config(vocab_size=10**9), ("13,0", "cannot hold them")),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("prepare", "says"), [case[1:] for case in MODELS], ids=[case[0] for case in MODELS])
@pytest.mark.usefixtures("no_weights")
def test_config_json__is_refused_before_anything_is_loaded(
    stage: Stage, prepare: Prepare, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(stage)
    sentence = refusal(stage, capsys)
    assert_says(sentence, says)
    assert str(stage.model) in sentence
    assert plan.main(["--config_json", str(stage.model / "config.json")]) == (0 if "files" in sentence else 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("no_weights")
def test_config_json__that_describes_too_many_modules_is_refused_while_they_are_built(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the argument is called that multiplies them."""
    monkeypatch.setattr(config_check, "MOST_MODULES", 20)
    assert_says(refusal(stage, capsys), (str(stage.model), "more than 20 modules"))


class Mark:
    """What is run when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("plain", [True, False], ids=["plain pickle", "torch file"])
def test_pickled_weights__are_refused_and_not_run(
    stage: Stage, capsys: pytest.CaptureFixture[str], plain: bool
) -> None:
    (stage.model / "model.safetensors").unlink()
    mark, path = stage.root / "mark", stage.model / "pytorch_model.bin"
    content = {"bert.embeddings.word_embeddings.weight": Mark(mark), "filler": torch.zeros(10_000)}
    if plain:
        path.write_bytes(pickle.dumps({"a": Mark(mark), "filler": b"x" * 100_000}))
    else:
        torch.save(content, path)
    assert_says(refusal(stage, capsys), (str(stage.model), "pickle", "safetensors"))
    assert not mark.exists()


def told(stage: Stage, caplog: pytest.LogCaptureFixture) -> str:
    """What a run that is only planned says."""
    stage.flags.append("--dry_run")
    with caplog.at_level(logging.WARNING):
        assert train.main(stage.command()) == 0
    return caplog.text


def test_two_blanks__are_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The reference's data may have them; a causal model sees the first alone."""

    def edit(rows: pd.DataFrame) -> pd.DataFrame:
        rows.loc[2, "masked"] = "[MASK] said that [MASK] was tired ."
        return rows

    stage.edit_class("M", edit)
    assert_says(told(stage, caplog), ("1 of 6 rows have several blanks", "row 2", "[MASK] said that"))


def test_same_word__in_some_rows_is_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def edit(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(label=["she", "he", "he", "he", "he", "he"])

    stage.edit_class("M", edit)
    assert_says(told(stage, caplog), ("the same word in both classes", "'she'"))


def test_json_lines__are_cut_at_line_ends_only(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """JSON may hold a line separator of Unicode as it is; Python's splitlines would cut the object there."""
    rows = [line(masked=f"the man {at} said that [MASK]\u2028was tired .") for at in range(2)]
    text = "\n".join(json.dumps(json.loads(row), ensure_ascii=False) for row in rows)
    text += "\n" + line(split="validation") + "\n" + line(split="test")
    class_file("M.jsonl", text)(stage)
    told(stage, caplog)


SECRET = "hf_" + "a1B2" * 6


def files_with(directory: Path, text: str) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_secrets__in_free_arguments_reach_no_file_of_a_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that looks like one, nor one that is named so, nor one of the environment; facts stay."""
    monkeypatch.setenv("MY_SERVICE_API_KEY", "correct-horse-battery")
    stage.changes = {
        "metadata": {"note": f"made with {SECRET}", "password": "hunter2-hunter2", "tokenizer": "wordpiece"},
        "run_name": "run of correct-horse-battery",
    }
    assert train.main(stage.command()) == 0
    for secret in (SECRET, "hunter2-hunter2", "correct-horse-battery"):
        assert files_with(stage.runs, secret) == []
    written = stage.runs / "run_config.yaml"
    assert "wordpiece" in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600
    train.parse(["--config", str(written)])  # it is still a configuration
