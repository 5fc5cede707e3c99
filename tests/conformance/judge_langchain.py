"""LangChain's ChatOpenAI as a judge. Runs in the judges' own environment; `python -m tests.conformance` starts it.

REAL_URL serves the real small model, SCRIPTED_URL the scripted one, which says what a prompt dictates.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def real(**options: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 24, **options}
    return ChatOpenAI(base_url=os.environ["REAL_URL"], api_key="local", model=os.environ["REAL_MODEL"], **options)


def scripted(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=os.environ["SCRIPTED_URL"], api_key="local", model="scripted", **options)


def dictated(text: str) -> HumanMessage:
    return HumanMessage(f"\x0e{text}\x0f")


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"\x0eIt rains in {city}.\x0f"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(description="What the person is called.")
    age: int


def test_invoke_has_text_usage_and_a_finish_reason() -> None:
    answer = real().invoke([SystemMessage("Be brief."), HumanMessage("Why is the sea salt?")])
    assert answer.text
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == os.environ["REAL_MODEL"]
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_stream_joins_to_what_invoke_says() -> None:
    whole = real().invoke("Count to five.")
    joined = None
    for chunk in real(stream_usage=True).stream("Count to five."):
        joined = chunk if joined is None else joined + chunk
    assert joined.text == whole.text
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_batch_and_async_say_the_same() -> None:
    model = real()
    first, second = model.batch(["Count to five.", "Say hello."])
    assert first.text == model.invoke("Count to five.").text
    assert second.text == asyncio.run(real().ainvoke("Say hello.")).text


def test_log_probabilities_are_passed_on() -> None:
    answer = real().bind(logprobs=True, top_logprobs=2).invoke("Say hello.")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    assert "".join(one["token"] for one in content) == answer.text


def test_bound_tools_are_called_and_their_results_taken() -> None:
    model = scripted().bind_tools([weather])
    question = dictated(CALL)
    answer = model.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = model.invoke([question, answer, result])
    assert (final.text, final.tool_calls) == ("It rains in Paris.", [])


def test_a_streamed_call_joins_to_the_whole_one() -> None:
    joined = None
    for chunk in scripted().bind_tools([weather]).stream([dictated(CALL)]):
        joined = chunk if joined is None else joined + chunk
    [call] = joined.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    assert joined.invalid_tool_calls == []


def test_the_real_model_makes_a_demanded_call() -> None:
    for choice in ("any", "weather"):
        answer = real(max_tokens=400).bind_tools([weather], tool_choice=choice).invoke("The weather in Paris?")
        assert isinstance(answer, AIMessage)
        assert {call["name"] for call in answer.tool_calls} == {"weather"}
        assert answer.invalid_tool_calls == []


def test_structured_output_is_a_pydantic_model() -> None:
    for method in ("json_schema", "function_calling"):
        person = real(max_tokens=400).with_structured_output(Person, method=method).invoke("Ann is 40 years old.")
        assert isinstance(person, Person), method


def test_structured_output_in_json_mode_is_json() -> None:
    model = scripted().with_structured_output(None, method="json_mode")
    assert model.invoke([dictated('{"name": "Ann", "age": 40}')]) == {"name": "Ann", "age": 40}


def test_structured_output_streams() -> None:
    parts = list(real(max_tokens=400).with_structured_output(Person).stream("Ann is 40 years old."))
    assert isinstance(parts[-1], Person)


def test_texts_are_completed() -> None:
    model = OpenAI(
        base_url=os.environ["REAL_URL"],
        api_key="local",
        model=os.environ["REAL_MODEL"],
        temperature=0,
        max_tokens=5,
    )
    assert "".join(model.stream("The capital of France")) == model.invoke("The capital of France")
