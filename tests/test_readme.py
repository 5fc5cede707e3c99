"""The README tells the truth: its links lead somewhere, its names exist, its settings are all of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from decode.registry import PUBLISHED
from tokenferry.cli import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    ("module", "name"), re.findall(r"\[`([\w.]+)`\]\([\w/.]+\.py\) `([\w.]+)`", README), ids=lambda value: str(value)
)
def test_every_step_of_the_straight_line_exists(module: str, name: str) -> None:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)


def test_every_setting_is_in_the_table() -> None:
    sources = (ROOT / "tasks/settings.py").read_text() + (ROOT / "tasks/preflight.py").read_text()
    variables = set(re.findall(r'environ, "([A-Z_]+)"', sources))
    assert len(variables) > 15
    table = README.partition("## Settings")[2].partition("\n## ")[0]
    assert {name for name in variables if f"`{name}`" not in table and f"`{name}=" not in table} == set()


def test_every_model_is_in_the_table() -> None:
    for model in PUBLISHED.values():
        assert f"`{model.name}`" in README
        assert f"{model.download_bytes / 1e6:,.0f} MB" in README


@pytest.mark.parametrize("line", re.findall(r"`tokenferry (\w+[^`]*)`", README))
def test_every_command_is_one(line: str) -> None:
    words = [word.replace("MODEL", "smollm2-135m-instruct") for word in line.split()]
    assert build_parser().parse_args(words).command is not None
