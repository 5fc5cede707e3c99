"""openai-python as a judge, at a real model. `python -m tests.conformance` starts it in the judges' own environment.

REAL_URL serves the real small model. What the scripted model can show of this client is in the tests themselves.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

NUM_REQUESTS = 40
MODEL = os.environ["REAL_MODEL"]
PROMPTS = (
    "Write some emoji, 😀🎉🌍, and Chinese words, 你好世界.",
    "Count to ten.",
    "What is the weather in Paris?",
    "Write a haiku in Japanese: 春",
    "Say <tool_call> twice.",
)
STOPS: tuple[str | list[str], ...] = (["a"], ["\n", " the "], ["e", "o", "i", "u"], "😀")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    mood: Literal["good", "bad"]


TOOLS = [pydantic_function_tool(Person, name=name) for name in ("find", "greet")]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": Person.model_json_schema()},
}
CHOICES = ("auto", "required", {"type": "function", "function": {"name": "greet"}})


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=os.environ["REAL_URL"], api_key="local", max_retries=0) as made:
        yield made


@dataclass
class Joined:
    """One choice of a stream, put together."""

    content: str = ""
    num_roles: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    """[name, arguments] of each."""

    def add(self, choice: Any) -> None:
        assert self.finish_reasons == [], "nothing comes behind the finish reason"
        self.content += choice.delta.content or ""
        self.num_roles += choice.delta.role is not None
        self.logprobs += choice.logprobs.content if choice.logprobs else []
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(self.calls)
                self.calls.append([call.function.name, ""])
            self.calls[call.index][1] += call.function.arguments or ""
        if choice.finish_reason:
            self.finish_reasons.append(choice.finish_reason)


def some_request(rng: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0, 0.7, 1, 1.8]),
        "max_tokens": rng.choice([1, 5, 20, 60]),
        "n": rng.choice([1, 1, 2, 3]),
    }
    if rng.random() < 0.4:
        asked["stop"] = rng.choice(STOPS)
    if rng.random() < 0.4:
        asked |= {"logprobs": True, "top_logprobs": rng.choice([0, 3])}
    if rng.random() < 0.3:
        asked |= {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"30": 5}}
    kind = rng.random()
    if kind < 0.25:
        asked |= {"tools": TOOLS, "tool_choice": rng.choice(CHOICES), "parallel_tool_calls": rng.random() < 0.5}
    elif kind < 0.45:
        asked["response_format"] = rng.choice([SCHEMA, {"type": "json_object"}])
    return asked


@pytest.mark.parametrize("seed", range(NUM_REQUESTS))
def test_a_stream_is_the_whole_answer_whatever_is_asked(client: OpenAI, seed: int) -> None:
    asked = some_request(random.Random(seed))
    whole = client.chat.completions.create(**asked)
    joined = [Joined() for _ in range(asked["n"])]
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            joined[choice.index].add(choice)
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices) == len(joined)
    for seen, choice in zip(joined, whole.choices, strict=True):
        check(asked, seen, choice)
    if asked.get("logprobs"):
        assert sum(len(seen.logprobs) for seen in joined) == usage.completion_tokens


def check(asked: dict[str, Any], seen: Joined, choice: Choice) -> None:
    assert (seen.num_roles, seen.finish_reasons) == (1, [choice.finish_reason])
    assert seen.content == (choice.message.content or "")
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]
    assert seen.calls == calls
    assert seen.logprobs == ((choice.logprobs.content if choice.logprobs else None) or [])
    stops = asked.get("stop", [])
    assert [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop in seen.content] == []
    if not stops and not calls and "tools" not in asked and seen.logprobs:
        said = b"".join(bytes(entry.bytes or []) for entry in seen.logprobs)
        assert said.decode(errors="replace") == seen.content
    if not stops and choice.finish_reason != "length":
        for _, arguments in calls:
            Person.model_validate_json(arguments)
        if asked.get("response_format") == SCHEMA:
            Person.model_validate_json(seen.content)
        elif "response_format" in asked:
            assert isinstance(json.loads(seen.content), dict)


def test_parse_gives_a_model_of_pydantic(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Ann is 40 years old and feels good."}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_the_stream_helper_tells_of_content_and_gives_the_parsed_end(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Ann is 40 years old."}], "temperature": 0}
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert "".join(event.delta for event in events if event.type == "content.delta") == final.content
    assert isinstance(final.parsed, Person)
    [done] = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.parsed
