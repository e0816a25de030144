"""Generated inputs to every command: it works, or it ends with 2 and one line; never a traceback, never a file outside.

The commands are called in this process, since a launch costs seconds. A default run draws a few inputs of each kind,
the slow one 2,000 in all (pytest -m slow tests/commands/test_generated_input.py). What is found is reported with the
smallest input that shows it.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import transformers
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage import PREFIX, Stage, content

from gradiend_dist import TrainingArguments
from gradiend_dist.__main__ import SUBCOMMANDS
from gradiend_dist.commands import apply, dashboard, evaluate, plan, report, rewrite, submit, train
from gradiend_dist.data.config import TextPredictionConfig

FEW, MANY = 12, 340

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "rewrite": rewrite.main,
    "apply": apply.main,
    "report": report.main,
    "submit": submit.main,
    "dashboard": dashboard.main,
    "plan": plan.main,
}

NUMBERS = st.one_of(
    st.integers(-3, 5), st.sampled_from([10**6, 2**31, 2**63, 10**400, -(2**63)]), st.floats(),
    st.sampled_from([float("nan"), float("inf"), 0.5, 1e-300]),
)  # fmt: skip

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " ", "\0", "\ud800", "../x", "/dev/zero", "null", "auto", "x" * 300, "[MASK]", "{a: ", "cuda:7", "--"]
    ),
)

SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)

VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)

ARGUMENTS = sorted({*TrainingArguments.__dataclass_fields__, *TextPredictionConfig.__dataclass_fields__})

# Seconds that an answer may take, on a busy machine as well.
TOO_LONG = 20.0

# What would reach the network or other devices instead of an answer.
LEFT_OUT = {"hf_dataset", "report_to", "trust_remote_code", "dataset_trust_remote_code"}

YAML_TEXTS = st.one_of(
    st.text(alphabet="ab:-[]{}&*!#|>\n \"'%,?0x.~\\", max_size=60),
    st.text(alphabet=string.printable, max_size=40).map(lambda text: f"metadata: {text}"),
    st.integers(1, 8).map(lambda depth: "\n".join(f"a{at}: &a{at} [{f'*a{at - 1}, ' * 9}x]" for at in range(depth))),
    st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")),
)

CELLS = st.one_of(
    SCALARS, st.sampled_from(["the man said that [MASK] left", "[MASK] [MASK]", "he", "train", "validation"]),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip

COLUMNS = st.sampled_from(["masked", "label", "split", "label_class", "alternative", "alternative_class", "M", "", "x"])


def drawn(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@pytest.fixture(autouse=True)
def somewhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written to a relative path is found, and nobody loads weights, asks W&B or runs sbatch."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def from_pretrained(*_args: Any, **_options: Any) -> None:
        raise ValueError("no weight is loaded here")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(dashboard, "save", lambda *_: "saved")


def ends_well(main: Callable[[Sequence[str]], int], argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """An exit code of 0, or of 2 with one line; anything that is raised fails the test by itself."""
    capsys.readouterr()
    start = time.monotonic()
    code = main(argv)
    seconds = time.monotonic() - start
    errors = capsys.readouterr().err
    assert code in (0, 2), f"{argv} ended with {code}"
    assert seconds < TOO_LONG, f"{argv} took {seconds:.0f} s"
    assert "Traceback" not in errors
    if code == 2:
        told = [line for line in errors.splitlines() if ": error: " in line]
        assert told and errors.splitlines()[-1] == told[-1], errors
    return code


def rehearse(stage: Stage, capsys: pytest.CaptureFixture[str]) -> int:
    """The training command up to its first weight: it writes nothing, here or elsewhere."""
    before = content(stage.runs), sorted(stage.root.iterdir()), sorted(Path.cwd().iterdir())
    code = ends_well(train.main, ["--config", str(stage.config), "--dry_run"], capsys)
    assert (content(stage.runs), sorted(stage.root.iterdir()), sorted(Path.cwd().iterdir())) == before
    return code


def good(stage: Stage) -> dict[str, Any]:
    if stage.config.exists():
        stage.config.unlink()
    stage.command()
    values: dict[str, Any] = yaml.safe_load(stage.config.read_text())
    return values


# --- each kind twice: a few inputs in the default suite, many in the slow one


def kinds(strategy: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a check(stage, capsys, drawn value): a test with a parameter for the number of inputs."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize(
            "examples", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
        )
        def test(stage: Stage, capsys: pytest.CaptureFixture[str], examples: int) -> None:
            given(strategy)(drawn(examples)(lambda value: check(stage, capsys, value)))()

        test.__doc__ = check.__doc__
        return test

    return decorate


@kinds(YAML_TEXTS)
def test_train__any_file_is_a_configuration_or_one_line(stage: Stage, capsys: Any, text: str) -> None:
    stage.config.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    assert rehearse(stage, capsys) == 2, "model and data are never in it"


@kinds(
    st.dictionaries(
        st.sampled_from([name for name in ARGUMENTS if name not in LEFT_OUT]), VALUES, min_size=1, max_size=2
    )
)
def test_train__any_value_of_an_argument_works_or_is_one_line(
    stage: Stage, capsys: Any, changes: dict[str, Any]
) -> None:
    stage.config.write_text(yaml.safe_dump({**good(stage), **changes}), encoding="utf-8", errors="surrogatepass")
    rehearse(stage, capsys)


@kinds(st.lists(st.dictionaries(COLUMNS, CELLS, max_size=5), max_size=6))
def test_train__any_table_is_data_or_one_line(stage: Stage, capsys: Any, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, default=str) for row in rows]
    for path in stage.data.glob("*"):
        path.unlink()
    (stage.data / "F.jsonl").write_text("\n".join(lines))
    base = {"masked": ["the man said that [MASK] left"] * 3, "label": "he", "split": ["train", "validation", "test"]}
    pd.DataFrame(base).to_csv(stage.data / "M.csv", index=False)
    good(stage)
    rehearse(stage, capsys)


@kinds(st.binary(max_size=80) | st.text(alphabet='masked,label\n"[]x;\0', max_size=60).map(str.encode))
def test_train__any_bytes_are_a_table_or_one_line(stage: Stage, capsys: Any, raw: bytes) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        for path in stage.data.glob("F.*"):
            path.unlink()
        (stage.data / f"F.{suffix}").write_bytes(raw)
        good(stage)
        rehearse(stage, capsys)


@kinds(st.tuples(st.sampled_from(["bert", "gpt2"]), st.randoms(use_true_random=False), VALUES, VALUES))
def test_train__any_config_json_is_a_model_or_one_line(stage: Stage, capsys: Any, value: Any) -> None:
    family, random, first, second = value
    path = stage.model / "config.json"
    kept = path.read_text()
    found = json.loads(kept) if family == "bert" else tiny.base_model(family, 30).config.to_dict()
    found[random.choice(sorted(found))] = first
    found[random.choice(sorted(found))] = second
    good(stage)
    path.write_text(json.dumps(found))
    try:
        rehearse(stage, capsys)
        ends_well(plan.main, ["--config_json", str(path)], capsys)
    finally:
        path.write_text(kept)


def flags_of(name: str) -> list[str]:
    kinds_of_flags = {
        "apply": apply.ApplyOptions, "evaluate": evaluate.EvaluateOptions, "rewrite": rewrite.RewriteOptions,
        "submit": submit.JobOptions,
        "dashboard": dashboard.DashboardOptions,
    }  # fmt: skip
    own = {
        "train": [name for name in ARGUMENTS if name not in LEFT_OUT],
        "report": ["output"],
        "plan": ["config_json", "gpus", "gpu_memory", "seeds", "params", "pre_prune_topk"],
    }
    return own.get(name) or list(kinds_of_flags[name].__dataclass_fields__)


@kinds(
    st.sampled_from(sorted(COMMANDS)).flatmap(
        lambda name: st.tuples(
            st.just(name), st.lists(st.tuples(st.sampled_from(flags_of(name)), SCALARS.map(str)), max_size=3)
        )
    )
)
def test_command__any_flags_work_or_are_one_line(stage: Stage, capsys: Any, value: Any) -> None:
    name, flags = value
    good(stage)
    (stage.runs / "run_config.yaml").write_text(stage.config.read_text())
    argv = [str(stage.runs)] if name in ("evaluate", "rewrite", "report", "apply") else []
    argv += ["--config", str(stage.config)] if name in ("submit", "train") else []
    argv += [word for flag, text in flags for word in (f"--{flag}", text)]
    if name in ("submit", "dashboard", "train"):
        argv.append("--dry_run")
    ends_well(COMMANDS[name], argv, capsys)
    extra = sorted(path.name for path in Path.cwd().iterdir() if path.name != ".hypothesis")
    assert name == "report" or extra == [], f"{name} wrote {extra}"


def test_commands__are_all_drawn() -> None:
    """A new subcommand gets its generated inputs as well."""
    assert {*COMMANDS, "demo"} == set(SUBCOMMANDS)
    assert PREFIX.startswith("gradiend-dist train")
