"""Fault 20 with a real process and a real server: SIGKILL the recorder at random moments, 40,000 events."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

from redis import Redis

from bridge.catalog.catalog import Catalog
from bridge.catalog.recorder import Recorder
from tasks.process.clients import connect
from tasks.protocol import keys

NUM_FACTS = 40_000
NUM_LIVES = 5
LIMIT_S = 60.0

RECORDER = """
import sys, time
from pathlib import Path
from bridge.catalog.catalog import Catalog
from bridge.catalog.recorder import Recorder
from tasks.process.clients import connect

recorder = Recorder(
    connect(sys.argv[1], use="short"), Catalog(Path(sys.argv[2])), clock_ms=lambda: time.time_ns() // 1_000_000
)
while True:
    recorder.tick()
"""


def write(redis: Redis, first: int, end: int) -> None:
    now_ms = time.time_ns() // 1_000_000
    with redis.pipeline(transaction=False) as pipe:
        for n in range(first, end):
            pipe.xadd(keys.EVENTS, {"k": "submitted", "id": f"r{n}", "a": 1, "m": "m", "t": now_ms, "d": "{}"})
        pipe.execute()


def test_40000_facts_are_recorded_once_each_whatever_moment_the_recorder_is_killed_at(
    valkey_url: str, tmp_path: Path
) -> None:
    redis = connect(valkey_url, use="short")
    redis.flushall()
    seed = 40_000
    print("seed", seed)
    rng = random.Random(seed)
    deadline = time.monotonic() + LIMIT_S
    num_written = 0
    for life in range(NUM_LIVES):
        num_to_write = NUM_FACTS * (life + 1) // NUM_LIVES
        is_last = life == NUM_LIVES - 1
        # By then it has just started, or is in the middle of something, or has nearly all.
        num_left_at_kill = 0 if is_last else rng.randrange(num_to_write - num_written)
        process = subprocess.Popen([sys.executable, "-c", RECORDER, valkey_url, str(tmp_path)])
        try:
            while num_written < num_to_write or int(redis.xlen(keys.EVENTS)) > num_left_at_kill:
                assert time.monotonic() < deadline
                end = min(num_written + 1_000, num_to_write)
                write(redis, num_written, end)
                num_written = end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"the recorder died by itself: {process.wait(timeout=0.005)}")
        finally:
            process.kill()
            process.wait()
    catalog = Catalog(tmp_path)
    recorder = Recorder(redis, catalog, clock_ms=lambda: 0)
    assert not recorder.record_batch()
    assert catalog.query("SELECT count(*), count(DISTINCT request_id) FROM requests") == [(NUM_FACTS, NUM_FACTS)]
    assert catalog.position.num_recorded == NUM_FACTS
    assert redis.xlen(keys.EVENTS) == 0
    catalog.close()
    redis.close()
