"""What a process manager makes of PORT, and what we make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.process.supervisor import EXIT_CANNOT_SERVE
from tokenferry.cell.processes import web_environ


@pytest.mark.parametrize(
    ("given", "port"),
    [
        ({"PORT": "5000", "HONCHO_PROCESS_NAME": "web.1"}, "8080"),  # plain `honcho start`
        ({"PORT": "5001", "HONCHO_PROCESS_NAME": "web.2"}, "8081"),  # `honcho start -c web=2`
        ({"PORT": "9000", "HONCHO_PROCESS_NAME": "web.1"}, "9000"),  # `PORT=9000 honcho start`
        ({"PORT": "9001", "HONCHO_PROCESS_NAME": "web.2"}, "9001"),
        ({"PORT": "5000"}, "5000"),  # no honcho: said by a person
        ({}, None),
    ],
)
def test_web_takes_the_port_that_a_person_means(given: dict[str, str], port: str | None) -> None:
    assert web_environ(given).get("PORT") == port


def test_a_model_that_is_not_here_ends_the_web_process_with_what_to_do(tmp_path: Path) -> None:
    environ = {**os.environ, "MODEL": "smollm2-135m-instruct", "TOKENFERRY_CACHE": str(tmp_path), "PORT": "0"}
    command = [sys.executable, "-m", "tokenferry.cli", "web"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CANNOT_SERVE
    assert "run `tokenferry pull smollm2-135m-instruct`" in ended.stderr
