"""Legacy completions over HTTP: prompts, choices, echo, log probabilities, and answers of no tokens."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.render.spec import decode_spec
from app.text.scripted import scripted_text_edge
from decode.engine.sampling import TokenLogprobs
from tasks.protocol.contract import pack_logprobs
from tasks.protocol.record import Append, Terminal
from tests.app.web import EOS, FINGERPRINT, MODEL, START_S, Exchange, Inline, Web, Worker

NO_TOKEN = scripted_text_edge().vocab_size


async def claimed(web: Web, **fields: Any) -> tuple[Worker, Exchange]:
    worker = web.worker()
    exchange = await web.complete(**fields)
    worker.claim("cmpl-1")
    return worker, exchange


def append(worker: Worker, request_id: str, *tokens: int, likeliest: int, end: str) -> None:
    """Each token has log probability -1, and beside it `likeliest` others from 900 on."""
    logprobs = [TokenLogprobs(-1.0, tuple((900 + i, -0.25 * (i + 1)) for i in range(likeliest))) for _ in tokens]
    data = pack_logprobs(logprobs)
    worker.records.append_many([Append(request_id, 1, 0, tokens, 0, Terminal("finished", end), data)])


def text_of(chunks: list[Any], index: int) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def events(exchange: Exchange) -> list[Any]:
    """The data of every event so far."""
    lines = [line for line in exchange.body.decode().split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else orjson.loads(data) for data in (line[6:] for line in lines)]


def chunks_of(exchange: Exchange, stream: bool) -> list[Any]:
    """All parts of an answer with choices, streamed or not."""
    return [data for data in events(exchange) if data != "[DONE]"] if stream else [exchange.json]


def offsets(exchange: Exchange) -> list[int]:
    choices = [choice for chunk in chunks_of(exchange, True) for choice in chunk["choices"]]
    return [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]


async def test_a_text_is_continued(web: Web) -> None:
    worker = web.worker()
    exchange = await web.complete(max_tokens=7, stop=["<104>"], seed=5)
    job = worker.claim("cmpl-1")
    assert bytes(job.prompt_token_ids) == b"hi"
    assert (job.sampling.max_tokens, job.sampling.seed, job.sampling.stop_token_ids) == (7, 5, (EOS,))
    worker.append("cmpl-1", 0, 101, 102, EOS, end="stop")
    await web.turn()
    assert exchange.status == 200
    assert exchange.json == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(START_S),
        "model": MODEL,
        "system_fingerprint": FINGERPRINT,
        "choices": [{"index": 0, "text": "<101><102>", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        },
    }
    assert exchange.headers["x-request-id"] == "cmpl-1"


async def test_16_tokens_are_the_default(web: Web) -> None:
    worker = web.worker()
    await web.complete()
    assert worker.claim("cmpl-1").sampling.max_tokens == 16


async def test_tokens_are_continued_as_they_are(web: Web) -> None:
    worker = web.worker()
    await web.complete(prompt=[5, 999, 0])
    assert worker.claim("cmpl-1").prompt_token_ids == (5, 999, 0)


async def test_every_prompt_has_n_choices_in_the_order_of_the_prompts(web: Web) -> None:
    worker = web.worker()
    exchange = await web.complete(prompt=["a", "bc"], n=2, seed=7)
    ids = ["cmpl-1", "cmpl-1.1", "cmpl-1.2", "cmpl-1.3"]
    jobs = [worker.claim(choice_id) for choice_id in ids]
    assert [bytes(job.prompt_token_ids) for job in jobs] == [b"a", b"a", b"bc", b"bc"]
    assert len({job.sampling.seed for job in jobs}) == 4
    for number, choice_id in enumerate(ids):
        worker.append(choice_id, 0, 100 + number, end="length")
    await web.turn()
    choices = exchange.json["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(i, f"<{100 + i}>") for i in range(4)]
    usage = exchange.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 4)


async def test_a_stream_is_text_finish_reason_usage_and_done(web: Web) -> None:
    worker, exchange = await claimed(web, stream=True, stream_options={"include_usage": True})
    worker.append("cmpl-1", 0, 101, 102)
    await web.turn()
    worker.append("cmpl-1", 2, 103, end="length")
    await web.turn()
    *chunks, usage = chunks_of(exchange, True)
    assert events(exchange)[-1] == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {"cmpl-1"}
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]] == [None, None, "length"]
    assert text_of(chunks, 0) == "<101><102><103>"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_the_prompt_in_front_of_every_choice(web: Web, stream: bool) -> None:
    worker = web.worker()
    exchange = await web.complete(prompt=["a", "b"], n=2, echo=True, stream=stream)
    for number, choice_id in enumerate(["cmpl-1", "cmpl-1.1", "cmpl-1.2", "cmpl-1.3"]):
        worker.claim(choice_id)
        worker.append(choice_id, 0, 100 + number, end="length")
    await web.turn()
    chunks = chunks_of(exchange, stream)
    assert [text_of(chunks, i) for i in range(4)] == ["a<100>", "a<101>", "b<102>", "b<103>"]


@pytest.mark.parametrize("place", range(6))
async def test_an_echo_comes_once_wherever_a_stream_is_cut(web: Web, place: int) -> None:
    worker = web.worker()
    first = await web.complete(prompt=["a", "b"], echo=True, stream=True)
    for number, choice_id in enumerate(["cmpl-1", "cmpl-1.1"]):
        worker.claim(choice_id)
        worker.append(choice_id, 0, 100 + number, end="length")
    await web.turn()
    had = first.events[: place + 1]
    rest = await web.get("/v1/completions/cmpl-1", last_event_id=had[-1][0])
    await web.turn()
    chunks = [data for _, data in [*had, *rest.events] if data != "[DONE]"]
    assert [text_of(chunks, i) for i in range(2)] == ["a<100>", "b<101>"]


async def test_the_echo_of_many_tokens_is_made_off_the_event_loop() -> None:
    pool_threads: list[bool] = []

    class Pool(Inline):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            pool_threads.append(True)
            try:
                return super().submit(function, *args, **kwargs)
            finally:
                pool_threads.pop()

    def token_bytes(token_id: int) -> bytes:
        assert pool_threads
        return b"x"

    edge = scripted_text_edge()
    edge._token_bytes = token_bytes
    web = Web(text_edges={MODEL: edge}, pool=Pool())
    exchange = await web.complete(prompt=[5] * 10_000, echo=True, max_tokens=0)
    assert exchange.json["choices"][0]["text"] == "x" * 10_000


async def test_the_echo_of_tokens_is_their_text(web: Web) -> None:
    exchange = await web.complete(prompt=[[5, 6], [7]], echo=True, max_tokens=0)
    assert [c["text"] for c in exchange.json["choices"]] == ["<5><6>", "<7>"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_no_tokens_are_generated_at_once_and_without_a_worker(web: Web, stream: bool, echo: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    exchange = await web.complete(max_tokens=0, echo=echo, n=2, stream=stream, **options)
    assert (exchange.status, exchange.is_over) == (200, True)
    chunks = chunks_of(exchange, stream)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [text_of(chunks, i) for i in range(2)] == (["hi", "hi"] if echo else ["", ""])
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length", "length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    if stream:
        assert exchange.headers["content-type"].startswith("text/event-stream")
        assert events(exchange)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_parallel_lists(web: Web, stream: bool) -> None:
    worker = web.worker()
    exchange = await web.complete(logprobs=2, stream=stream)
    assert worker.claim("cmpl-1").sampling.num_logprobs == 2
    append(worker, "cmpl-1", 101, 900, EOS, likeliest=2, end="stop")
    await web.turn()
    chunks = chunks_of(exchange, stream)
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for logprobs in [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]:
        for name in found:
            found[name] += logprobs[name]
    assert found == {
        "tokens": ["<101>", "<900>"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [
            {"<900>": -0.25, "<901>": -0.5, "<101>": -1.0},
            {"<900>": -0.25, "<901>": -0.5},
        ],
        "text_offset": [0, 5],
    }


async def test_without_others_beside_them_log_probabilities_are_of_the_tokens_alone(web: Web) -> None:
    worker, exchange = await claimed(web, logprobs=0)
    append(worker, "cmpl-1", 101, likeliest=0, end="length")
    await web.turn()
    logprobs = exchange.json["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-1.0], None)


async def test_offsets_count_text_that_is_held_back_for_a_stop_string(web: Web) -> None:
    worker, exchange = await claimed(web, logprobs=0, stop="<101><9")
    append(worker, "cmpl-1", 101, 102, 103, likeliest=0, end="length")
    await web.turn()
    choice = exchange.json["choices"][0]
    assert choice["text"] == "<101><102><103>"
    assert choice["logprobs"]["text_offset"] == [0, 5, 10]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [NO_TOKEN]}, "prompt"),
        ({"prompt": [[1], [2, NO_TOKEN]]}, "prompt[1]"),
        ({"logit_bias": {str(NO_TOKEN): 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"n": 129}, "n"),
        ({"prompt": "a" * 1001}, "prompt"),
        ({"prompt": "a" * 999, "max_tokens": 2}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_is_named_and_reaches_no_queue(
    web: Web, fields: dict[str, Any], param: str, stream: bool
) -> None:
    web.worker()
    exchange = await web.complete(**fields, stream=stream)
    assert (exchange.status, exchange.error["param"]) == (400, param)
    assert web.records.state("cmpl-1") is None


async def test_a_prompt_beyond_the_context_says_both_numbers(web: Web) -> None:
    web.worker()
    exchange = await web.complete(prompt="a" * 1001)
    assert exchange.error["code"] == "context_length_exceeded"
    assert "1001" in exchange.error["message"]
    assert "1000" in exchange.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found_before_any_event(web: Web, stream: bool) -> None:
    exchange = await web.complete(model="nope", stream=stream)
    assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")


async def test_the_answer_can_be_asked_for_again_with_its_log_probabilities(web: Web) -> None:
    worker, exchange = await claimed(web, logprobs=0, stream=True)
    append(worker, "cmpl-1", 101, 102, 103, likeliest=0, end="length")
    await web.turn()
    assert offsets(exchange) == [0, 5, 10]
    spec = decode_spec(web.records.answer("cmpl-1") or b"")
    assert (spec.kind, spec.num_logprobs) == ("completion", 0)
    again = await web.request("GET", "/v1/completions/cmpl-1", headers={"last-event-id": "1"})
    await web.turn()
    assert offsets(again) == [10]
    assert text_of(chunks_of(again, True), 0) == "<103>"
