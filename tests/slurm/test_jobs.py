"""Real jobs on a real Slurm: two nodes with two ranks each. However a job is disturbed, it ends as its user expects;
one that goes on ends with the very bytes of one that was left alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cluster import Cluster
from fake_wandb import read_offline

from gradiend_dist import demo

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Four ranks start on whatever cores there are.
STARTED = 240.0
ENDED = 300.0
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of ten steps over a tenth of a small model."""
    root = tmp_path_factory.mktemp("jobs")
    model = demo.build_masked_lm(root / "model")
    data = root / "data"
    data.mkdir()
    for name, frame in demo.feature_data().items():
        frame.to_csv(data / f"{name}.csv", index=False)
    values = {
        "model": str(model),
        "data": str(data),
        "target_classes": ["M", "F"],
        "pre_prune_config": {"n_samples": 4, "topk": 0.11, "source": "diff"},
        "train_batch_size": 5,
        "train_max_size": 33,
        "encoder_eval_train_max_size": 4,
        "encoder_eval_max_size": 4,
        "max_steps": 10,
        "eval_steps": 3,
        "learning_rate": 0.01,
        "max_seeds": 2,
        "min_convergent_seeds": None,
        "logging_steps": 1,
        "ddp_timeout": 120,
        "report_to": ["wandb"],
    }
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    return root / "run.yaml"


@dataclass
class Job:
    """A submitted training."""

    cluster: Cluster
    id: str
    directory: Path
    results: Path

    @property
    def log(self) -> Path:
        return self.directory / "job.log"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, pattern: str, limit: float = STARTED) -> None:
        self.cluster.wait_line(self.log, pattern, limit)

    def end(self) -> str:
        state = self.cluster.wait_state(self.id, ENDS, ENDED)
        print(self.text)
        return state

    def rank_logs(self, start: int = 0) -> list[str]:
        found = (self.directory / "logs" / self.id / str(start)).glob("rank_*.err")
        return sorted(path.name for path in found)


