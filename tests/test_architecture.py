"""The rules of the rooms that import-linter cannot say: who reads the environment, who builds clients, and so on."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("app", "bridge", "decode", "tasks", "tokenferry")
COMPOSITION_ROOTS = {"app/main.py", "bridge/main.py", "tasks/worker/__main__.py"}
APP_MAY_USE_OF_DECODE = {
    "decode.checkpoint",
    "decode.engine.sampling",
}
NAMES_WITHOUT_MEANING = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}


def modules(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """Modules that are imported directly, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def reads_environment(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in ast.walk(tree)
    )


def test_every_init_is_empty() -> None:
    full = [path for room in ROOMS for path in (ROOT / room).rglob("__init__.py") if path.read_text().strip()]
    assert full == []


def test_only_composition_roots_read_the_environment() -> None:
    readers = {name for name, tree in modules("app", "bridge", "decode", "tasks") if reads_environment(tree)}
    assert readers <= COMPOSITION_ROOTS


def test_only_composition_roots_build_clients() -> None:
    builders = {
        name
        for name, tree in modules("app", "bridge", "decode", "tasks")
        if "tasks.process.clients" in imported(tree)
    }
    assert builders <= COMPOSITION_ROOTS


def test_duckdb_is_imported_in_the_catalog_alone() -> None:
    assert {name for name, tree in modules(*ROOMS) if "duckdb" in imported(tree)} == {"bridge/catalog/catalog.py"}


def test_the_http_edge_takes_little_of_decode() -> None:
    taken = {module for _, tree in modules("app") for module in imported(tree) if module.startswith("decode.")}
    known = {
        module for module in taken if any(module == ok or module.startswith(f"{ok}.") for ok in APP_MAY_USE_OF_DECODE)
    }
    assert taken == known


def test_no_files_import_each_other_in_a_circle() -> None:
    """What is imported for types alone counts, too: who reads one file of a circle has to read them all."""
    trees = {name[:-3].replace("/", "."): tree for name, tree in modules(*ROOMS)}
    graph = {name: (imported(tree) & trees.keys()) - {name} for name, tree in trees.items()}
    TopologicalSorter(graph).prepare()


def test_no_folder_is_crowded() -> None:
    folders = Counter(str(Path(name).parent) for name, _ in modules(*ROOMS) if Path(name).name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > 12} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name for name, _ in modules(*ROOMS) if Path(name).name in NAMES_WITHOUT_MEANING] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_begins_with_what_it_is(room: str) -> None:
    bare = [name for name, tree in modules(room) if tree.body and not ast.get_docstring(tree)]
    assert bare == []
