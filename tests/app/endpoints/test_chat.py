"""Whole answers over HTTP: chat, models, health."""

from __future__ import annotations

import pytest

from app.text.scripted import scripted_text_edge
from tests.app.web import EOS, FINGERPRINT, MODEL, NUM_PROMPT_TOKENS, START_S, Web, end_of


async def test_a_whole_answer_has_text_reason_usage_and_fingerprint(web: Web) -> None:
    worker, exchange = await web.claimed_chat()
    worker.append("chatcmpl-1", 0, 101, 102, cached=16)
    await web.turn()
    assert not exchange.is_over
    worker.append("chatcmpl-1", 2, 103, EOS, end="stop", cached=16)
    await web.turn()
    assert exchange.status == 200
    assert exchange.json == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(START_S),
        "model": MODEL,
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "<101><102><103>",
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "completion_tokens": 3,
            "total_tokens": NUM_PROMPT_TOKENS + 3,
            "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        },
    }
    assert exchange.headers["x-worker"] == "w1"
    assert exchange.headers["x-request-id"] == "chatcmpl-1"


async def test_the_job_holds_what_the_request_asked_for(web: Web) -> None:
    worker = web.worker()
    await web.chat(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        top_k=40,
        min_p=0.1,
        ignore_eos=True,
        min_tokens=2,
    )
    job = worker.claim("chatcmpl-1")
    assert bytes(job.prompt_token_ids) == b"user: hi\nassistant:"
    assert (job.model, job.created_ms) == (MODEL, int(START_S * 1000))
    sampling = job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.seed, sampling.top_k, sampling.min_p) == (-3, 40, 0.1)
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.stop_token_ids) == (True, 2, (EOS,))


async def test_without_limits_a_request_gets_a_seed_and_the_rest_of_the_context(web: Web) -> None:
    worker = web.worker(max_model_len=100)
    await web.chat()
    sampling = worker.claim("chatcmpl-1").sampling
    assert (sampling.seed, sampling.max_tokens) == (4242, 100 - NUM_PROMPT_TOKENS)


async def test_max_completion_tokens_wins_over_max_tokens(web: Web) -> None:
    worker = web.worker()
    await web.chat(max_tokens=9, max_completion_tokens=3)
    assert worker.claim("chatcmpl-1").sampling.max_tokens == 3


async def test_a_stop_string_ends_the_answer_before_it_and_closes_the_request(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stop=["2><10"])
    worker.append("chatcmpl-1", 0, 101, 102, 103, 104, cached=5)
    await web.turn()
    assert end_of(web) == ("finished", "stop")
    await web.turn()
    choice = exchange.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<101><10", "stop")
    assert exchange.json["usage"]["completion_tokens"] == 3
    assert exchange.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert exchange.headers["x-worker"] == "w1"


async def test_the_length_limit_is_the_finish_reason(web: Web) -> None:
    worker, exchange = await web.claimed_chat(max_tokens=1)
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert exchange.json["choices"][0]["finish_reason"] == "length"
    assert exchange.json["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("reason", "status"), [("engine_error", 500), ("poison", 500), ("no_worker", 503)])
async def test_a_failed_generation_is_an_error_response(web: Web, reason: str, status: int) -> None:
    worker, exchange = await web.claimed_chat()
    worker.append("chatcmpl-1", 0, 101, end=reason)
    await web.turn()
    assert exchange.status == status
    assert exchange.error["code"] == reason
    assert exchange.error["type"] == "server_error"
    assert ("retry-after" in exchange.headers) == (status == 503)


async def test_a_lost_stream_is_an_error_response_and_cancels_the_request(web: Web) -> None:
    _, exchange = await web.claimed_chat()
    web.redis.xadd("tf:{chatcmpl-1}:out", {"x": "y"}, id="0-1")
    await web.turn()
    assert (exchange.status, exchange.error["code"]) == (503, "stream_lost")
    assert end_of(web) == ("cancelled", "disconnect")


async def test_a_record_that_vanished_is_an_error_response(web: Web) -> None:
    web.worker()
    exchange = await web.chat()
    web.redis.flushall()
    web.now_s += 5
    await web.turn()
    assert (exchange.status, exchange.error["code"]) == (503, "stream_lost")


async def test_redis_out_of_reach_for_too_long_is_an_error_response(web: Web) -> None:
    web.worker()
    exchange = await web.chat()
    await web.turn()
    web.server.connected = False
    await web.turn()
    assert not exchange.is_over
    web.now_s += 10
    await web.turn()
    assert (exchange.status, exchange.error["code"]) == (503, "stream_lost")


async def test_list_content_and_null_content_with_tool_calls_reach_the_prompt_as_text(web: Web) -> None:
    worker = web.worker()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await web.chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
            },
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Rainy"}]},
        ]
    )
    prompt = bytes(worker.claim("chatcmpl-1").prompt_token_ids)
    call_text = b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result_text = b"<tool_response>\nRainy\n</tool_response>"
    turns = (b"system: be brief", b"user: a", b"assistant: " + call_text, b"user: " + result_text, b"assistant:")
    assert prompt == b"\n".join(turns)


async def test_models_are_listed_and_shown_without_any_worker(web: Web) -> None:
    exchange = await web.request("GET", "/v1/models")
    model = {"id": MODEL, "object": "model", "created": int(START_S), "owned_by": "tokenferry"}
    assert exchange.json == {"object": "list", "data": [model]}
    assert (await web.request("GET", f"/v1/models/{MODEL}")).json == model
    assert (await web.request("GET", "/v1/models/")).json["data"] == [model]


async def test_a_model_name_may_have_slashes() -> None:
    web = Web(text_edges={"org/name": scripted_text_edge()})
    exchange = await web.request("GET", "/v1/models/org/name")
    assert exchange.json["id"] == "org/name"


async def test_live_while_the_process_runs(web: Web) -> None:
    web.server.connected = False
    assert (await web.request("GET", "/livez")).status == 200


async def test_ready_with_redis_and_a_live_worker(web: Web) -> None:
    exchange = await web.request("GET", "/readyz")
    assert (exchange.status, exchange.json["reason"]) == (503, f"no_worker: {MODEL}")
    web.worker()
    assert (await web.request("GET", "/readyz")).status == 200
    web.server.connected = False
    exchange = await web.request("GET", "/readyz")
    assert (exchange.status, exchange.json["reason"]) == (503, "queue_unreachable")


async def test_two_fingerprints_at_work_leave_the_fingerprint_open(web: Web) -> None:
    worker = web.worker("w1")
    web.worker("w2", fingerprint="fp-2")
    exchange = await web.chat()
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert exchange.json["system_fingerprint"] is None
