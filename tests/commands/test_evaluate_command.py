"""gradiend-dist evaluate and rewrite: what a user types, reads and gets; wrong input is one line and exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForMaskedLM, AutoTokenizer

from gradiend_dist import __main__, demo
from gradiend_dist.commands import evaluate, rewrite, train

QUICK = ["--lrs", "0.5", "0.05", "--max_size", "20"]


@pytest.fixture(scope="module")
def run_dir(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    for name, frame in demo.feature_data().items():
        if name != "N":
            (root / "data").mkdir(exist_ok=True)
            frame.to_csv(root / "data" / f"{name}.csv", index=False)
    demo.neutral_data()[:30].to_csv(root / "neutral.csv", index=False)
    values = {
        "model": str(masked_lm), "data": str(root / "data"), "eval_neutral_data": str(root / "neutral.csv"),
        "target_classes": ["M", "F"], "experiment_dir": str(root / "runs"), "run_id": "gender", "max_steps": 20,
        "train_batch_size": 8, "eval_steps": 10, "learning_rate": 1e-3, "max_seeds": 1,
        "pre_prune_config": {"n_samples": 4, "topk": 0.1, "source": "diff"},
    }  # fmt: skip
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    assert train.main(["--config", str(root / "run.yaml")]) == 0
    shutil.move(root / "runs" / "gender", root / "moved")
    return root / "moved"


def test_evaluate__prints_one_table_each_and_leaves_files(run_dir, capsys):
    assert __main__.main(["evaluate", str(run_dir), *QUICK]) == 0
    text = capsys.readouterr().out
    assert "encoder: correlation" in text and "base model" in text and "F strengthened" in text
    for name in ("encoder_distributions.png", "decoder_probability_shifts.png"):
        assert (run_dir / name).stat().st_size > 5_000 and name in text
    assert len(json.loads((run_dir / "decoder_grid_cache.json").read_text())["results"]) == 5
    capsys.readouterr()
    assert (
        evaluate.main([str(run_dir), *QUICK, "--parts", "decoder", "--plot", "false", "--selector", "lms_times_metric"])
        == 0
    )
    assert "encoder" not in capsys.readouterr().out


def test_rewrite__saves_the_selected_model(run_dir, tmp_path, capsys):
    assert __main__.main(["rewrite", str(run_dir), "--target_class", "F", "--output_dir", str(tmp_path / "f")]) == 0
    text = capsys.readouterr().out
    assert "F strengthened" in text and "P(F) at blanks of M" in text and str(tmp_path / "f") in text
    AutoModelForMaskedLM.from_pretrained(tmp_path / "f")
    assert AutoTokenizer.from_pretrained(tmp_path / "f").mask_token == "[MASK]"


@pytest.mark.parametrize("scaling", ["tensor", "curvature"])
def test_scaling__is_that_of_the_selected_model(scaling, run_dir, tmp_path, capsys):
    flags = ["--lrs", "1e-6", "1e-7", "--max_size", "20", "--scaling", scaling]  # larger ones destroy the model
    assert evaluate.main([str(run_dir), *flags, "--parts", "decoder", "--plot", "false"]) == 0
    kept = sorted(path.name for path in (run_dir / "decoder").iterdir())
    assert (
        sum(name.startswith(f"{scaling}_split_test_max_20") for name in kept) == 4
        and f"base_{scaling}_split_test_max_20_neutral_20.json" in kept
    )
    capsys.readouterr()
    assert rewrite.main([str(run_dir), "--target_class", "F", "--output_dir", str(tmp_path / "f"), *flags]) == 0
    assert f"| scaled by | {scaling}" in capsys.readouterr().out
    assert sorted(path.name for path in (run_dir / "decoder").iterdir()) == kept, "its points were used"
    given = ["--target_class", "F", "--learning_rate", "0.05", "--scaling", scaling]
    assert rewrite.main([str(run_dir), *given, "--output_dir", str(tmp_path / "g")]) == 0
    assert f"| scaled by | {scaling}" in capsys.readouterr().out


def test_rewrite__at_a_given_point_scores_nothing_and_keeps_the_dtype(run_dir, masked_lm, tmp_path, monkeypatch):
    half = tmp_path / "half"
    AutoModelForMaskedLM.from_pretrained(masked_lm, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(masked_lm).save_pretrained(half)
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    for name in ("run_config.yaml", "model/config.json"):
        (run / name).write_text((run / name).read_text().replace(str(masked_lm), str(half)))
    monkeypatch.setattr("gradiend_dist.evaluation.decoder_evaluation.ModelScores", None)
    flags = ["--target_class", "M", "--weaken", "true", "--learning_rate", "0.5"]
    assert rewrite.main([str(run), *flags, "--output_dir", str(tmp_path / "new")]) == 0
    base, new = (AutoModelForMaskedLM.from_pretrained(path, dtype="auto") for path in (half, tmp_path / "new"))
    assert new.dtype == torch.bfloat16
    same = sum(int((a == b).sum()) for a, b in zip(base.parameters(), new.parameters(), strict=True))
    total = sum(p.numel() for p in base.parameters())
    assert 0.85 * total < same < total, "a tenth is touched"
    assert "feature factor -1" in (tmp_path / "new" / "README.md").read_text()
    assert rewrite.main([str(run), *flags, "--output_dir", str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "wide", dtype="auto").dtype == torch.float32


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("evaluate", [], "RUN_DIR is missing"),
        ("evaluate", ["/no/such/run"], "RUN_DIR=/no/such/run is no directory"),
        ("evaluate", ["{data}"], "has no run_config.yaml"),
        ("evaluate", ["{run}", "--selector", "best"], "selector='best' is not known: choose one of lms_threshold"),
        ("evaluate", ["{run}", "--scaling", "fisher"], "scaling='fisher' is not known: choose one of plain, tensor"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{new}", "--scaling", "x"], "scaling='x' is not"),
        ("evaluate", ["{run}", "--lms_ratio", "99"], "lms_ratio=99.0 is not in [0, 1]"),
        ("evaluate", ["{run}", "--parts", "decoder", "--target_class", "X"], "target_class='X' is not a target class"),
        ("evaluate", ["{run}", "--parts", "nothing"], "parts='nothing' is not known"),
        ("evaluate", ["{run}", "--parts", "decoder", "--lrs", "fast"], "--lrs"),
        ("evaluate", ["{run}", "--split", "nothing"], "no rows in split 'nothing'"),
        ("evaluate", ["{run}", "--splt", "test"], "split"),
        ("rewrite", ["{run}", "--target_class", "F"], "output_dir is missing"),
        ("rewrite", ["{run}", "--output_dir", "{new}"], "target_class is missing"),
        ("rewrite", ["{run}", "--target_class", "X", "--output_dir", "{new}"], "target_class='X' is not a target"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{new}", "--dtype", "int4"], "dtype='int4'"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{data}"], "holds other files than a rewritten"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{new}", "--max_shard_size", "big"], "e.g. 5GB"),
        ("rewrite", ["{run}", "--feature_factor", "1", "--output_dir", "{new}"], "needs a learning_rate"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{model}"], "holds other files than a rewritten"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{base}"], "holds other files than a rewritten"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{new}", "--learning_rate", "1",
                     "--feature_factor", "1"], "does not make F strengthened"),
        ("rewrite", ["{run}", "--target_class", "F", "--output_dir", "{new}", "--learning_rate", "1", "--part",
                     "decoder-bias", "--feature_factor", "1"], "no effect on part=decoder-bias"),
        ("evaluate", ["{run}", "--parts", "decoder", "--max_size", "0"], "max_size=0 must be positive"),
    ],
)  # fmt: skip
def test_wrong_input__is_one_line(command, flags, words, run_dir, masked_lm, tmp_path, capsys):
    places = {"{model}": str(run_dir / "model"), "{base}": str(masked_lm)}
    places |= {"{run}": str(run_dir), "{data}": str(run_dir.parent / "data"), "{new}": str(tmp_path / "new")}
    before = sorted(path.name for path in run_dir.iterdir())
    assert __main__.main([command, *(places.get(flag, flag) for flag in flags)]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith(f"gradiend-dist {command}: error")
    ]
    assert len(lines) == 1 and words in lines[0], lines
    assert not (tmp_path / "new").exists() and sorted(path.name for path in run_dir.iterdir()) == before


def test_help__ends_well(capsys):
    for command in ("evaluate", "rewrite"):
        with pytest.raises(SystemExit) as end:
            __main__.main([command, "--help"])
        assert end.value.code == 0 and f"gradiend-dist {command} RUN_DIR" in capsys.readouterr().out


def test_delta__applied_is_the_rewritten_model(run_dir, tmp_path, capsys):
    step = ["--target_class", "F", "--learning_rate", "0.05", "--scaling", "curvature"]
    for form in ("model", "delta"):
        assert rewrite.main([str(run_dir), *step, "--as", form, "--output_dir", str(tmp_path / form)]) == 0
    assert f"delta         {tmp_path / 'delta'}" in capsys.readouterr().out
    wanted = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").state_dict()
    for strength, same in (("1", True), ("0.5", False)):
        output = tmp_path / f"applied_{strength}"
        flags = ["--strength", strength, "--output_dir", str(output)]
        assert __main__.main(["apply", str(tmp_path / "delta"), *flags]) == 0
        found = AutoModelForMaskedLM.from_pretrained(output).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()) == same
    assert "| strength | 0.5 times that |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "DELTA is missing"),
        (["nowhere", "--output_dir", "x"], "nowhere holds no delta"),
        (["nowhere"], "output_dir is missing"),
        (["nowhere", "--output_dir", "x", "--strength", "nan"], "strength=nan is not finite"),
        (["nowhere", "--output_dir", "x", "--dtype", "int8"], "dtype='int8' is not known"),
    ],
)
def test_apply__of_wrong_input_is_one_line(flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["apply", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not list(tmp_path.iterdir())
