"""The images as far as they can be judged without an engine: their files, read; their entry point, run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
ENTRYPOINT = DOCKER / "entrypoint.sh"
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL", re.IGNORECASE)


# --- reading the files


@dataclass
class Stage:
    """What stands between two FROMs."""

    image: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]

    @property
    def sources(self) -> list[str]:
        """What is copied from the context."""
        copies = [shlex.split(rest) for rest in self.of("COPY") if not rest.startswith("--from=")]
        return [source for *sources, _ in copies for source in sources]


def instructions(text: str) -> list[tuple[str, str]]:
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    lines = [line.strip() for line in re.sub(r"\\\n", " ", kept).splitlines()]
    return [(line.split(None, 1)[0], " ".join(line.split()[1:])) for line in lines if line]


def defaults(name: str) -> dict[str, str]:
    """The arguments above the first FROM."""
    head = (DOCKER / name).read_text().split("\nFROM ")[0]
    return dict(rest.split("=", 1) for word, rest in instructions(head) if word == "ARG")


def stages(name: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for word, rest in instructions((DOCKER / name).read_text()):
        if word == "FROM":
            image, _, stage = rest.partition(" AS ")
            for argument, value in defaults(name).items():
                image = image.replace(f"${{{argument}}}", value)
            found[stage] = Stage(image)
        elif found:
            list(found.values())[-1].instructions.append((word, rest))
    return found


def definition() -> list[tuple[str, list[str]]]:
    """Section and lines of the Apptainer definition, in order; its headers are sections without a name."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "gradiend_dist.def").read_text(), flags=re.MULTILINE)
    parts = re.split(r"^(%\w+.*|Bootstrap: .*)$", text, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return [(title.strip(), [line.strip() for line in body.splitlines() if line.strip()]) for title, body in sections]


def section(title: str) -> list[list[str]]:
    return [lines for found, lines in definition() if found == title]


def ignored(path: str) -> bool:
    """As Docker reads .dockerignore: the last pattern that fits the path, or a folder above it, decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and _pattern(line.removeprefix("!")).fullmatch(path):
            verdict = not line.startswith("!")
    return verdict


def _pattern(text: str) -> re.Pattern[str]:
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+])", text)
    return re.compile(
        "".join(translated.get(part, part if part[:1] == "[" else re.escape(part)) for part in parts) + "(?:/.*)?"
    )


def pins(path: Path) -> dict[str, Requirement]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines if line}


# --- the Dockerfiles


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__names_exact_images_and_compiles_in_a_stage_that_is_not_shipped(name: str) -> None:
    found = stages(name)
    assert list(found) == ["build", "runtime"]
    for stage in found.values():
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[\w.-]+", stage.image), (
            f"{stage.image} may mean another image tomorrow"
        )
    shipped = " ".join(found["runtime"].of("RUN"))
    assert not re.search(r"pip install|g\+\+|nvcc|build-essential", shipped)
    of_kernels = set(re.findall(r"\bgcc\b|\S+-dev\b", shipped))  # Triton compiles on the machine where it runs
    assert of_kernels == ({"gcc", "libc6-dev", "python3.12-dev"} if name == "Dockerfile" else set())
    assert found["runtime"].of("COPY")[0] == "--from=build /opt/venv /opt/venv"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__ends_as_a_user_without_rights_with_signals_that_arrive(name: str) -> None:
    runtime = stages(name)["runtime"]
    assert runtime.of("USER") == ["${UID}:${GID}"]
    assert {"UID=1000", "GID=1000"} <= set(runtime.of("ARG"))
    (entry,), (command,) = runtime.of("ENTRYPOINT"), runtime.of("CMD")
    init, _, script = json.loads(entry)
    assert init == "/usr/bin/tini" and re.search(r"\btini\b", " ".join(runtime.of("RUN")))
    assert script == "/opt/gradiend_dist/docker/entrypoint.sh" and os.access(ENTRYPOINT, os.X_OK)
    assert json.loads(command) == ["gradiend-dist", "--help"]
    assert runtime.of("STOPSIGNAL") == ["SIGTERM"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__hands_the_launchers_signals_to_the_ranks(name: str) -> None:
    """The same signals as launch/single_node.sh, also where `accelerate launch` is started without it."""
    (wanted,) = re.findall(r"PET_SIGNALS_TO_HANDLE:-([A-Z0-9,]+)", (ROOT / "launch" / "single_node.sh").read_text())
    assert f"PET_SIGNALS_TO_HANDLE={wanted}" in stages(name)["runtime"].of("ENV")[0].split()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__keeps_no_secret_and_writes_to_volumes(name: str) -> None:
    runtime = stages(name)["runtime"]
    for stage in stages(name).values():
        assert not [rest for word in ("ARG", "ENV") for rest in stage.of(word) if SECRET.search(rest)]
    assert not [rest for rest in runtime.of("ARG") if rest.startswith("PIP_")], "an address may hold a password"
    settings = dict(part.split("=", 1) for part in shlex.split(runtime.of("ENV")[0]))
    volumes = json.loads(runtime.of("VOLUME")[0])
    for variable in ("HOME", "HF_HOME", "WANDB_DIR"):
        assert any(Path(settings[variable]).is_relative_to(volume) for volume in volumes)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__copies_what_is_there_and_let_through(name: str) -> None:
    for stage in stages(name).values():
        for source in stage.sources:
            path = ROOT / source
            files = [source] if path.is_file() else [str(f.relative_to(ROOT)) for f in path.glob("*.*") if f.is_file()]
            assert files, f"COPY {source}: no such file"
            assert not [file for file in files if ignored(file)]
    assert {"accelerate_configs", "launch"} <= set(stages(name)["runtime"].sources), "job scripts start from these"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile__gives_the_package_build_all_it_reads(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"].get("package-dir", {"": "gradiend_dist"}).values()
    wanted = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *folders}
    assert wanted <= set(stages(name)["build"].sources)


@pytest.mark.parametrize("name", [*DOCKERFILES, "gradiend_dist.def"])
def test_pip__installs_only_versions_that_are_pinned(name: str) -> None:
    """Every call reads both files of constraints, and every name without a bound stands in one of them."""
    tested, of_images = pins(ROOT / "constraints.txt"), pins(DOCKER / "constraints-image.txt")
    assert not set(tested) & set(of_images), "one version, one place"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = pip_calls(name)
    assert len(calls) == 3
    for call in calls:
        assert re.findall(r"-c (\S+)", call) == ["constraints.txt", "docker/constraints-image.txt"]
        for what in re.sub(r"-c \S+|--\S+", "", call).replace('"', "").split():
            if what.startswith("."):
                asked = [Requirement(line) for extra in what[2:-1].split(",") for line in extras[extra]]
            else:
                asked = [Requirement(what)]
            for requirement in asked:
                pin = {**tested, **of_images}[canonicalize_name(requirement.name)]
                assert re.fullmatch(r"==[^*,]+", str(pin.specifier))
                assert requirement.specifier.contains(str(pin.specifier).removeprefix("=="))


def pip_calls(name: str) -> list[str]:
    """What follows `pip install`, in order."""
    steps = section("%post")[0] if name.endswith(".def") else stages(name)["build"].of("RUN")
    commands = " && ".join(steps).replace("$IMAGE_CONSTRAINTS", "constraints-image.txt")  # the argument's default
    return [" ".join(call.split()) for call in re.findall(r"pip install ([^&;]+)", commands)]


def test_image_for_cuda_12__installs_what_the_other_one_does() -> None:
    """An image for older drivers, whose packages of NVIDIA come with torch's builds for it."""
    (default,) = [argument for argument in stages("Dockerfile")["build"].of("ARG") if "IMAGE_CONSTRAINTS" in argument]
    assert default == "IMAGE_CONSTRAINTS=constraints-image.txt"
    ours, others = pins(DOCKER / "constraints-image.txt"), pins(DOCKER / "constraints-cuda12.txt")
    assert others == {name: pin for name, pin in ours.items() if not name.startswith(("cuda-", "nvidia-"))}


def test_images__for_gpus_agree_in_all_that_they_install() -> None:
    """The Apptainer definition repeats the Dockerfile, since it cannot read it."""
    docker = stages("Dockerfile")
    images = [
        line.removeprefix("From: ") for title, lines in definition() if title == "Bootstrap: docker" for line in lines
    ]
    assert [line for line in images if "/" in line] == [stage.image for stage in docker.values()]
    assert pip_calls("gradiend_dist.def") == pip_calls("Dockerfile")
    assert [call for call in pip_calls("Dockerfile") if "deepspeed" in call]
    build = " ".join(section("%post")[0])
    for argument in docker["build"].of("ARG"):
        assert argument in build or argument.startswith(("PIP_", "IMAGE_CONSTRAINTS"))
    for preparation in ("DS_ACCELERATOR=cuda", "g++ python3.12-dev python3.12-venv"):
        assert preparation in build and preparation in " ".join(docker["build"].of("RUN"))


def test_image__for_gpus_says_so() -> None:
    for name, kind in (("Dockerfile", "cuda"), ("Dockerfile.cpu", "cpu")):
        assert f"GRADIEND_DIST_IMAGE={kind}" in stages(name)["runtime"].of("ENV")[0].split()
    assert "export GRADIEND_DIST_IMAGE=cuda" in section("%environment")[0]


def test_definition__copies_what_is_there_and_becomes_the_command() -> None:
    copies = [line.split() for lines in section("%files") for line in lines]
    assert not [source for source, _ in copies if not (ROOT / source).exists()]
    installed = {source for source, _ in copies}
    built = {source for stage in stages("Dockerfile").values() for source in stage.sources}
    assert installed == built - {"docker/constraints-cuda12.txt"}  # the definition has no arguments to choose it by
    assert section("%runscript") == [['exec /opt/gradiend_dist/docker/entrypoint.sh "$@"']]
    assert "/opt/gradiend_dist/docker/entrypoint.sh" in {target for _, target in copies}


@pytest.mark.parametrize(
    ("path", "stays_out"),
    [
        (".git/config", True),
        (".venv/bin/python", True),
        (".env", True),
        ("runs/demo/run.yaml", True),
        ("tests/test_docker.py", True),
        ("docker/README.md", True),
        ("gradiend_dist/__pycache__/train.pyc", True),
        ("launch/.env", True),
        ("gradiend_dist/engines/zero.py", False),
        ("launch/single_node.sh", False),
        ("docker/entrypoint.sh", False),
    ],
)
def test_dockerignore__lets_through_what_is_named(path: str, stays_out: bool) -> None:
    assert ignored(path) is stays_out


# --- compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_compose__joins_two_ranks_that_differ_in_their_number_alone(compose: dict[str, Any]) -> None:
    services = compose["services"]
    first, second = (shlex.split(services[name]["command"]) for name in ("rank0", "rank1"))
    assert [(a, b) for a, b in zip(first, second, strict=True) if a != b] == [("0", "1")]
    assert first[first.index("--machine_rank") + 1] == "0"
    assert first[first.index("--main_process_ip") + 1] in services
    assert (ROOT / first[first.index("--config_file") + 1]).is_file()
    assert first[first.index("--num_processes") + 1] == first[first.index("--num_machines") + 1] == "2"
    assert first[-1] == f"{shlex.split(services['demo']['command'])[-1]}/run.yaml"
    assert services["rank0"]["depends_on"]["demo"]["condition"] == "service_completed_successfully"


def test_compose__builds_the_cpu_image_and_lets_ranks_save(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile.cpu"
        arguments = {rest.split("=")[0] for stage in stages("Dockerfile.cpu").values() for rest in stage.of("ARG")}
        assert set(build["args"]) <= arguments
        assert {volume.split(":")[0] for volume in service["volumes"]} == set(compose["volumes"])
        assert {volume.split(":")[1] for volume in service["volumes"]} == {"/runs", "/cache"}
        assert int(service["stop_grace_period"].removesuffix("s")) > 30, "torchrun's own patience"
        assert service["environment"]["ACCELERATE_USE_CPU"] == "true"
        assert not [name for name in service["environment"] if SECRET.search(name)]


# --- the entry point, run

FAKE_TORCH = """
import types
version = types.SimpleNamespace(cuda={cuda!r})
def init():
    if {error!r}:
        raise RuntimeError({error!r})
def ones(count, device):
    if device == {broken!r}:
        raise RuntimeError("CUDA error: no kernel image is available\\nCompile with more.")
    return types.SimpleNamespace(sum=lambda: types.SimpleNamespace(item=lambda: float(count)))
cuda = types.SimpleNamespace(init=init, device_count=lambda: 2, get_device_name=lambda index: f"Card {{index}}")
"""


def enter(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    return subprocess.run(
        [str(ENTRYPOINT), *command], env={**inherited, **environment}, capture_output=True, text=True, timeout=60
    )


no_device = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(), reason="this machine has a GPU"
)


@no_device
def test_entrypoint__without_a_gpu_is_one_sentence_and_exit_code_2() -> None:
    ended = enter("echo", "started", GRADIEND_DIST_IMAGE="cuda")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("gradiend_dist image: error: ") and line.endswith(".")
    assert all(remedy in line for remedy in ("--gpus all", "--nv", "GRADIEND_DIST_CPU_OK=1"))


@pytest.mark.parametrize(
    "environment",
    [{"GRADIEND_DIST_IMAGE": "cpu"}, {"GRADIEND_DIST_IMAGE": "cuda", "GRADIEND_DIST_CPU_OK": "1"}, {}],
)
def test_entrypoint__starts_the_command_as_it_stands(environment: dict[str, str]) -> None:
    ended = enter("sh", "-c", 'printf "[%s]" "$@"; exit 7', "sh", "two words", "$HOME", "", **environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "[two words][$HOME][]", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_entrypoint__is_replaced_by_the_command_that_gets_the_signals(number: signal.Signals) -> None:
    script = (
        f"import os, signal; signal.signal({int(number)}, lambda *_: os._exit(5)); "
        "print(os.getpid(), flush=True); signal.pause()"
    )
    with subprocess.Popen(
        [str(ENTRYPOINT), sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid, "a shell stands between the engine and the command"
            process.send_signal(number)
            assert process.wait(30) == 5
        finally:
            process.kill()


def check_gpus(folder: Path, device: str, **torch: str | None) -> subprocess.CompletedProcess[str]:
    """gpu_check.py beside a torch that answers as told, and a device file that is there."""
    values = {"cuda": "13.0", "error": "", "broken": "", **torch}
    (folder / "torch.py").write_text(FAKE_TORCH.format(**values))
    text = (DOCKER / "gpu_check.py").read_text()
    assert text.count('"/dev/dxg"') == 1
    (folder / "gpu_check.py").write_text(text.replace('"/dev/dxg"', repr(device)))
    shutil.copy(ENTRYPOINT, folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [str(folder / "entrypoint.sh"), "echo", "started"],
        env={"PATH": path, "GRADIEND_DIST_IMAGE": "cuda", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        (
            {"error": "The NVIDIA driver on your system is too old (found version 12040). Please update"},
            "is too old for CUDA 13.0 (The NVIDIA driver on your system is too old (found version 12040)): update it",
        ),
        ({"error": "No CUDA GPUs are available"}, "no GPU is usable in this image for CUDA 13.0 (No CUDA GPUs are"),
        ({"error": "Torch not compiled with CUDA enabled", "cuda": None}, "torch in this image was built without CUDA"),
        ({"broken": "cuda:1"}, "GPU 1 (Card 1) does not compute: CUDA error: no kernel image is available)"),
    ],
)
def test_gpu_check__says_why_a_gpu_is_of_no_use(tmp_path: Path, torch: dict[str, str | None], says: str) -> None:
    ended = check_gpus(tmp_path, str(tmp_path), **torch)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in line


def test_gpu_check__names_the_gpus_and_goes_on(tmp_path: Path) -> None:
    ended = check_gpus(tmp_path, str(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, "started\n")
    assert ended.stderr == "gradiend_dist image: 2 GPU(s): Card 0, Card 1\n"
