"""Web processes that end, in good order or not, and clients that leave, half leave, send too much, or never read."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tasks.protocol.record import RecordState
from tests.faults.cell import FaultyCell
from tests.faults.client import HOST, Ask, Asking, Seen, ask, body_of, request_bytes
from tests.faults.conftest import CellMaker
from tests.faults.oracle import Oracle, story
from tests.faults.verdict import judge_client

pytestmark = pytest.mark.e2e

LONG = 4000
"""Tokens: more than any of these tests waits for."""


@pytest.fixture(scope="module")
def shared(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=2, num_web=2, SCRIPTED_STEP_MS=10, MAX_NUM_SEQS=16)


@pytest.fixture
def cell(shared: FaultyCell) -> FaultyCell:
    """Whole again, whatever the test before did to it."""
    shared.wait_complete()
    return shared


@pytest.fixture(scope="module")
def narrow_cell(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(
        num_workers=1, SCRIPTED_STEP_MS=10, MAX_NUM_SEQS=1, MAX_NUM_BATCHED_TOKENS=8, MAX_MODEL_LEN=8000
    )


@pytest.fixture
def narrow(narrow_cell: FaultyCell) -> FaultyCell:
    """One worker with one slot, which reads a long prompt in many small pieces."""
    narrow_cell.wait_quiet()
    return narrow_cell


def state_of(cell: FaultyCell, request_id: str) -> RecordState:
    state = cell.records.state(request_id)
    assert state is not None, f"{request_id} has no record"
    return state


def open_ids(cell: FaultyCell) -> list[str]:
    """Requests that are not over."""
    return sorted(raw.decode() for raw in cell.redis.zrange("tf:due", 0, -1))  # type: ignore[union-attr]


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, "it never came true"
        await asyncio.sleep(0.005)


def memory_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1))


def test_a_web_process_told_to_end_ends_20_streams_with_an_event_and_itself_within_4_s(cell: FaultyCell) -> None:
    async def test() -> list[Seen]:
        asking = [Asking(cell.port, Ask(story(number), 60 if number < 4 else LONG)) for number in range(20)]
        await asyncio.gather(*(one.events(1) for one in asking))
        draining = cell.process("web")
        cell.processes.remove(draining)
        began_s = time.monotonic()
        draining.signal_group(signal.SIGTERM)
        await until(lambda: cell.get("/readyz") == 503)
        late = await ask(cell.port, Ask(story(1), 1))
        assert (late.status, late.error_code) == (503, "shutting_down")
        assert int(late.headers["retry-after"]) >= 1
        assert await asyncio.to_thread(draining.end) == 0
        assert time.monotonic() - began_s < 5
        cell.replace("web")
        return [await one.end() for one in asking]

    for seen in asyncio.run(test()):
        assert (seen.end, seen.error_code) in (("done", ""), ("error", "shutting_down"))
        assert seen.end == "error" or seen.ask.max_tokens < LONG
    cell.wait_quiet()


def test_the_requests_of_a_killed_web_process_are_cancelled_and_its_neighbours_go_on(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> Seen:
        asking = [Asking(cell.ports[0], Ask(story(number), LONG, is_streamed=number > 2)) for number in range(8)]
        neighbour = Asking(cell.ports[1], Ask(story(9), 150), web=1)
        await asyncio.gather(*(one.events(1) for one in [*asking[3:], neighbour]))
        await until(lambda: len(open_ids(cell)) == 9)
        ids = set(open_ids(cell)) - {neighbour.seen.request_id}
        cell.signal_at_work("web", signal.SIGKILL)
        killed_s = time.monotonic()
        await until(lambda: all(state_of(cell, request_id).is_over for request_id in ids))
        assert time.monotonic() - killed_s < 10
        assert {state_of(cell, request_id).state for request_id in ids} == {"cancelled"}
        assert {(await one.end()).end for one in asking} == {"cut"}
        return await neighbour.end()

    seen = asyncio.run(test())
    assert seen.end == "done"
    assert judge_client(seen, oracle, frozenset()) is None
    cell.wait_quiet()


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_leaving_while_queued_cancels_and_the_request_never_starts(narrow: FaultyCell, is_streamed: bool) -> None:
    async def test() -> RecordState:
        running = Asking(narrow.port, Ask(story(1), LONG))
        await running.events(1)
        waiting = Asking(narrow.port, Ask(story(2), 5, is_streamed=is_streamed))
        await until(lambda: narrow.records.num_waiting(narrow.model) == 1)
        [request_id] = set(open_ids(narrow)) - {running.seen.request_id}
        await waiting.leave()
        await until(lambda: state_of(narrow, request_id).is_over)
        await running.leave()
        short = await ask(narrow.port, Ask(story(3), 1))
        assert (short.end, short.answered_in_s < 10) == ("done", True)
        return state_of(narrow, request_id)

    state = asyncio.run(test())
    assert (state.state, state.claimed_ms, state.next_index) == ("cancelled", 0, 0)
    narrow.wait_quiet()


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_leaving_during_prefill_stops_it_and_the_next_request_starts_at_once(
    narrow: FaultyCell, is_streamed: bool
) -> None:
    async def test() -> RecordState:
        prefilling = Asking(narrow.port, Ask("long " * 1_500, 5, is_streamed=is_streamed))  # 950 steps
        await until(lambda: "held" in narrow.leftovers())
        [request_id] = open_ids(narrow)
        left_s = time.monotonic()
        await prefilling.leave()
        await until(lambda: state_of(narrow, request_id).is_over)
        short = await ask(narrow.port, Ask(story(3), 1))
        assert short.end == "done"
        assert time.monotonic() - left_s < 8
        return state_of(narrow, request_id)

    state = asyncio.run(test())
    assert (state.state, state.next_index) == ("cancelled", 0)
    narrow.wait_quiet()


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half closed"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_leaving_in_the_middle_frees_the_slot_and_no_token_follows(
    narrow: FaultyCell, is_streamed: bool, half: bool
) -> None:
    reader, writer = await asyncio.open_connection(HOST, narrow.port)
    wanted = Ask(story(4), LONG, is_streamed=is_streamed)
    writer.write(request_bytes("POST", "/v1/chat/completions", body_of(wanted, narrow.model)))
    await until(lambda: len(open_ids(narrow)) == 1)
    [request_id] = open_ids(narrow)
    await until(lambda: state_of(narrow, request_id).next_index >= 3)
    if half:
        writer.write_eof()
    else:
        writer.transport.abort()
    await until(lambda: state_of(narrow, request_id).is_over)
    last = state_of(narrow, request_id)
    assert (last.state, last.reason) == ("cancelled", "disconnect")
    await asyncio.to_thread(narrow.wait_quiet)
    assert state_of(narrow, request_id).next_index == last.next_index < LONG
    assert last.attempt == 1
    writer.transport.abort()
    del reader


def test_100_clients_that_connect_ask_and_drop_leave_nothing_running(cell: FaultyCell) -> None:
    async def test() -> None:
        wanted = [Ask(story(number), LONG, is_streamed=number % 2 > 0, leave_after=0) for number in range(100)]
        await asyncio.gather(*(ask(cell.port, one) for one in wanted))

    asyncio.run(test())
    cell.wait_quiet()


def test_time_outs_and_retries_of_a_client_do_not_pile_up(narrow: FaultyCell) -> None:
    with openai.OpenAI(base_url=narrow.base_url, api_key="local", max_retries=2, timeout=0.5) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(
                model=narrow.model, messages=[{"role": "user", "content": "slow"}], max_completion_tokens=LONG
            )
    narrow.wait_quiet()
    states = [narrow.redis.hget(key, "state") for key in narrow.redis.scan_iter("tf:{*}:req")]
    assert b"finished" not in {
        narrow.redis.hget(key, "state")
        for key in narrow.redis.scan_iter("tf:{*}:req")
        if int(narrow.redis.hget(key, "next_index") or 0) == LONG  # type: ignore[arg-type]
    }
    assert len(states) >= 1


def test_an_endless_upload_is_refused_and_memory_stays_flat(cell: FaultyCell) -> None:
    """1 GB, chunked."""
    pid = cell.wait_pid_at_work("web")
    before_kb = memory_kb(pid)
    part = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with socket.create_connection((HOST, cell.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        largest_kb = 0
        for number in range(1024):
            connection.sendall(part)
            if number % 64 == 0:
                largest_kb = max(largest_kb, memory_kb(pid))
        connection.sendall(b"0\r\n\r\n")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer
    assert largest_kb - before_kb < 48 * 1024


def test_clients_that_never_read_cost_little_memory_and_their_neighbours_go_on(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> Seen:
        pid = cell.wait_pid_at_work("web")
        before_kb = memory_kb(pid)
        deaf = []
        for number in range(10):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((HOST, cell.port))
            sock.sendall(request_bytes("POST", "/v1/chat/completions", body_of(Ask(story(number), LONG), cell.model)))
            deaf.append(sock)
        try:
            seen = await ask(cell.port, Ask(story(11), 150))
            growth_kb = memory_kb(pid) - before_kb
        finally:
            for sock in deaf:
                sock.close()
        assert growth_kb < 10 * 1024
        return seen

    seen = asyncio.run(test())
    assert seen.end == "done"
    assert judge_client(seen, oracle, frozenset()) is None
    cell.wait_quiet()
