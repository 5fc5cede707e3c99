"""The catalog: what happened to every request, attempt, worker and model, in one DuckDB file that we alone write.

Owns the upsert, the place up to which facts are recorded (`Position`, written in the same transaction as
their rows), retention, and the Parquet snapshot. Refuses to know where facts come from. The only module that imports
duckdb.

DuckDB lets one process open a file for writing and then no other process at all. So every reader reads the snapshot:
`<directory>/current/<table>.parquet`, a consistent set that is replaced as a whole (`open_snapshot`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import orjson

from bridge.catalog.facts import Rows
from bridge.catalog.minutes import COUNT_DUE, CREATE_DUE, NOTE_DUE, touched_by
from bridge.catalog.tables import DERIVED, FIRST_KEPT, SCHEMA_VERSION, TABLES
from bridge.catalog.views import VIEWS

SHRINK_TO = 0.75
"""What is left of a catalog that outgrew its bound, as a share of that: so that it need not shrink soon again."""


class CatalogError(RuntimeError):
    """The catalog cannot be opened or written. Nothing was changed: try again later, or do what the message says."""


class CatalogBusy(CatalogError):
    """Another process has the file open; it can be opened when that process ends."""


class CatalogTooNew(CatalogError):
    """The file was written by a newer version: upgrade, or point DATA_DIR elsewhere. Trying again does not help."""


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where the events stream is recorded. Stream ids mean something within one `generation` of it only."""

    generation: str = ""
    last_id: str = "0-0"
    num_recorded: int = 0
    """Facts recorded since the file was made (a fact that is recorded twice would count twice)."""
    num_skipped: int = 0
    """Entries that were not facts."""


