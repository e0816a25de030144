"""The submit command: a training as a Slurm job, or as an array of them, checked before it waits in a queue.

gradiend-dist submit --nodes 2 --gpus-per-node 8 --engine zero3 --config run.yaml [--dry_run] [-- --FLAG VALUE ...]
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradiend_dist.commands.flags import CommandParser
from gradiend_dist.config.checks import require, require_positive
from gradiend_dist.config.fields import documented
from gradiend_dist.errors import UserError, exit_code, print_line

NAME = "gradiend-dist submit"

ENGINES = ("auto", "single", "multi_gpu", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")

SUBMIT_SECONDS = 120.0


@documented
@dataclass(kw_only=True)
class JobOptions:
    """What is asked of Slurm. What is not given is as launch/train.sbatch, or the cluster, has it."""

    nodes: int = 1
    """Nodes."""
    gpus_per_node: int | None = None
    """GPUs of each node, one rank each. None: one rank on CPUs."""
    engine: str = "auto"
    """One of auto, single, multi_gpu, fsdp2, zero1, zero2, zero3, zero3_offload."""
    time: str | None = None
    """Time limit, e.g. 8:00:00; the job goes on by itself after it."""
    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    cpus_per_task: int | None = None
    """CPUs of each node."""
    mem: str | None = None
    """Memory of each node, e.g. 128G."""
    job_name: str | None = None
    """Name of the job. None: that of experiment_dir."""
    log_dir: str = "logs"
    """Logs of the ranks go to log_dir/JOB."""
    sbatch_options: str = ""
    """Further options of sbatch: --sbatch_options='--exclusive --mail-type=END'."""
    seeds: int | None = None
    """Train so many seeds, each as a job of an array, then select the best."""
    pairs: str | None = None
    """File with a pair of classes a line: one job of an array for each."""
    parallel: int | None = None
    """Jobs of an array that run at the same time."""
    config: str | None = None
    """Configuration of the training; what follows -- overrides it."""


def home() -> Path:
    """Where launch/ and accelerate_configs/ are: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / "launch").is_dir() else package.parent


def parse(argv: Sequence[str]) -> tuple[JobOptions, list[str], bool]:
    """The job's options, the training's arguments, and whether to stop after printing."""
    own, rest = list(argv), []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = CommandParser(
        {"the job": JobOptions},
        prog=NAME,
        description="Submit a training to Slurm: one job, or with --seeds or --pairs an array and a job after it. "
        "What stands behind -- are further arguments of the training.",
    )
    parser.add_argument("--dry_run", action="store_true", default=False, help="print what would be submitted, and stop")
    values = vars(parser.parse(own, reads_config=False))
    options = JobOptions(**{item.name: values[item.name] for item in dataclasses.fields(JobOptions)})
    training = rest if options.config is None else ["--config", options.config, *rest]
    check(options, training)
    return options, training, bool(values["dry_run"])


def check(options: JobOptions, training: Sequence[str]) -> None:
    """What is wrong with the job, and what is wrong with the training: both known before it waits for its turn."""
    from gradiend_dist.commands import train

    require(options.engine in ENGINES, f"engine={options.engine!r} is not known: choose one of {', '.join(ENGINES)}.")
    for name in ("nodes", "gpus_per_node", "cpus_per_task", "parallel"):
        require_positive(name, getattr(options, name))
    ranks = options.nodes * (options.gpus_per_node or 1)
    require(
        options.engine != "single" or ranks == 1,
        f"engine=single is one process, and nodes={options.nodes} with gpus_per_node={options.gpus_per_node} are "
        f"{ranks}: choose multi_gpu, or ask for one.",
    )
    require(options.seeds is None or options.pairs is None, "seeds and pairs are both set: pass only one.")
    require(
        options.pairs is None or Path(options.pairs).is_file(),
        f"pairs={options.pairs} does not exist: pass a file with two classes a line.",
    )
    try:
        shlex.split(options.sbatch_options)
    except ValueError as error:
        raise UserError(
            f"sbatch_options={options.sbatch_options!r} cannot be read ({error}): check its quotes."
        ) from error
    require(options.seeds is None or options.seeds >= 2, f"seeds={options.seeds} is no array: pass at least 2.")
    require(
        options.parallel is None or options.seeds is not None or options.pairs is not None,
        f"parallel={options.parallel} belongs to an array: pass seeds or pairs as well.",
    )
    require(bool(training), "the training's arguments are missing: pass --config FILE, or arguments behind --.")
    command = train.parse(list(training))  # a wrong argument is told here and not after hours in a queue
    where = command.args.experiment_dir
    require(where is not None, "experiment_dir is not set: a job that is queued again must find its state there.")
    require(
        options.seeds is None or command.args.only_seed is None,
        "only_seed is what the jobs of --seeds are given: leave it out.",
    )


def command_line(options: JobOptions, training: Sequence[str]) -> list[str]:
    """What is run to submit. A list, never a line: no shell reads a user's value."""
    from gradiend_dist.commands import train

    command = train.parse(list(training))
    experiment = Path(command.args.experiment_dir or ".")
    asked = {
        "nodes": options.nodes,
        "gpus-per-node": options.gpus_per_node,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "job-name": options.job_name or experiment.name,
    }
    slurm = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    slurm += shlex.split(options.sbatch_options)
    own = ["--engine", options.engine, "--log_dir", str(Path(options.log_dir).absolute())]
    launch = home() / "launch"
    if options.seeds is None and options.pairs is None:
        return ["sbatch", "--parsable", *slurm, str(launch / "train.sbatch"), *own, "--", *training]
    array = ["--parallel", str(options.parallel)] if options.parallel is not None else []
    for option in slurm:
        array += ["--sbatch", option]
    if options.seeds is not None:
        array += ["--seeds", str(options.seeds), "--first_seed", str(command.args.first_seed)]
    else:
        array += ["--pairs", str(options.pairs), "--experiment_dir", str(experiment)]
    return ["bash", str(launch / "seed_array.sbatch"), *array, *own, "--", *training]


def environment() -> dict[str, str]:
    """The job's, which Slurm carries over: where the scripts are, and the commands of this installation."""
    commands = Path(sys.executable).parent
    found = {"GRADIEND_DIST_HOME": str(home())}
    for name, command in (("ACCELERATE", "accelerate"), ("GRADIEND_DIST", "gradiend-dist")):
        if (commands / command).is_file() and "CONTAINER" not in os.environ:
            found[name] = os.environ.get(name, str(commands / command))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(NAME, lambda: run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Print the command that submits, and run it unless this is a rehearsal."""
    options, training, dry_run = parse(argv)
    command, added = command_line(options, training), environment()
    for name, value in added.items():
        print(f"{name}={shlex.quote(value)} \\")
    print(shlex.join(command), flush=True)
    if not dry_run:
        return submit(command, added)
    if command[0] == "bash":  # the script of arrays shows what it would submit
        command.insert(2, "--dry_run")
        return subprocess.run(command, env={**os.environ, **added}, timeout=SUBMIT_SECONDS, check=False).returncode
    return 0


def submit(command: list[str], added: dict[str, str]) -> int:
    require(
        shutil.which("sbatch") is not None,
        "sbatch is not found: submit on a login node of a Slurm cluster, or look at the command with --dry_run.",
    )
    try:
        done = subprocess.run(command, env={**os.environ, **added}, timeout=SUBMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print_line(NAME, "error: Slurm does not answer: try again later.")
        return 1
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
