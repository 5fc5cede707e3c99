"""The straight line with a real model: the default checkpoint, two workers, the `openai` client, and a kill."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoint.names import DEFAULT_MODEL
from tasks.process.settings import Settings
from tests.e2e.harness import HOST, TestedCell
from tokenferry.pull import pull

pytestmark = pytest.mark.e2e

ENVIRON = {"NUM_THREADS": "1", "KV_CACHE_TOKENS": "8192", "MAX_NUM_SEQS": "8"}


@pytest.fixture(scope="module")
def cell() -> Iterator[TestedCell]:
    pull(DEFAULT_MODEL, Settings.from_env(os.environ).cache_dir)
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        with TestedCell(Path(folder), model=DEFAULT_MODEL, num_workers=2, environ=ENVIRON, start_s=180) as running:
            yield running


def test_the_script_of_the_readme_runs(cell: TestedCell) -> None:
    with cell.client() as client:
        assert [model.id for model in client.models.list().data] == [DEFAULT_MODEL]
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_completion_tokens=40,
            temperature=0,
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.completion_tokens > 1
    assert answer.system_fingerprint


def test_a_stream_gives_the_same_text_with_usage_at_the_end(cell: TestedCell) -> None:
    prompt = "Name three colours."
    answer = cell.shared_client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=40,
        temperature=0,
    )
    streamed = cell.stream(prompt, 40)
    assert streamed.text == answer.choices[0].message.content
    assert answer.usage is not None
    assert streamed.num_output_tokens == answer.usage.completion_tokens
    assert streamed.finish_reasons == [answer.choices[0].finish_reason]


def test_a_kill_in_mid_stream_changes_not_one_token(cell: TestedCell) -> None:
    undisturbed = cell.stream("Tell me a story about a ferry.", 60)
    killed = cell.stream("Tell me a story about a ferry.", 60, kill_after_events=10)
    assert killed.text == undisturbed.text
    assert killed.num_output_tokens == undisturbed.num_output_tokens
    assert cell.attempt_of(killed.request_id) == 2
    cell.wait_until(lambda: len(cell.workers()) == 2, "the killed worker is back", 180)


def test_a_kill_among_drafts_changes_not_one_token(cell: TestedCell) -> None:
    text = "The ferry left the harbour at seven in the morning, and two hundred passengers watched the lights go out."
    undisturbed = cell.stream(f"Repeat the following text word for word: {text} {text}", 60)
    killed = cell.stream(f"Repeat the following text word for word: {text} {text}", 60, kill_after_events=5)
    assert killed.text == undisturbed.text
    assert cell.attempt_of(killed.request_id) == 2
    cell.wait_until(lambda: drafts_that_were_right(cell) > 10, "drafts are counted", 10)
    cell.wait_until(lambda: len(cell.workers()) == 2, "the killed worker is back", 180)


def drafts_that_were_right(cell: TestedCell) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{cell.ports[0]}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    shown = [line for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_total{")]
    return sum(float(line.split()[-1]) for line in shown)


PEOPLE = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 4,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "mood": {"enum": ["ultraviolet", "zebra-striped"]}},
                "required": ["name", "mood"],
            },
        }
    },
    "required": ["people"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
            },
        },
    }
]


def test_a_kill_in_the_middle_of_structured_output_changes_not_one_token(cell: TestedCell) -> None:
    options = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}}}
    undisturbed = cell.stream("List four people.", 200, **options)
    killed = cell.stream("List four people.", 200, kill_after_events=10, **options)
    assert killed.text == undisturbed.text
    assert killed.finish_reasons == ["stop"]
    assert cell.attempt_of(killed.request_id) == 2
    people = json.loads(killed.text)["people"]
    assert {person["mood"] for person in people} <= {"ultraviolet", "zebra-striped"}
    cell.wait_until(lambda: len(cell.workers()) == 2, "the killed worker is back", 180)


def test_a_demanded_call_is_made_streamed_and_not(cell: TestedCell) -> None:
    request: Any = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 100,
        "temperature": 0,
    }
    with cell.client() as client:
        whole = client.chat.completions.create(**request).choices[0]
        with client.chat.completions.stream(**request) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    [call], [same] = whole.message.tool_calls or [], streamed.message.tool_calls or []
    assert call.function.arguments == same.function.arguments
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
