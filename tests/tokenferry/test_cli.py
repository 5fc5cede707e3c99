"""The command line: failures are told in one line that says what to do, and flags stand for their variables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenferry.cli import PREFLIGHT_FLAGS, SETTING_FLAGS, build_parser, environ_from, main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFERRY_CACHE", str(tmp_path / "cache"))


def test_a_bad_setting_stops_with_the_name_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", "many")
    assert main(["serve"]) == 2
    assert "PORT must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VARIANT", "fp7"),
        ("MAX_NUM_SEQS", "0"),
        ("KV_CACHE_TOKENS", "-1"),
        ("MAX_MODEL_LEN", "x"),
        ("WORKERS", "1.5"),
        ("LEASE_MS", "1"),
        ("REDIS_URL", "http://x"),
        ("FIRST_TOKEN_DEADLINE_S", "never"),
        ("PREFLIGHT_MIN_MEMORY_MB", "lots"),
    ],
)
def test_serve_reads_every_setting_before_it_starts_anything(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "scripted")
    monkeypatch.setenv(variable, value)
    assert main(["serve"]) == 2
    assert variable in capsys.readouterr().err


def test_an_unknown_model_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm2-135m-instuct"]) == 1
    assert "did you mean smollm2-135m-instruct?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "near"), [(["tpo"], "top"), (["docter"], "doctor"), (["requests", "--state", "faild"], "failed")]
)
def test_a_mistyped_command_or_choice_suggests_the_nearest(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_terms_are_told_before_a_download(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "gemma-3-270m"]) == 1
    assert "--accept-terms" in capsys.readouterr().err


def test_models_says_what_is_here_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "smollm2-135m-instruct" in shown
    assert "Apache-2.0" in shown
    assert "no: download" in shown


def test_preflight_refuses_with_the_figures_and_force_lets_it_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "scripted")
    assert main(["preflight", "--min-memory-mb", "999999999"]) == 1
    captured = capsys.readouterr()
    assert "needed at least 999,999,999 MB" in captured.err
    assert "short" in captured.out
    assert main(["preflight", "--min-memory-mb", "999999999", "--force"]) == 0


def test_models_and_preflight_are_told_to_programs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--json"]) == 0
    known = {model["name"]: model["is_here"] for model in json.loads(capsys.readouterr().out)}
    assert known["smollm2-135m-instruct"] is False
    monkeypatch.setenv("MODEL", "scripted")
    assert main(["preflight", "--json", "--min-memory-mb", "999999999"]) == 1
    passed = {finding["what"]: finding["passed"] for finding in json.loads(capsys.readouterr().out)}
    assert False in passed.values()


def test_a_flag_stands_for_its_variable_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1234")
    monkeypatch.setenv("MODEL", "from-environment")
    options = build_parser().parse_args(["serve", "--model", "scripted", "--force", "--workers", "2"])
    environ = environ_from(options, SETTING_FLAGS, PREFLIGHT_FLAGS)
    assert environ["MODEL"] == "scripted"
    assert environ["PORT"] == "1234"
    assert environ["WORKERS"] == "2"
    assert environ["PREFLIGHT_FORCE"] == "1"
    assert "PREFLIGHT_MIN_SWAP_MB" not in environ


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, tokenferry.cli as cli; cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("serve", "requests", "doctor", "top", "--follow"):
        assert command.lstrip("-") in script


def test_bash_takes_the_completion(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "arguments", [["requests", "--limit", "0"], ["requests", "--state", "lost"], ["bench", "-c", "x"]]
)
def test_an_argument_that_is_not_allowed_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[1] in capsys.readouterr().err
