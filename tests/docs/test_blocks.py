"""Every shell and Python block of README.md and docs/ is executed as it is written, on the small embedded model.

A page runs in a copy of the tree's examples, configurations and scripts, with a finished run in runs/gender. Hub ids
are directories there that hold a small model, so nothing is looked up. Commands of this package run in this process;
what needs another machine (pip, make, sbatch, docker, W&B) has the check that stands in for it in `STAND_INS`. A
command that neither knows fails its page: add it here, or leave it out of the page.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig

from gradiend_dist import demo

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "docker" / "README.md"]
EXECUTED = ("sh", "python")
# Several trainings each, or a launch: all others run by default.
SLOW = {"quickstart.md", "processes.md"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- pages


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; `line` is that of their first line."""
    start, language, lines = 0, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if start:
                yield Block(page, start, language, "\n".join(lines) + "\n")
                start = 0
            else:
                start, language, lines = number + 1, line.removeprefix("```").strip(), []
        elif start:
            lines.append(line)
    assert not start, f"{name_of(page)}: the block in line {start - 1} is not closed"


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words; `&&` joins several on a line."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                yield words
                words = []


# --- what is run


def package_main(words: list[str]) -> int:
    """gradiend-dist, as its console script starts it; what would be sent to W&B is only printed."""
    module, _, function = PYPROJECT["project"]["scripts"]["gradiend-dist"].partition(":")
    if words[1] == "dashboard" and "--dry_run" not in words:
        words = [*words, "--dry_run"]
    return getattr(importlib.import_module(module), function)(words[1:])


def check_training(arguments: list[str]) -> int:
    """A training that is launched elsewhere: its arguments, files and data are right."""
    return importlib.import_module("gradiend_dist.train").main([*arguments, "--dry_run"])


def accelerate(words: list[str]) -> int:
    """Two CPU ranks are launched; one process runs here; of other launches the training's arguments are checked."""
    assert words[1] == "launch", words
    given = launch_command_parser().parse_args(words[2:])
    assert given.module, "the pages launch modules of the package"
    config = yaml.safe_load(Path(given.config_file).read_text()) if given.config_file else {"num_processes": 1}
    if Path(given.config_file or "").name == "cpu_2.yaml":
        command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        return subprocess.run(command, env=environment, timeout=240, check=False).returncode
    if config["num_processes"] > 1 and given.training_script == "gradiend_dist.train":
        return check_training(given.training_script_args)
    return importlib.import_module(given.training_script).main(given.training_script_args)


def python(words: list[str]) -> int:
    """Examples run; a benchmark takes minutes, so its file and its flags are looked at."""
    if words[1:3] == ["-m", "venv"]:
        return 0 if importlib.util.find_spec("venv") else 1
    script = Path(words[1])
    if script.parts[0] == "benchmarks":
        source = (ROOT / script).read_text()
        return 0 if all(word in source for word in words[2:] if word.startswith("--")) else 1
    assert script.parts[0] == "examples", words
    before, sys.argv = sys.argv, words[1:]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return 0


def launch_script(words: list[str]) -> int:
    """A script of launch/, printing what it would start; what it would train is checked here. sbatch is a stand-in."""
    dry = [] if words[0].endswith(".sbatch") else ["--dry_run"]
    if "--" in words:
        assert check_training(words[words.index("--") + 1 :]) == 0
    environment = {**os.environ, "NUM_PROCESSES": "8"}  # which single_node.sh otherwise counts in GPUs
    return subprocess.run(["bash", words[0], *dry, *words[1:]], env=environment, timeout=60, check=False).returncode


def sbatch(words: list[str]) -> int:
    script = next(word for word in words if word.endswith(".sbatch"))
    assert check_training(words[words.index("--") + 1 :]) == 0
    return subprocess.run(["bash", script, "--help"], timeout=60, check=False, capture_output=True).returncode


