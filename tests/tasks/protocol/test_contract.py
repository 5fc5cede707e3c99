"""The codec: what is written can be read, and what cannot be read is refused loudly."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.engine.sampling import SamplingParams, TokenLogprobs
from tasks.protocol import keys
from tasks.protocol.contract import (
    ContractError,
    TerminalEvent,
    TokenEvent,
    WorkerLoad,
    decode_entry,
    decode_job,
    decode_worker_info,
    decode_worker_load,
    encode_job,
    encode_terminal,
    encode_worker_info,
    encode_worker_load,
    entry_id,
    pack_logprobs,
    pack_source,
    pack_step,
    pack_tokens,
    unpack_logprobs,
    unpack_source,
    unpack_step,
    unpack_tokens,
)
from tests.tasks.cell import info, job

JOB = replace(
    job("chatcmpl-ü", prompt=(0, 1, 2**31)),
    sampling=SamplingParams(
        7, 0.5, 0.9, 40, 0.1, 2**63, (1, 2), True, 3, 0.5, -0.5, ((7, -100.0), (8, 1.5)), 2, "start: /a/"
    ),
)

TOKENS = st.integers(0, 2**32 - 1)


def changed(data: bytes, **changes: object) -> bytes:
    fields = {**orjson.loads(data), **changes}
    return orjson.dumps({name: value for name, value in fields.items() if value is not ...})


def test_a_job_comes_back_as_it_was() -> None:
    assert decode_job(encode_job(JOB)) == JOB


def test_a_worker_comes_back_as_it_was() -> None:
    assert decode_worker_info(encode_worker_info(info())) == info()
    assert decode_worker_load(encode_worker_load(WorkerLoad(1, 2, 3, 4, 5))) == WorkerLoad(1, 2, 3, 4, 5)


@given(st.lists(TOKENS))
def test_tokens_come_back_as_they_were(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed) == tuple(token_ids)


@given(st.integers(0, 3), st.lists(st.tuples(st.floats(-50, 0, width=32), st.integers(0, 2**32 - 1)), min_size=1))
def test_log_probabilities_come_back_as_they_were_in_equal_parts(
    num_top: int, drawn: list[tuple[float, int]]
) -> None:
    logprobs = tuple(TokenLogprobs(value, ((token, value),) * num_top) for value, token in drawn)
    packed = pack_logprobs(logprobs)
    assert len(packed) % len(drawn) == 0
    assert unpack_logprobs(packed, len(drawn)) == logprobs


@pytest.mark.parametrize(("data", "num_tokens"), [(b"1234567", 1), (b"12345678", 1), (b"12345", 2), (b"", 1)])
def test_log_probabilities_that_do_not_fit_their_tokens_are_refused(data: bytes, num_tokens: int) -> None:
    with pytest.raises(ContractError, match=r"^logprobs: "):
        unpack_logprobs(data, num_tokens)


@given(st.lists(st.tuples(TOKENS, TOKENS, TOKENS)))
def test_a_step_comes_back_as_it_was(tokens: list[tuple[int, int, int]]) -> None:
    assert list(unpack_step(pack_step(tokens))) == tokens
    assert len(pack_step(tokens)) == 12 * len(tokens)


@given(st.text(min_size=1), TOKENS)
def test_a_source_comes_back_as_it_was(worker: str, slot: int) -> None:
    assert unpack_source(pack_source(worker, slot)) == (worker, slot)


@pytest.mark.parametrize("data", [b"", b"\1\0\0", b"\1\0\0\0", b"\1\0\0\0\xff"])
def test_a_damaged_source_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match="source"):
        unpack_source(data)


def test_a_damaged_step_is_refused() -> None:
    with pytest.raises(ContractError, match="step"):
        unpack_step(b"\0" * 13)


def test_entries_come_back_as_events() -> None:
    tokens = {b"t": pack_tokens([5, 6])}
    assert decode_entry(entry_id(0, 1).encode(), tokens) == TokenEvent(0, 1, (5, 6))
    end = {b"e": encode_terminal("failed", "poison", "why", "w1", 3)}
    assert decode_entry(entry_id(9, 4).encode(), end) == TerminalEvent(9, 4, "failed", "poison", "why", "w1", 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        changed(encode_job(JOB), v=1),
        changed(encode_job(JOB), v=...),
        changed(encode_job(JOB), model=...),
        changed(encode_job(JOB), surprise=1),
        changed(encode_job(JOB), sampling=None),
        changed(encode_job(JOB), sampling={"max_tokens": 1}),
        changed(encode_job(JOB), prompt_token_ids=3),
    ],
)
def test_a_damaged_job_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match=r"^job: "):
        decode_job(data)


@pytest.mark.parametrize(
    "data", [b"", changed(encode_worker_info(info()), v=1), changed(encode_worker_info(info()), pid=...)]
)
def test_a_damaged_worker_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match=r"^worker: "):
        decode_worker_info(data)


def test_a_damaged_load_is_refused() -> None:
    with pytest.raises(ContractError, match=r"^load: "):
        decode_worker_load(changed(encode_worker_load(WorkerLoad()), surprise=1))


@pytest.mark.parametrize(
    "fields",
    [{}, {b"x": b"1"}, {b"t": b"123"}, {b"e": b"?"}, {b"e": b'{"v":2,"state":"finished"}'}],
)
def test_a_damaged_entry_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(ContractError):
        decode_entry(b"1-1", fields)


def test_no_request_id_can_reach_the_keys_of_another_thing() -> None:
    hostile = ("worker:w1", "due", "events", "}:req", "a}:out", "reader:x:open")
    others = {keys.DUE, keys.EVENTS, keys.worker("w1"), keys.held("w1"), keys.reader_open("x"), keys.request("a")}
    assert {keys.request(request_id) for request_id in hostile} & others == set()
    assert {keys.out(request_id) for request_id in hostile} & others == set()


def test_the_scripts_see_the_same_templates_as_python() -> None:
    constants = keys.lua_constants(
        "REQUEST:format(id) .. QUEUE_CONTINUE:format(model, f) .. MAX_TRIMMED"
    ).splitlines()
    assert constants == [
        f"local MAX_TRIMMED = {keys.MAX_TRIMMED}",
        f'local QUEUE_CONTINUE = "{keys.queue_continue("%s", "%s")}"',
        f'local REQUEST = "{keys.request("%s")}"',
    ]
