"""The overhead figures: what is subtracted from what, and a short run against a real cell."""

from __future__ import annotations

import os

import pytest

from bench.machine import cpu_s, descendants, has_bfloat16, memory_mb, processor, vectors
from bench.overhead import RedisUse, arrivals, cell, per_token_us, redis_per_token, request_overhead, table


def test_arrivals_are_a_steady_rate_and_the_same_for_the_same_seed() -> None:
    times = arrivals(50.0, 100.0, 1)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert times == arrivals(50.0, 100.0, 1) != arrivals(50.0, 100.0, 2)


def test_what_redis_has_done_before_does_not_count() -> None:
    before = RedisUse(2.0, {"xadd": 10}, {"xadd": 30.0})
    after = RedisUse(2.5, {"xadd": 14, "xread": 3}, {"xadd": 42.0, "xread": 9.0})
    assert after.since(before) == RedisUse(0.5, {"xadd": 4, "xread": 3}, {"xadd": 12.0, "xread": 9.0})


def test_microseconds_a_token() -> None:
    assert per_token_us(0.5, 100_000) == 5.0
    assert per_token_us(0.5, 0) == 500_000.0


def test_a_process_and_what_it_has_used() -> None:
    before = cpu_s(os.getpid())
    sum(i * i for i in range(300_000))
    assert cpu_s(os.getpid()) > before
    assert memory_mb(os.getpid()) > 5
    assert os.getpid() in descendants(os.getppid())


def test_the_machine_is_named_from_what_the_system_says(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Example 9000\nflags\t\t: sse2 avx2 avx512f\n")
    assert (processor(cpuinfo), vectors(cpuinfo)) == ("Example 9000", "AVX-512")
    assert not has_bfloat16(cpuinfo)
    cpuinfo.write_text("flags\t\t: sse2 avx2 avx512f avx512_bf16\n")
    assert has_bfloat16(cpuinfo)
    assert vectors(tmp_path / "nothing") == "no vectors that we know"
    assert not has_bfloat16(tmp_path / "nothing")


@pytest.mark.e2e
def test_both_figures_come_from_a_real_cell() -> None:
    with cell(step_ms=0.0) as (one, target):
        requests = request_overhead(one, target, 40.0, 0.5)
        redis = redis_per_token(target, one.redis, 4, 50, 0.0, 0.2)
    assert requests["errors"] == redis["errors"] == 0
    assert 0 < requests["p50_ms"] <= requests["p99_ms"] <= requests["worst_ms"]
    assert set(requests["cpu_ms_per_request"]) == {"web", "bridge", "worker", "redis", "client"}
    assert redis["tokens"] == 4 * 50
    assert redis["calls_per_token"]["xadd"] > 0
    text = table(requests, [redis, redis])
    assert "| failed requests | 0 | 0 |" in text
