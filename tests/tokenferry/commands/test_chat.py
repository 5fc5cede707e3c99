"""The chat command: a client like any other, driven line by line against the one-process server."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from rich.console import Console

from tokenferry.cell.one_process import LocalServer, open_server
from tokenferry.commands.chat import choose_model, converse
from tokenferry.commands.chat import run as run_chat


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server("scripted", environ={}, scripted_step_ms=0) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="local", max_retries=0, timeout=30) as running:
        yield running


def keyboard(*lines: str | BaseException) -> Callable[[str], str]:
    """What a person types, then the end of the input."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    return read


def talk(client: openai.OpenAI, *lines: str | BaseException, **options: Any) -> str:
    shown = io.StringIO()
    converse(client, "scripted", Console(file=shown, width=200), keyboard(*lines), max_tokens=6, **options)
    return shown.getvalue()


def test_an_answer_is_shown_with_its_rate(client: openai.OpenAI) -> None:
    shown = talk(client, "hello")
    assert shown.count("<") == 6
    assert "(6 tokens," in shown


def test_the_conversation_is_kept_until_new(client: openai.OpenAI) -> None:
    def answers(shown: str) -> list[str]:
        return [line for line in shown.splitlines() if line.startswith("<")]

    same, again, forgotten = answers(talk(client, "hello", "hello", "/new", "hello"))
    assert same == forgotten != again


def test_a_system_message_goes_first(client: openai.OpenAI) -> None:
    assert talk(client, "hello") != talk(client, "hello", system="be brief")


def test_exit_leaves_at_once(client: openai.OpenAI) -> None:
    assert "<" not in talk(client, "", "/exit", "hello")


def test_ctrl_c_at_the_prompt_leaves(client: openai.OpenAI) -> None:
    assert "<" not in talk(client, KeyboardInterrupt(), "hello")


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(client: openai.OpenAI) -> None:
    class Interrupting(io.StringIO):
        armed = True

        def write(self, text: str) -> int:
            if self.armed and "<" in text:
                self.armed = False
                super().write(text)
                raise KeyboardInterrupt
            return super().write(text)

    shown = Interrupting()
    converse(client, "scripted", Console(file=shown, width=200), keyboard("hello", "more"), max_tokens=6)
    assert "(stopped)" in shown.getvalue()
    assert "(6 tokens," in shown.getvalue()


def test_an_error_of_the_server_is_shown_and_the_question_forgotten(client: openai.OpenAI) -> None:
    shown = io.StringIO()
    converse(client, "nobody", Console(file=shown, width=200), keyboard("hello"))
    assert "nobody" in shown.getvalue().splitlines()[-2]


def test_the_first_model_is_chosen(client: openai.OpenAI) -> None:
    assert choose_model(client) == "scripted"


def test_no_server_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat("http://127.0.0.1:9/v1", "local", "", "", None) == 1
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err
