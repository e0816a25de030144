"""Imports point one way: from the rooms further down to those further up, without a cycle inside a room.

Imports inside functions and under TYPE_CHECKING count: they would only hide a cycle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gradiend_dist"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# A module imports the rows before its own, and its own room. Folders and single modules alike are rooms.
ORDER = (
    "errors", "space", "config", "data", "distributed", "model", "storage", "gradients", "engines", "memory",
    "forecast", "rewriting", "model_with_gradiend", "session", "evaluation", "report", "tracking", "training",
    "trainer", "demo", "commands", "train evaluate __main__",
)  # fmt: skip
ROWS = {room: row for row, rooms in enumerate(ORDER) for room in rooms.split()}

# Who may import inside a function: a command, which must answer --help at once.
STARTS = ("__main__", "commands")
# What may be imported inside a function, from anywhere, and why.
IMPORTED_LATE = {
    "engines.kernels": "Triton is optional, and takes time to import",
    "report.figures": "matplotlib is optional",
    "report.plots": "matplotlib is optional",
    "tracking.wandb_page": "W&B takes a second to import, and few runs use it",
}


@dataclass(frozen=True)
class Edge:
    """One import: of the importing module, what it imports, and whether it does so inside a function."""

    source: str
    target: str
    line: int
    inside_function: bool

    def __str__(self) -> str:
        return f"gradiend_dist.{self.source} imports gradiend_dist.{self.target} in line {self.line}"

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.target


def room(module: str) -> str:
    return module.split(".")[0]


@cache
def modules() -> dict[str, Path]:
    """All modules by their dotted name below the package; a folder's __init__ has the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def edges() -> tuple[Edge, ...]:
    return tuple(edge for module, path in modules().items() if module for edge in imports(module, path.read_text()))


def imports(module: str, source: str) -> Iterator[Edge]:
    """Every import of a project module, at any depth."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        for target in targets(node):
            yield Edge(module, target, node.lineno, id(node) in inside)  # type: ignore[attr-defined]


def targets(node: ast.AST) -> Iterator[str]:
    """The project's modules that a statement imports; names of the package itself (its version) are no module."""
    names: list[str] = []
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    for name in names:
        package, _, target = name.partition(".")
        if package == "gradiend_dist":
            target = target if target in modules() else target.rpartition(".")[0]
            if target:
                yield target


def cycles() -> set[frozenset[str]]:
    """Groups of modules of one room that import each other in a circle."""
    graph = {module: {e.target for e in edges() if e.source == module and room(e.target) == room(module)}
             for module in modules()}  # fmt: skip
    found = set()
    while True:
        try:
            TopologicalSorter(graph).prepare()
            return found
        except CycleError as error:
            circle = frozenset(error.args[1])
            found.add(circle)
            for module in circle:
                graph[module] -= circle


def tree() -> str:
    """The rooms in their order, each module with the first line of its docstring: for docs/architecture.md."""
    lines = []
    for name in (name for names in ORDER for name in names.split()):
        inner = [module for module in modules() if module.startswith(f"{name}.")]
        lines.append(f"{name + ('/' if inner else '.py'):28}{first_line(name)}".rstrip())
        for module in inner:
            *folders, last = module.split(".")
            is_folder = any(other.startswith(f"{module}.") for other in inner)
            entry = "    " * len(folders) + last + ("/" if is_folder else ".py")
            lines.append(f"{entry:27} {first_line(module)}".rstrip())
    return "```text\n" + "\n".join(lines) + "\n```"


def first_line(module: str) -> str:
    return (ast.get_docstring(ast.parse(modules()[module].read_text())) or "").partition("\n")[0]


# --- the tests


def test_rooms__are_all_in_the_order():
    """A new folder or module at the top has a place, and no name in the order is without one."""
    assert {room(module) for module in modules() if module} == set(ROWS)


def test_imports__point_upwards_only():
    wrong = [edge for edge in edges() if ROWS[room(edge.target)] > ROWS[room(edge.source)]]
    assert [str(edge) for edge in wrong] == []


def test_imports__inside_a_room_have_no_cycle():
    assert [sorted(circle) for circle in cycles()] == []


def test_imports__inside_functions_have_a_reason():
    late = [edge for edge in edges() if edge.inside_function and room(edge.source) not in STARTS]
    assert [str(edge) for edge in late if edge.target not in IMPORTED_LATE] == []
    assert {edge.target for edge in late} >= IMPORTED_LATE.keys(), "what is imported late no more needs no reason"


