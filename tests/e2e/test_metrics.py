"""One scrape sees the cell: real processes, and the numbers are what was done."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import HOST, TestedCell

pytestmark = pytest.mark.e2e

NUM_REQUESTS, NUM_TOKENS = 6, 20

Numbers = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def cell(short_folder: Path) -> Iterator[TestedCell]:
    """Two web processes, two workers, JSON logs."""
    environ = {"SCRIPTED_STEP_MS": "2", "MAX_NUM_SEQS": "8", "LOG_FORMAT": "json"}
    with TestedCell(short_folder, num_workers=2, num_web=2, environ=environ) as running:
        yield running


def scrape(cell: TestedCell, web: int) -> Numbers:
    with urllib.request.urlopen(f"http://{HOST}:{cell.ports[web]}/metrics", timeout=10) as response:
        text = response.read().decode()
    found: Numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(numbers: Numbers, name: str, **labels: str) -> float:
    return sum(value for of, value in numbers.get(name, []) if labels.items() <= of.items())


def processes(numbers: Numbers, name: str) -> set[str]:
    return {labels["process"] for labels, _ in numbers.get(name, [])}


def test_every_web_process_shows_what_the_whole_cell_has_done(cell: TestedCell) -> None:
    prompts = [f"number {number} of a few prompts, long enough to fill a block" for number in range(NUM_REQUESTS)]
    seen = [cell.stream(prompt, NUM_TOKENS, extra_body={"ignore_eos": True}) for prompt in prompts]
    with cell.open_stream("a long one", 4000, extra_body={"ignore_eos": True}) as stream:
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    num_tokens = NUM_REQUESTS * NUM_TOKENS
    assert [one.num_output_tokens for one in seen] == [NUM_TOKENS] * NUM_REQUESTS

    def is_shown(web: int) -> bool:
        numbers = scrape(cell, web)
        names = ("tokenferry_requests_ended_total", "vllm:request_prefill_time_seconds_count")
        times = ("vllm:e2e_request_latency_seconds_count", "tokenferry_attempts_total")
        return all(total(numbers, name) == NUM_REQUESTS + 1 for name in (*names, *times))

    for web in range(2):
        cell.wait_until(lambda web=web: is_shown(web), "the numbers of all processes")  # type: ignore[misc]
        numbers = scrape(cell, web)
        of = {"model_name": "scripted"}
        assert total(numbers, "vllm:request_success_total", finished_reason="length", **of) == NUM_REQUESTS
        assert total(numbers, "vllm:request_success_total", finished_reason="abort", **of) == 1
        assert total(numbers, "tokenferry_requests_ended_total", state="cancelled", reason="disconnect") == 1
        assert total(numbers, "tokenferry_attempts_total", **of) == NUM_REQUESTS + 1
        assert total(numbers, "tokenferry_failovers_total", **of) == 0
        assert total(numbers, "vllm:generation_tokens_total", **of) >= num_tokens + 1
        prompt_tokens = total(numbers, "vllm:prompt_tokens_total", **of)
        assert prompt_tokens > sum(one.num_prompt_tokens for one in seen)
        assert total(numbers, "vllm:prefix_cache_queries_total") == prompt_tokens
        assert total(numbers, "vllm:prefix_cache_hits_total") >= sum(one.num_cached_tokens for one in seen)
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert total(numbers, f"vllm:{name}_count", **of) == NUM_REQUESTS + 1
        assert total(numbers, "vllm:request_prefill_time_seconds_count") == NUM_REQUESTS + 1
        assert total(numbers, "vllm:request_decode_time_seconds_count") == NUM_REQUESTS
        assert total(numbers, "vllm:inter_token_latency_seconds_count") >= NUM_REQUESTS * (NUM_TOKENS - 1)
        assert total(numbers, "tokenferry_http_requests_total", route="/v1/chat/completions") == NUM_REQUESTS + 1
        assert total(numbers, "tokenferry_stream_bytes_total") > num_tokens
        assert total(numbers, "tokenferry_redis_up") == 1
        assert total(numbers, "tokenferry_recorder_lag_seconds") < 60
        assert len(processes(numbers, "vllm:num_requests_running")) == 2
        assert len(processes(numbers, "tokenferry_open_answers")) == 2
        assert len(processes(numbers, "tokenferry_watchdog_reoffers_total")) == 1


def test_a_worker_that_is_killed_shows_as_a_failover(cell: TestedCell) -> None:
    before = scrape(cell, 0)
    seen = cell.stream("kill it", 200, kill_after_events=20, extra_body={"ignore_eos": True})
    assert seen.num_output_tokens == 200
    cell.wait_until(
        lambda: (
            total(scrape(cell, 0), "tokenferry_failovers_total") == total(before, "tokenferry_failovers_total") + 1
        ),
        "the failover",
    )
    cell.wait_until(lambda: total(scrape(cell, 1), "tokenferry_watchdog_reoffers_total") >= 1, "the watchdog's part")


def test_every_line_of_every_process_is_an_object_with_its_request(cell: TestedCell) -> None:
    seen = cell.stream("tell me a SECRET", 5)

    def lines() -> list[dict[str, object]]:
        own = (line for log in cell.folder.glob("*.log") for line in log.read_text().splitlines())
        return [json.loads(line) for line in own if line.startswith("{")]

    def of_it() -> list[dict[str, object]]:
        return [one for one in lines() if one.get("request_id") == seen.request_id and one["logger"] == "app.access"]

    cell.wait_until(lambda: bool(of_it()), "the access line")
    [access] = of_it()
    assert (access["tokens"], access["status"], access["model"]) == (5, 200, "scripted")
    assert "SECRET" not in cell.logs()
