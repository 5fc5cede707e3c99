"""Shutting down: nothing new, and a final event for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import TimeoutError

from tests.app.web import Web, end_of


async def test_new_requests_are_refused_while_draining(web: Web) -> None:
    web.worker()
    await web.app.drain(budget_s=1)
    exchange = await web.chat()
    assert (exchange.status, exchange.error["code"]) == (503, "shutting_down")
    assert int(exchange.headers["retry-after"]) >= 1
    ready = await web.request("GET", "/readyz")
    assert (ready.status, ready.json["reason"]) == (503, "draining")


async def test_an_answer_that_ends_within_the_budget_ends_as_ever(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    drain = asyncio.ensure_future(web.app.drain(budget_s=60))
    await web.settle()
    assert not drain.done()
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    await drain
    assert exchange.events[-1][1] == "[DONE]"


async def test_a_stream_that_does_not_end_in_time_gets_an_error_event_and_is_cancelled(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True)
    worker.append("chatcmpl-1", 0, 101)
    await web.turn()
    await web.app.drain(budget_s=0)
    await web.settle()
    assert exchange.events[-1][1]["error"]["code"] == "shutting_down"
    assert exchange.is_over
    assert end_of(web) == ("cancelled", "disconnect")


async def test_a_stream_that_was_being_accepted_when_the_drain_ended_gets_an_error_event_too(web: Web) -> None:
    web.worker()
    submit = web.submitter.submit

    def submit_while_it_drains(*args: Any, **options: Any) -> Any:
        drain = web.app.drain(budget_s=60)
        with pytest.raises(StopIteration):  # nothing is open, so it waits for nothing
            drain.send(None)
        return submit(*args, **options)

    web.submitter.submit = submit_while_it_drains  # type: ignore[method-assign]
    exchange = await web.chat(stream=True)
    assert exchange.events[-1][1]["error"]["code"] == "shutting_down"
    assert exchange.is_over
    assert end_of(web) == ("cancelled", "disconnect")


async def test_a_whole_answer_that_does_not_end_in_time_is_an_error_response(web: Web) -> None:
    web.worker()
    exchange = await web.chat()
    await web.app.drain(budget_s=0)
    await web.settle()
    assert (exchange.status, exchange.error["code"]) == (503, "shutting_down")


async def test_stopping_gives_the_reader_lease_back(web: Web) -> None:
    await web.turn()
    assert web.redis.zscore("tf:readers", "reader-1") is not None
    await web.app.stop()
    assert web.redis.zscore("tf:readers", "reader-1") is None


async def test_requests_that_could_not_be_closed_are_left_to_the_watchdog(web: Web) -> None:
    web.worker()
    exchange = await web.chat(stream=True)
    await web.turn()

    def time_out(request_ids: Sequence[str], reader: str) -> list[str]:
        raise TimeoutError

    web.records.detach = time_out  # type: ignore[method-assign,assignment]
    exchange.leave()
    await web.settle()
    await web.app.stop()
    assert web.records.open_of("reader-1") == ["chatcmpl-1"]
    assert web.redis.zscore("tf:readers", "reader-1") is not None
