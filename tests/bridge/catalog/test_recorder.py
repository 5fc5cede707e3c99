"""The recorder, killed at every seam, and over streams that begin anew. Fault 20: nothing twice, nothing missing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from bridge.catalog.catalog import Catalog, CatalogError, Position
from bridge.catalog.recorder import DAY_MS, FORGET_EVERY_MS, Recorder
from decode.engine.sampling import SamplingParams
from tasks.protocol import keys
from tasks.protocol.contract import GenerationJob
from tasks.protocol.record import Idempotency, Origin
from tests.bridge.cell import Cell


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path)
    yield catalog
    catalog.close()


def recorder_of(cell: Cell, catalog: Catalog, **options: Any) -> Recorder:
    return Recorder(cell.redis, catalog, clock_ms=options.pop("clock_ms", Clock()), **options)


def submit(cell: Cell, *request_ids: str, **options: Any) -> None:
    for request_id in request_ids:
        cell.fact("submitted", request_id, 1, **options)


def drain(recorder: Recorder) -> None:
    while recorder.record_batch():
        pass
    recorder.record_batch()  # takes nothing, and gives the last batch back


def ids(catalog: Catalog) -> list[str]:
    return [row[0] for row in catalog.query("SELECT request_id FROM requests ORDER BY 1")]


def test_facts_become_rows_and_leave_the_stream(cell: Cell, catalog: Catalog) -> None:
    submit(cell, "r1", "r2")
    drain(recorder_of(cell, catalog))
    assert ids(catalog) == ["r1", "r2"]
    assert catalog.position.num_recorded == 2
    assert cell.redis.xlen(keys.EVENTS) == 0


def test_the_last_facts_stay_for_who_looks_and_are_not_recorded_twice(cell: Cell, catalog: Catalog) -> None:
    submit(cell, "r1", "r2", "r3")
    recorder = recorder_of(cell, catalog, keep_facts=2)
    drain(recorder)
    assert [fields[b"id"] for _, fields in cell.redis.xrange(keys.EVENTS)] == [b"r2", b"r3"]
    submit(cell, "r4")
    drain(recorder)
    assert [fields[b"id"] for _, fields in cell.redis.xrange(keys.EVENTS)] == [b"r3", b"r4"]
    assert ids(catalog) == ["r1", "r2", "r3", "r4"]
    assert catalog.position.num_recorded == 4


def test_what_is_recorded_goes_first_when_as_much_is_waiting(cell: Cell, catalog: Catalog) -> None:
    submit(cell, "r1", "r2", "r3", "r4", "r5")
    recorder = recorder_of(cell, catalog, keep_facts=2, max_rows=1)
    for _ in range(3):
        recorder.record_batch()
    assert [fields[b"id"] for _, fields in cell.redis.xrange(keys.EVENTS)] == [b"r2", b"r3", b"r4", b"r5"]
    drain(recorder)
    assert ids(catalog) == ["r1", "r2", "r3", "r4", "r5"]


def test_the_scripts_own_facts_are_understood(cell: Cell, catalog: Catalog) -> None:
    cell.join("w1", 1000)
    cell.offer("r1", 1000)
    cell.claim("r1", "w1", 1020)
    cell.publish("r1", 1, 0, (7, 8), 1050)
    cell.publish("r1", 1, 2, (9,), 1060, end=True)
    cell.records.leave("w1", "m", now_ms=2000)
    drain(recorder_of(cell, catalog))
    assert catalog.position.num_skipped == 0
    assert catalog.query(
        "SELECT request_id, model, state, reason, worker, num_attempts, num_prompt_tokens, num_output_tokens,"
        " num_cached_tokens, submitted_ms, claimed_ms, first_token_ms, ended_ms FROM requests"
    ) == [("r1", "m", "finished", "stop", "w1", 1, 3, 3, 0, 1000, 1020, 1050, 1060)]
    assert catalog.query("SELECT attempt, worker, outcome, first_index, next_index FROM attempts") == [
        (1, "w1", "finished", 0, 3)
    ]
    assert catalog.query(
        "SELECT worker, host, device, fingerprint, max_num_seqs, joined_ms, left_ms FROM workers"
    ) == [("w1", "h", "cpu", "fp1", 8, 1000, 2000)]
    assert catalog.query("SELECT model, fingerprint, variant, max_model_len FROM models") == [
        ("m", "fp1", "fp32", 100)
    ]


def test_who_asked_and_how_is_recorded_with_every_choice(cell: Cell, catalog: Catalog) -> None:
    cell.join("w1", 1000)
    jobs = [
        GenerationJob(request_id, "m", (1, 2), SamplingParams(max_tokens=9), 1000, "flex")
        for request_id in ("x", "x.1")
    ]
    cell.records.submit(
        jobs,
        reader=None,
        max_waiting=9,
        idempotency=Idempotency("key", "digest"),
        origin=Origin("team", "u1", "chat", is_streamed=True),
        now_ms=1000,
    )
    cell.offer("plain", 1000)
    drain(recorder_of(cell, catalog))
    columns = (
        "request_id, answer_id, num_choices, kind, service_class, api_key, end_user, is_streamed, is_idempotent,"
        " num_prompt_tokens, max_tokens"
    )
    assert catalog.query(f"SELECT {columns} FROM requests ORDER BY 1") == [
        ("plain", "plain", 1, None, "default", None, None, False, False, 3, 9),
        ("x", "x", 2, "chat", "flex", "team", "u1", True, True, 2, 9),
        ("x.1", "x", 2, "chat", "flex", "team", "u1", True, True, 2, 9),
    ]


def test_why_a_request_failed_is_recorded_and_no_message_of_one_that_did_not(cell: Cell, catalog: Catalog) -> None:
    cell.join("w1", 1000)
    for request_id, state in (("bad", "failed"), ("left", "cancelled")):
        cell.offer(request_id, 1000)
        cell.records.close(request_id, state, "why", "a message", now_ms=1010)  # type: ignore[arg-type]
    drain(recorder_of(cell, catalog))
    assert catalog.query("SELECT request_id, reason, message FROM requests ORDER BY 1") == [
        ("bad", "why", "a message"),
        ("left", "why", None),
    ]


def test_a_failover_is_two_attempts_of_one_request(cell: Cell, catalog: Catalog) -> None:
    cell.join("w1", 1000)
    cell.join("w2", 1400)
    cell.watchdog.tick(1400)
    cell.offer("r1", 1000)
    cell.claim("r1", "w1", 1010)
    cell.publish("r1", 1, 0, (7, 8), 1020)
    cell.watchdog.tick(1500)
    cell.claim("r1", "w2", 1510, attempt=2)
    cell.publish("r1", 2, 2, (9,), 1520, end=True)
    drain(recorder_of(cell, catalog))
    assert catalog.query(
        "SELECT attempt, worker, outcome, reason, offer_reason, first_index, next_index FROM attempts ORDER BY 1"
    ) == [
        (1, "w1", "lost", "worker_lost", None, 0, 2),
        (2, "w2", "finished", "stop", "worker_lost", 2, 3),
    ]
    assert catalog.query("SELECT state, num_attempts, worker FROM requests") == [("finished", 2, "w2")]


def test_a_batch_holds_at_most_its_limit_and_says_whether_more_is_waiting(cell: Cell, catalog: Catalog) -> None:
    recorder = recorder_of(cell, catalog, max_rows=3)
    recorder.record_batch()  # marks the stream
    submit(cell, *"abcdef", "g")
    assert [recorder.record_batch() for _ in range(3)] == [True, True, False]
    assert ids(catalog) == list("abcdefg")


def test_malformed_facts_are_skipped_counted_and_named_in_the_log(
    cell: Cell, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    submit(cell, "r1")
    cell.redis.xadd(keys.EVENTS, {"k": "submitted", "id": "bad", "a": "x", "t": "1"}, id="*")
    cell.redis.xadd(keys.EVENTS, {b"\xff": b"\xff"})
    cell.fact("claimed", "r1", 1)  # without its worker
    submit(cell, "r2")
    drain(recorder_of(cell, catalog))
    assert ids(catalog) == ["r1", "r2"]
    assert (catalog.position.num_recorded, catalog.position.num_skipped) == (2, 3)
    assert "claimed without worker" in caplog.text
    assert cell.redis.xlen(keys.EVENTS) == 0


def test_facts_of_an_unknown_kind_are_skipped_and_said_once(
    cell: Cell, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        cell.fact("teleported", "r1", 1)
    drain(recorder_of(cell, catalog))
    assert catalog.position.num_skipped == 3
    assert caplog.text.count("teleported") == 1


# -- killed at each seam


class Killed(BaseException):
    pass


class KillableRedis:
    """A client under which the process dies before or after the n-th command has reached the server."""

    def __init__(self, cell: Cell, lives: Lives) -> None:
        self._redis, self._lives = cell.redis, lives

    def pipeline(self, transaction: bool) -> Any:
        pipe: Any = self._redis.pipeline(transaction=transaction)
        execute = pipe.execute
        pipe.execute = lambda: self._lives.step(execute)
        return pipe

    def set(self, *args: Any) -> Any:
        return self._lives.step(self._redis.set, *args)


class KillableCatalog(Catalog):
    lives: Lives

    def record(self, *args: Any) -> None:
        self.lives.step(super().record, *args)


class Lives:
    """Counts the seams: one before and one after each step that changes something, and dies at the one it is told."""

    def __init__(self, die_at: int) -> None:
        self.seams_left = die_at

    def seam(self) -> None:
        self.seams_left -= 1
        if self.seams_left == 0:
            raise Killed

    def step(self, call: Any, *args: Any) -> Any:
        self.seam()
        result = call(*args)
        self.seam()
        return result


def live_until_killed(cell: Cell, folder: Path, die_at: int, batches: int = 50, max_rows: int = 10) -> bool:
    """A recorder's life. True when it was killed, False when it had nothing left to do before that."""
    catalog = KillableCatalog(folder)
    catalog.lives = Lives(die_at)
    recorder = Recorder(KillableRedis(cell, catalog.lives), catalog, max_rows=max_rows, clock_ms=Clock())  # type: ignore[arg-type]
    try:
        for _ in range(batches):
            if not recorder.record_batch():
                return False
    except Killed:
        return True
    finally:
        catalog.close()
    return False


