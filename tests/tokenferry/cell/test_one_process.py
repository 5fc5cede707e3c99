"""The one-process server: the same answers as the processes give, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tasks.process.settings import SettingsError
from tokenferry.cell.one_process import LocalServer, open_server
from tokenferry.errors import ForPeople


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server("scripted", environ={}, scripted_step_ms=0) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="local", max_retries=0, timeout=30) as running:
        yield running


def ask(client: openai.OpenAI, text: str, max_tokens: int = 8) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": text}],
        max_completion_tokens=max_tokens,
        temperature=0,
    )


def test_it_lists_its_model_and_answers(server: LocalServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [server.model] == ["scripted"]
    answer = ask(client, "hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_stream_joins_to_the_whole_answer_with_usage_at_the_end(client: openai.OpenAI) -> None:
    whole = ask(client, "once more", 20)
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "once more"}],
            max_completion_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_many_at_once_all_get_their_own_answer(client: openai.OpenAI) -> None:
    alone = [ask(client, f"number {number}").choices[0].message.content for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(
            pool.map(lambda number: ask(client, f"number {number}").choices[0].message.content, range(12))
        )
    assert together == alone


def test_the_record_of_an_answer_can_be_looked_at(server: LocalServer, client: openai.OpenAI) -> None:
    state = server.records.state(ask(client, "look").id)
    assert state is not None
    assert state.state == "finished"


def test_settings_are_given_in_lower_case_and_checked() -> None:
    with pytest.raises(SettingsError, match="MAX_NUM_SEQS"), open_server("scripted", environ={}, max_num_seqs=0):
        pass


def test_an_address_that_is_taken_is_told(server: LocalServer) -> None:
    with (
        pytest.raises(ForPeople, match="cannot listen on 192"),
        open_server("scripted", environ={}, host="192.0.2.1"),
    ):
        pass


def test_closing_it_ends_its_threads_and_its_port() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with open_server("scripted", environ={}) as running:
        with openai.OpenAI(base_url=running.base_url, api_key="local", max_retries=0) as client:
            ask(client, "hello", 2)
    with openai.OpenAI(base_url=running.base_url, api_key="local", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            ask(client, "hello", 2)
    left = {thread.name for thread in threading.enumerate() if thread.is_alive()} - before
    assert {name for name in left if name in ("web", "engine", "publisher", "heartbeat") or "bridge" in name} == set()