class Catalog:
    """The open catalog. Use from one thread; `interrupt` alone may be called from another."""

    def __init__(self, directory: Path) -> None:
        """Opens or creates `<directory>/catalog.duckdb`. Raises CatalogBusy, CatalogTooNew, CatalogError."""
        self.directory = directory
        self.is_snapshot_due = True
        """Whether the snapshot is behind the tables. At first it may be: the last process was perhaps killed."""
        directory.mkdir(parents=True, exist_ok=True)
        self._db = _open(directory / "catalog.duckdb")
        try:
            with self._transaction():
                self._prepare_schema()
            self.position = self._read_position()
        except BaseException:
            self._db.close()
            raise

    def record(self, rows: Rows, position: Position) -> None:
        """Upserts `rows` and moves to `position`, both or neither. Raises CatalogError.

        `rows` hold at most one row for a key (`bridge.catalog.facts.fold`). A column that a row does not name stays
        as it is.
        """
        with self._transaction():
            for table, of_table in rows.items():
                if of_table:
                    self._db.execute(_UPSERTS[table], [orjson.dumps(of_table).decode(), _JSON_TYPES[table]])
            if touched := touched_by(rows):
                self._db.execute(NOTE_DUE, [touched])
            self._db.execute(
                "UPDATE position SET generation = ?, last_id = ?, num_recorded = ?, num_skipped = ?",
                [position.generation, position.last_id, position.num_recorded, position.num_skipped],
            )
        self.position = position
        self.is_snapshot_due = self.is_snapshot_due or any(rows.values())

    def forget_before(self, cutoff_ms: int) -> None:
        """Deletes what has not changed since `cutoff_ms`. A worker stays while an attempt names it."""
        deletions = (
            "DELETE FROM requests WHERE updated_ms < ?",
            "DELETE FROM attempts WHERE updated_ms < ?",
            "DELETE FROM workers WHERE updated_ms < ? AND NOT EXISTS"
            " (SELECT 1 FROM attempts WHERE attempts.worker = workers.worker)",
            "DELETE FROM models WHERE updated_ms < ? AND NOT EXISTS"
            " (SELECT 1 FROM workers WHERE workers.fingerprint = models.fingerprint)",
            "DELETE FROM minutes WHERE minute_ms < ?",
        )
        with self._transaction():
            self._count_minutes()
            counts = [self._db.execute(sql, [cutoff_ms]).fetchone() for sql in deletions]
        self.is_snapshot_due = self.is_snapshot_due or counts != [(0,)] * len(deletions)

    def size_bytes(self) -> int:
        """What the tables take on disk, and the snapshots. Space in the file that is free again does not count."""
        ((used_blocks, block_size),) = self.query("SELECT used_blocks, block_size FROM pragma_database_size()")
        others = [self.directory / "catalog.duckdb.wal", *self.directory.glob("snapshot-*/*")]
        return int(used_blocks) * int(block_size) + sum(path.stat().st_size for path in others if path.exists())

    def shrink_to(self, max_bytes: int) -> int:
        """When it is larger, forgets the requests that ended first, with their attempts. Returns how many.

        What has not ended stays, and so do the minutes.
        """
        size = self.size_bytes()
        if size <= max_bytes:
            return 0
        ((num_ended,),) = self.query("SELECT count(ended_ms) FROM requests")
        num_to_go = num_ended - int(num_ended * SHRINK_TO * max_bytes / size)
        if num_to_go == 0:
            return 0
        with self._transaction():
            self._count_minutes()
            (last_ms,) = self._db.execute(
                "SELECT ended_ms FROM requests WHERE ended_ms IS NOT NULL ORDER BY ended_ms LIMIT 1 OFFSET ?",
                [num_to_go - 1],
            ).fetchone() or (0,)
            self._db.execute(
                "DELETE FROM attempts WHERE request_id IN (SELECT request_id FROM requests WHERE ended_ms <= ?)",
                [last_ms],
            )
            (num_gone,) = self._db.execute("DELETE FROM requests WHERE ended_ms <= ?", [last_ms]).fetchone() or (0,)
        with _duckdb_errors():
            self._db.execute("CHECKPOINT")  # only now their space is free
        self.is_snapshot_due = True
        return int(num_gone)

    def snapshot(self) -> None:
        """Replaces the Parquet snapshot as a whole. The one before stays, for who is still reading it."""
        number = _snapshot_number(self.directory) + 1
        fresh = self.directory / f"snapshot-{number}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        with self._transaction():
            self._count_minutes()
            for table in (*TABLES, *DERIVED):
                path = _quoted(fresh / f"{table}.parquet")
                self._db.execute(f"COPY {table} TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
        link = self.directory / "current.new"
        link.unlink(missing_ok=True)
        link.symlink_to(fresh.name)
        os.replace(link, self.directory / "current")
        self.is_snapshot_due = False
        for old in self.directory.glob("snapshot-*"):
            if old.name not in (fresh.name, f"snapshot-{number - 1}"):
                shutil.rmtree(old, ignore_errors=True)

    def interrupt(self) -> None:
        """Makes a statement that is running in another thread raise CatalogError; for a process that must end now."""
        try:
            self._db.interrupt()
        except duckdb.Error:  # closed already
            pass

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT on the live tables. Raises CatalogError."""
        with _duckdb_errors():
            return self._db.execute(sql, list(parameters)).fetchall()

    def close(self) -> None:
        self._db.close()

    def _count_minutes(self) -> None:
        """Before its requests are read or forgotten, every minute that was touched is counted."""
        if self._db.execute("SELECT count(*) FROM minutes_due").fetchone() != (0,):
            for statement in COUNT_DUE:
                self._db.execute(statement)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _duckdb_errors():
            self._db.execute("BEGIN")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        try:
            self._db.execute("ROLLBACK")
        except duckdb.Error:  # a failed COMMIT has ended the transaction already
            pass

    def _prepare_schema(self) -> None:
        db = self._db
        db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER)")
        found = db.execute("SELECT max(version) FROM schema_version").fetchone()
        version = found[0] if found else None
        if version is None:
            db.execute("INSERT INTO schema_version VALUES (?)", [SCHEMA_VERSION])
        elif version != SCHEMA_VERSION:
            raise CatalogTooNew(
                f"{self.directory / 'catalog.duckdb'} has catalog schema {version}, this version knows"
                f" {SCHEMA_VERSION}: upgrade tokenferry, or set DATA_DIR to another folder"
            )
        db.execute(
            "CREATE TABLE IF NOT EXISTS position"
            " (generation VARCHAR, last_id VARCHAR, num_recorded BIGINT, num_skipped BIGINT)"
        )
        if db.execute("SELECT count(*) FROM position").fetchone() == (0,):
            db.execute("INSERT INTO position VALUES ('', '0-0', 0, 0)")
        db.execute(CREATE_DUE)
        for table, (key, columns) in {**TABLES, **DERIVED}.items():
            spelled = ", ".join(f"{name} {kind}" for name, kind in columns.items())
            db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({spelled}, PRIMARY KEY ({', '.join(key)}))")
            for name, kind in columns.items():
                db.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {kind}")

    def _read_position(self) -> Position:
        ((generation, last_id, num_recorded, num_skipped),) = self.query("FROM position")
        return Position(generation, last_id, num_recorded, num_skipped)


def open_snapshot(directory: Path) -> duckdb.DuckDBPyConnection:
    """A connection of its own, in memory, with the tables of the latest snapshot as views, and
    `bridge.catalog.views`.

    It reads the snapshot's folder and no other file, whatever it is asked. Raises CatalogError.
    """
    current = Path(os.path.realpath(directory / "current"))
    db = duckdb.connect(":memory:")
    try:
        for table in (*TABLES, *DERIVED):
            path = current / f"{table}.parquet"
            if not path.exists():
                raise CatalogError(
                    f"no catalog snapshot in {directory}: the bridge of this version has not run with this DATA_DIR"
                )
            db.execute(f"CREATE VIEW {table} AS FROM '{_quoted(path)}'")
        for name, view in VIEWS.items():
            db.execute(f"CREATE VIEW {name} AS {view.sql}")
        db.execute(f"SET allowed_directories = ['{_quoted(current)}']")
        db.execute("SET enable_external_access = false")
        db.execute("SET lock_configuration = true")
    except BaseException:
        db.close()
        raise
    return db


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask_snapshot(directory: Path, sql: str, parameters: Sequence[Any] = ()) -> QueryResult:
    """One reading statement over the latest snapshot. Raises CatalogError: for a statement that is no query, too."""
    with _duckdb_errors(), open_snapshot(directory) as db:
        statements = db.extract_statements(sql)
        if len(statements) != 1 or statements[0].type not in _READING:
            raise CatalogError("only one statement that reads is possible here: SELECT, FROM, DESCRIBE, EXPLAIN ...")
        done = db.execute(statements[0], list(parameters))
        return QueryResult(tuple(column[0] for column in done.description), done.fetchall())


def export_snapshot(directory: Path, target: Path) -> list[Path]:
    """Copies every table of the latest snapshot, as Parquet, into `target`. Raises CatalogError."""
    current = Path(os.path.realpath(directory / "current"))
    open_snapshot(directory).close()
    try:
        target.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy2(current / f"{table}.parquet", target)) for table in (*TABLES, *DERIVED)]
    except OSError as error:
        raise CatalogError(f"cannot be written to {target}: {error}") from error


def _open(path: Path) -> duckdb.DuckDBPyConnection:
    # One thread and a small buffer: the recorder must never take the processors from the engine.
    try:
        return duckdb.connect(str(path), config={"threads": 1, "memory_limit": "256MB"})
    except duckdb.IOException as error:
        if "lock" in str(error):
            raise CatalogBusy(f"{path} is open in another process: {error}") from error
        raise CatalogError(f"{path} cannot be opened: {error}") from error
    except duckdb.Error as error:
        raise CatalogError(f"{path} cannot be opened: {error}") from error


@contextmanager
def _duckdb_errors() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise CatalogError(str(error)) from error


def _upsert(table: str) -> str:
    key, columns = TABLES[table]
    order = {
        c: (table, "excluded") if c in FIRST_KEPT[table] else ("excluded", table) for c in columns if c not in key
    }
    sets = ", ".join(f"{c} = coalesce({first}.{c}, {second}.{c})" for c, (first, second) in order.items())
    # from_json puts NULL where a value does not fit its column: one odd value never holds up the stream.
    return (
        f"INSERT INTO {table} BY NAME SELECT unnest(from_json(?, ?), recursive := true)"
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {sets}"
    )


_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_UPSERTS = {table: _upsert(table) for table in TABLES}
_JSON_TYPES = {table: orjson.dumps([dict(columns)]).decode() for table, (_, columns) in TABLES.items()}


def _snapshot_number(directory: Path) -> int:
    try:
        return int(os.readlink(directory / "current").removeprefix("snapshot-"))
    except (OSError, ValueError):
        return 0


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
