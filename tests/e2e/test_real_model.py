"""The straight line with a real model: the default checkpoint, two workers, the `openai` client, and a kill."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode.registry import DEFAULT_MODEL
from tasks.settings import cache_dir
from tests.e2e.harness import TestedCell
from tokenferry.pull import pull

pytestmark = pytest.mark.e2e

ENVIRON = {"NUM_THREADS": "1", "KV_CACHE_TOKENS": "8192", "MAX_NUM_SEQS": "8"}


@pytest.fixture(scope="module")
def cell() -> Iterator[TestedCell]:
    pull(DEFAULT_MODEL, cache_dir(os.environ))
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
