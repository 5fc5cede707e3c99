"""Completions, tokens and API keys with the openai client, against the one-process server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.app.web import MODEL
from tokenferry.cell.one_process import LocalServer, open_server

KEY = "sk-ferry"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEY} Ann\n")
    with open_server(MODEL, environ={}, scripted_step_ms=0, api_keys_file=path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as made:
        yield made


def test_the_openai_client_gets_the_same_completion_streamed_and_whole(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=8, seed=1, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text[0] for choice in whole.choices] == ["a", "a", "b", "b"]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 32)
    texts = [""] * 4
    reasons: list[str] = []
    for chunk in client.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=8, seed=1, echo=True, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length"] * 4


def test_the_openai_client_reads_log_probabilities_of_a_completion(client: OpenAI) -> None:
    [choice] = client.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs or []) == len(choice.logprobs.top_logprobs or []) == 4
    offsets = choice.logprobs.text_offset or []
    places = [
        choice.text[offset:].startswith(token) for offset, token in zip(offsets, choice.logprobs.tokens, strict=True)
    ]
    assert places == [True] * 4


def test_the_openai_client_is_told_that_its_key_is_wrong(server: LocalServer) -> None:
    with OpenAI(base_url=server.base_url, api_key="sk-mallory", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError) as caught:
            other.models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.request_id


def call(
    server: LocalServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, Message, bytes]:
    with closing(HTTPConnection(server.origin.removeprefix("http://"))) as connection:
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def test_tokens_of_a_text_over_a_socket(server: LocalServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi"}).encode()
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    _, answered, data = call(server, "POST", "/tokenize", body, **headers)
    assert json.loads(data)["tokens"] == [104, 105]
    assert answered["x-request-id"] == "mine"
    assert call(server, "HEAD", "/livez")[0] == 200
    assert call(server, "POST", "/tokenize", body)[0] == 401
