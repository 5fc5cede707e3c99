"""Several choices, and log probabilities, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from app.answers import delivery as answering
from app.answers.admission import choice_seed
from decode.engine.sampling import TokenLogprobs
from tests.app.endpoints.test_stream import bytes_edge
from tests.app.web import EOS, MODEL, NUM_PROMPT_TOKENS, Inline, Web, end_of

USAGE = {"include_usage": True}
IDS = ("chatcmpl-1", "chatcmpl-1.1", "chatcmpl-1.2")


async def test_every_choice_has_its_role_its_text_and_one_finish_reason(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_choices(3, stream=True, stream_options=USAGE)
    worker.append(IDS[1], 0, 201, cached=9)
    await web.turn()
    worker.append(IDS[0], 0, 101, cached=2)
    worker.append(IDS[2], 0, 301, 302, EOS, end="stop", cached=9)
    await web.turn()
    worker.append(IDS[0], 1, 102, end="length", cached=2)
    worker.append(IDS[1], 1, 202, end="length", cached=9)
    await web.turn()
    assert [exchange.text_of(number) for number in range(3)] == ["<101><102>", "<201><202>", "<301><302>"]
    choices = [choice for chunk in exchange.chunks for choice in chunk["choices"]]
    assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
    for number, reason in enumerate(["length", "length", "stop"]):
        mine = [choice for choice in choices if choice["index"] == number]
        assert ["role" in choice["delta"] for choice in mine] == [True] + [False] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]
    assert [chunk["usage"] is None for chunk in exchange.chunks] == [True] * (len(exchange.chunks) - 1) + [False]
    usage = exchange.chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT_TOKENS, 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert {chunk["id"] for chunk in exchange.chunks} == {"chatcmpl-1"}
    assert exchange.events[-1] == ("2,2,3", "[DONE]")


async def test_a_whole_answer_has_all_choices_in_order(web: Web) -> None:
    worker, exchange = await web.claimed_choices(3)
    for number in (2, 0, 1):
        worker.append(IDS[number], 0, 100 * number, end="length")
        await web.turn()
    shown = [(choice["index"], choice["message"]["content"]) for choice in exchange.json["choices"]]
    assert shown == [(0, "<0>"), (1, "<100>"), (2, "<200>")]
    assert exchange.json["usage"]["completion_tokens"] == 3
    assert exchange.json["usage"]["prompt_tokens"] == NUM_PROMPT_TOKENS


async def test_choices_differ_by_their_seed_and_the_same_seed_repeats_them(web: Web) -> None:
    worker = web.worker()
    seeds = []
    for number in (1, 2):
        await web.chat(n=3, seed=-7, temperature=1)
        ids = (f"chatcmpl-{number}", f"chatcmpl-{number}.1", f"chatcmpl-{number}.2")
        jobs = [worker.claim(request_id) for request_id in ids]
        assert len({job.prompt_token_ids for job in jobs}) == 1
        seeds.append([job.sampling.seed for job in jobs])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert seeds[0][0] == -7


def test_seeds_of_choices_stay_in_the_range_of_seeds() -> None:
    seeds = [choice_seed(seed, number) for seed in (0, 1, -(2**63), 2**63 - 1) for number in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


async def test_all_choices_are_taken_or_none() -> None:
    web = Web(max_waiting=2)
    web.worker()
    exchange = await web.chat(n=3)
    assert exchange.status == 429
    assert web.records.num_waiting(MODEL) == 0


async def test_a_stop_string_in_one_choice_closes_that_one_only(outlet: bool) -> None:
    web = Web(outlet=outlet)
    worker, exchange = await web.claimed_choices(3, stream=True, stop=["<202>"])
    worker.append(IDS[1], 0, 201, 202, 203)
    worker.append(IDS[0], 0, 101)
    await web.turn()
    assert [end_of(web, request_id)[0] for request_id in IDS] == ["streaming", "finished", "claimed"]
    worker.append(IDS[0], 1, 102, end="length")
    worker.append(IDS[2], 0, 301, end="length")
    await web.turn()
    assert [exchange.text_of(number) for number in range(3)] == ["<101><102>", "<201>", "<301>"]
    assert exchange.events[-1][1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_ends_the_answer_with_one_error_and_the_others_with_it(
    web: Web, stream: bool
) -> None:
    worker, exchange = await web.claimed_choices(3, stream=stream)
    worker.append(IDS[0], 0, 101, end="length")
    worker.append(IDS[1], 0, 201, end="engine_error")
    await web.turn()
    assert exchange.is_over
    assert end_of(web, IDS[2]) == ("cancelled", "other_choice_failed")
    if not stream:
        assert (exchange.status, exchange.error["code"]) == (500, "engine_error")
        return
    assert [data["error"]["code"] for _, data in exchange.events if "error" in data] == ["engine_error"]
    assert b"[DONE]" not in exchange.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_choices(web: Web, stream: bool) -> None:
    worker = web.worker()
    exchange = await web.chat(stream=stream, n=3)
    worker.claim(IDS[0])
    worker.append(IDS[0], 0, 101, end="length")
    await web.turn()
    exchange.leave()
    await web.settle()
    assert [end_of(web, i) for i in IDS] == [("finished", "length"), *[("cancelled", "disconnect")] * 2]
    assert web.records.num_waiting(MODEL) == 0
    assert web.app.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_have_true_bytes_and_the_likeliest_beside_them(stream: bool) -> None:
    web = Web(text_edges={MODEL: bytes_edge()})
    worker = web.worker()
    exchange = await web.chat(stream=stream, logprobs=True, top_logprobs=2)
    assert worker.claim("chatcmpl-1").sampling.num_logprobs == 2
    first, second = "é".encode()
    likeliest = ((first, -0.5), (65, float("-inf")))
    worker.append("chatcmpl-1", 0, first, logprobs=[TokenLogprobs(-0.5, likeliest)])
    await web.turn()
    worker.append("chatcmpl-1", 1, second, logprobs=[TokenLogprobs(-0.25, ((second, -0.25), (66, -3.0)))])
    await web.turn()
    last = TokenLogprobs(-0.125, ((EOS, -0.125), (67, -4.0)))
    worker.append("chatcmpl-1", 2, EOS, end="stop", logprobs=[last])
    await web.turn()
    if stream:
        choices = [choice for chunk in exchange.chunks for choice in chunk["choices"]]
        assert [choice["logprobs"] is None for choice in choices] == [True, False, True]
        shown = choices[1]["logprobs"]
    else:
        shown = exchange.json["choices"][0]["logprobs"]
        assert exchange.json["usage"]["completion_tokens"] == 2
    assert shown == {
        "content": [
            {
                "token": "\ufffd",
                "bytes": [first],
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "\ufffd", "bytes": [first], "logprob": -0.5},
                    {"token": "A", "bytes": [65], "logprob": -9999.0},
                ],
            },
            {
                "token": "\ufffd",
                "bytes": [second],
                "logprob": -0.25,
                "top_logprobs": [
                    {"token": "\ufffd", "bytes": [second], "logprob": -0.25},
                    {"token": "B", "bytes": [66], "logprob": -3.0},
                ],
            },
        ],
        "refusal": None,
    }


async def test_without_others_beside_them_the_list_is_empty() -> None:
    web = Web(text_edges={MODEL: bytes_edge()})
    worker, exchange = await web.claimed_chat(logprobs=True)
    worker.append("chatcmpl-1", 0, 65, end="length", logprobs=[TokenLogprobs(-1.5)])
    await web.turn()
    [entry] = exchange.json["choices"][0]["logprobs"]["content"]
    assert entry == {"token": "A", "bytes": [65], "logprob": -1.5, "top_logprobs": []}


async def test_penalties_biases_and_the_tier_reach_the_worker(web: Web) -> None:
    worker = web.worker()
    exchange = await web.chat(
        presence_penalty=1.5, frequency_penalty=-0.5, logit_bias={"7": -100}, service_tier="flex"
    )
    job = worker.claim("chatcmpl-1")
    assert (job.sampling.presence_penalty, job.sampling.frequency_penalty) == (1.5, -0.5)
    assert (job.sampling.logit_bias, job.priority) == (((7, -100.0),), "flex")
    worker.append("chatcmpl-1", 0, 65, end="length")
    await web.turn()
    assert exchange.json["service_tier"] == "flex"


@pytest.mark.parametrize(("n", "is_long"), [(1, False), (2, True)])
async def test_a_long_answer_is_rendered_off_the_event_loop(
    web: Web, monkeypatch: pytest.MonkeyPatch, n: int, is_long: bool
) -> None:
    in_threads: list[Any] = []
    submit = Inline.submit

    def noted(self: Inline, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        in_threads.append(getattr(function, "func", function))
        return submit(self, function, *args, **kwargs)

    monkeypatch.setattr(Inline, "submit", noted)
    monkeypatch.setattr(answering, "LONG_ANSWER", 10)
    worker = web.worker()
    exchange = await web.chat(n=n, logprobs=True, top_logprobs=2)
    for choice_id in ["chatcmpl-1", "chatcmpl-1.1"][:n]:
        worker.claim(choice_id)
        logprobs = [TokenLogprobs(-1.0, ((5, -1.0), (6, -2.0)))] * 2
        worker.append(choice_id, 0, 101, 102, end="length", logprobs=logprobs)
    await web.turn()
    assert [len(choice["logprobs"]["content"]) for choice in exchange.json["choices"]] == [2] * n
    assert (answering._rendered in in_threads) is is_long