def assert_recorded_once(cell: Cell, folder: Path, num_facts: int) -> None:
    catalog = Catalog(folder)
    drain(recorder_of(cell, catalog))
    assert len(ids(catalog)) == num_facts
    assert catalog.position.num_recorded == num_facts
    assert cell.redis.xlen(keys.EVENTS) == 0
    catalog.close()


@pytest.mark.parametrize("die_at", range(1, 13))
def test_killed_at_any_seam_of_its_first_batches_it_records_each_fact_once(
    cell: Cell, tmp_path: Path, die_at: int
) -> None:
    submit(cell, *(f"r{n}" for n in range(25)))
    assert live_until_killed(cell, tmp_path, die_at)
    assert_recorded_once(cell, tmp_path, 25)


def test_killed_again_and_again_at_random_seams_while_facts_arrive_it_records_each_once(
    cell: Cell, tmp_path: Path
) -> None:
    seed = 20
    print("seed", seed)
    rng = random.Random(seed)
    num_facts = num_kills = 0
    for _ in range(15):
        arriving = rng.randrange(1, 40)
        submit(cell, *(f"r{num_facts + n}" for n in range(arriving)))
        num_facts += arriving
        num_kills += live_until_killed(cell, tmp_path, rng.randrange(1, 20))
    assert num_kills > 7
    assert_recorded_once(cell, tmp_path, num_facts)


