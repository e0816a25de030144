"""A real Slurm with two nodes on one machine: loopback only, private directory, no service of the system is touched."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

NODES = ("n1", "n2")
FREEZER = Path("/sys/fs/cgroup/freezer")
SUPERUSER_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# A node has its own host name, /etc/hosts and process ids. This shell is process 1 there: its death ends the node.
NODE_PROGRAM = 'hostname "$0" && mount --bind "$1" /etc/hosts && slurmd -D -N "$0"; exit $?'

Proctrack = Literal["cgroup", "linuxproc"]


def missing() -> str | None:
    """Why no cluster can be started here, as one sentence; None where it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster for tests needs root (host names, mounts and process ids of its own for each node)"
    needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "setpriv")
    absent = [name for name in needed if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} not found: run tests/slurm/install.sh"
    if subprocess.run([*_namespaces(), "true"], capture_output=True).returncode != 0:
        return "this container may not create namespaces: run it with CAP_SYS_ADMIN"
    return None


def strictest_proctrack() -> Proctrack:
    """`cgroup` where Slurm 22.05 can have it without systemd (version 1 hierarchy, writable), else `linuxproc`."""
    probe = FREEZER / f"probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return "linuxproc"
    return "cgroup"


@dataclass
class Cluster:
    """Nodes n1 and n2 with fake GPUs; partition `main` is pre-empted with grace, `harsh` without, both by `high`.

    Under `cgroup`, as on real clusters, a signal reaches only the process that srun started; under `linuxproc` all its
    descendants too. A requeued job waits `requeue_delay` seconds (Slurm's own default: 120).
    """

    directory: Path
    proctrack: Proctrack = "linuxproc"
    gpus: int = 2
    cpus: int = 32
    grace: int = 20
    kill_wait: int = 5
    slurmd_timeout: int = 10
    requeue_delay: int = 5
    user_signal: bool = True  # pre-emption sends the signal of --signal=B:..., not just SIGTERM to the steps
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For every Slurm command: this cluster, and nothing of a job that these tests may themselves run in."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": _path()}

    def start(self, limit: float = 30) -> None:
        """Write the configuration and start munged, slurmctld and both nodes; returns when both are idle."""
        assert not self.processes, "the cluster runs already"
        self._prepare()
        try:
            self._start_munged()
            self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
            for name in NODES:
                self._start_node(name)
            self._wait(lambda: all(self.node_state(name) == "idle" for name in NODES), limit, self._daemon_trouble)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel all jobs, then end the processes that `start` made, and no others."""
        if "slurmctld" in self.processes:
            self.run("scancel", "--user=root", check=False)
            with suppress(TimeoutError):
                self._wait(lambda: not self.run("squeue", "--noheader", check=False).stdout, self.kill_wait + 5)
        for name in reversed(list(self.processes)):
            self._end(name)
        if self.proctrack == "cgroup":
            _remove_empty_cgroups()

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """One command against this cluster; `check` makes its failure an error that shows its messages."""
        done = subprocess.run(
            command,
            env=self.environment | dict(env or {}),
            cwd=cwd or self.directory,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr or done.stdout}")
        return done

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Submit and return the job id; a task of an array is then `id_task`."""
        return self.run("sbatch", "--parsable", *arguments, env=env, cwd=cwd).stdout.strip().partition(";")[0]

    def scancel(self, *arguments: str) -> None:
        """scancel; with `--batch --signal=USR1 id` it is the warning of --signal=B:USR1@n without the wait for it."""
        self.run("scancel", *arguments)

    def state(self, job: str) -> str:
        """Its state in capitals, e.g. RUNNING; COMPLETING hides what it will be."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """`scontrol show job` as a mapping; for job names and comments that do not themselves contain ` Key=`."""
        text = self.run("scontrol", "show", "job", "--oneliner", job).stdout
        pairs = re.findall(r"([A-Z][\w:/]*)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*\Z)", text, flags=re.DOTALL)
        return dict(pairs)

    def node_state(self, name: str) -> str:
        """idle, alloc, mix, down*, ...; empty while slurmctld does not answer."""
        return self.run(
            "sinfo", "--noheader", f"--nodes={name}", "--partition=main", "--format=%t", check=False
        ).stdout.strip()

    def wait_state(self, job: str, states: str | Collection[str], limit: float = 30) -> str:
        """The first of these states that the job is seen in."""
        wanted = {states} if isinstance(states, str) else set(states)
        seen: list[str] = []

        def reached() -> bool:
            seen.append(self.state(job))
            return seen[-1] in wanted

        self._wait(reached, limit, lambda: f"job {job} is {seen[-1]}, not {' or '.join(sorted(wanted))}")
        return seen[-1]

    def wait_line(self, file: Path, pattern: str, limit: float = 30) -> str:
        """The first line of the file in which the regular expression is found; the file may not exist yet."""

        def text() -> str:
            return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

        def found() -> list[str]:
            return [line for line in text().splitlines() if re.search(pattern, line)]

        self._wait(lambda: bool(found()), limit, lambda: f"{file} has no line with {pattern}:\n{text()}")
        return found()[0]

    def start_now(self, job: str, limit: float = 30) -> None:
        """Spare a requeued job its delay; returns when it runs, so only for a job that finds its nodes free."""

        def runs() -> bool:
            state = self.state(job)
            if state == "PENDING":  # again and again: Slurm sets the delay anew when the last process has ended
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            return state == "RUNNING"

        self._wait(runs, limit, lambda: f"job {job} is {self.state(job)}")

    def kill_node(self, name: str) -> None:
        """The node disappears with all that runs on it, as in a power cut; Slurm notices after `slurmd_timeout`."""
        self._end(name)

    def restart_node(self, name: str, limit: float = 60) -> None:
        """The node comes back empty; returns when Slurm uses it again."""
        self._start_node(name)
        self._wait(
            lambda: self.node_state(name) in ("idle", "mix", "alloc"),
            limit,
            lambda: f"{name} is {self.node_state(name)}",
        )

    def _prepare(self) -> None:
        assert not re.search(r"\s", str(self.directory)), "Slurm's configuration cannot hold a path with blanks"
        for part in ("munge", "state", "log", "dev", *(f"spool/{name}" for name in NODES)):
            (self.directory / part).mkdir(parents=True, exist_ok=True)
        for directory in (self.directory, self.directory / "munge"):
            directory.chmod(0o711)  # munged refuses a socket that not everybody can reach
        key = self.directory / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for index in range(self.gpus):  # Slurm drops a GPU without a device file
            (self.directory / f"dev/nvidia{index}").symlink_to("/dev/null")
        hosts = [line for line in Path("/etc/hosts").read_text().splitlines() if not set(NODES) & set(line.split())]
        (self.directory / "hosts").write_text("\n".join([*hosts, f"127.0.0.1 {' '.join(NODES)}", ""]))
        self.ports = _free_ports(1 + len(NODES))
        (self.directory / "slurm.conf").write_text(self._configuration())
        (self.directory / "gres.conf").write_text(f"Name=gpu File={self.directory}/dev/nvidia[0-{self.gpus - 1}]\n")
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")

    def _configuration(self) -> str:
        here = self.directory
        controller, *nodes = self.ports
        node_lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} RealMemory=256000"
            f" Gres=gpu:{self.gpus}"
            for name, port in zip(NODES, nodes, strict=True)
        ]
        partition = f"Nodes={','.join(NODES)} State=UP MaxTime=INFINITE"
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname().partition('.')[0]}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            # Both flags: the first keeps slurmd and srun to the loopback, the second slurmctld.
            "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            # A requeued job waits as long as its old credential lives.
            f"AuthInfo=socket={here}/munge/socket,cred_expire={self.requeue_delay}",
            "CredType=cred/munge",
            f"StateSaveLocation={here}/state",
            f"SlurmdSpoolDir={here}/spool/%n",
            f"SlurmctldPidFile={here}/slurmctld.pid",
            f"SlurmdPidFile={here}/slurmd.%n.pid",
            f"SlurmctldLogFile={here}/log/slurmctld.log",
            f"SlurmdLogFile={here}/log/slurmd.%n.log",
            f"ProctrackType=proctrack/{self.proctrack}",
            # Two clusters share the cgroup of a node name, so their jobs need different numbers.
            f"FirstJobId={controller * 1000}",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "PropagateResourceLimits=NONE",
            "MpiDefault=none",
            "MailProg=/bin/true",
            "MinJobAge=3600",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerCPU=100",
            "SlurmdParameters=config_overrides",  # believe the sizes below, not the machine's
            "ReturnToService=2",
            f"KillWait={self.kill_wait}",
            f"SlurmdTimeout={self.slurmd_timeout}",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            *(["SlurmctldParameters=preempt_send_user_signal"] if self.user_signal else []),
            "GresTypes=gpu",
            *node_lines,
            f"PartitionName=main {partition} Default=YES PriorityTier=1 GraceTime={self.grace}",
            f"PartitionName=harsh {partition} PriorityTier=1 GraceTime=0",
            f"PartitionName=high {partition} PriorityTier=10 PreemptMode=OFF",
        ]
        return "\n".join([*lines, ""])

    def _start_munged(self) -> None:
        here = self.directory / "munge"
        files = [
            f"--key-file={here}/key",
            f"--pid-file={here}/pid",
            f"--log-file={here}/log",
            f"--seed-file={here}/seed",
        ]
        self._spawn("munged", ["munged", "--foreground", f"--socket={here}/socket", *files])
        self._wait((here / "socket").exists, 10, self._daemon_trouble)

    def _start_node(self, name: str) -> None:
        self._spawn(name, [*_namespaces(), "sh", "-c", NODE_PROGRAM, name, str(self.directory / "hosts")])

    def _spawn(self, name: str, command: list[str]) -> None:
        # Should these tests themselves be killed, the kernel ends the daemons with them.
        with (self.directory / f"log/{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _end(self, name: str) -> None:
        process = self.processes.pop(name)
        if name in NODES:
            process.kill()  # unshare ignores SIGTERM; its death is the node's
        else:
            process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _daemon_trouble(self) -> str:
        ended = {name: process.returncode for name, process in self.processes.items() if process.poll() is not None}
        states = {name: self.node_state(name) for name in NODES} if "slurmctld" in self.processes else {}
        logs = "\n".join(f"{file.name}: {_tail(file)}" for file in sorted((self.directory / "log").iterdir()))
        return f"the cluster does not come up (nodes {states}, ended {ended})\n{logs}"

    def _wait(self, condition: Callable[[], bool], limit: float, trouble: Callable[[], str] = lambda: "") -> None:
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"after {limit:g} s: {trouble()}")
            time.sleep(0.1)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SUPERUSER_PATH}"


def _namespaces() -> list[str]:
    return ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _free_ports(number: int) -> list[int]:
    """Neighbouring ports that nobody listens on, below those that the kernel hands out for connections."""
    while True:
        base = random.SystemRandom().randrange(20000, 30000)
        ports = list(range(base, base + number))
        with ExitStack() as held, suppress(OSError):
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports


def _remove_empty_cgroups() -> None:
    for name in NODES:
        for directory, _, _ in os.walk(FREEZER / f"slurm_{name}", topdown=False):
            with suppress(OSError):  # another cluster has a job in it
                os.rmdir(directory)


def _tail(file: Path) -> str:
    return " | ".join(file.read_text(errors="replace").splitlines()[-3:])
