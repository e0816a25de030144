"""The package as a user gets it: light to import, pinned, startable, and free of traces of a developer's machine."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).resolve().parents[1]
SINGLE = ROOT / "accelerate_configs" / "single.yaml"


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """Version by package name, for the running Python."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    for requirement in requirements:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{requirement} is not one exact version"
    valid = [requirement for requirement in requirements if requirement.marker is None or requirement.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in valid}


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the package in this tree, installed or not."""
    path = os.pathsep.join(filter(None, [str(cwd), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def test_import__brings_in_no_heavy_library() -> None:
    """Fails if an eager import makes `--help`, or a wrong argument, wait for torch."""
    heavy = ["torch", "transformers", "accelerate", "deepspeed", "wandb", "matplotlib", "datasets"]
    code = (
        "import sys, gradiend_dist\n"
        "assert gradiend_dist.__file__, 'a folder without __init__.py was imported'\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = run_python("-c", code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
    assert result.stderr == ""


def test_constraints__pin_torch_and_everything_the_package_asks_for(
    pyproject: dict[str, Any], pins: dict[str, str]
) -> None:
    """Fails for a dependency added without a pin, or a pin that the declared bound refuses."""
    assert pins["torch"] == "2.13.0"
    extras = pyproject["project"]["optional-dependencies"]
    # bitsandbytes has no build for every machine that runs the tests, so no version of it was tested.
    tested = [
        *pyproject["project"]["dependencies"],
        *(line for name in extras if name != "8bit" for line in extras[name]),
    ]
    for requirement in map(Requirement, tested):
        name = canonicalize_name(requirement.name)
        if name in pins or sys.version_info >= (3, 11):
            assert requirement.specifier.contains(pins[name]), f"{requirement} against the pin {name}=={pins[name]}"


def test_entry_points__every_console_script_can_be_called(pyproject: dict[str, Any]) -> None:
    scripts = pyproject["project"]["scripts"]
    assert "gradiend-dist" in scripts
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_makefile__installs_extras_that_exist(pyproject: dict[str, Any]) -> None:
    """pip only warns about an unknown extra, and the warning is silenced there."""
    installed = re.findall(r'-e "\.\[([\w,-]+)\]"', (ROOT / "Makefile").read_text())
    assert installed, "the Makefile no longer installs the package with extras"
    wanted = {extra for extras in installed for extra in extras.split(",")}
    assert wanted <= set(pyproject["project"]["optional-dependencies"])


def test_package__lists_every_folder_of_code_and_brings_the_scripts_along(pyproject: dict[str, Any]) -> None:
    """Fails for a new folder that would be missing from an installation, where no test would miss it."""
    setuptools = pyproject["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "gradiend_dist").rglob("__init__.py")}
    extra = {"gradiend_dist.launch": "launch", "gradiend_dist.accelerate_configs": "accelerate_configs"}
    assert set(setuptools["packages"]) == {folder.replace("/", ".") for folder in folders} | set(extra)
    for package, folder in extra.items():
        assert setuptools["package-dir"][package] == folder
        patterns = setuptools["package-data"][package]
        assert all(any(path.match(one) for one in patterns) for path in (ROOT / folder).iterdir()), folder


def test_tree__holds_what_the_package_promises() -> None:
    assert (ROOT / "gradiend_dist" / "py.typed").exists()
    assert "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def source_files() -> Iterator[Path]:
    """Text files of the tree that a user would get; environments, runs and caches are not part of it."""
    kinds = {".cfg", ".def", ".json", ".md", ".py", ".sbatch", ".sh", ".toml", ".txt", ".yaml", ".yml"}
    names = {"Makefile", "Dockerfile", "run"}
    made = {"build", "dist", "runs", "wandb", "__pycache__", "node_modules"}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(
            name
            for name in folders
            if name not in made
            and (not name.startswith(".") or name in {".ci", ".github"})
            and not name.endswith(".egg-info")
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        )
        yield from (Path(folder) / name for name in sorted(files) if Path(name).suffix in kinds or name in names)


def test_tree__names_no_path_of_a_machine() -> None:
    """Fails for a home directory or a work folder of somebody's machine in code, tests, documents or configurations."""
    machine_path = re.compile(r"(?<![\w.$}~/-])/(?:root|home|Users|work)/[\w.]")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in source_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if machine_path.search(line)
    ]
    assert not found, "\n".join(found)


def test_single_yaml__is_one_process_without_distribution() -> None:
    config = yaml.safe_load(SINGLE.read_text())
    assert (config["distributed_type"], config["num_processes"], config["mixed_precision"]) == ("NO", 1, "no")
    assert config["use_cpu"] is False, "a GPU that is there must be used"


def test_single_yaml__launches_without_a_warning_and_ends_quietly(tmp_path: Path) -> None:
    """Fails if accelerate asks or warns about a missing setting, or adds a traceback to a failed run."""
    (tmp_path / "script.py").write_text(
        "import sys\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "print(state.distributed_type, state.num_processes)\nsys.exit(3)\n"
    )
    launch = ["-m", "accelerate.commands.launch", "--quiet", "--config_file", str(SINGLE), "-m", "script"]
    result = run_python(*launch, cwd=tmp_path)
    assert result.stdout.split() == ["DistributedType.NO", "1"]
    assert (result.returncode, result.stderr) == (1, "")