# -- Redis away, emptied, set back


def test_redis_being_away_loses_nothing(cell: Cell, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(cell, catalog)
    submit(cell, "r1")

    def away(**_: object) -> None:
        raise ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(cell.redis, "pipeline", away)
        for _ in range(3):
            with pytest.raises(ConnectionError):
                recorder.tick()
    drain(recorder)
    assert ids(catalog) == ["r1"]


def test_a_catalog_that_cannot_be_written_leaves_the_facts_in_the_stream(
    cell: Cell, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_of(cell, catalog)
    recorder.record_batch()
    submit(cell, "r1")

    def full(*_: object) -> None:
        raise CatalogError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "record", full)
        with pytest.raises(CatalogError):
            recorder.tick()
    assert cell.redis.xlen(keys.EVENTS) == 1
    drain(recorder)
    assert ids(catalog) == ["r1"]


def test_after_a_flush_ids_that_start_lower_are_recorded_once(cell: Cell, catalog: Catalog) -> None:
    recorder = recorder_of(cell, catalog)
    submit(cell, "old", entry_id="5000-0")
    drain(recorder)
    cell.redis.flushall()
    submit(cell, "lower", entry_id="10-0")
    submit(cell, "higher", entry_id="9000-0")
    drain(recorder)
    assert ids(catalog) == ["higher", "lower", "old"]
    assert catalog.position.num_recorded == 3
    assert cell.redis.xlen(keys.EVENTS) == 0


def test_a_flush_between_recording_and_giving_back_never_trims_the_new_stream(cell: Cell, catalog: Catalog) -> None:
    recorder = recorder_of(cell, catalog)
    recorder.record_batch()
    submit(cell, "old", entry_id="5000-0")
    recorder.record_batch()  # recorded; the entry is given back with the next batch
    cell.redis.flushall()
    submit(cell, "lower", entry_id="10-0")
    drain(recorder)
    assert ids(catalog) == ["lower", "old"]


def test_a_flush_while_no_recorder_runs_is_noticed_by_the_next(cell: Cell, tmp_path: Path) -> None:
    for request_id, entry_id in (("old", "5000-0"), ("lower", "10-0")):
        cell.redis.flushall()
        submit(cell, request_id, entry_id=entry_id)
        catalog = Catalog(tmp_path)
        drain(recorder_of(cell, catalog))
        found = ids(catalog)
        catalog.close()
    assert found == ["lower", "old"]


@pytest.mark.parametrize("die_at", range(1, 7))
def test_killed_while_it_adopts_a_new_stream_it_records_each_fact_once(
    cell: Cell, tmp_path: Path, die_at: int
) -> None:
    submit(cell, "old", entry_id="5000-0")
    live_until_killed(cell, tmp_path, 1000)
    cell.redis.flushall()
    submit(cell, "lower", entry_id="10-0")
    assert live_until_killed(cell, tmp_path, die_at)
    catalog = Catalog(tmp_path)
    drain(recorder_of(cell, catalog))
    assert ids(catalog) == ["lower", "old"]
    assert catalog.position.num_recorded == 2
    catalog.close()


def test_a_stream_that_went_back_under_the_same_mark_is_read_again(cell: Cell, catalog: Catalog) -> None:
    recorder = recorder_of(cell, catalog)
    submit(cell, "old", entry_id="5000-0")
    drain(recorder)
    cell.redis.delete(keys.EVENTS)  # a copy was restored that still has the mark
    submit(cell, "old", entry_id="10-0")
    submit(cell, "new", entry_id="11-0")
    drain(recorder)
    assert ids(catalog) == ["new", "old"]
    assert cell.redis.xlen(keys.EVENTS) == 0


def test_another_catalog_takes_the_stream_over_where_the_first_left_it(cell: Cell, tmp_path: Path) -> None:
    first, second = Catalog(tmp_path / "1"), Catalog(tmp_path / "2")
    submit(cell, "r1")
    drain(recorder_of(cell, first))
    submit(cell, "r2")
    drain(recorder_of(cell, second))
    submit(cell, "r3")
    drain(recorder_of(cell, first))
    assert (ids(first), ids(second)) == (["r1", "r3"], ["r2"])
    first.close()
    second.close()


def test_the_mark_of_the_stream_is_the_catalogs(cell: Cell, catalog: Catalog) -> None:
    drain(recorder_of(cell, catalog))
    assert cell.redis.get(keys.EVENTS_GENERATION) == catalog.position.generation.encode()
    assert catalog.position != Position()


# -- upkeep


def test_a_snapshot_is_taken_when_something_changed_and_its_time_has_come(
    cell: Cell, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    recorder = recorder_of(cell, catalog, clock_ms=clock, snapshot_every_ms=2000)
    taken: list[int] = []
    snapshot = catalog.snapshot

    def counted() -> None:
        taken.append(clock.now_ms - 1_000_000_000_000)
        snapshot()

    monkeypatch.setattr(catalog, "snapshot", counted)
    recorder.tick()
    for _ in range(4):
        clock.now_ms += 1000
        submit(cell, "r1")
        recorder.tick()
    clock.now_ms += 5000
    recorder.tick()
    recorder.tick()
    assert taken == [0, 2000, 4000]


def test_snapshots_of_a_large_catalog_become_rarer(
    cell: Cell, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    recorder = recorder_of(cell, catalog, clock_ms=clock, snapshot_every_ms=2000)
    taken: list[int] = []

    def slow() -> None:
        taken.append(clock.now_ms - 1_000_000_000_000)
        clock.now_ms += 500  # and is_snapshot_due stays set

    monkeypatch.setattr(catalog, "snapshot", slow)
    for _ in range(25):
        recorder.tick()
        clock.now_ms += 1000
    assert taken == [0, 10_500, 21_000]


def test_facts_older_than_the_days_to_keep_are_forgotten_now_and_then(cell: Cell, catalog: Catalog) -> None:
    clock = Clock()
    recorder = recorder_of(cell, catalog, clock_ms=clock, keep_days=2)
    submit(cell, "old", t=clock.now_ms - 2 * DAY_MS - 1)
    submit(cell, "young", t=clock.now_ms - 2 * DAY_MS)
    recorder.tick()
    recorder.tick()
    assert ids(catalog) == ["old", "young"]  # forgotten once, before anything was there
    clock.now_ms += FORGET_EVERY_MS - 1
    recorder.tick()
    assert ids(catalog) == ["old", "young"]
    clock.now_ms = 1_000_000_000_000 + FORGET_EVERY_MS
    recorder.tick()
    assert ids(catalog) == []


def test_a_catalog_beyond_its_bound_forgets_what_ended_first_with_its_next_upkeep(
    cell: Cell, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []
    monkeypatch.setattr(catalog, "shrink_to", lambda max_bytes: bounds.append(max_bytes) or 0)
    clock = Clock()
    recorder = recorder_of(cell, catalog, clock_ms=clock, max_mb=17)
    recorder.tick()
    clock.now_ms += FORGET_EVERY_MS - 1
    recorder.tick()
    assert bounds == [17_000_000]
    clock.now_ms += 1
    recorder.tick()
    assert bounds == [17_000_000] * 2


def test_a_last_round_records_what_is_there_and_leaves_a_fresh_snapshot(cell: Cell, catalog: Catalog) -> None:
    recorder = recorder_of(cell, catalog, max_rows=2)
    submit(cell, *"abcde")
    recorder.finish()
    assert ids(catalog) == list("abcde")
    assert not catalog.is_snapshot_due
