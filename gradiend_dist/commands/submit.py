"""The submit command: a training as a Slurm job, or as an array of them, checked before it waits in a queue.

gradiend-dist submit --nodes 2 --gpus-per-node 8 --engine zero3 --config run.yaml [--dry_run] [-- --FLAG VALUE ...]
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradiend_dist.commands.flags import CommandParser
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import check_path, check_types, require, require_positive, shown
from gradiend_dist.config.documents import DocumentError, read_text
from gradiend_dist.config.fields import documented
from gradiend_dist.errors import UserError, exit_code, print_line

if TYPE_CHECKING:
    from gradiend_dist.commands.train import Command

NAME = "gradiend-dist submit"

ENGINES = ("auto", "single", "multi_gpu", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")

SUBMIT_SECONDS = 120.0

# Slurm's MaxArraySize, where nobody has changed it, less one.
LARGEST_ARRAY = 1000

FORMS_OF_SLURM = {
    "time": (re.compile(r"(\d+-)?\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE), "8:00:00, 90 or 1-12"),
    "mem": (re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE), "128G or 0"),
}
# Of one GPU's rank: a process of its own, threads that read and save, and the state while it is saved.
CPUS_PER_GPU = 8

MEMORY_PER_GPU = 64

# Before a time limit: for the step that runs and for ranks to meet, and for writing the state, which all nodes do at
# once to one file system.
SECONDS_TO_STOP = 180

BYTES_PER_SECOND = 2**30

# Passed on under the same names.
OPTIONS_OF_SBATCH = (
    "nodes", "gpus_per_node", "time", "partition", "account", "qos", "constraint", "cpus_per_task", "mem",
)  # fmt: skip


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
    """CPUs of each node. None: 8 for each GPU."""
    mem: str | None = None
    """Memory of each node, e.g. 128G; 0: all of it. None: 64G for each GPU."""
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

    check_types(JobOptions, vars(options))
    check_job(options)
    require(bool(training), "the training's arguments are missing: pass --config FILE, or arguments behind --.")
    command = train.parse(list(training))  # a wrong argument is told here and not after hours in a queue
    where = command.args.experiment_dir
    require(where is not None, "experiment_dir is not set: a job that is queued again must find its state there.")
    require(
        options.seeds is None or command.args.only_seed is None,
        "only_seed is what the jobs of --seeds are given: leave it out.",
    )
    last = command.args.first_seed + (options.seeds or 1) - 1
    require(last < 2**32, f"seeds={options.seeds} from seed {command.args.first_seed} on end above 2^32: pass fewer.")
    if options.pairs is not None:
        check_pairs(read_pairs(Path(options.pairs)), command)


def check_job(options: JobOptions) -> None:
    """What Slurm would tell in its own words, or only when the job begins."""
    for name, (form, examples) in FORMS_OF_SLURM.items():
        value = getattr(options, name)
        require(
            value is None or form.fullmatch(value) is not None,
            f"{name}={shown(value)} is not in a form of Slurm: pass e.g. {examples}.",
        )
    check_path("log_dir", options.log_dir)
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
    require(
        options.seeds is None or 2 <= options.seeds <= LARGEST_ARRAY,
        f"seeds={options.seeds} is no array of 2 to {LARGEST_ARRAY} jobs: pass a number of these.",
    )
    require(
        options.parallel is None or options.seeds is not None or options.pairs is not None,
        f"parallel={options.parallel} belongs to an array: pass seeds or pairs as well.",
    )


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Two classes a line, with a blank or a comma between them; a line that begins with # is a remark."""
    try:
        lines = read_text(path).splitlines()
    except DocumentError as error:
        raise UserError(f"pairs={path} cannot be read: {error}.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        words = [] if line.lstrip().startswith("#") else line.replace(",", " ").split()
        require(len(words) in (0, 2), f"pairs={path}, line {number} is not two classes: {shown(line)}.")
        if words:
            require(words[0] != words[1], f"pairs={path}, line {number} names {words[0]!r} twice: pass two classes.")
            found.append((words[0], words[1]))
    require(bool(found), f"pairs={path} holds no pair: write two classes a line.")
    twice = [pair for pair in found if found.count(pair) > 1]
    require(not twice, f"pairs={path} has the pair {' '.join(twice[0] if twice else ())} twice: two jobs would be one.")
    return found


def check_pairs(pairs: Sequence[tuple[str, str]], command: Command) -> None:
    """Every class is in the data, which is read once for it; on the hub it may not be reached from here."""
    from gradiend_dist.data.pairs import Request, read_input, resolve_classes
    from gradiend_dist.data.readers import as_local_path

    config = command.config
    if not isinstance(config.data, str) or as_local_path(config.data, "data") is None:
        return
    given = None
    for pair in pairs:
        of_pair = dataclasses.replace(config, target_classes=list(pair))
        request = Request(of_pair, 0, identity=False, reference=command.args.behaviour.reference_data)
        given = given or read_input(request)
        resolve_classes(request, given)


def command_line(options: JobOptions, training: Sequence[str]) -> list[str]:
    """What is run to submit. A list, never a line: no shell reads a user's value."""
    from gradiend_dist.commands import train

    command = train.parse(list(training))
    experiment = Path(command.args.experiment_dir or ".")
    own_share = shares(options)
    given = {name: getattr(options, name) for name in OPTIONS_OF_SBATCH}
    asked = {name: own_share.get(name) if value is None else value for name, value in given.items()}
    slurm = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if value is not None]
    warning = seconds_of_warning(command.model, command.args)
    if warning > SECONDS_TO_STOP:
        slurm.append(f"--signal=B:USR1@{warning}")
    slurm += [f"--job-name={options.job_name or experiment.name}", *shlex.split(options.sbatch_options)]
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


def shares(options: JobOptions) -> dict[str, Any]:
    """CPUs and memory of the GPUs that are asked for; without GPUs those of the script."""
    if options.gpus_per_node is None:
        return {}
    return {"cpus_per_task": CPUS_PER_GPU * options.gpus_per_node, "mem": f"{MEMORY_PER_GPU * options.gpus_per_node}G"}


def seconds_of_warning(model: str, args: TrainingArguments) -> int:
    """How long before its end a job must hear of it, to save its state."""
    from gradiend_dist.commands.plan import forecast

    try:
        size = forecast(model, args).state_size
    except UserError:  # a model that only the nodes see
        print_line(NAME, f"the model cannot be read here: the job hears of its end {SECONDS_TO_STOP} s before it")
        return SECONDS_TO_STOP
    return SECONDS_TO_STOP + size // BYTES_PER_SECOND


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
