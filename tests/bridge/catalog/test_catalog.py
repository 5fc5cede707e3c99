from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pytest

from bridge.catalog import tables
from bridge.catalog.catalog import (
    Catalog,
    CatalogError,
    CatalogTooNew,
    Position,
    ask_snapshot,
    export_snapshot,
    open_snapshot,
)
from bridge.catalog.facts import Rows
from bridge.catalog.tables import FIRST_KEPT, TABLES


def request(request_id: str, **columns: str | int) -> Rows:
    return {"requests": [{"request_id": request_id, "updated_ms": 1, **columns}]}


def ids(catalog: Catalog) -> list[str]:
    return [row[0] for row in catalog.query("SELECT request_id FROM requests ORDER BY 1")]


def test_a_new_catalog_is_empty_and_at_the_beginning(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "not" / "there" / "yet")
    assert catalog.position == Position("", "0-0", 0, 0)
    assert ids(catalog) == []
    catalog.close()


def test_rows_and_position_survive_being_closed(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    position = Position("g", "7-1", 3, 1)
    catalog.record(request("r1", state="offered"), position)
    catalog.close()
    again = Catalog(tmp_path)
    assert again.position == position
    assert ids(again) == ["r1"]
    again.close()


def test_a_later_row_changes_only_the_columns_that_it_names(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1", state="offered", num_prompt_tokens=5), Position())
    catalog.record(request("r1", state="claimed", worker="w1"), Position())
    assert catalog.query("SELECT state, worker, num_prompt_tokens FROM requests") == [("claimed", "w1", 5)]
    catalog.close()


def test_the_first_value_of_a_moment_stands(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for claimed_ms in (10, 20):
        catalog.record(request("r1", claimed_ms=claimed_ms), Position())
    assert catalog.query("SELECT claimed_ms FROM requests") == [(10,)]
    catalog.close()


def test_a_batch_written_twice_is_there_once(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    rows: Rows = {
        **request("r1", state="offered"),
        "attempts": [{"request_id": "r1", "attempt": 1, "worker": "w"}, {"request_id": "r1", "attempt": 2}],
        "workers": [{"worker": "w", "model": "m"}],
        "models": [{"model": "m", "fingerprint": "f"}],
    }
    for _ in range(2):
        catalog.record(rows, Position())
    counts = {table: catalog.query(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}
    assert counts == {"requests": 1, "attempts": 2, "workers": 1, "models": 1}
    catalog.close()


def test_a_batch_that_fails_leaves_rows_and_position_as_they_were(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1"), Position("g", "1-0"))
    bad: Rows = {**request("r2"), "attempts": [{"request_id": "r2"}]}  # its key lacks the attempt
    with pytest.raises(CatalogError):
        catalog.record(bad, Position("g", "2-0"))
    assert catalog.position == Position("g", "1-0")
    assert ids(catalog) == ["r1"]
    catalog.record(request("r3"), Position("g", "3-0"))
    assert ids(catalog) == ["r1", "r3"]
    catalog.close()


def test_a_value_that_does_not_fit_its_column_is_left_out_and_the_row_stays(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1", num_prompt_tokens=2**40, state="é\u2028'\"\\"), Position())
    assert catalog.query("SELECT num_prompt_tokens, state FROM requests") == [(None, "é\u2028'\"\\")]
    catalog.close()


def test_while_it_is_open_another_process_is_told_that_it_is_busy(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    code = f"""
from pathlib import Path
from bridge.catalog.catalog import Catalog, CatalogBusy
try:
    Catalog(Path({str(tmp_path)!r}))
except CatalogBusy as error:
    print("busy:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "busy:" in done.stdout
    assert "catalog.duckdb" in done.stdout
    catalog.close()


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.catalog.catalog.SCHEMA_VERSION", tables.SCHEMA_VERSION + 1)
    Catalog(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(CatalogTooNew, match=r"catalog\.duckdb has catalog schema 2, .* knows 1: upgrade"):
        Catalog(tmp_path)
    with pytest.raises(CatalogTooNew):  # and it is not held open either
        Catalog(tmp_path)


def test_a_file_that_is_no_catalog_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "catalog.duckdb").write_bytes(b"not a database " * 500)
    with pytest.raises(CatalogError, match=r"catalog\.duckdb cannot be opened"):
        Catalog(tmp_path)


def test_a_column_that_was_added_since_is_there_when_an_older_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1", state="offered"), Position())
    catalog.close()
    key, columns = TABLES["requests"]
    monkeypatch.setattr(
        "bridge.catalog.catalog.TABLES", {**TABLES, "requests": (key, {**columns, "colour": "VARCHAR"})}
    )
    again = Catalog(tmp_path)
    assert again.query("SELECT state, colour FROM requests") == [("offered", None)]
    again.close()


def test_the_first_kept_columns_exist() -> None:
    assert all(kept <= TABLES[table][1].keys() for table, kept in FIRST_KEPT.items())
    assert FIRST_KEPT.keys() == TABLES.keys()


def test_what_has_not_changed_since_the_cutoff_is_forgotten(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for request_id, updated_ms, worker in (("old", 10, "w-old"), ("new", 20, "w-new")):
        rows: Rows = {
            "requests": [{"request_id": request_id, "updated_ms": updated_ms}],
            "attempts": [{"request_id": request_id, "attempt": 1, "worker": worker, "updated_ms": updated_ms}],
            "workers": [{"worker": worker, "fingerprint": worker, "updated_ms": 1}],
            "models": [{"model": "m", "fingerprint": worker, "updated_ms": 1}],
        }
        catalog.record(rows, Position())
    catalog.forget_before(20)
    assert ids(catalog) == ["new"]
    left = {table: catalog.query(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}
    assert left == {"requests": 1, "attempts": 1, "workers": 1, "models": 1}
    assert catalog.query("SELECT worker FROM workers") == [("w-new",)]
    catalog.close()


def test_only_what_was_really_forgotten_asks_for_a_snapshot(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1"), Position())
    catalog.snapshot()
    catalog.forget_before(1)
    assert not catalog.is_snapshot_due
    catalog.forget_before(2)
    assert catalog.is_snapshot_due
    catalog.close()


def ended(first: int, end: int) -> Rows:
    """Requests that ended at that millisecond, each with its attempt."""
    return {
        "requests": [
            {"request_id": f"r{n:06}", "state": "finished", "ended_ms": n, "updated_ms": n} for n in range(first, end)
        ],
        "attempts": [{"request_id": f"r{n:06}", "attempt": 1, "updated_ms": n} for n in range(first, end)],
    }


def test_a_catalog_within_its_bound_forgets_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(ended(0, 9), Position())
    catalog.snapshot()
    assert catalog.shrink_to(catalog.size_bytes()) == 0
    assert len(ids(catalog)) == 9
    catalog.close()


def test_beyond_its_bound_what_ended_first_goes_first_with_its_attempts(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(ended(0, 4000), Position())
    catalog.record(request("open"), Position())
    catalog.snapshot()
    num_gone = catalog.shrink_to(catalog.size_bytes() // 2)
    left = ids(catalog)
    assert 2400 < num_gone < 2600  # to three quarters of half of it
    assert left == ["open", *(f"r{n:06}" for n in range(num_gone, 4000))]
    assert catalog.query("SELECT count(*) FROM attempts") == [(4000 - num_gone,)]
    assert catalog.is_snapshot_due
    catalog.close()


def test_the_size_of_a_catalog_counts_tables_log_and_snapshots(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(ended(0, 1000), Position())
    catalog.snapshot()  # counts the minutes; the next one only writes itself
    before = catalog.size_bytes()
    catalog.snapshot()
    snapshot = sum(path.stat().st_size for path in tmp_path.glob("snapshot-2/*.parquet"))
    assert snapshot > 1000
    assert catalog.size_bytes() == before + snapshot
    catalog.close()


def test_a_catalog_that_was_bounded_again_and_again_stays_near_its_bound(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    bound = 3_000_000
    largest = num_gone = 0
    for first in range(0, 36_000, 6000):
        catalog.record(ended(first, first + 6000), Position())
        catalog.snapshot()
        num_gone += catalog.shrink_to(bound)
        largest = max(largest, (tmp_path / "catalog.duckdb").stat().st_size)
    assert num_gone > 5_000
    assert len(ids(catalog)) > 3_000
    assert largest < 2 * bound
    catalog.close()


def test_the_snapshot_shows_what_was_recorded_while_the_catalog_is_open(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1", state="offered"), Position())
    assert catalog.is_snapshot_due
    catalog.snapshot()
    assert not catalog.is_snapshot_due
    with open_snapshot(tmp_path) as reader:
        assert reader.execute("SELECT request_id, state FROM requests").fetchall() == [("r1", "offered")]
        assert reader.execute("SELECT count(*) FROM attempts").fetchall() == [(0,)]
    catalog.close()


def test_a_reader_of_the_snapshot_before_goes_on_reading_it(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1"), Position())
    catalog.snapshot()
    reader = open_snapshot(tmp_path)
    catalog.record(request("r2"), Position())
    catalog.snapshot()
    assert reader.execute("SELECT request_id FROM requests").fetchall() == [("r1",)]
    with open_snapshot(tmp_path) as newer:
        assert newer.execute("SELECT count(*) FROM requests").fetchall() == [(2,)]
    reader.close()
    catalog.close()


def test_at_most_two_snapshots_are_kept(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for _ in range(5):
        catalog.snapshot()
    assert sorted(path.name for path in tmp_path.glob("snapshot-*")) == ["snapshot-4", "snapshot-5"]
    catalog.close()


def test_a_snapshot_that_was_cut_short_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1"), Position())
    catalog.snapshot()
    catalog.record(request("r2"), Position())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.catalog.catalog.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        catalog.snapshot()
    monkeypatch.undo()
    with open_snapshot(tmp_path) as reader:
        assert reader.execute("SELECT request_id FROM requests").fetchall() == [("r1",)]
    catalog.snapshot()
    with open_snapshot(tmp_path) as reader:
        assert reader.execute("SELECT count(*) FROM requests").fetchall() == [(2,)]
    catalog.close()


def test_without_a_snapshot_the_reader_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no catalog snapshot"):
        open_snapshot(tmp_path)


def snapshot_of(folder: Path) -> Path:
    catalog = Catalog(folder)
    catalog.record(request("r1", state="offered"), Position())
    catalog.snapshot()
    catalog.close()
    return folder


def test_a_question_to_the_snapshot_gives_columns_and_rows(tmp_path: Path) -> None:
    answer = ask_snapshot(
        snapshot_of(tmp_path), "SELECT request_id, state FROM requests WHERE state = ?", ["offered"]
    )
    assert answer.columns == ("request_id", "state")
    assert answer.records == [{"request_id": "r1", "state": "offered"}]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM requests",
        "CREATE TABLE t AS SELECT 1",
        "COPY requests TO '{target}'",
        "COPY (SELECT 1) TO '{target}'",
        "SET threads = 3",
        "ATTACH '{target}'",
        "SELECT 1; DROP VIEW requests",
        "",
    ],
)
def test_whoever_asks_the_snapshot_only_reads(tmp_path: Path, sql: str) -> None:
    target = tmp_path / "target"
    with pytest.raises(CatalogError, match="only one statement that reads"):
        ask_snapshot(snapshot_of(tmp_path / "c"), sql.format(target=target))
    assert not target.exists()


def test_whoever_asks_the_snapshot_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with pytest.raises(CatalogError, match="Cannot access file"):
        ask_snapshot(snapshot_of(tmp_path / "c"), f"FROM '{tmp_path}/secret.csv'")


def test_a_question_with_a_mistake_names_it(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="colour"):
        ask_snapshot(snapshot_of(tmp_path), "SELECT colour FROM requests")


def test_an_export_is_the_tables_as_parquet(tmp_path: Path) -> None:
    paths = export_snapshot(snapshot_of(tmp_path / "c"), tmp_path / "new" / "folder")
    assert sorted(path.name for path in paths) == [
        f"{name}.parquet" for name in ("attempts", "minutes", "models", "requests", "workers")
    ]
    exported = tmp_path / "new" / "folder" / "requests.parquet"
    assert duckdb.sql(f"SELECT request_id FROM '{exported}'").fetchall() == [("r1",)]


def test_an_export_into_what_is_no_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CatalogError, match="cannot be written to"):
        export_snapshot(snapshot_of(tmp_path / "c"), tmp_path / "file")


def test_a_folder_with_a_quote_in_its_name_works(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "it's")
    catalog.snapshot()
    open_snapshot(tmp_path / "it's").close()
    catalog.close()


def test_a_statement_that_fails_is_a_catalog_error(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(CatalogError, match="nowhere"):
        catalog.query("SELECT * FROM nowhere")
    catalog.close()
    catalog.interrupt()  # does no harm after the end


def test_a_long_statement_can_be_interrupted_from_another_thread(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    caught: list[CatalogError] = []

    def work() -> None:
        try:
            catalog.query("SELECT count(*) FROM range(100000000000)")
        except CatalogError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        catalog.interrupt()
        thread.join(0.01)
    assert "nterrupt" in str(caught[0])
    catalog.close()


def test_the_file_opens_with_plain_duckdb_once_it_is_closed(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.record(request("r1"), Position())
    catalog.close()
    with duckdb.connect(str(tmp_path / "catalog.duckdb"), read_only=True) as db:
        assert db.execute("SELECT request_id FROM requests").fetchall() == [("r1",)]
