"""Coming back to an answer: its state, the rest of its stream, from any web process, and stopping it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.web import BODY, EOS, ID, Web, end_of

PATH = f"/v1/chat/completions/{ID}"
KEEP = {"x_disconnect": "continue"}


async def left_after_two_tokens(web: Web) -> Any:
    """A streamed answer whose client has gone after "<101><102>", and went on."""
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    worker, exchange = await web.claimed_post(body, **KEEP)
    worker.append(ID, 0, 101)
    await web.turn()
    worker.append(ID, 1, 102)
    await web.turn()
    exchange.leave()
    await web.settle()
    return worker, exchange


async def test_an_answer_that_was_asked_to_go_on_outlives_its_client(web: Web) -> None:
    worker, exchange = await left_after_two_tokens(web)
    assert exchange.task.done()
    assert end_of(web) == ("streaming", "")
    assert worker.append(ID, 2, 103, end="length").next_index == 3


@pytest.mark.parametrize("by_header", [False, True])
async def test_the_rest_of_a_stream_comes_from_any_web_process_and_makes_it_whole(web: Web, by_header: bool) -> None:
    worker, first = await left_after_two_tokens(web)
    other = Web(beside=web)
    last_id = first.events[-1][0]
    assert last_id == 1
    if by_header:
        rest = await other.get(f"{PATH}?stream=true&starting_after=-1", last_event_id=str(last_id))
    else:
        rest = await other.get(f"{PATH}?stream=true&starting_after={last_id}")
    await other.turn()
    assert (rest.status, rest.headers["x-request-id"]) == (200, ID)
    assert rest.headers["content-type"].startswith("text/event-stream")
    worker.append(ID, 2, 103, EOS, end="stop", cached=4)
    await other.turn()
    assert [data if data == "[DONE]" else data["choices"] for _, data in rest.events] == [
        [{"index": 0, "delta": {"content": "<103>"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
        [],
        "[DONE]",
    ]
    assert rest.chunks[-1]["usage"]["completion_tokens"] == 3
    assert {chunk["created"] for chunk in [*first.chunks, *rest.chunks]} == {first.chunks[0]["created"]}


async def test_without_a_place_the_stream_begins_at_its_beginning(web: Web) -> None:
    await left_after_two_tokens(web)
    again = await web.get(f"{PATH}?stream=true")
    await web.turn()
    assert again.text == "<101><102>"
    assert "role" in again.chunks[0]["choices"][0]["delta"]


async def test_a_finished_stream_can_be_read_again_and_beyond_its_end_there_is_only_the_end(web: Web) -> None:
    worker, _ = await left_after_two_tokens(web)
    worker.append(ID, 2, 103, end="length")
    for after, text in ((0, "<102><103>"), (2, ""), (99, "")):
        exchange = await web.get(f"{PATH}?stream=true&starting_after={after}")
        await web.turn()
        assert exchange.text == text
        assert [choice["finish_reason"] for c in exchange.chunks for choice in c["choices"]][-1] == "length"
        assert exchange.events[-1][1] == "[DONE]"
        assert exchange.is_over


@pytest.mark.parametrize("value", ["x", "-3", "1.5", "1,2", "", "99999999999", "\u0661".encode().hex()])
async def test_a_place_that_is_none_is_400_and_named(web: Web, value: str) -> None:
    await left_after_two_tokens(web)
    exchange = await web.get(f"{PATH}?stream=true&starting_after={value}")
    if value:
        assert (exchange.status, exchange.error["param"]) == (400, "starting_after")
    exchange = await web.get(f"{PATH}?stream=true", last_event_id=value)
    assert (exchange.status, exchange.error["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(("query", "param"), [("starting_after=1", "starting_after"), ("stream=maybe", "stream")])
async def test_a_query_that_has_no_meaning_is_400_and_named(web: Web, query: str, param: str) -> None:
    await left_after_two_tokens(web)
    exchange = await web.get(f"{PATH}?{query}")
    assert (exchange.status, exchange.error["param"]) == (400, param)


@pytest.mark.parametrize("path", [PATH, f"{PATH}?stream=true&starting_after=1"])
async def test_an_unknown_answer_is_404(web: Web, path: str) -> None:
    exchange = await web.get(path)
    assert (exchange.status, exchange.error["code"]) == (404, "completion_not_found")
    assert ID in exchange.error["message"]
    exchange = await web.request("POST", f"{PATH}/cancel")
    assert (exchange.status, exchange.error["code"]) == (404, "completion_not_found")


async def test_a_choice_is_no_answer_of_its_own(web: Web) -> None:
    web.worker()
    await web.chat(n=2)
    assert (await web.get(f"{PATH}.1")).status == 404
    assert (await web.get(PATH)).status == 200


async def test_the_state_goes_from_queued_to_in_progress_to_the_completion(web: Web) -> None:
    worker = web.worker()
    accepted = await web.chat(background=True)
    assert (accepted.status, accepted.json["status"], accepted.json["id"]) == (200, "queued", ID)
    assert (await web.get(PATH)).json["status"] == "queued"
    worker.claim(ID)
    assert (await web.get(PATH)).json["status"] == "in_progress"
    worker.append(ID, 0, 101)
    known = (await web.get(PATH)).json
    assert known["status"] == "in_progress"
    assert known["choices"][0]["message"]["content"] == "<101>"
    assert known["choices"][0]["finish_reason"] is None
    worker.append(ID, 1, 102, end="length")
    whole = (await web.get(PATH)).json
    assert whole["status"] == "completed"
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == "<101><102>"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 2


async def test_a_request_in_the_background_is_read_by_nobody_and_lives_on(web: Web) -> None:
    web.worker()
    await web.chat(background=True)
    assert web.app.num_open == 0
    assert web.records.open_of("reader-1") == []
    assert end_of(web) == ("offered", "")


async def test_a_stream_in_the_background_outlives_its_client(web: Web) -> None:
    web.worker()
    exchange = await web.chat(background=True, stream=True)
    assert "role" in exchange.chunks[0]["choices"][0]["delta"]
    exchange.leave()
    await web.settle()
    assert end_of(web) == ("offered", "")


async def test_a_failed_answer_says_why_and_what_there_is_of_it(web: Web) -> None:
    worker, _ = await web.claimed_chat(background=True)
    worker.append(ID, 0, 101, end="engine_error")
    known = (await web.get(PATH)).json
    assert (known["status"], known["error"]["code"]) == ("failed", "engine_error")
    assert known["choices"][0]["message"]["content"] == "<101>"
    assert known["choices"][0]["finish_reason"] is None


async def test_the_stop_string_of_an_answer_that_nobody_reads_is_seen(web: Web) -> None:
    worker, _ = await web.claimed_chat(background=True, stop="<102>", n=2)
    worker.append(ID, 0, 101)
    await web.turn()
    worker.append(ID, 1, 102)
    await web.turn()
    assert end_of(web) == ("finished", "stop")
    assert end_of(web, f"{ID}.1") == ("offered", "")


async def test_a_stop_string_that_nobody_saw_ends_the_answer_when_somebody_looks(web: Web) -> None:
    worker, _ = await web.claimed_chat(background=True, stop="<102>")
    worker.append(ID, 0, 101, 102, 103)
    known = (await web.get(PATH)).json
    assert (known["status"], known["choices"][0]["message"]["content"]) == ("completed", "<101>")
    assert known["choices"][0]["finish_reason"] == "stop"
    assert end_of(web) == ("finished", "stop")


async def test_stopping_ends_every_choice_and_tells_every_reader(web: Web) -> None:
    worker, exchange = await web.claimed_chat(stream=True, n=2)
    worker.append(ID, 0, 101)
    await web.turn()
    stopped = await web.request("POST", f"{PATH}/cancel")
    assert (stopped.status, stopped.json["status"]) == (200, "cancelled")
    assert stopped.json["error"]["code"] == "stopped"
    assert [end_of(web), end_of(web, f"{ID}.1")] == [("cancelled", "stopped")] * 2
    await web.turn()
    assert exchange.events[-1][1]["error"]["code"] == "stopped"
    assert b"[DONE]" not in exchange.body
    assert exchange.is_over
    assert worker.append(ID, 1, 102).reason == "closed"


async def test_stopping_what_is_over_changes_nothing(web: Web) -> None:
    worker, _ = await web.claimed_chat(background=True)
    worker.append(ID, 0, 101, end="length")
    known = (await web.get(PATH)).json
    stopped = await web.request("POST", f"{PATH}/cancel")
    assert (stopped.status, stopped.json) == (200, known)
    assert end_of(web) == ("finished", "length")


async def test_one_client_that_leaves_does_not_end_what_another_one_reads(web: Web) -> None:
    worker, first = await web.claimed_chat(stream=True)
    worker.append(ID, 0, 101)
    await web.turn()
    other = Web(beside=web)
    second = await web.get(f"{PATH}?stream=true")
    third = await other.get(f"{PATH}?stream=true&starting_after=0")
    for reader in (web, other):
        await reader.turn()
    first.leave()
    await web.settle()
    assert end_of(web) == ("streaming", "")
    second.leave()
    await web.settle()
    assert end_of(web) == ("streaming", "")
    worker.append(ID, 1, 102)
    await other.turn()
    assert third.text == "<102>"
    third.leave()
    await other.settle()
    assert end_of(web) == ("cancelled", "disconnect")


@pytest.mark.parametrize("query", ["", "?stream=true"])
async def test_its_head_can_be_asked_for_without_reading_it(web: Web, query: str) -> None:
    await left_after_two_tokens(web)
    for path in (PATH, PATH.replace("/chat/", "/")):
        exchange = await web.request("HEAD", f"{path}{query}")
        assert (exchange.status, exchange.body) == (200, b"")
        assert exchange.headers["content-length"] == str(len((await web.get(PATH)).body))
    assert (await web.request("HEAD", PATH + "0")).status == 404


async def test_a_method_that_a_known_answer_does_not_have_is_405(web: Web) -> None:
    assert (await web.request("PUT", PATH)).status == 405
    assert (await web.get(f"{PATH}/cancel")).status == 405


async def test_a_header_that_has_no_meaning_is_400_and_named(web: Web) -> None:
    web.worker()
    exchange = await web.post(BODY, x_disconnect="maybe")
    assert (exchange.status, exchange.error["param"]) == (400, "X-Disconnect")


async def test_nothing_can_be_resumed_while_draining_but_its_state_is_told(web: Web) -> None:
    await left_after_two_tokens(web)
    await web.app.drain(budget_s=0)
    assert (await web.get(PATH)).json["status"] == "in_progress"
    exchange = await web.get(f"{PATH}?stream=true")
    assert (exchange.status, exchange.error["code"]) == (503, "shutting_down")


async def test_an_answer_that_outlives_its_reader_is_left_running_by_a_drain(web: Web) -> None:
    worker = web.worker()
    exchange = await web.post({**BODY, "stream": True}, **KEEP)
    worker.claim(ID)
    await web.app.drain(budget_s=0)
    await web.settle()
    assert exchange.events[-1][1]["error"]["code"] == "shutting_down"
    assert end_of(web) == ("claimed", "")


async def test_redis_away_is_503(web: Web) -> None:
    await left_after_two_tokens(web)
    web.server.connected = False
    for exchange in (await web.get(PATH), await web.request("POST", f"{PATH}/cancel")):
        assert (exchange.status, exchange.error["code"]) == (503, "queue_unreachable")
