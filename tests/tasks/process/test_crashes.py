"""What died lately: told by whoever saw it, read by whoever looks."""

from __future__ import annotations

import pytest
from redis import Redis

from tasks.observe.live import LiveCell
from tasks.process import crashes
from tasks.process.clients import connect
from tasks.process.crashes import KEPT, LATELY_MS, reason_of, recent_crashes, report_crash, told
from tasks.protocol import keys
from tests.conftest import RedisServer


@pytest.fixture
def redis(redis_server: RedisServer) -> Redis:
    return redis_server.connect()


def now_ms(redis: Redis) -> int:
    return LiveCell(redis).look().at_ms


def test_a_process_that_dies_again_and_again_is_one_line_with_its_last_reason(redis: Redis) -> None:
    for reason in ("first", "second"):
        report_crash(redis, "worker", 7, reason)
    report_crash(redis, "web", 8, "third")
    web, worker = recent_crashes(redis, now_ms(redis))
    assert (worker.process, worker.supervisor_pid, worker.num_times, worker.reason) == ("worker", 7, 2, "second")
    assert "(supervisor 7) died 2 times in 10 minutes, last 3 s ago: second" in told(worker, worker.last_ms + 3000)
    assert "died 3 s ago and was started again: third" in told(web, web.last_ms + 3000)
    assert (web.process, web.num_times, web.is_over) == ("web", 1, False)


def test_a_look_at_the_cell_has_it_without_any_worker(redis: Redis) -> None:
    report_crash(redis, "worker", 7, "no such model", is_over=True)
    seen = LiveCell(redis).look()
    [crash] = seen.crashes
    assert seen.workers == ()
    assert "(supervisor 7) ended for good 0 s ago: no such model" in told(crash, crash.last_ms)


def test_what_died_long_ago_is_not_told(redis: Redis) -> None:
    report_crash(redis, "worker", 7, "x")
    assert recent_crashes(redis, now_ms(redis) + LATELY_MS + 1000) == ()


def test_a_crash_loop_does_not_fill_redis(redis: Redis) -> None:
    for _ in range(KEPT + 5):
        report_crash(redis, "worker", 7, "x" * 10_000)
    assert redis.xlen(keys.CRASHES) == KEPT
    assert 0 < redis.ttl(keys.CRASHES) <= crashes.TTL_S  # type: ignore[operator]
    assert len(recent_crashes(redis, now_ms(redis))[0].reason) == crashes.MAX_REASON


def test_without_redis_nothing_is_raised() -> None:
    report_crash(connect("redis://127.0.0.1:1/0", use="short"), "worker", 7, "x")


def test_an_exit_status_is_said_in_words() -> None:
    assert reason_of(-9).startswith("killed by SIGKILL")
    assert reason_of(-11) == "killed by SIGSEGV"
    assert reason_of(-200) == "killed by signal 200"
    assert "STALL_LIMIT_S" in reason_of(70)
    assert "status 1" in reason_of(1)
