"""docs/conformance.md tells the truth: no number is left out, and the judges have these versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai

TESTS = Path(__file__).parent.parent
PAGE = (TESTS.parent / "docs/conformance.md").read_text()


def test_no_number_is_left_out_and_each_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 43))
    assert [number for number, row in rows if "::test_" not in row] == []


def test_the_versions_of_the_judges_are_those_that_are_installed_for_them() -> None:
    here = Path(__file__).parent
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (here / "requirements.txt").read_text(), re.MULTILINE))
    packages = json.loads((here / "package.json").read_text())["dependencies"]
    judges = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert len(pinned) == 4
    for name, version in pinned.items():
        assert re.search(rf"^\| `{name}[ `].*\| {re.escape(version)} \|", judges, re.MULTILINE), name
    for name in ("openai", "ai", "@ai-sdk/openai-compatible"):
        assert re.search(rf"`{name}`.*{re.escape(packages[name])}", judges), name


def test_every_judge_of_the_page_is_a_program() -> None:
    programs = {path.stem.removeprefix("judge_") for path in Path(__file__).parent.glob("judge_*")}
    named = re.search(r"# some: (.*)", PAGE)
    assert named is not None
    assert programs == set(named.group(1).split(", "))


def test_the_page_names_the_major_version_of_openais_client_that_runs_in_these_tests() -> None:
    assert re.search(rf"\| `openai` \(Python\) \| {openai.__version__.partition('.')[0]}\.", PAGE)