def pip(words: list[str]) -> int:
    """The extras exist, and so does the file of pins."""
    assert words[1] == "install", words
    assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).is_file()
    asked = {extra for word in words for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")}
    return 0 if asked <= set(PYPROJECT["project"]["optional-dependencies"]) else 1


def make(words: list[str]) -> int:
    """The targets exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return 0 if set(words[1:]) <= targets else 1


def docker(words: list[str]) -> int:
    file = ROOT / words[words.index("-f") + 1]
    return 0 if "services" in yaml.safe_load(file.read_text()) else 1


def wandb(words: list[str]) -> int:
    assert words[1:] == ["login"]
    return 0 if importlib.util.find_spec("wandb") else 1


def tail(words: list[str]) -> int:
    """The log's name is that which the job script asks for: JOB_NAME-NUMBER.log."""
    asks = "#SBATCH --output=%x-%j.log" in (ROOT / "launch" / "train.sbatch").read_text()
    return 0 if asks and re.fullmatch(r"\w+-\d+\.log", words[-1]) else 1


def touch(words: list[str]) -> int:
    """A request to a running training, by a name that the package looks for."""
    name = Path(words[1]).name
    return 0 if any(f'"{name}"' in path.read_text() for path in (ROOT / "gradiend_dist").rglob("*.py")) else 1


def nothing(words: list[str]) -> int:
    """The environment is active, and torch has one thread here in any case."""
    assert words in ([".", ".venv/bin/activate"], ["export", "OMP_NUM_THREADS=1"]), words
    return 0


RUN: dict[str, Callable[[list[str]], int]] = {
    "gradiend-dist": package_main,
    "accelerate": accelerate,
    "python": python,
    "python3": python,
    "launch/single_node.sh": launch_script,
    "launch/seed_array.sbatch": launch_script,
    "launch/sync_wandb.sh": launch_script,
}
STAND_INS: dict[str, Callable[[list[str]], int]] = {
    "sbatch": sbatch,
    "pip": pip,
    "make": make,
    "docker": docker,
    "wandb": wandb,
    "tail": tail,
    "touch": touch,
    ".": nothing,
    "export": nothing,
}


def run_shell(block: Block) -> None:
    for words in commands(block.text):
        program = RUN.get(words[0]) or STAND_INS.get(words[0])
        assert program is not None, f"{block.where}: nothing runs or stands in for {shlex.join(words)}"
        assert program(words) == 0, f"{block.where}: {shlex.join(words)}"


def run_python(block: Block, names: dict[str, object]) -> None:
    source = "\n" * (block.line - 1) + block.text  # so that a traceback shows the page's line
    exec(compile(source, str(block.page), "exec"), names)


# --- where it is run


@pytest.fixture(scope="module")
def tree(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a page finds: the examples and scripts of a clone, base models under their hub ids, and a finished run."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("examples", "accelerate_configs", "launch"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(masked_lm, root / "bert-base-cased")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    llama = LlamaConfig(vocab_size=50, **sizes)
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(root / "meta-llama" / "Llama-3.1-8B")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert package_main(["gradiend-dist", "train", "--config", "examples/run.yaml"]) == 0
    return root


@pytest.fixture
def clone(tree: Path, masked_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of that tree for one page, as the working directory; sbatch is a stand-in, and nothing is pre-trained."""
    root = tmp_path / "clone"
    shutil.copytree(tree, root)
    monkeypatch.chdir(root)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\necho 4711\n")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for variable in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(variable)

    def built(directory: Path, **_: object) -> Path:
        return Path(shutil.copytree(masked_lm, directory))

    monkeypatch.setitem(demo.BUILDERS, "masked", ("base_model", built))
    monkeypatch.setitem(demo.PRETRAIN_STEPS, "causal", 2)


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (page.name in SLOW)) for page in PAGES]
)
def test_page__every_block_runs(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails for a command, flag, argument or name in the documentation that does not exist or does not work."""
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.language == "sh":
            run_shell(block)
        elif block.language == "python":
            run_python(block, names)
    if page.name == "README.md":
        check_tables(page, capfd.readouterr().out)


def check_tables(page: Path, printed: str) -> None:
    """The tables that are shown have the columns of those that the commands have just printed."""
    headers = {" ".join(line.split()) for line in printed.splitlines()}
    shown = [" ".join(block.text.splitlines()[0].split()) for block in blocks(page) if block.language == "text"]
    assert shown and set(shown) <= headers


# --- what needs no model


def test_readme__shows_rows_of_the_example() -> None:
    (sample,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "csv")
    rows = (ROOT / "examples" / "gender.csv").read_text().splitlines()
    assert set(sample.splitlines()) <= set(rows)


def test_readme__is_short() -> None:
    assert 120 <= len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_blocks__are_of_a_known_language() -> None:
    """A shell block under another name, or under none, would not be run."""
    for page in PAGES:
        for block in blocks(page):
            assert block.language in (*EXECUTED, "text", "csv", "bibtex", "yaml", "json"), block.where


def test_commands__are_read_like_a_shell_reads_them() -> None:
    text = "a 'b c' # d\ne \\\n  --f=1 && g\n\n"
    assert list(commands(text)) == [["a", "b c"], ["e", "--f=1"], ["g"]]


def test_pages__are_all_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name})" not in index]
    assert not missing


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a code host makes of the headings: lower case, without punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in LINKED])
def test_page__every_link_leads_somewhere(page: Path) -> None:
    """Fails for a page, file, picture or heading that was renamed."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() and file.is_relative_to(ROOT), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(page)} links to {target}: no such heading"


def test_example__tells_no_class_by_its_context() -> None:
    """Both classes have the same sentences but for the subject, and no subject or sentence is in two splits."""
    pd = pytest.importorskip("pandas")
    rows = pd.read_csv(ROOT / "examples" / "gender.csv")
    assert len(rows) == 300 and rows["masked"].is_unique
    assert (rows["masked"].str.count(re.escape("[MASK]")) == 1).all()
    assert set(zip(rows["label"], rows["label_class"], strict=True)) == {("he", "M"), ("she", "F")}
    assert rows.groupby(["split", "label_class"]).size().to_dict() == {
        ("test", "F"): 30, ("test", "M"): 30, ("train", "F"): 90, ("train", "M"): 90, ("validation", "F"): 30,
        ("validation", "M"): 30,
    }  # fmt: skip
    endings = rows["masked"].str.split("[MASK]", regex=False).str[1]
    for ending, splits in rows.groupby(endings)["split"].agg(set).items():
        assert len(splits) == 1, ending