def test_architecture__has_the_tree_of_the_folders():
    """docs/architecture.md is for those who look for the place of a change: it must not rot."""
    page = ARCHITECTURE.read_text() if ARCHITECTURE.exists() else ""
    if "<!-- tree -->" not in page:
        pytest.skip("docs/architecture.md has no tree yet")
    written = page.partition("<!-- tree -->")[2].partition("<!-- /tree -->")[0]
    assert written.strip() == tree(), "print it anew: python tests/test_architecture.py"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import gradiend_dist.space", [("space", False)]),
        ("from gradiend_dist import __version__", []),
        ("from gradiend_dist.storage import files", [("storage.files", False)]),
        ("from gradiend_dist.errors import UserError", [("errors", False)]),
        ("if TYPE_CHECKING:\n    from gradiend_dist.trainer import TextPredictionTrainer", [("trainer", False)]),
        ("class A:\n    def f(self):\n        from gradiend_dist.storage.files import x", [("storage.files", True)]),
    ],
)
def test_imports__are_seen_in_every_form(source, found):
    """The rules above hold for what is seen."""
    assert [(edge.target, edge.inside_function) for edge in imports("test", source)] == found


# Who asks for the argument itself: it is checked and read there, or a result depends on it as on every argument.
READS_COMPAT = ("config.arguments", "evaluation.encoder_report", "evaluation.decoder_evaluation")


def test_differences_to_the_reference__are_asked_of_behaviour():
    """Fails if code branches on `compat`: config/compat.py would no longer list every difference."""
    branches = [
        f"{module}:{node.lineno}"
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "compat" and module not in READS_COMPAT
    ]
    assert not branches


COLLECTIVES = frozenset(
    "total total_on_host smallest largest all_agree gather decide first together concatenate redistribute all_reduce "
    "reduce_scatter exchange broadcast barrier meet".split()
)
# The collectives themselves, which are about ranks in every line.
SAID_ABOVE = ("distributed.",)
# Methods of many classes, torch's and Python's own among them: what is called is not known by its name.
OF_MANY = frozenset("join load result gather leave save_pretrained initialize_weights".split())


def says_who_calls(node: ast.AST) -> bool:
    text = " ".join((ast.get_docstring(node) or "").lower().split())  # type: ignore[arg-type]
    words = ("all ranks", "every rank", "rank 0", "ranks of", "no other rank", "each process")
    return any(said in text for said in words)


@dataclass(frozen=True)
class Function:
    """A function or method, and whether it, its class or what it stands in says who must call it."""

    module: str
    node: ast.FunctionDef
    says_it: bool

    def __str__(self) -> str:
        return f"{self.module}.{self.node.name}:{self.node.lineno}"


@cache
def functions() -> tuple[Function, ...]:
    found = []
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        said = {
            id(child)
            for outer in ast.walk(tree)
            if isinstance(outer, ast.ClassDef | ast.FunctionDef) and says_who_calls(outer)
            for child in ast.walk(outer)
        }
        found += [Function(module, n, id(n) in said) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return tuple(found)


def for_all_ranks() -> set[str]:
    """Names that belong to functions for all ranks and to no others."""
    by_name: dict[str, list[Function]] = {}
    for function in functions():
        by_name.setdefault(function.node.name, []).append(function)
    return {
        name
        for name, alike in by_name.items()
        if all(function.says_it for function in alike)
        and any("all ranks" in (ast.get_docstring(function.node) or "").lower() for function in alike)
    } - OF_MANY


def test_functions_that_call_collectives__say_who_must_call_them():
    """A function that only some ranks enter would hang the others: its docstring, or its class's, says who must.

    By its own lines (`comm.gather(...)`, `self.comm.first(...)`), and by what it calls that is for all ranks itself.
    """
    silent = [
        function for function in functions() if not function.says_it and not function.module.startswith(SAID_ABOVE)
    ]
    assert [str(function) for function in silent if calls_collective(function.node)] == []
    indirect = for_all_ranks()
    assert len(indirect) > 40
    assert [str(function) for function in silent if called(function.node) & indirect] == []


def calls_collective(function: ast.FunctionDef) -> bool:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in COLLECTIVES
        and ast.unparse(call.value).split(".")[-1] == "comm"
        for call in calls
    )


def called(function: ast.FunctionDef) -> set[str]:
    """The names of what it calls, of methods and functions alike."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else call.id for call in calls
            if isinstance(call, ast.Attribute | ast.Name)}  # fmt: skip


if __name__ == "__main__":
    print(tree())
