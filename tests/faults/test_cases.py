"""The README of the fault suite tells the truth: every test that it names exists, and no number is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
README = (Path(__file__).parent / "README.md").read_text()
NAMED = sorted(set(re.findall(r"`(\w+(?:/\w+)+)::(test_\w+)`", README)))


@pytest.mark.parametrize(("module", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_named_test_exists(module: str, name: str) -> None:
    tree = ast.parse((TESTS / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_no_number_is_left_out_and_each_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", README, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [*range(1, 21), *range(26, 37)]
    assert [number for number, row in rows if "::test_" not in row] == []


def test_every_test_of_this_folder_is_in_the_table() -> None:
    here = {
        node.name
        for path in (TESTS / "faults").glob("test_*.py")
        if path.name not in ("test_cases.py", "test_driver.py", "test_parts.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert here - {name for _, name in NAMED} == set()


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (TESTS / "faults" / link).exists()] == []
