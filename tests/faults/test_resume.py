"""Clients that come back, and the ways to end: stop, disconnect and resume are three different things."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import replace

import openai
import pytest

from tests.faults.cell import FaultyCell
from tests.faults.client import Ask, Asking, Seen, ask, exchange, request_bytes
from tests.faults.conftest import CellMaker
from tests.faults.oracle import MAX_TOKENS, Oracle, story
from tests.faults.persistent import PATH, ask_with_habit
from tests.faults.verdict import judge_client

pytestmark = pytest.mark.e2e

LONG = 4000
GO_ON = (("x-disconnect", "continue"),)
NOTHING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def shared(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=2, num_web=2, SCRIPTED_STEP_MS=10)


@pytest.fixture
def cell(shared: FaultyCell) -> FaultyCell:
    """Whole again, whatever the test before did to it."""
    shared.wait_complete()
    return shared


def ended(cell: FaultyCell, request_id: str) -> tuple[str, str]:
    """State and reason, once the request is over."""

    def is_over() -> bool:
        state = cell.records.state(request_id)
        return state is not None and state.is_over

    cell.wait_until(is_over, f"{request_id} is over")
    state = cell.records.state(request_id)
    assert state is not None
    return state.state, state.reason


def test_stop_disconnect_and_resume_are_three_outcomes(cell: FaultyCell, oracle: Oracle) -> None:
    async def test() -> tuple[Seen, Seen, Seen]:
        stopped, left = Asking(cell.port, Ask(story(1), LONG)), Asking(cell.port, Ask(story(2), LONG))
        resumed = Asking(cell.port, Ask(story(3), MAX_TOKENS, headers=GO_ON))
        await asyncio.gather(*(one.events(3) for one in (stopped, left, resumed)))
        stop = request_bytes("POST", f"{PATH}/{stopped.seen.request_id}/cancel")
        await exchange(cell.ports[1], stop, Seen(stopped.seen.ask, 1), 10)
        await left.leave()
        seen = await resumed.leave()
        rest = request_bytes("GET", f"{PATH}/{seen.request_id}?stream=true&starting_after={seen.last_id}")
        await exchange(cell.ports[1], rest, seen, 30)
        return await stopped.end(), left.seen, seen

    stopped, left, resumed = asyncio.run(test())
    assert (stopped.end, stopped.error_code) == ("error", "stopped")
    assert ended(cell, stopped.request_id) == ("cancelled", "stopped")
    assert ended(cell, left.request_id) == ("cancelled", "disconnect")
    assert ended(cell, resumed.request_id) == ("finished", "length")
    assert resumed.end == "done"
    assert judge_client(resumed, oracle, NOTHING) is None
    cell.wait_quiet()


def test_a_client_that_resumes_gets_all_of_it_through_kills_of_web_processes_and_workers(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        wanted = [
            Ask(story(number), MAX_TOKENS, leave_after=20 + number, num_choices=1 + number % 2, habit="resume")
            for number in range(6)
        ]
        asking = [
            asyncio.ensure_future(ask_with_habit(cell.ports, n % 2, one, random.Random(n), limit_s=45))
            for n, one in enumerate(wanted)
        ]
        for name in ("web", "worker.1", "web.2"):
            await asyncio.sleep(0.4)
            cell.signal_at_work(name, signal.SIGKILL)
        return list(await asyncio.gather(*asking))

    for seen in asyncio.run(test()):
        # One that was cut off before its first event has no place to come back to.
        assert seen.end == "done" or not seen.last_id, seen
        assert judge_client(seen, oracle, frozenset({"cut"})) is None
    cell.wait_complete()
    cell.wait_quiet()


def test_work_in_the_background_outlives_its_client_and_its_web_process(cell: FaultyCell, oracle: Oracle) -> None:
    async def test() -> Seen:
        wanted = Ask(story(4), MAX_TOKENS, is_streamed=False, habit="background")
        waiting = asyncio.ensure_future(ask_with_habit(cell.ports, 0, wanted, random.Random(1), limit_s=45))
        await asyncio.sleep(0.5)
        cell.signal_at_work("web", signal.SIGKILL)
        return await waiting

    seen = asyncio.run(test())
    assert seen.end == "done"
    assert judge_client(seen, oracle, NOTHING) is None
    cell.wait_complete()


def test_background_work_that_was_stopped_is_not_reported_as_completed(cell: FaultyCell) -> None:
    async def test() -> Seen:
        wanted = Ask(story(5), LONG, is_streamed=False, fields=(("background", True),))
        seen = await ask(cell.port, wanted)
        other = Seen(wanted, 1)
        await exchange(cell.ports[1], request_bytes("POST", f"{PATH}/{seen.request_id}/cancel"), other, 10)
        assert other.error_code == "stopped"
        await exchange(cell.ports[0], request_bytes("GET", f"{PATH}/{seen.request_id}"), seen, 10)
        return seen

    seen = asyncio.run(test())
    assert seen.error_code == "stopped"
    assert ended(cell, seen.request_id) == ("cancelled", "stopped")
    cell.wait_quiet()


def test_automatic_retries_with_a_key_never_make_a_second_generation(cell: FaultyCell, oracle: Oracle) -> None:
    """The client gives its first try up; the retries of openai-python join that generation."""
    before = set(cell.redis.scan_iter("tf:{*}:req"))
    with openai.OpenAI(base_url=cell.base_url, api_key="local", max_retries=5, timeout=1.0) as client:
        answer = client.chat.completions.create(
            model=cell.model,
            messages=[{"role": "user", "content": story(6)}],
            max_completion_tokens=MAX_TOKENS,
            temperature=0,
            extra_headers={"Idempotency-Key": "the same one"},
        )
    assert answer.choices[0].message.content == oracle.answer(story(6), MAX_TOKENS).text
    assert len(set(cell.redis.scan_iter("tf:{*}:req")) - before) == 1
    cell.wait_quiet()


def test_a_key_cannot_be_used_for_another_request(cell: FaultyCell) -> None:
    async def test() -> list[Seen]:
        keyed = Ask(story(7), 3, headers=(("idempotency-key", "taken"),))
        return [await ask(cell.ports[n], replace(keyed, max_tokens=n + 3)) for n in range(2)]

    first, second = asyncio.run(test())
    assert (first.end, second.status) == ("done", 409)


def test_a_kill_with_several_choices_changes_none_of_them(cell: FaultyCell, oracle: Oracle) -> None:
    async def test() -> Seen:
        asking = Asking(cell.port, Ask(story(8), MAX_TOKENS, num_choices=3))
        seen = await asking.events(20)
        cell.kill_engine_of(seen.request_id)
        return await asking.end()

    seen = asyncio.run(test())
    assert seen.end == "done"
    assert judge_client(seen, oracle, NOTHING) is None
    cell.wait_complete()
    cell.wait_quiet()
