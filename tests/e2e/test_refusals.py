"""What a client is told when something is missing: a worker, room in the queue, Redis."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.harness import TestedCell

pytestmark = pytest.mark.e2e


@pytest.fixture
def small() -> Iterator[TestedCell]:
    """One slow worker with one slot, and a queue for one."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        environ = {"SCRIPTED_STEP_MS": "20", "MAX_NUM_SEQS": "1", "MAX_WAITING": "1"}
        with TestedCell(Path(folder), environ=environ) as running:
            yield running


def ask(cell: TestedCell, max_tokens: int = 5) -> str:
    answer = cell.shared_client.chat.completions.create(
        model=cell.model,
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=max_tokens,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def test_without_a_worker_the_answer_is_503_and_with_one_it_works_again(small: TestedCell) -> None:
    before = ask(small)
    small.end("worker.1")
    small.wait_until(lambda: small.get("/readyz") == 503, "not ready without a worker")
    small.wait_until(lambda: _status_of(small) == 503, "refused without a worker")
    small.start("worker.1", "worker")
    small.wait_until(lambda: small.get("/readyz") == 200, "ready again")
    small.wait_until(lambda: _status_of(small) == 200, "served again")
    assert ask(small) == before


def test_a_full_queue_is_429_with_a_time_to_come_back(small: TestedCell) -> None:
    with ThreadPoolExecutor(1) as pool, small.open_stream("the slot is taken", 4000):
        small.wait_until(lambda: small.records.num_waiting(small.model) == 0, "the first one runs")
        waiting = pool.submit(ask, small)
        small.wait_until(lambda: small.records.num_waiting(small.model) == 1, "the second one waits")
        with pytest.raises(openai.RateLimitError) as refusal:
            ask(small)
    assert int(refusal.value.response.headers["retry-after"]) >= 1
    assert waiting.result(20)


def test_redis_away_is_503_and_nothing_accepted_is_lost(small: TestedCell) -> None:
    before = ask(small, 60)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, small, 60)
        small.wait_until(lambda: bool(small.leftovers().get("held")), "the answer is under way")
        small.valkey.kill()
        assert small.get("/readyz") == 503
        assert _status_of(small) == 503
        small.valkey.start()
        small.valkey.wait_until_ready()
        assert running.result(20) == before
    small.wait_until(lambda: small.get("/readyz") == 200, "ready again")
    assert ask(small, 60) == before


def test_web_going_down_ends_every_stream_with_an_event(small: TestedCell) -> None:
    with small.open_stream("hello", 4000) as stream:
        chunks = iter(stream)
        next(chunks)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(small.end, "web")
            with pytest.raises(openai.APIError):
                list(chunks)
            assert ended.result(20) == 0


def _status_of(cell: TestedCell) -> int:
    try:
        ask(cell, 1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200
