"""Calling scripts on a server that forgets them at any moment, and what each of them is put together from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tasks.protocol.lua
from tasks.protocol.lua import PARTS, Scripts
from tests.conftest import RedisServer

FOLDER = Path(tasks.protocol.lua.__file__).parent / "scripts"
BODIES = {path.stem: path.read_text() for path in FOLDER.glob("*.lua")}
TEXTS = {path.stem: path.read_text() for path in FOLDER.glob("parts/*.lua")}


def test_a_server_that_forgets_scripts_again_and_again_still_runs_them(redis_server: RedisServer) -> None:
    redis: Any = redis_server.connect()

    class Forgetting:
        """Every call finds a server that has just forgotten everything."""

        def evalsha(self, *args: Any) -> Any:
            redis.script_flush()
            return redis.evalsha(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(redis, name)

    scripts = Scripts(Forgetting())  # type: ignore[arg-type]
    assert scripts.call("leave", 1, "w1", "m") == 1
    assert scripts.call("peers", 1, "w1", "m") == -1


@pytest.mark.parametrize("name", PARTS)
def test_a_script_has_the_parts_that_it_uses_before_it_and_no_others(name: str) -> None:
    of_parts = set().union(*map(_defined, TEXTS.values()))
    at_hand: set[str] = set()
    unused = set(PARTS[name])
    for text in (*(TEXTS[part] for part in PARTS[name]), BODIES[name]):
        needed = _words(text) & of_parts - _defined(text)
        assert needed <= at_hand
        unused -= {part for part in unused if _defined(TEXTS[part]) & needed}
        at_hand |= _defined(text)
    assert not unused


def test_every_script_and_part_is_used() -> None:
    assert set(PARTS) == set(BODIES)
    assert set(TEXTS) == {part for parts in PARTS.values() for part in parts}


def _defined(text: str) -> set[str]:
    return set(re.findall(r"^local (?:function )?(\w+)", text, re.MULTILINE))


def _words(text: str) -> set[str]:
    """All that may be a name: no comment, no member, nothing in quotes."""
    return set(re.findall(r"(?<![.'\w])\w+(?!['\w])", re.sub(r"--.*", "", text)))
