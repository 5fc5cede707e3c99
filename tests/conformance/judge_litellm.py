"""LiteLLM as a judge. Runs in the judges' own environment; `python -m tests.conformance` starts it.

REAL_URL serves the real small model, SCRIPTED_URL the scripted one, which says what a prompt dictates.
"""

from __future__ import annotations

import json
import os
from typing import Any

# Prices, which it would fetch otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest
from pydantic import BaseModel

CALL = '\x0e<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\x0f'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


class Person(BaseModel):
    name: str
    age: int


def real(content: str, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, **options}
    return ask(os.environ["REAL_URL"], os.environ["REAL_MODEL"], content, **options)


def ask(url: str, model: str, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return litellm.completion(
        model=f"openai/{model}", api_base=url, api_key="local", messages=messages, num_retries=0, **options
    )


def test_a_stream_joins_to_the_whole_answer() -> None:
    whole = real("Count to five.")
    chunks = list(real("Count to five.", stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks)
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


def test_a_call_is_the_same_streamed_and_whole() -> None:
    url = os.environ["SCRIPTED_URL"]
    whole = ask(url, "scripted", CALL, tools=TOOLS)
    joined = litellm.stream_chunk_builder(list(ask(url, "scripted", CALL, tools=TOOLS, stream=True)))
    for answer in (whole, joined):
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_response_format_of_pydantic_is_followed() -> None:
    answer = real("Ann is 40 years old.", response_format=Person, max_tokens=400)
    Person.model_validate_json(answer.choices[0].message.content)


def test_errors_are_of_their_classes() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        real("long " * 10_000)
    with pytest.raises(litellm.NotFoundError):
        ask(os.environ["REAL_URL"], "nope", "hi")
    with pytest.raises(litellm.BadRequestError):
        real("hi", extra_body={"top_logprobs": 99})
