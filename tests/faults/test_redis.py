"""A Redis that restarts, is away, is slow, loses its data or its scripts, or whose replies get lost."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tasks.protocol.lua import source
from tests.faults.cell import FaultyCell
from tests.faults.client import Ask, Asking, Seen, ask
from tests.faults.conftest import CellMaker
from tests.faults.oracle import MAX_TOKENS, Oracle, story
from tests.faults.proxy import After
from tests.faults.verdict import judge_client, judge_record

pytestmark = pytest.mark.e2e

NOTHING: frozenset[str] = frozenset()
REFUSALS = frozenset({"queue_unreachable", "no_worker"})


@pytest.fixture(scope="module")
def shared(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=2, links=("web", "worker.1", "bridge"), MAX_WAITING=400)


@pytest.fixture
def cell(shared: FaultyCell) -> FaultyCell:
    """Whole again, whatever the test before did to it."""
    shared.wait_complete()
    return shared


def sha(script: str) -> bytes:
    return hashlib.sha1(source(script).encode()).hexdigest().encode()


def assert_kept(cell: FaultyCell, seen: Seen, oracle: Oracle, excused: frozenset[str] = NOTHING) -> None:
    assert judge_client(seen, oracle, excused) is None
    assert judge_record(cell.redis, seen.request_id, seen.ask.content, oracle) is None


class Load:
    """Clients that ask again and again, inside `async with`."""

    def __init__(self, cell: FaultyCell, num_clients: int = 6, max_tokens: int = MAX_TOKENS) -> None:
        self.done: list[Seen] = []
        self._cell = cell
        self._max_tokens = max_tokens
        self._num_clients = num_clients
        self._is_over = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(self._num_clients)]
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._is_over.set()
        await asyncio.gather(*self._clients)

    async def _client(self, number: int) -> None:
        while not self._is_over.is_set():
            number += self._num_clients
            wanted = Ask(story(number), self._max_tokens, is_streamed=number % 3 > 0)
            self.done.append(await ask(self._cell.port, wanted))
            if self.done[-1].end == "refused":
                await asyncio.sleep(0.05)

    async def wait_next(self) -> float:
        """Seconds until another answer is complete."""
        began_s, num_done = time.monotonic(), self._num_complete()
        while self._num_complete() == num_done:
            assert time.monotonic() - began_s < 45, "nothing is answered any more"
            await asyncio.sleep(0.01)
        return time.monotonic() - began_s

    def _num_complete(self) -> int:
        return sum(seen.end == "done" for seen in self.done)


def test_five_restarts_of_redis_under_load_lose_nothing(cell: FaultyCell, oracle: Oracle) -> None:
    statuses: list[int] = []

    async def test() -> list[Seen]:
        async with Load(cell) as load:
            for _ in range(5):
                await load.wait_next()
                cell.valkey.kill()
                statuses.append(await asyncio.to_thread(cell.get, "/readyz"))
                cell.valkey.start()
                await asyncio.to_thread(cell.valkey.wait_until_ready)
                await asyncio.to_thread(cell.wait_until, lambda: cell.get("/readyz") == 200, "it is ready again")
                await load.wait_next()
        return load.done

    for seen in asyncio.run(test()):
        assert_kept(cell, seen, oracle, REFUSALS)
    assert statuses == [503] * 5
    cell.wait_quiet()


def test_a_redis_that_answers_nothing_for_8_s_leaves_nobody_stuck_and_doubles_nothing(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        async with Load(cell) as load:
            await load.wait_next()
            assert cell.valkey.process is not None
            cell.valkey.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(8)
            cell.valkey.process.send_signal(signal.SIGCONT)
            await load.wait_next()
        return load.done

    for seen in asyncio.run(test()):
        assert_kept(cell, seen, oracle, REFUSALS)
    cell.wait_quiet()


def test_redis_away_beyond_the_bound_ends_streams_with_an_error_and_all_recover_without_a_restart(
    cell: FaultyCell, oracle: Oracle
) -> None:
    names = ["web", "bridge", *cell.worker_names]

    async def test() -> list[Seen]:
        pids = [cell.pid_at_work(name) for name in names]
        asked = [Ask(story(number), 4000, is_streamed=number > 0) for number in range(4)]
        asking = [Asking(cell.port, wanted) for wanted in asked]
        await asyncio.gather(*(one.events(3) for one in asking[1:]))
        cell.valkey.kill()
        away_s = time.monotonic()
        ended = [await one.end() for one in asking]
        assert time.monotonic() - away_s < 30
        assert await asyncio.to_thread(cell.get, "/readyz") == 503
        assert (await ask(cell.port, Ask(story(1), 1))).error_code == "queue_unreachable"
        cell.valkey.start()
        await asyncio.to_thread(cell.wait_complete)
        assert [cell.pid_at_work(name) for name in names] == pids
        return ended

    for seen in asyncio.run(test()):
        assert (seen.end, seen.error_code) == ("error" if seen.ask.is_streamed else "refused", "stream_lost")
    assert_kept(cell, asyncio.run(ask(cell.port, Ask(story(2), 20))), oracle)
    cell.wait_quiet()


def test_a_redis_that_lost_its_data_ends_each_open_stream_with_an_error_and_serves_again(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        asking = [Asking(cell.port, Ask(story(number), 4000)) for number in range(20)]
        await asyncio.gather(*(one.events(2) for one in asking[:8]))
        cell.redis.flushall()
        return [await one.end() for one in asking]

    for seen in asyncio.run(test()):
        assert (seen.end, seen.error_code) == ("error", "stream_lost")
    cell.wait_complete()
    assert_kept(cell, asyncio.run(ask(cell.port, Ask(story(2), 20))), oracle)
    cell.wait_quiet()


def test_scripts_that_redis_forgot_go_unnoticed(cell: FaultyCell, oracle: Oracle) -> None:
    redis: Any = cell.redis

    async def test() -> list[Seen]:
        async with Load(cell, max_tokens=60) as load:
            for _ in range(5):
                await load.wait_next()
                redis.script_flush()
            await load.wait_next()
        return load.done

    for seen in asyncio.run(test()):
        assert_kept(cell, seen, oracle)


@pytest.mark.parametrize("after", ["cut", "mute"])
@pytest.mark.parametrize(("name", "script"), [("worker.1", "fetch"), ("worker.1", "claim"), ("worker.1", "append")])
def test_a_lost_reply_to_a_worker_leaves_the_request_with_one_end(
    lonely: FaultyCell, oracle: Oracle, name: str, script: str, after: After
) -> None:
    async def test() -> Seen:
        loss = lonely.link(name).lose_reply(sha(script), after)
        seen = await ask(lonely.port, Ask(story(3), 60))
        assert loss.happened.is_set()
        return seen

    seen = asyncio.run(test())
    assert seen.end == "done", seen
    assert_kept(lonely, seen, oracle)
    lonely.wait_quiet()


@pytest.mark.parametrize("after", ["cut", "mute"])
def test_a_lost_reply_to_a_submit_makes_one_request_or_none(lonely: FaultyCell, oracle: Oracle, after: After) -> None:
    async def test() -> Seen:
        loss = lonely.link("web").lose_reply(sha("submit"), after)
        seen = await ask(lonely.port, Ask(story(4), 60))
        assert loss.happened.is_set()
        return seen

    seen = asyncio.run(test())
    assert (seen.end, seen.error_code) in (("done", ""), ("refused", "queue_unreachable"))
    lonely.wait_quiet()
    assert_kept(lonely, seen, oracle, REFUSALS)
    lonely.wait_quiet()


@pytest.fixture(scope="module")
def lonely_cell(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=1, links=("web", "worker.1"))


@pytest.fixture
def lonely(lonely_cell: FaultyCell) -> FaultyCell:
    """One worker, so that it is the one that every request meets."""
    lonely_cell.wait_complete()
    return lonely_cell


def test_a_stalled_way_to_redis_of_one_worker_moves_its_requests_to_the_other(
    cell: FaultyCell, oracle: Oracle
) -> None:
    async def test() -> list[Seen]:
        asking = [Asking(cell.port, Ask(story(number), MAX_TOKENS)) for number in range(6)]
        await asyncio.gather(*(one.events(2) for one in asking))
        cell.link("worker.1").stall()
        try:
            return [await one.end() for one in asking]
        finally:
            cell.link("worker.1").flow()

    for seen in asyncio.run(test()):
        assert seen.end == "done"
        assert_kept(cell, seen, oracle)
    cell.wait_complete()
    cell.wait_quiet()


def test_an_idle_stream_needs_no_new_connection(make_cell: CellMaker) -> None:
    """Idle for longer than every read time-out (5 s): a request waits for the only slot."""
    cell = make_cell(num_workers=1, MAX_NUM_SEQS=1, SCRIPTED_STEP_MS=100)

    async def test() -> tuple[Seen, set[str], set[str]]:
        running = Asking(cell.port, Ask(story(1), 3000))
        await running.events(1)
        waiting = Asking(cell.port, Ask(story(2), 2))
        await asyncio.to_thread(cell.wait_until, lambda: cell.records.num_waiting(cell.model) == 1, "it waits")
        await running.events(10)
        before = connections(cell)
        await running.events(10 + 53)
        after = connections(cell)
        await running.leave()
        return await waiting.end(), before, after

    seen, before, after = asyncio.run(test())
    assert seen.end == "done"
    assert before <= after, "a connection was replaced"


def test_300_streams_need_no_more_connections_than_a_few(cell: FaultyCell) -> None:
    async def test() -> dict[int, int]:
        found = {}
        for num_streams in (10, 300):
            asking = [Asking(cell.port, Ask(story(number), 3000)) for number in range(num_streams)]
            await until(lambda num=num_streams: num_open(cell) == num)
            found[num_streams] = len(connections(cell))
            await asyncio.gather(*(one.leave() for one in asking))
            await asyncio.to_thread(cell.wait_quiet)
        return found

    found = asyncio.run(test())
    # The pool of one web process may grow to 16 short connections and 2 blocking ones; the rest is the workers'.
    assert found[300] - found[10] <= 16, found


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


def num_open(cell: FaultyCell) -> int:
    """Requests that are not over."""
    return int(str(cell.leftovers().get("due", 0)))


def connections(cell: FaultyCell) -> set[str]:
    """Ids of the connections to Redis, besides this test's own."""
    redis: Any = cell.redis
    own = redis.client_id()
    return {client["id"] for client in redis.client_list() if client["id"] != str(own)}
