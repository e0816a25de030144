"""The job scripts and `gradiend-dist submit` without a cluster: what they print, refuse and pass on. tests/slurm/ runs
them on a real one."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_wandb import FakeWandb

from gradiend_dist import UserError
from gradiend_dist.commands import submit

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
EVIL = "a b'c\"d $(touch ran) `touch ran` ; touch ran * \\ #"


def run(*command: object, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script as a user starts it, outside of any job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return subprocess.run(
        [str(word) for word in command],
        env={**kept, **variables},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"model": "m", "data": "d", "experiment_dir": str(tmp_path / "exp"), "max_seeds": 4})
    )
    return path


@pytest.fixture
def sbatch(tmp_path: Path) -> Path:
    """A stand-in that notes what it is called with and gives out job numbers; tests/slurm/ has the real one."""
    directory = tmp_path / "bin"
    directory.mkdir()
    script = directory / "sbatch"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"calls = open({str(tmp_path / 'calls')!r}, 'a+')\n"
        "calls.write(json.dumps([sys.argv[1:], os.environ.get('GRADIEND_DIST_HOME')]) + '\\n')\n"
        "calls.seek(0)\nprint(100 + len(calls.readlines()))\n"
    )
    script.chmod(0o755)
    return directory


def calls(tmp_path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


# --- the scripts


@pytest.mark.parametrize("name", ["single_node.sh", "train.sbatch", "seed_array.sbatch", "sync_wandb.sh"])
def test_script__can_be_started_and_explains_itself(name: str, tmp_path: Path) -> None:
    assert (LAUNCH / name).stat().st_mode & stat.S_IXUSR
    found = run("bash", LAUNCH / name, "--help", directory=tmp_path)
    assert found.returncode == 0 and found.stdout.startswith("usage:")
    assert max(map(len, found.stdout.splitlines())) <= 122


@pytest.mark.parametrize("name", ["train.sbatch", "seed_array.sbatch"])
def test_job_script__asks_slurm_for_a_warning_and_to_be_queued_again(name: str) -> None:
    asked = [
        line.split(maxsplit=1)[1] for line in (LAUNCH / name).read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180", "--ntasks-per-node=1"} <= set(asked)


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("train.sbatch", ["--", "--config", "x"], "this is a job script: sbatch"),
        ("train.sbatch", [], "the arguments of the training are missing"),
        ("train.sbatch", ["--engine"], "--engine needs a value"),
        ("seed_array.sbatch", ["--", "x"], "neither --seeds nor --pairs"),
        ("seed_array.sbatch", ["--seeds", "1", "--", "x"], "--seeds 1 is no number of at least 2"),
        ("seed_array.sbatch", ["--seeds", "x", "--", "x"], "--seeds x is no number"),
        ("seed_array.sbatch", ["--seeds", "2"], "the arguments of the training are missing"),
        ("seed_array.sbatch", ["--seeds", "2", "--pairs", "p", "--", "x"], "both given"),
        ("seed_array.sbatch", ["--pairs", "p", "--", "x"], "--pairs needs --experiment_dir"),
        ("seed_array.sbatch", ["--pairs", "none", "--experiment_dir", "e", "--", "x"], "--pairs none does not exist"),
        ("seed_array.sbatch", ["--pairs", "bad", "--experiment_dir", "e", "--", "x"], "is not two classes: a b c"),
        ("single_node.sh", ["--num_processes", "4", "--", "x"], "single is one process and --num_processes is 4"),
        ("sync_wandb.sh", ["nowhere"], "nowhere is no directory"),
        ("sync_wandb.sh", ["--limit", "x"], "--limit needs a number"),
        ("sync_wandb.sh", ["--nonsense"], "--nonsense is no option"),
    ],
)
def test_script__says_what_is_wrong(script: str, arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("M F\na b c\n")
    found = run("bash", LAUNCH / script, *arguments, directory=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"{script}: error: ") and says in found.stderr and found.stderr.count("\n") == 1


def test_seed_array__submits_the_array_and_the_selection_after_it(tmp_path: Path, sbatch: Path) -> None:
    """Fails if a value with blanks, quotes or commands in it is split, or run."""
    command = ["bash", LAUNCH / "seed_array.sbatch", "--seeds", "3", "--first_seed", "5", "--parallel", "2"]
    command += ["--sbatch", "--gpus-per-node=8", "--sbatch", f"--comment={EVIL}", "--engine", "fsdp2"]
    found = run(*command, "--", "--run_name", EVIL, directory=tmp_path, PATH=f"{sbatch}:{os.environ['PATH']}")
    assert found.returncode == 0, found.stderr
    (array, home), (selection, _) = calls(tmp_path)
    script = f"{ROOT}/launch/seed_array.sbatch"
    rest = ["--engine", "fsdp2", "--log_dir", "logs", "--", "--run_name", EVIL]
    slurm = ["--parsable", "--gpus-per-node=8", f"--comment={EVIL}"]
    seeds = ["--first_seed", "5", "--seeds", "3"]
    assert home == str(ROOT)
    assert array == [*slurm, "--array=0-2%2", script, "--task", *seeds, *rest]
    after = ["--nodes=1", "--dependency=afterok:101", "--kill-on-invalid-dep=yes", "--output=%x-%j-select.log"]
    assert selection == [*slurm, *after, script, "--select", *seeds, *rest]
    assert shlex.split(found.stdout.splitlines()[0])[1:] == array, "what is printed is what is run"
    assert found.stdout.splitlines()[-1] == "array 101, selection 102"
    assert not list(tmp_path.rglob("ran"))


def test_seed_array__prints_without_submitting(tmp_path: Path, sbatch: Path) -> None:
    (tmp_path / "pairs").write_text("M F\n")
    command = [
        "bash",
        LAUNCH / "seed_array.sbatch",
        "--pairs",
        "pairs",
        "--experiment_dir",
        "all",
        "--dry_run",
        "--",
        "x",
    ]
    # Also from inside an interactive job, which has a number as well.
    found = run(*command, directory=tmp_path, PATH=f"{sbatch}:{os.environ['PATH']}", SLURM_JOB_ID="7")
    assert found.returncode == 0 and not (tmp_path / "calls").exists()
    assert f"--pairs {tmp_path}/pairs --experiment_dir {tmp_path}/all" in found.stdout
    assert "--dependency=afterok:ARRAY" in found.stdout


# --- gradiend-dist submit


def submitted(*arguments: object) -> list[str]:
    options, training, _ = submit.parse([str(word) for word in arguments])
    return submit.command_line(options, training)


def test_submit__is_one_sbatch_of_the_job_script(config: Path) -> None:
    flags = ["--nodes", 2, "--gpus-per-node", 8, "--engine", "zero3", "--time", "8:00:00", "--mem", "0"]
    found = submitted(
        *flags, "--sbatch_options=--exclusive --mail-type=END", "--config", config, "--", "--max_steps", 7
    )
    slurm, rest = found[: found.index(f"{ROOT}/launch/train.sbatch")], found[found.index("--engine") :]
    assert slurm == [
        *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=8", "--time=8:00:00", "--mem=0", "--job-name=exp"),
        *("--exclusive", "--mail-type=END"),
    ]
    assert rest[2:] == ["--log_dir", str(Path("logs").absolute()), "--", "--config", str(config), "--max_steps", "7"]


def test_submit__runs_what_it_prints_and_quotes_every_value(
    config: Path, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{sbatch}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    arguments = ["--job_name", EVIL, "--partition", EVIL, "--config", str(config), "--", "--run_name", EVIL]
    assert submit.main([*arguments]) == 0
    ((given, home),) = calls(tmp_path)
    assert f"--job-name={EVIL}" in given and f"--partition={EVIL}" in given and given[-2:] == ["--run_name", EVIL]
    assert home == str(ROOT)
    printed = capfd.readouterr().out
    shown = shlex.split(printed.replace("\\\n", " "))
    assert shown[shown.index("sbatch") + 1 : -1] == given and shown[-1] == "101"
    assert not list(tmp_path.rglob("ran"))


def test_submit__of_an_array_shows_both_jobs_without_submitting(
    config: Path, tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{sbatch}:{os.environ['PATH']}")
    assert submit.main(["--seeds", "4", "--parallel", "2", "--config", str(config), "--dry_run"]) == 0
    assert not (tmp_path / "calls").exists()
    *_, array, selection = capfd.readouterr().out.splitlines()
    assert "--array=0-3%2" in array and "--select --first_seed 0 --seeds 4" in selection


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "zero9"], "engine='zero9' is not known: choose one of auto"),
        (["--nodes", "0"], "nodes=0 must be positive"),
        (["--engine", "single", "--nodes", "2"], "engine=single is one process"),
        (["--seeds", "2", "--pairs", "p"], "seeds and pairs are both set"),
        (["--pairs", "nowhere"], "pairs=nowhere does not exist"),
        (["--sbatch_options='--x"], "cannot be read (No closing quotation)"),
        (["--parallel", "2"], "parallel=2 belongs to an array"),
        (["--seeds", "1"], "seeds=1 is no array"),
        (["--", "--max_steps", "0"], "max_steps=0 trains nothing"),
        (["--", "--experiment_dir", "null"], "experiment_dir is not set"),
        (["--nonsense", "1"], "--nonsense"),
    ],
)
def test_submit__tells_what_is_wrong_before_it_waits_in_a_queue(
    arguments: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["--config", str(config), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gradiend-dist submit: error: ") and says in said.err


def test_submit__without_slurm_says_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="sbatch is not found: submit on a login node"):
        submit.submit(["sbatch"], {})


def test_home__is_found_in_a_source_tree_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit.home() == ROOT
    (tmp_path / "launch").mkdir()
    monkeypatch.setattr(submit, "__file__", str(tmp_path / "commands" / "submit.py"))
    assert submit.home() == tmp_path


# --- offline W&B runs from the login node


def recorded(directory: Path, identity: str, values: list[float], start: str) -> Path:
    """A real offline run of the client, in a directory whose name says that it began at `start`."""
    script = (
        "import sys, wandb\n"
        "settings = wandb.Settings(silent=True, console='off', x_disable_meta=True, x_disable_stats=True)\n"
        f"run = wandb.init(project='p', id={identity!r}, dir={str(directory)!r}, mode='offline', settings=settings)\n"
        f"for value in {values!r}: run.log({{'loss': value}}, commit=True)\n"
        "run.finish()\n"
    )
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    before = set((directory / "wandb").glob("offline-run-*"))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment, capture_output=True)
    (made,) = set((directory / "wandb").glob("offline-run-*")) - before
    moved = made.rename(made.with_name(f"offline-run-{start}-{identity}"))
    old = time.time() - 600  # no job is at it
    for path in moved.glob("*.wandb"):
        os.utime(path, (old, old))
    return moved


def test_sync__uploads_the_parts_of_a_run_oldest_first_and_once(tmp_path: Path) -> None:
    """Fails if the second part becomes a run of its own, comes first, or is uploaded twice."""
    directory = tmp_path / "runs of 'mine'"
    directory.mkdir()
    recorded(directory, "abc", [3.0, 4.0], "20260102_000000")
    recorded(directory, "abc", [1.0, 2.0], "20260101_000000")
    with FakeWandb() as service:
        variables = {**service.environment, "WANDB": str(Path(sys.executable).parent / "wandb")}
        dry = run("bash", LAUNCH / "sync_wandb.sh", "--dry_run", directory, directory=tmp_path, **variables)
        assert dry.stdout.count("wandb sync --include-online") == 2 and not service.runs
        for said in ("2 uploaded, 0 left", "0 uploaded, 0 left"):
            found = run("bash", LAUNCH / "sync_wandb.sh", directory, directory=tmp_path, **variables)
            assert found.returncode == 0 and said in found.stdout, found.stdout + found.stderr
        assert list(service.runs) == ["abc"]
        assert [row["loss"] for row in service.runs["abc"].history] == [1.0, 2.0, 3.0, 4.0]


def test_sync__leaves_alone_what_a_job_is_writing_and_tells_what_it_could_not_upload(tmp_path: Path) -> None:
    part = recorded(tmp_path, "abc", [1.0], "20260101_000000")
    (file,) = part.glob("*.wandb")
    with FakeWandb("refuse") as service:
        variables = {**service.environment, "WANDB": str(Path(sys.executable).parent / "wandb")}
        failed = run("bash", LAUNCH / "sync_wandb.sh", "--limit", "4", directory=tmp_path, **variables)
        assert failed.returncode == 1 and f"not uploaded: ./wandb/{part.name}" in failed.stderr
        file.touch()
        found = run("bash", LAUNCH / "sync_wandb.sh", directory=tmp_path, **variables)
        assert found.returncode == 0 and "0 uploaded, 0 left" in found.stdout
