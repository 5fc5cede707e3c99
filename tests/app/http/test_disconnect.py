"""A client that leaves, and one that does not read: the generation ends, at once or at the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from app.http.connection import DisconnectWatch, Receive, Scope, Send
from tests.app.web import BODY, Exchange, Web, end_of


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_queued_cancels_and_the_request_can_never_start(web: Web, stream: bool) -> None:
    web.worker()
    exchange = await web.chat(stream=stream)
    exchange.leave()
    await web.settle()
    assert exchange.task.done()
    assert end_of(web) == ("cancelled", "disconnect")
    assert web.records.num_waiting("scripted") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_prefill_makes_the_next_append_refused(web: Web, stream: bool) -> None:
    worker, exchange = await web.claimed_chat(stream=stream)
    exchange.leave()
    await web.settle()
    assert end_of(web) == ("cancelled", "disconnect")
    assert worker.append("chatcmpl-1", 0, 101).reason == "closed"


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_mid_decode_cancels_without_another_token(web: Web, stream: bool) -> None:
    worker, exchange = await web.claimed_chat(stream=stream)
    worker.append("chatcmpl-1", 0, 101, 102)
    await web.turn()
    exchange.leave()
    await web.settle()
    assert end_of(web) == ("cancelled", "disconnect")
    assert exchange.task.done()
    assert web.app.num_open == 0


async def test_leaving_after_the_end_changes_nothing(web: Web) -> None:
    tasks = asyncio.all_tasks()
    worker, exchange = await web.claimed_chat(stream=True)
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert asyncio.all_tasks() == tasks, "nobody waits for the client any more"
    exchange.leave()
    await web.settle()
    assert end_of(web) == ("finished", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_kept_of_an_answer_that_is_over(web: Web, stream: bool) -> None:
    worker = web.worker()
    await web.chat(stream=stream, n=2)
    assert web.app._closer.num_reading == 2
    for request_id in ("chatcmpl-1", "chatcmpl-1.1"):
        worker.claim(request_id)
        worker.append(request_id, 0, 101, end="length")
    await web.turn()
    await web.turn()
    assert (web.app._closer.num_reading, web.app._closer.num_pending) == (0, 0)
    assert (web.app.num_open, web.reader.num_feeds) == (0, 0)


async def test_leaving_before_the_queue_answered_cancels(web: Web) -> None:
    web.worker()
    submit = web.submitter.submit
    exchanges: list[Exchange] = []

    def submit_slowly(jobs: object, **options: object) -> object:
        exchanges[0].leave()
        return submit(jobs, **options)  # type: ignore[arg-type]

    web.submitter.submit = submit_slowly  # type: ignore[method-assign,assignment]
    web.on_start = exchanges.append
    await web.chat(stream=True)
    assert end_of(web) == ("cancelled", "disconnect")
    assert exchanges[0].task.done()


async def test_a_task_that_is_killed_before_its_first_byte_cancels(web: Web) -> None:
    web.worker()
    web.on_start = Exchange.stop_reading
    exchange = await web.chat(stream=True)
    await web.turn()
    assert web.reader.num_feeds == 1
    exchange.task.cancel()
    await web.settle()
    assert end_of(web) == ("cancelled", "disconnect")
    await web.turn()
    assert web.reader.num_feeds == 0


async def test_neighbours_of_a_client_that_left_read_on(web: Web) -> None:
    worker = web.worker()
    first, second = await web.chat(stream=True), await web.chat(stream=True)
    first.leave()
    await web.settle()
    worker.claim("chatcmpl-2")
    worker.append("chatcmpl-2", 0, 101, end="length")
    await web.turn()
    assert second.text == "<101>"
    assert second.is_over


async def test_a_cancel_that_redis_did_not_take_is_tried_again(web: Web) -> None:
    web.worker()
    exchange = await web.chat(stream=True)
    web.server.connected = False
    exchange.leave()
    await web.settle()
    web.server.connected = True
    assert end_of(web) == ("offered", "")
    web.app.tick(web.now_s)
    assert end_of(web) == ("cancelled", "disconnect")


@pytest.mark.parametrize("outlet", [False, True])
async def test_a_client_that_does_not_read_falls_back_and_catches_up_from_redis(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_chat(stream=True)
    exchange.stop_reading()
    for index in range(100):
        worker.append("chatcmpl-1", index, 100 + index)
        if index % 5 == 0:
            await web.turn()
    worker.append("chatcmpl-1", 100, 999, end="length")
    assert web.reader.num_feeds == 0, "a laggard is not read"
    exchange.read_on()
    for _ in range(40):
        await web.settle()
        await web.turn()
    assert exchange.text == "".join(f"<{100 + index}>" for index in range(100)) + "<999>"
    assert exchange.is_over


async def test_a_client_that_does_not_read_is_dropped_and_cancelled_at_the_stall_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    web = Web(stall_limit_s=30.0)
    with caplog.at_level("INFO"):
        worker, exchange = await web.claimed_chat(stream=True)
        exchange.stop_reading()
        worker.append("chatcmpl-1", 0, 101)
        await web.turn()
        web.now_s = 29.9
        web.app.tick(web.now_s)
        assert not exchange.was_dropped
        web.now_s = 30.0
        web.app.tick(web.now_s)
        await web.settle()
        assert exchange.was_dropped
        assert exchange.task.done()
        assert end_of(web) == ("cancelled", "disconnect")
    assert "chatcmpl-1 client did not read for 30 s: dropped" in caplog.text


async def test_a_client_that_reads_slowly_but_reads_is_kept() -> None:
    web = Web(stall_limit_s=30.0)
    worker, exchange = await web.claimed_chat(stream=True)
    for index in range(10):
        exchange.stop_reading()
        worker.append("chatcmpl-1", index, 101)
        await web.turn()
        web.now_s += 20
        web.app.tick(web.now_s)
        exchange.read_on()
        await web.settle()
    assert not exchange.was_dropped
    assert len(exchange.chunks) == 11


async def test_waiting_for_tokens_is_not_a_stall() -> None:
    web = Web(stall_limit_s=30.0)
    web.worker()
    exchange = await web.chat(stream=True)
    web.now_s = 10_000
    web.app.tick(web.now_s)
    assert not exchange.was_dropped


async def test_the_watch_passes_on_what_is_not_http(web: Web) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    watch = DisconnectWatch(app, stall_limit_s=1)
    await watch({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]


async def test_a_client_that_comes_while_another_ones_leave_is_not_told_yet_keeps_the_answer(web: Web) -> None:
    worker, first = await web.claimed_chat(stream=True)
    web.server.connected = False
    first.leave()
    await web.settle()
    web.server.connected = True
    second = await web.request("GET", "/v1/chat/completions/chatcmpl-1?stream=true")
    web.app.tick(web.now_s)
    assert end_of(web) == ("claimed", "")
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert second.text == "<101>"
    assert web.app._closer.num_pending == 0


async def test_a_client_that_comes_while_another_one_is_being_left_keeps_the_answer(web: Web) -> None:
    _, first = await web.claimed_post({**BODY, "stream": True}, idempotency_key="k")
    closer = web.app._closer
    detach = web.records.detach

    def detach_while_somebody_comes(request_ids: Sequence[str], reader: str) -> list[str]:
        closer.begin_reading(request_ids)
        return detach(request_ids, reader)

    web.records.detach = detach_while_somebody_comes  # type: ignore[method-assign,assignment]
    first.leave()
    await web.settle()
    assert web.records.open_of("reader-1") == ["chatcmpl-1"]


@pytest.mark.parametrize("outlet", [False, True])
async def test_a_client_that_reads_several_choices_late_gets_all_of_them(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_choices(3, stream=True)
    ids = ["chatcmpl-1", "chatcmpl-1.1", "chatcmpl-1.2"]
    exchange.stop_reading()
    for index in range(60):
        for number, request_id in enumerate(ids):
            worker.append(request_id, index, 100 * (number + 1) + index, end="length" if index == 59 else None)
        if index % 5 == 0:
            await web.turn()
    assert web.reader.num_feeds == 0, "a laggard is not read"
    exchange.read_on()
    for _ in range(80):
        await web.settle()
        await web.turn()
    for number in range(3):
        assert exchange.text_of(number) == "".join(f"<{100 * (number + 1) + index}>" for index in range(60))
    assert exchange.is_over