def environment(step_seconds: float = 0.0) -> dict[str, str]:
    paths = [str(ROOT), str(Path(__file__).parent / "slow_steps"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "STEP_SECONDS": str(step_seconds),
        "ACCELERATE": str(BIN / "accelerate"),
        "GRADIEND_DIST": str(BIN / "gradiend-dist"),
        "GRADIEND_DIST_HOME": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "TOKENIZERS_PARALLELISM": "false",
    }


def submit(
    cluster: Cluster,
    directory: Path,
    run_file: Path,
    *arguments: str,
    slurm: tuple[str, ...] = (),
    step_seconds: float = 0.0,
    results: str = "run",
) -> Job:
    directory.mkdir(exist_ok=True)
    options = ["--nodes=2", "--gpus-per-node=2", "--output=job.log", "--time=15", *slurm]
    training = ["--config", str(run_file), "--experiment_dir", str(directory / results), *arguments]
    script = str(ROOT / "launch" / "train.sbatch")
    number = cluster.sbatch(*options, script, "--", *training, env=environment(step_seconds), cwd=directory)
    return Job(cluster, number, directory, directory / results)


def outcome(results: Path) -> dict[str, Any]:
    """All that a run leaves, down to the bytes of its model; places and times left out."""
    stats = json.loads((results / "training_stats.json").read_text())
    for seed in (stats, *stats["seeds"].values()):
        del seed["time"]
    report = json.loads((results / "seeds" / "seed_report.json").read_text())
    for run in report["runs"]:
        for name in ("output_dir", "trained", "used_cache"):
            del run[name]
    return {"stats": stats, "report": report, "weights": (results / "model" / "model.safetensors").read_bytes()}


def wandb_runs(results: Path) -> list[Path]:
    return sorted((results / "wandb").glob("offline-run-*/*.wandb"))


def require_free(cluster: Cluster) -> None:
    """Both nodes idle, as every test finds them and leaves them."""
    for name in ("n1", "n2"):
        cluster._wait(lambda name=name: cluster.node_state(name) == "idle", 60, lambda: "a node is busy")  # type: ignore[misc]


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = submit(cluster, tmp_path_factory.mktemp("undisturbed"), run_file)
    assert job.end() == "COMPLETED"
    return job


def test_job__joins_two_nodes_and_keeps_a_log_of_every_rank(undisturbed: Job) -> None:
    assert "2 nodes x 2 ranks, engine multi_gpu" in undisturbed.text
    assert "4 ranks, engine sliced" in undisturbed.text
    port = 15000 + int(undisturbed.id) % 15000
    assert f"--main_process_ip n1 --main_process_port {port} " in undisturbed.text, "the command is printed first"
    assert undisturbed.rank_logs() == [f"rank_{rank}.err" for rank in range(4)]
    assert (undisturbed.directory / "logs" / undisturbed.id).stat().st_mode & 0o077 == 0, "logs are private"
    assert "<- selected" in undisturbed.text and "== finished" in undisturbed.text


def test_job__gives_the_result_of_one_process(undisturbed: Job, run_file: Path, tmp_path: Path) -> None:
    """Fails if nodes train beside each other in worlds of their own."""
    command = [sys.executable, "-m", "gradiend_dist.train", "--config", str(run_file), "--experiment_dir"]
    alone = {**os.environ, **environment(), "RANK": "0"}
    subprocess.run([*command, str(tmp_path / "alone")], check=True, env=alone, timeout=ENDED, capture_output=True)
    ours, theirs = outcome(undisturbed.results), outcome(tmp_path / "alone")
    assert ours["report"]["best_seed"] == theirs["report"]["best_seed"]
    for seed, record in ours["stats"]["seeds"].items():
        assert record["losses"] == pytest.approx(theirs["stats"]["seeds"][seed]["losses"], rel=1e-4)


def test_job__whose_time_is_over_saves_is_queued_again_and_goes_on(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path
) -> None:
    """What --signal=B:USR1@180 sends, in the middle of the second seed; the W&B run is the same one afterwards."""
    # --resume false is for the start; a job that was queued again must not throw away what it has just saved.
    job = submit(cluster, tmp_path, run_file, "--resume", "false", step_seconds=1.0)
    job.wait_for(r"seed 1 step 4/10")
    cluster.scancel("--batch", "--signal=USR1", job.id)
    job.wait_for(r"== queued again, to go on from the saved state")
    cluster.start_now(job.id, 60)
    assert job.end() == "COMPLETED"
    assert "start 2, 2 nodes x 2 ranks" in job.text and "going on after step" in job.text
    assert job.rank_logs(1) == [f"rank_{rank}.err" for rank in range(4)]
    assert outcome(job.results) == outcome(undisturbed.results)
    rows, others = ((one.results / "metrics.jsonl").read_text().splitlines() for one in (job, undisturbed))
    assert [timeless(row) for row in rows] == [timeless(row) for row in others]
    parts = wandb_runs(job.results)
    assert len(parts) == 2 and parts[0].name == parts[1].name, "one run, in two parts"
    steps = [row["seed_1/loss"] for part in parts for row in read_offline(part).rows if "seed_1/loss" in row]
    assert len(steps) == 10


def test_job__that_reaches_its_time_limit_is_warned_by_slurm_itself(
    cluster: Cluster, run_file: Path, tmp_path: Path
) -> None:
    """Nobody sends a signal here: two minutes, and a warning one minute before, which Slurm times in half minutes."""
    limit = ("--time=2", "--signal=B:USR1@60")
    job = submit(cluster, tmp_path, run_file, "--max_seeds", "1", "--max_steps", "30", slurm=limit, step_seconds=4.0)
    job.wait_for(r"== queued again, to go on from the saved state", ENDED)
    cluster.start_now(job.id, 60)
    job.wait_for(r"going on after step")
    cluster.scancel(job.id)
    assert job.end() == "CANCELLED"
    assert "TIME LIMIT" not in job.text


def timeless(line: str) -> dict[str, Any]:
    """A row without what depends on the machine's speed."""
    changing = ("time", "seconds", "per_second", "memory")
    return {name: value for name, value in json.loads(line).items() if not any(word in name for word in changing)}


def test_job__that_is_preempted_comes_back_by_itself(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, run_file, slurm=("--exclusive",), step_seconds=1.0)
    job.wait_for(r"seed 0 step 3/10")
    urgent = cluster.sbatch(
        "--partition=high", "--nodes=2", "--exclusive", "--output=urgent.log", "--wrap", "srun hostname", cwd=tmp_path
    )
    cluster.wait_state(urgent, "COMPLETED", 120)
    cluster.start_now(job.id, 60)
    assert job.end() == "COMPLETED"
    assert outcome(job.results) == outcome(undisturbed.results)


def test_job__that_is_cancelled_stays_so_and_the_same_command_goes_on(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, run_file, step_seconds=1.0)
    job.wait_for(r"seed 0 step 5/10")
    cluster.scancel(job.id)
    assert job.end() == "CANCELLED"
    assert "queued again" not in job.text
    require_free(cluster)
    assert (job.results / "state" / "run.json").is_file(), "its state was saved before Slurm killed it"
    again = submit(cluster, tmp_path, run_file, slurm=("--output=again.log",))
    assert cluster.wait_state(again.id, ENDS, ENDED) == "COMPLETED"
    assert "going on after step" in (tmp_path / "again.log").read_text()
    assert outcome(job.results) == outcome(undisturbed.results)


def test_job__goes_on_after_its_node_was_lost(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, run_file, "--save_steps", "2", step_seconds=1.0)
    job.wait_for(r"state saved after step 4")
    cluster.kill_node("n2")
    cluster.wait_state(job.id, "PENDING", 120)
    cluster.run("scontrol", "hold", job.id)
    cluster.restart_node("n2")
    # Not at once: what Slurm could not tell the lost node about this job, it says when the node is back. On clusters a
    # job waits for two minutes; here it would be seconds, for the sake of the other tests.
    time.sleep(90)
    cluster.run("scontrol", "release", job.id)
    job.wait_for(r"start 2, 2 nodes x 2 ranks")
    assert job.end() == "COMPLETED"
    assert "going on after step" in job.text
    assert outcome(job.results)["weights"] == outcome(undisturbed.results)["weights"]


def test_job__goes_on_after_a_rank_was_killed(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path
) -> None:
    """As by the kernel, when memory is short: the job is queued again, a few times at most."""
    job = submit(cluster, tmp_path, run_file, "--save_steps", "2", step_seconds=1.0)
    job.wait_for(r"state saved after step 4")
    kill_rank(job, 3)
    job.wait_for(r"== queued again, after a lost rank \(1 of 2\)")
    cluster.start_now(job.id, 120)
    assert job.end() == "COMPLETED"
    assert "going on after step" in job.text
    # Ranks hear of it one after another, by the connections that close: who has not heard yet may be named as well.
    assert re.search(r"rank (\d, )*3 is gone or does not answer", job.text.split("== last lines of ")[1])
    assert outcome(job.results)["weights"] == outcome(undisturbed.results)["weights"]


def kill_rank(job: Job, rank: int) -> None:
    """A node's processes are seen from outside of it, under other numbers."""
    for process in psutil.process_iter(["cmdline"]):
        own = str(job.results) in (process.info["cmdline"] or ())
        if own and process.environ().get("RANK") == str(rank):
            process.kill()
            return
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max_steps", "0"), "max_steps=0 trains nothing"),
        (("--learning_rate", "1e30", "--lr_scheduler_type", "constant"), "is not finite at step"),
    ],
    ids=["wrong argument", "not a number"],
)
def test_job__that_would_fail_again_is_not_queued_again(
    cluster: Cluster, run_file: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    job = submit(cluster, tmp_path, run_file, *arguments)
    assert job.end() == "FAILED"
    assert cluster.show(job.id)["ExitCode"] == "2:0"
    assert cluster.show(job.id)["Restarts"] == "0"
    last = job.text.split("== last lines of ")[1]
    assert says in last and "Traceback" not in job.text
    alerts = [alert.title for part in wandb_runs(job.results) for alert in read_offline(part).alerts]
    assert alerts == (["not finite"] if "finite" in says else [])


def test_job__with_hostile_names_runs_and_runs_nothing_else(cluster: Cluster, run_file: Path, tmp_path: Path) -> None:
    evil = "a b'c\"d $(touch ran) `touch ran` ; touch ran #"
    options = ("--nodes=1", "--gpus-per-node=1", f"--job-name={evil}")
    job = submit(cluster, tmp_path, run_file, "--max_seeds", "1", "--run_name", evil, slurm=options, results=evil)
    assert job.end() == "COMPLETED"
    assert "engine single" in job.text and "one process" in job.text
    assert (job.results / "model" / "model.safetensors").is_file()
    assert job.rank_logs() == ["rank_0.err"]
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_job__runs_other_engines_over_nodes(
    cluster: Cluster, run_file: Path, undisturbed: Job, tmp_path: Path, engine: str
) -> None:
    directory = tmp_path
    training = ["--config", str(run_file), "--experiment_dir", str(directory / "run"), "--max_seeds", "1"]
    script = str(ROOT / "launch" / "train.sbatch")
    variables = environment()
    if engine == "zero3":
        del variables["ACCELERATE_USE_CPU"]
        variables["ACCELERATE_TORCH_DEVICE"] = "cpu"
    options = ["--nodes=2", "--gpus-per-node=1", "--output=job.log", "--time=15"]
    number = cluster.sbatch(*options, script, "--engine", engine, "--", *training, env=variables, cwd=directory)
    job = Job(cluster, number, directory, directory / "run")
    assert job.end() == "COMPLETED"
    assert f"2 ranks, engine {'zero' if engine == 'zero3' else 'sliced'}" in job.text
    ours = json.loads((job.results / "model" / "training.json").read_text())["losses"]
    theirs = json.loads((undisturbed.results / "training_stats.json").read_text())["seeds"]["0"]["losses"]
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_array__of_seeds_and_its_selection_give_the_result_of_one_run(
    cluster: Cluster, run_file: Path, tmp_path: Path
) -> None:
    """Both through `gradiend-dist submit`; each task trains its seed in one process."""
    plain = [sys.executable, "-m", "gradiend_dist.train", "--config", str(run_file), "--experiment_dir", "plain"]
    alone = {**os.environ, **environment(), "RANK": "0"}
    subprocess.run(plain, check=True, env=alone, timeout=ENDED, capture_output=True, cwd=tmp_path)
    command = [sys.executable, "-m", "gradiend_dist", "submit", "--seeds", "2", "--gpus-per-node", "1", "--time", "15"]
    command += ["--config", str(run_file), "--", "--experiment_dir", "array"]
    submitted = cluster.run(*command, env=environment(), cwd=tmp_path)
    print(submitted.stdout)
    array, selection = submitted.stdout.splitlines()[-1].removeprefix("array ").split(", selection ")
    assert cluster.wait_state(selection, ENDS, ENDED) == "COMPLETED", log_of(tmp_path)
    assert outcome(tmp_path / "array") == outcome(tmp_path / "plain")
    rows = (tmp_path / "array" / "metrics.jsonl").read_text().splitlines()
    expected = (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()
    key = json.dumps
    assert sorted((timeless(row) for row in rows if "step" in row), key=key) == sorted(
        (timeless(row) for row in expected if "step" in row), key=key
    )
    assert cluster.state(f"{array}_0") == cluster.state(f"{array}_1") == "COMPLETED"


def test_array__of_pairs_ends_in_one_table(cluster: Cluster, run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("# classes\nM F\nF,N\n")
    command = ["bash", str(ROOT / "launch" / "seed_array.sbatch"), "--pairs", "pairs.txt", "--experiment_dir", "all"]
    command += ["--sbatch", "--gpus-per-node=1", "--sbatch", "--time=15", "--", "--config", str(run_file)]
    command += ["--max_seeds", "1"]
    submitted = cluster.run(*command, env=environment(), cwd=tmp_path)
    selection = submitted.stdout.splitlines()[-1].split(", selection ")[1]
    assert cluster.wait_state(selection, ENDS, ENDED) == "COMPLETED", log_of(tmp_path)
    table = (tmp_path / f"gradiend_dist-{selection}-select.log").read_text()
    assert "M_F" in table and "F_N" in table
    for name in ("M_F", "F_N"):
        assert (tmp_path / "all" / name / "report.html").is_file()


def log_of(directory: Path) -> str:
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(directory.glob("*.log")))
