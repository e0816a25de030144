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
    assert {"--cpus-per-task=8", "--mem=64G"} <= set(asked)  # many sites give one CPU to 8 ranks where nobody asks


def stand_ins(tmp_path: Path, **scripts: str) -> Path:
    """Commands of these names, which do as told."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    return directory


def test_train_sbatch__gives_a_node_its_cpus_and_its_ranks_what_nccl_and_the_allocator_read(tmp_path: Path) -> None:
    """Fails if srun is left with one CPU for all ranks, or nothing tells in which collective a rank was lost."""
    commands = stand_ins(tmp_path, scontrol="printf 'n1\\nn2\\n'", srun="env")
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "12", "SLURM_NTASKS_PER_NODE": "2",
        "GRADIEND_DIST_HOME": str(ROOT), "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    found = subprocess.run(
        ["bash", str(LAUNCH / "train.sbatch"), "--log_dir", str(tmp_path / "logs"), "--", "x"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    seen = dict(line.partition("=")[::2] for line in found.stdout.splitlines() if "=" in line)
    assert seen["SRUN_CPUS_PER_TASK"] == "24" and seen["FIRST_NODES"].split() == ["n1", "n2"]
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "true" and int(seen["TORCH_FR_BUFFER_SIZE"]) > 0
    assert seen["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/logs/7/0/nccl_rank_"


ABORTED = "  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 4711)"
STOPPED = "  rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 4711)\n  exitcode  : 1 (pid: 4712)"


@pytest.mark.parametrize(
    ("code", "launcher", "outcome", "again"),
    [
        (1, ABORTED, "", True),  # NCCL's watchdog
        (137, "", "", True),  # a single process, by the kernel
        (1, STOPPED, "", False),  # an error of a user's
        (1, ABORTED, "failed 2", False),  # told before it died
    ],
)
def test_train_sbatch__a_rank_that_ends_by_a_signal_is_a_lost_one(
    tmp_path: Path, code: int, launcher: str, outcome: str, again: bool
) -> None:
    """Fails if a job is not queued again after a rank that could not say why it ended."""
    (tmp_path / "told").write_text(launcher)
    commands = stand_ins(
        tmp_path,
        scontrol=f"[[ $1 == requeue ]] && echo queued >{tmp_path}/queued || echo n1",
        srun=f'cp {tmp_path}/told "$RANK_LOGS/launcher_0.err"\n'
        f'printf "{outcome}" >"$GRADIEND_DIST_OUTCOME"\nexit {code}',
        squeue="echo RUNNING",
        sleep="exit 0",
    )
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n1", "GRADIEND_DIST_HOME": str(ROOT), "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    script = ["bash", str(LAUNCH / "train.sbatch"), "--log_dir", str(tmp_path / "logs"), "--", "x"]
    found = subprocess.run(
        script, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False
    )
    assert found.returncode != 0 and (tmp_path / "queued").exists() is again, found.stdout + found.stderr


@pytest.mark.parametrize(("own", "expected"), [("127.0.1.1", "ib0"), ("10.0.0.1", "")])
@pytest.mark.parametrize("node", ["0", "1"])
def test_node__listens_where_the_way_to_another_node_begins(tmp_path: Path, own: str, expected: str, node: str) -> None:
    """Fails if gloo listens on loopback where the host's name means that, or is told otherwise where it does not."""
    other = "n2" if node == "0" else "n1"
    commands = stand_ins(
        tmp_path,
        getent=f"[[ $2 == {other} ]] && echo '10.0.0.9 {other}' || echo '{own} here'",
        ip="echo '10.0.0.9 dev ib0 src 10.0.0.1 uid 0'",
    )
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}", "RANK_LOGS": str(tmp_path), "SLURM_NODEID": node,
        "SLURM_JOB_NUM_NODES": "2", "RANKS_PER_NODE": "1", "FIRST_NODES": "n1 n2 ", "GLOO_SOCKET_IFNAME": "",
    }  # fmt: skip
    found = subprocess.run(
        ["bash", str(LAUNCH / "node.sh"), "env", "-u", "NONE", "sh", "-c", "echo =$GLOO_SOCKET_IFNAME=", "--", ""],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert f"={expected}=" in found.stdout, found.stderr


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
        *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=8", "--time=8:00:00", "--cpus-per-task=64", "--mem=0"),
        "--job-name=exp",
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
        (["--", "--max_steps", "0", "--initialization", "random"], "max_steps=0 trains nothing"),
        (["--", "--experiment_dir", "null"], "experiment_dir is not set"),
        (["--nonsense", "1"], "--nonsense"),
        (["--time", "8 hours"], "time='8 hours' is not in a form of Slurm"),
        (["--mem", "lots"], "mem='lots' is not in a form of Slurm"),
        (["--mem=-4G"], "mem='-4G' is not in a form of Slurm"),
        (["--seeds", "100000"], "seeds=100000 is no array of 2 to 1000"),
        (["--seeds", "9", "--", "--seed", str(2**32 - 1)], "end above 2^32"),
        (["--log_dir", "x" * 300], "log_dir="),
    ],
)
def test_submit__tells_what_is_wrong_before_it_waits_in_a_queue(
    arguments: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["--config", str(config), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gradiend-dist submit: error: ") and says in said.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("M F\nF F\n", "line 2 names 'F' twice"),
        ("M F\n\nM F N\n", "line 3 is not two classes"),
        ("# classes\n", "holds no pair"),
        ("M F\nM,F\n", "has the pair M F twice"),
        ("M F\nM Q\n", "'Q' is not in the data"),
        ("M F\r\nM X\r\n", "'X' is not in the data"),
        ("\ud800", "cannot be read"),
    ],
)
def test_submit__reads_the_pairs_and_looks_for_them_in_the_data(
    text: str, says: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of an array would find it out hours later."""
    (tmp_path / "pairs").write_bytes(text.encode(errors="surrogatepass"))
    (tmp_path / "d").mkdir()
    for name in "MF":
        (tmp_path / "d" / f"{name}.csv").write_text("masked,label,split\n[MASK] left,he,train\n")
    command = ["--config", str(config), "--pairs", str(tmp_path / "pairs"), "--", "--data", str(tmp_path / "d")]
    assert submit.main(command) == 2
    assert says in capsys.readouterr().err


def test_seed_array__reads_pairs_of_another_system(tmp_path: Path) -> None:
    """Line ends of Windows must not become part of a class, which no job would find in the data."""
    (tmp_path / "pairs").write_bytes(b"M F\r\n\r\nF,N\r\n")
    script = ["bash", ROOT / "launch" / "seed_array.sbatch", "--pairs", "pairs", "--experiment_dir", "all"]
    found = run(*script, "--dry_run", "--", "x", directory=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "--array=0-1" in found.stdout


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


def test_submit__warns_as_long_before_the_end_as_the_state_needs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a state of many GiB has the three minutes of a small one; shares of a node follow its GPUs."""
    assert not any(word.startswith("--signal") for word in submitted("--config", config))
    monkeypatch.setattr(submit, "BYTES_PER_SECOND", 1000)
    model = config.parent / "config.json"
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 9,
        "vocab_size": 99,
    }
    model.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes}))
    found = submitted("--config", config, "--gpus-per-node", 4, "--", "--model", model.parent)
    assert {"--cpus-per-task=32", "--mem=256G"} <= set(found)
    (signal,) = [word for word in found if word.startswith("--signal=B:USR1@")]
    assert int(signal.partition("@")[2]) > submit.SECONDS_TO_STOP
