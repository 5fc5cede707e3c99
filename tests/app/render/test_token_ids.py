"""`return_token_ids`: the ids of the prompt and of the answer, beside what they say."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.app.endpoints.test_stream import bytes_edge
from tests.app.endpoints.test_tools import HERMES_EDGE, PARIS, THINKING_EDGE, TOOLS, answered
from tests.app.reference.test_openapi import matches
from tests.app.web import EOS, HELLO, ID, MODEL, Exchange, Web

PROMPT = list(b"user: hi\nassistant:")
USAGE = {"include_usage": True}


async def complete(web: Web, **fields: Any) -> Exchange:
    return await web.complete(**{"return_token_ids": True, **fields})


def ids_in(exchange: Exchange) -> dict[int, list[int]]:
    """Of every choice of a stream, in the order in which they came."""
    found: dict[int, list[int]] = defaultdict(list)
    for chunk in exchange.chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["token_ids"]
    return dict(found)


def prompts_in(exchange: Exchange) -> list[tuple[int, list[int]]]:
    """The number of every chunk that has the tokens of the prompt, and those."""
    chunks = enumerate(exchange.chunks)
    return [(number, chunk["prompt_token_ids"]) for number, chunk in chunks if "prompt_token_ids" in chunk]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_does_not_ask_for_ids_gets_none(web: Web, stream: bool) -> None:
    worker, exchange = await web.claimed_chat(stream=stream, return_token_ids=False)
    worker.append(ID, 0, 101, end="length")
    await web.turn()
    assert exchange.is_over
    assert b"token_ids" not in exchange.body


async def test_a_stream_begins_with_the_prompt_and_every_token_is_in_it_once(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_chat(stream=True, return_token_ids=True, stream_options=USAGE)
    worker.append(ID, 0, 101)
    await web.turn()
    worker.append(ID, 1, 102, 103)
    await web.turn()
    worker.append(ID, 3, 104, EOS, end="stop")
    await web.turn()
    shown = [
        (choice["delta"].get("content"), choice["token_ids"]) for c in exchange.chunks for choice in c["choices"]
    ]
    assert shown == [
        ("", []),
        ("<101>", [101]),
        ("<102><103>", [102, 103]),
        ("<104>", [104]),
        (None, []),
    ]
    assert prompts_in(exchange) == [(0, PROMPT)]
    assert exchange.chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(matches("ChatCompletionChunk", chunk) for chunk in exchange.chunks)


async def test_a_whole_answer_has_the_prompt_beside_its_choices_and_ids_in_each(web: Web) -> None:
    worker = web.worker()
    exchange = await web.chat(return_token_ids=True, n=2)
    for number, choice_id in enumerate((ID, f"{ID}.1")):
        worker.claim(choice_id)
        worker.append(choice_id, 0, 101 + number, 111, EOS, end="stop")
    await web.turn()
    assert exchange.json["prompt_token_ids"] == PROMPT
    assert [choice["token_ids"] for choice in exchange.json["choices"]] == [[101, 111], [102, 111]]
    assert exchange.json["usage"]["completion_tokens"] == 4
    assert matches("ChatCompletion", exchange.json)


async def test_in_a_stream_of_two_choices_each_has_its_own(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_choices(2, stream=True, return_token_ids=True)
    worker.append(f"{ID}.1", 0, 201)
    await web.turn()
    worker.append(ID, 0, 101, 102, end="length")
    worker.append(f"{ID}.1", 1, 202, end="length")
    await web.turn()
    assert ids_in(exchange) == {0: [101, 102], 1: [201, 202]}
    assert prompts_in(exchange) == [(0, PROMPT)]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_id_is_that_of_the_token_which_completes_a_stop_string(stream: bool) -> None:
    web = Web(text_edges={MODEL: bytes_edge()})
    options = {"stream_options": USAGE} if stream else {}
    worker, exchange = await web.claimed_chat(stream=stream, return_token_ids=True, stop="BCD", **options)
    for place, token in enumerate(b"ABxBC"):
        worker.append(ID, place, token)
        await web.turn()
    worker.append(ID, 5, *b"Dyz", end="length")
    await web.turn()
    assert exchange.content(stream) == "ABx"
    ids = ids_in(exchange)[0] if stream else exchange.json["choices"][0]["token_ids"]
    assert bytes(ids) == b"ABxBCD"
    last = exchange.chunks[-1] if stream else exchange.json
    assert last["usage"]["completion_tokens"] == 6


async def test_ids_of_text_that_is_held_back_come_with_the_next_text_or_with_the_end(outlet: bool) -> None:
    web = Web(outlet=outlet, text_edges={MODEL: bytes_edge()})
    worker, exchange = await web.claimed_chat(stream=True, return_token_ids=True)
    first, second = "é".encode()
    for place, token in enumerate((65, first, second, first)):
        worker.append(ID, place, token)
        await web.turn()
    worker.append(ID, 4, EOS, end="stop")
    await web.turn()
    shown = [
        (choice["delta"].get("content"), choice["token_ids"]) for c in exchange.chunks for choice in c["choices"]
    ]
    assert shown == [("", []), ("A", [65]), ("é", [first, second]), ("\ufffd", [first]), (None, [])]


@pytest.mark.parametrize("group", [1, 7, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_calls_and_thoughts_are_all_there(stream: bool, group: int) -> None:
    thinking = f"<think>hm é</think>\n\nSo: {PARIS}"
    web = Web(text_edges=THINKING_EDGE)
    options = {"stream_options": USAGE} if stream else {}
    exchange = await answered(web, thinking, group, stream=stream, tools=TOOLS, return_token_ids=True, **options)
    choices = [choice for chunk in (exchange.chunks if stream else [exchange.json]) for choice in chunk["choices"]]
    assert bytes(token for choice in choices for token in choice["token_ids"]) == thinking.encode()
    assert choices[-1]["finish_reason"] == "tool_calls"
    last = exchange.chunks[-1] if stream else exchange.json
    assert last["usage"]["completion_tokens"] == len(thinking.encode())


async def test_an_answer_that_breaks_off_in_a_call_has_the_ids_of_its_half() -> None:
    half = PARIS[:20]
    web = Web(text_edges=HERMES_EDGE)
    exchange = await answered(web, half, 3, "length", stream=True, tools=TOOLS, return_token_ids=True)
    assert bytes(ids_in(exchange)[0]) == half.encode()


@pytest.mark.parametrize("num_seen", range(6))
async def test_the_rest_of_a_stream_has_the_rest_of_the_ids(num_seen: int) -> None:
    web = Web(text_edges={MODEL: bytes_edge()})
    worker, first = await web.claimed_chat(stream=True, return_token_ids=True, stop="ZZZ", n=1)
    for place, token in enumerate(b"abZc"):
        worker.append(ID, place, token)
        await web.turn()
    worker.append(ID, 4, ord("Z"), EOS, end="stop")
    await web.turn()
    undisturbed = ids_in(first)[0]
    assert bytes(undisturbed) == b"abZcZ"
    before = first.events[:num_seen]
    other = Web(beside=web, text_edges={MODEL: bytes_edge()})
    after = f"&starting_after={before[-1][0]}" if before else ""
    rest = await other.get(f"/v1/chat/completions/{ID}?stream=true{after}")
    await other.turn()
    seen = [token for _, chunk in before for choice in chunk["choices"] for token in choice["token_ids"]]
    assert seen + ids_in(rest)[0] == undisturbed
    assert prompts_in(rest) == ([] if before else [(0, [1, 2, 3])])


async def test_an_answer_in_the_background_shows_the_ids_that_there_are(web: Web) -> None:
    worker = web.worker()
    accepted = await web.chat(background=True, store=True, return_token_ids=True)
    assert accepted.json["prompt_token_ids"] == PROMPT
    assert accepted.json["choices"][0]["token_ids"] == []
    worker.claim(ID)
    worker.append(ID, 0, 101)
    assert (await web.get(f"/v1/chat/completions/{ID}")).json["choices"][0]["token_ids"] == [101]
    worker.append(ID, 1, 102, EOS, end="stop")
    state = (await web.get(f"/v1/chat/completions/{ID}")).json
    assert state["choices"][0]["token_ids"] == [101, 102]
    assert matches("ChatCompletionState", state)
    [listed] = (await web.get("/v1/chat/completions")).json["data"]
    assert {**listed, "status": "completed"} == state


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_every_choice_of_a_completion_has_the_tokens_of_its_own_prompt(
    web: Web, stream: bool, echo: bool
) -> None:
    worker = web.worker()
    exchange = await complete(web, prompt=["a", "bc"], n=2, stream=stream, echo=echo)
    names = ["cmpl-1", "cmpl-1.1", "cmpl-1.2", "cmpl-1.3"]
    for number, choice_id in enumerate(names):
        worker.claim(choice_id)
        worker.append(choice_id, 0, 101 + number, EOS, end="stop")
    await web.turn()
    parts = exchange.chunks if stream else [exchange.json]
    assert all(matches("Completion", part) for part in parts)
    assert all("prompt_token_ids" not in part for part in parts)
    for number, prompt in enumerate(("a", "a", "bc", "bc")):
        mine = [choice for part in parts for choice in part["choices"] if choice["index"] == number]
        assert [choice["prompt_token_ids"] for choice in mine if "prompt_token_ids" in choice] == [
            list(prompt.encode())
        ]
        assert "prompt_token_ids" in mine[0]
        assert [token for choice in mine for token in choice["token_ids"]] == [101 + number]
        assert "".join(choice["text"] for choice in mine) == (prompt if echo else "") + f"<{101 + number}>"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_no_tokens_has_the_ids_of_its_prompt(web: Web, stream: bool) -> None:
    exchange = await complete(web, prompt=[5, 6], max_tokens=0, stream=stream)
    first = (exchange.chunks[0] if stream else exchange.json)["choices"][0]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([5, 6], [])


async def test_a_completion_that_is_resumed_does_not_tell_its_prompt_again(web: Web) -> None:
    worker = web.worker()
    exchange = await complete(web, stream=True)
    worker.claim("cmpl-1")
    worker.append("cmpl-1", 0, 101, end="length")
    await web.turn()
    opening = exchange.events[0][0]
    rest = await web.get(f"/v1/completions/cmpl-1?stream=true&starting_after={opening}")
    await web.turn()
    assert b"prompt_token_ids" not in rest.body
    assert ids_in(rest) == {0: [101]}


async def test_only_true_and_false_are_taken(web: Web) -> None:
    for exchange in (await web.chat(return_token_ids="yes"), await complete(web, return_token_ids=1)):
        assert (exchange.status, exchange.error["param"]) == (400, "return_token_ids")
    assert (await web.post({"model": MODEL, "messages": HELLO, "return_token_ids": None})).status != 400
