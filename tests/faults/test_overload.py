"""Too much at once, and a long life: a flood, and a thousand requests of all kinds that leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from dataclasses import replace

import pytest

from bench.failover import memory_kb, percentile
from tests.faults.cell import FaultyCell
from tests.faults.client import Ask, Seen, ask
from tests.faults.conftest import CellMaker
from tests.faults.oracle import Oracle, story
from tests.faults.schedule import draw_ask
from tests.faults.verdict import judge_client

pytestmark = pytest.mark.e2e

NUM_FLOOD = 2_000
NUM_MIXED = 1_000


@pytest.fixture(scope="module")
def cell(make_module_cell: CellMaker) -> FaultyCell:
    return make_module_cell(num_workers=2, SCRIPTED_STEP_MS=2, MAX_WAITING=100, MAX_NUM_SEQS=16, STREAM_TTL_S=5)


def test_a_flood_is_answered_with_429_and_what_was_accepted_finishes(make_cell: CellMaker, oracle: Oracle) -> None:
    cell = make_cell(num_workers=2, SCRIPTED_STEP_MS=20, MAX_WAITING=100, MAX_NUM_SEQS=8)
    pid = cell.wait_pid_at_work("web")
    before_kb = memory_kb(pid)

    async def test() -> list[Seen]:
        return await asyncio.gather(
            *(ask(cell.port, Ask(story(number), 20), limit_s=120) for number in range(NUM_FLOOD))
        )

    done = asyncio.run(test())
    counts = Counter((seen.end, seen.error_code) for seen in done)
    assert set(counts) == {("done", ""), ("refused", "queue_full")}
    assert counts["done", ""] >= 100
    for seen in done:
        assert judge_client(seen, oracle, frozenset({"queue_full"})) is None
        if seen.status == 429:
            assert int(seen.headers["retry-after"]) >= 1
    outside_s = [seen.answered_in_s for seen in done if seen.status == 429]
    inside_s = [int(seen.headers["openai-processing-ms"]) / 1000 for seen in done if seen.status == 429]
    for where, waited_s in (("at the client", outside_s), ("inside the server", inside_s)):
        print(f"429 {where}: p50 {percentile(waited_s, 0.5):.3f} s, p99 {percentile(waited_s, 0.99):.3f} s")
    assert memory_kb(pid) - before_kb < 100 * 1024
    cell.wait_quiet()


def test_a_thousand_mixed_requests_leave_every_count_where_it_was(cell: FaultyCell, oracle: Oracle) -> None:
    """Finished, stopped, left and refused ones; what is kept for a while expires, and nothing else is kept."""
    rng = random.Random(5)

    async def client(number: int) -> list[Seen]:
        return [await ask(cell.port, shortened(draw_ask(rng, oracle))) for _ in range(number)]

    async def load(num_requests: int) -> list[Seen]:
        seen = await asyncio.gather(*(client(num_requests // 20) for _ in range(20)))
        return [one for group in seen for one in group]

    asyncio.run(load(40))
    before = counts_of(cell)
    for seen in asyncio.run(load(NUM_MIXED)):
        assert judge_client(seen, oracle, frozenset({"queue_full"})) is None
    assert counts_of(cell) == before


def shortened(wanted: Ask) -> Ask:
    """An answer's length is not what this is about."""
    return replace(wanted, max_tokens=1 + wanted.max_tokens // 4)


def counts_of(cell: FaultyCell) -> dict[str, int]:
    """Keys of both databases that stay for more than a minute, by kind, once what is kept of requests has expired."""
    cell.wait_quiet()
    deadline_s = time.monotonic() + 40
    while any(True for _ in cell.redis.scan_iter("tf:{*}:*", count=1000)):
        assert time.monotonic() < deadline_s, "requests do not expire"
        time.sleep(0.1)
    kept = [name for name, ms in cell.lifetimes_ms().items() if not 0 <= ms <= 60_000 and "tf:events" not in name]
    return dict(Counter(re.sub(r"[0-9a-f]{8}", "*", name) for name in kept))
