"""Workers that die, hang, freeze, drain and come back, as clients of the whole server see it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tests.faults.cell import FaultyCell
from tests.faults.client import Ask, Asking, Seen, ask
from tests.faults.conftest import CellMaker
from tests.faults.oracle import MAX_TOKENS, Oracle, story
from tests.faults.verdict import judge_client, judge_record

pytestmark = pytest.mark.e2e

NOTHING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def shared(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=2)


@pytest.fixture(scope="module")
def lone_cell(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=1)


@pytest.fixture
def lone(lone_cell: FaultyCell) -> FaultyCell:
    """One worker, whole again."""
    lone_cell.wait_complete()
    return lone_cell


@pytest.fixture
def cell(shared: FaultyCell) -> FaultyCell:
    """Whole again, whatever the test before did to it."""
    shared.wait_complete()
    return shared


def assert_exact(cell: FaultyCell, seen: Seen, oracle: Oracle) -> None:
    assert seen.end == "done", seen
    assert judge_client(seen, oracle, NOTHING) is None
    assert judge_record(cell.redis, seen.request_id, seen.ask.content, oracle) is None


def name_of(cell: FaultyCell, worker: str) -> str:
    """The process under which the engine of that worker id runs."""
    found = [name for name in cell.worker_names if (info := cell.engine_of(name)) and info.worker == worker]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("stop", [(), ("never there",)], ids=["plain", "with a stop string"])
def test_a_kill_in_mid_stream_is_a_short_pause_and_nothing_else(
    cell: FaultyCell, oracle: Oracle, stop: tuple[str, ...]
) -> None:
    async def test() -> Seen:
        asking = Asking(cell.port, Ask(story(1), MAX_TOKENS, stop))
        seen = await asking.events(10)
        cell.kill_engine_of(seen.request_id)
        return await asking.end()

    seen = asyncio.run(test())
    assert_exact(cell, seen, oracle)
    assert cell.attempt_of(seen.request_id) == 2
    assert max(b - a for a, b in zip(seen.arrivals_s, seen.arrivals_s[1:], strict=False)) < 5


def test_a_kill_before_the_first_token_is_a_later_first_token_and_nothing_else(
    make_cell: CellMaker, oracle: Oracle
) -> None:
    cell = make_cell(num_workers=2, SCRIPTED_STEP_MS=100)

    async def test() -> Seen:
        asking = Asking(cell.port, Ask(story(2), 8))
        await asyncio.to_thread(cell.wait_until, lambda: "held" in cell.leftovers(), "a worker has it")
        [request_id] = [id_ for info in cell.workers() for id_, _ in cell.records.held(info.worker)]
        cell.kill_engine_of(request_id)
        assert asking.seen.arrivals_s == []
        return await asking.end()

    seen = asyncio.run(test())
    assert_exact(cell, seen, oracle)
    assert cell.attempt_of(seen.request_id) == 2


def test_a_frozen_worker_is_continued_elsewhere_and_writes_nothing_when_it_comes_back(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> Seen:
        asking = Asking(cell.port, Ask(story(3), MAX_TOKENS))
        seen = await asking.events(10)
        frozen = cell.worker_of(seen.request_id)
        [pid] = [info.pid for info in cell.workers() if info.worker == frozen]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(
                cell.wait_until, lambda: cell.worker_of(seen.request_id) not in ("", frozen), "another one has it"
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        return await asking.end()

    seen = asyncio.run(test())
    assert_exact(cell, seen, oracle)
    assert cell.attempt_of(seen.request_id) == 2
    cell.wait_quiet()
    assert_exact(cell, seen, oracle)


def test_an_engine_that_never_returns_from_a_step_is_treated_as_dead(make_cell: CellMaker, oracle: Oracle) -> None:
    cell = make_cell(num_workers=1, STALL_LIMIT_S=1, environ_by_name={"worker.1": {"SCRIPTED_STEP_MS": "60000"}})

    async def test() -> Seen:
        asking = Asking(cell.port, Ask(story(4), 20))
        await asyncio.to_thread(cell.wait_until, lambda: "held" in cell.leftovers(), "the hanging worker has it")
        cell.start("worker.2", "worker")
        return await asking.end()

    seen = asyncio.run(test())
    assert_exact(cell, seen, oracle)
    assert cell.attempt_of(seen.request_id) >= 2
    assert "the engine has been in one step for" in cell.logs()


def test_a_request_whose_workers_keep_dying_fails_after_three_of_them(make_cell: CellMaker) -> None:
    cell = make_cell(num_workers=1, STALL_LIMIT_S=1, SCRIPTED_STEP_MS=60_000)
    seen = asyncio.run(ask(cell.port, Ask(story(5), 20)))
    assert (seen.end, seen.error_code) == ("error", "poison")
    assert cell.attempt_of(seen.request_id) == 3
    cell.wait_quiet()


def test_a_worker_killed_between_the_offer_and_the_first_token_leaves_the_request_to_the_next(
    lone: FaultyCell, oracle: Oracle
) -> None:
    """The only worker is frozen before it can take the request, then killed: the next one to come takes it."""

    async def test() -> Seen:
        pid = lone.signal_at_work("worker.1", signal.SIGSTOP)
        asking = Asking(lone.port, Ask(story(6), 20))
        await asyncio.to_thread(lone.wait_until, lambda: lone.records.num_waiting(lone.model) == 1, "it waits")
        lone.kill("worker.1")
        assert pid is not None
        lone.replace("worker.1")
        return await asking.end()

    assert_exact(lone, asyncio.run(test()), oracle)


def test_a_rolling_restart_of_all_workers_loses_nothing_and_keeps_nobody_long(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        done: list[Seen] = []
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            while not is_over.is_set():
                number += 7
                done.append(await ask(cell.port, Ask(story(number), 20 + number % 100, is_streamed=number % 3 > 0)))

        clients = [asyncio.ensure_future(client(number)) for number in range(6)]
        for name in cell.worker_names:
            process = cell.process(name)
            cell.processes.remove(process)
            assert await asyncio.to_thread(process.end) == 0
            cell.replace(name)
            await asyncio.to_thread(cell.wait_complete)
        is_over.set()
        await asyncio.gather(*clients)
        return done

    done = asyncio.run(test())
    assert len(done) > 10
    for seen in done:
        assert_exact(cell, seen, oracle)
    assert max(seen.answered_in_s for seen in done) < 15
    cell.wait_quiet()


def test_what_is_sent_while_a_worker_drains_starts_at_once_elsewhere(cell: FaultyCell, oracle: Oracle) -> None:
    async def test() -> list[Seen]:
        first = Asking(cell.port, Ask(story(8), MAX_TOKENS))
        seen = await first.events(3)
        name = name_of(cell, cell.worker_of(seen.request_id))
        draining = cell.process(name)
        cell.processes.remove(draining)
        for _ in range(2):  # honcho sends it twice
            draining.signal_group(signal.SIGTERM)
        both = await asyncio.gather(*(ask(cell.port, Ask(story(number), 5)) for number in (9, 10)))
        status = await asyncio.to_thread(draining.end)
        assert status == 0
        cell.replace(name)
        return [await first.end(), *both]

    for seen in asyncio.run(test()):
        assert_exact(cell, seen, oracle)
        state = cell.records.state(seen.request_id)
        assert state is not None
        assert state.claimed_ms - state.offered_ms < 5_000


def test_in_a_burst_both_workers_take_part_and_nobody_waits_beside_a_free_slot(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        return await asyncio.gather(*(ask(cell.port, Ask(story(number), MAX_TOKENS)) for number in range(12)))

    done = asyncio.run(test())
    assert len({cell.worker_of(seen.request_id) for seen in done}) == 2
    for seen in done:
        assert_exact(cell, seen, oracle)
        state = cell.records.state(seen.request_id)
        assert state is not None
        assert state.claimed_ms - state.submitted_ms < 2_000


def test_a_generation_longer_than_every_time_out_is_claimed_once(make_cell: CellMaker, oracle: Oracle) -> None:
    """Than lease, lease check (5 s), first-token deadline, stall limit and each read time-out (at most 5 s)."""
    cell = make_cell(num_workers=1, SCRIPTED_STEP_MS=50, FIRST_TOKEN_DEADLINE_S=1, STALL_LIMIT_S=1)
    seen = asyncio.run(ask(cell.port, Ask(story(11), 108)))
    assert_exact(cell, seen, oracle)
    assert seen.answered_in_s > 5.3
    assert cell.attempt_of(seen.request_id) == 1


def test_a_crash_loop_has_growing_pauses(lone: FaultyCell) -> None:
    pauses_s = []
    for _ in range(4):
        pid = lone.wait_pid_at_work("worker.1")
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        lone.wait_pid_at_work("worker.1", other_than=pid)
        pauses_s.append(time.monotonic() - killed_s)
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] > 0.7
