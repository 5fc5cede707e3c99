"""Refusals over HTTP: each is immediate, in OpenAI's shape, and reaches nobody else."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from redis.exceptions import TimeoutError as RedisTimeout

from app.answers.admission import FULL_TTL_S
from app.errors import model_not_found
from tasks.protocol import keys
from tasks.protocol.contract import GenerationJob
from tests.app.web import HELLO, MODEL, NUM_PROMPT_TOKENS, Web, end_of


@pytest.mark.parametrize(
    "body",
    [b'{"model":"m", x}', b"", b"[]", b'"text"', b"null", b'{"model":"\xff"}', b"[" * 100_000, b'{"a":' * 5000],
)
async def test_a_body_that_is_no_json_object_is_refused(web: Web, body: bytes) -> None:
    exchange = await web.post(body)
    assert exchange.status == 400
    assert (exchange.error["type"], exchange.error["param"]) == ("invalid_request_error", None)


async def test_another_content_type_is_refused(web: Web) -> None:
    exchange = await web.post(b"{}", content_type="text/plain")
    assert (exchange.status, exchange.error["code"]) == (400, "unsupported_content_type")


async def test_a_missing_content_type_and_a_charset_are_taken(web: Web) -> None:
    web.worker()
    body = orjson.dumps({"model": MODEL, "messages": HELLO, "stream": True})
    assert (await web.request("POST", "/v1/chat/completions", body)).status == 200
    assert (await web.post(body, content_type="application/json; charset=utf-8")).status == 200


async def test_a_compressed_body_is_refused(web: Web) -> None:
    exchange = await web.post(gzip.compress(b"{}"), content_encoding="gzip")
    assert (exchange.status, exchange.error["code"]) == (400, "unsupported_content_encoding")


async def test_a_declared_body_over_the_limit_is_refused_before_more_of_it_is_read() -> None:
    web = Web(max_body_bytes=999)
    parts = [b"x" * 10] * 100
    exchange = await web.request("POST", "/v1/chat/completions", parts, {"content-length": "1000"})
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")
    assert exchange.num_parts_read == 1


async def test_a_chunked_body_is_refused_at_the_limit() -> None:
    web = Web(max_body_bytes=99)
    exchange = await web.request("POST", "/v1/chat/completions", [b"x" * 10] * 1000)
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")
    assert exchange.num_parts_read == 10


async def test_a_body_that_arrives_in_parts_is_one_body(web: Web) -> None:
    web.worker()
    body = orjson.dumps({"model": MODEL, "messages": HELLO, "stream": True})
    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    assert (await web.request("POST", "/v1/chat/completions", parts)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found_before_any_event(web: Web, stream: bool) -> None:
    web.worker()
    exchange = await web.chat(model="nope", stream=stream)
    assert exchange.status == 404
    assert (exchange.error["code"], exchange.error["param"]) == ("model_not_found", "model")
    assert exchange.error["type"] == "invalid_request_error"


def test_an_unknown_model_is_told_with_the_nearest_or_with_what_is_served() -> None:
    assert "Did you mean `llama`?" in model_not_found("lama", ["qwen", "llama"]).message
    assert model_not_found("zzz", ["qwen", "llama"]).message.endswith(" Served here: `llama`, `qwen`.")
    assert model_not_found("zzz", []).message.endswith("not served here.")


async def test_an_unknown_model_is_not_found_in_the_list(web: Web) -> None:
    exchange = await web.request("GET", "/v1/models/nope")
    assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")


async def test_an_unknown_path_is_not_found(web: Web) -> None:
    exchange = await web.request("GET", "/v2/nothing")
    assert exchange.status == 404
    assert (exchange.error["type"], exchange.error["code"]) == ("invalid_request_error", "unknown_url")
    assert exchange.headers["x-request-id"].startswith("req-")


async def test_a_method_that_a_path_does_not_take_is_told_which_it_does(web: Web) -> None:
    exchange = await web.request("PUT", "/v1/chat/completions")
    assert (exchange.status, exchange.error["code"]) == (405, "method_not_allowed")
    assert "POST" in exchange.headers["allow"]


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(web: Web) -> None:
    web.worker(max_model_len=NUM_PROMPT_TOKENS)
    exchange = await web.chat()
    assert exchange.status == 400
    assert (exchange.error["code"], exchange.error["param"]) == ("context_length_exceeded", "messages")
    assert exchange.error["message"].count(str(NUM_PROMPT_TOKENS)) == 2


async def test_a_prompt_beyond_the_kv_pool_is_refused(web: Web) -> None:
    web.worker(kv_cache_tokens=12)
    exchange = await web.chat()
    assert (exchange.status, exchange.error["code"]) == (400, "context_length_exceeded")
    assert "12 tokens" in exchange.error["message"]


async def test_prompt_and_asked_output_together_must_fit(web: Web) -> None:
    web.worker(max_model_len=NUM_PROMPT_TOKENS + 10)
    exchange = await web.chat(max_tokens=11)
    assert (exchange.status, exchange.error["code"]) == (400, "context_length_exceeded")
    assert (await web.chat(max_tokens=10, stream=True)).status == 200


async def test_the_smallest_live_worker_sets_the_limit(web: Web) -> None:
    web.worker("w1", max_model_len=1000)
    web.worker("w2", max_model_len=15)
    assert "15 tokens" in (await web.chat()).error["message"]


async def test_a_request_is_taken_when_every_lease_has_just_lapsed_and_refused_soon_after(web: Web) -> None:
    web.worker("w1")
    assert (await web.chat(stream=True)).status == 200
    for ago_ms, status in ((1_000, 200), (60_000, 503)):
        web.now_s += 10
        seconds, micros = web.redis.time()
        web.redis.zadd(keys.workers(MODEL), {"w1": seconds * 1000 + micros // 1000 - ago_ms})
        assert (await web.chat(stream=True)).status == status


async def test_who_repeats_a_request_joins_it_though_its_worker_is_gone_meanwhile(web: Web) -> None:
    web.worker("w1")
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    first = await web.post(body, idempotency_key="k")
    web.records.expire_lease("w1", MODEL)
    web.now_s += 10
    assert (await web.chat(stream=True)).status == 503
    again = await web.post(body, idempotency_key="k")
    assert (again.status, again.headers["x-request-id"]) == (200, first.headers["x-request-id"])


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_live_worker_the_service_is_unavailable(web: Web, stream: bool) -> None:
    exchange = await web.chat(stream=stream)
    assert (exchange.status, exchange.error["code"]) == (503, "no_worker")
    assert int(exchange.headers["retry-after"]) >= 1


async def test_a_worker_that_left_since_the_last_request_is_noticed(web: Web) -> None:
    worker = web.worker()
    assert (await web.chat(stream=True)).status == 200
    web.records.leave(worker.info.worker, MODEL)
    assert (await web.chat(stream=True)).status == 503
    web.worker("w2", max_model_len=15)
    assert "15 tokens" in (await web.chat()).error["message"]


async def test_a_queue_that_was_full_a_moment_ago_is_not_asked_again() -> None:
    web = Web(max_waiting=2)
    worker = web.worker()
    for _ in range(2):
        assert (await web.chat(stream=True)).status == 200
    first = await web.chat(stream=True)
    worker.claim("chatcmpl-1")
    second = await web.chat(stream=True)
    assert (first.status, second.status) == (429, 429)
    assert second.headers["retry-after"] == first.headers["retry-after"]
    web.now_s += FULL_TTL_S
    assert (await web.chat(stream=True)).status == 200


async def test_while_the_queue_is_full_nothing_of_a_request_is_read() -> None:
    web = Web(max_waiting=2)
    web.worker()
    for _ in range(3):
        last = await web.chat(stream=True)
    assert last.status == 429
    assert (await web.post(b"no JSON")).status == 429
    web.now_s += FULL_TTL_S
    assert (await web.post(b"no JSON")).status == 400


async def test_a_full_queue_refuses_neither_a_higher_class_nor_a_key_that_is_known() -> None:
    web = Web(max_waiting=2)
    web.worker()
    asked = {"model": MODEL, "messages": HELLO, "stream": True}
    assert (await web.post(asked, idempotency_key="k")).status == 200
    await web.chat(stream=True)
    assert (await web.chat(stream=True)).status == 429
    assert (await web.chat(stream=True, service_tier="priority")).status == 200
    again = await web.post(asked, idempotency_key="k")
    assert (again.status, again.headers["x-idempotent-replay"]) == (200, "true")


async def test_what_is_on_its_way_to_the_queue_counts_as_waiting() -> None:
    """Those that come at once are all here before the first of them is in the queue."""
    web = Web(max_waiting=2)
    worker = web.worker()
    taken = web.records.submit
    calls = 0

    def submit(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        submitted = taken(*args, **kwargs)
        worker.claim(submitted.request_id)  # so that there is room in the queue
        return submitted

    web.records.submit = submit  # type: ignore[method-assign]
    exchanges = await asyncio.gather(*(web.chat(stream=True) for _ in range(5)))
    assert sorted(exchange.status for exchange in exchanges) == [200, 200, 429, 429, 429]
    assert calls == 2
    assert (await web.chat(stream=True)).status == 200


async def test_a_full_queue_asks_the_client_to_come_back() -> None:
    web = Web(max_waiting=2)
    web.worker()
    for _ in range(2):
        assert (await web.chat(stream=True)).status == 200
    exchange = await web.chat(stream=True)
    assert exchange.status == 429
    assert (exchange.error["type"], exchange.error["code"]) == ("rate_limit_error", "queue_full")
    assert exchange.headers["retry-after"].isdecimal()
    assert int(exchange.headers["retry-after"]) >= 1


async def test_the_slower_the_queue_moves_the_later_the_client_is_asked_to_come_back() -> None:
    web = Web(max_waiting=1)
    worker = web.worker()
    for number in range(4):
        await web.chat(stream=True)
        worker.claim(f"chatcmpl-{number + 1}")
    await web.chat(stream=True)
    soon = await web.chat(stream=True)
    assert 1 <= int(soon.headers["retry-after"]) <= 3
    for key in web.redis.keys("tf:claims:*"):
        web.redis.delete(key)
    web.now_s += FULL_TTL_S
    late = await web.chat(stream=True)
    assert 30 <= int(late.headers["retry-after"]) <= 35


async def test_redis_out_of_reach_is_unavailable(web: Web) -> None:
    web.worker()
    web.server.connected = False
    exchange = await web.chat()
    assert (exchange.status, exchange.error["code"]) == (503, "queue_unreachable")
    assert int(exchange.headers["retry-after"]) >= 1


async def test_a_lost_reply_to_submit_is_unavailable_and_the_request_does_not_run_on(web: Web) -> None:
    web.worker()
    submit = web.submitter.submit

    def lose_the_reply(jobs: Sequence[GenerationJob], **options: Any) -> None:
        submit(jobs, **options)
        raise RedisTimeout("no reply")

    web.submitter.submit = lose_the_reply  # type: ignore[method-assign,assignment]
    exchange = await web.chat()
    assert (exchange.status, exchange.error["code"]) == (503, "queue_unreachable")
    assert end_of(web)[0] == "cancelled"


async def test_a_bug_is_a_server_error_in_openai_shape_and_logged(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    web.worker()

    def fail(job: GenerationJob, **options: Any) -> None:
        raise ZeroDivisionError("secret detail")

    web.submitter.submit = fail  # type: ignore[method-assign,assignment]
    exchange = await web.chat()
    assert (exchange.status, exchange.error["type"]) == (500, "server_error")
    assert "secret" not in exchange.body.decode()
    assert any(record.exc_info and "chatcmpl-1" in record.getMessage() for record in caplog.records)


async def test_a_text_that_cannot_be_a_prompt_names_its_message(web: Web) -> None:
    exchange = await web.post(b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}')
    assert (exchange.status, exchange.error["param"]) == (400, "messages[0].content")


async def test_a_large_body_takes_the_same_way(web: Web) -> None:
    worker = web.worker(max_model_len=100_000, kv_cache_tokens=100_000)
    await web.chat(messages=[{"role": "user", "content": "x" * 50_000}], stream=True)
    assert len(worker.claim("chatcmpl-1").prompt_token_ids) == 50_000 + NUM_PROMPT_TOKENS - 2
