"""`requests`, `sql` and `export`, over a catalog that a bridge has left, as a person types them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge.catalog.catalog import Catalog, Position
from bridge.catalog.facts import Fact, fold
from tokenferry.cli import main
from tokenferry.commands.history import History, Wanted, duration_ms, show_requests
from tokenferry.errors import ForPeople

NOW_MS = 1_800_000_000_000


def life(request_id: str, at_ms: int, *, ttft_ms: int = 50, state: str = "finished", model: str = "m") -> list[Fact]:
    end = {"state": state, "reason": "stop", "message": "why\nnot", "next_index": 1234, "cached": 5}
    return [
        Fact("submitted", at_ms, request_id, 1, model=model, details={"prompt_tokens": 10}),
        Fact("claimed", at_ms + 20, request_id, 1, "w1", model),
        Fact("first_token", at_ms + ttft_ms, request_id, 1, "w1", model, {"cached": 5}),
        Fact("ended", at_ms + 150, request_id, 1, "w1", model, end),
    ]


def record(folder: Path, *facts: Fact) -> None:
    catalog = Catalog(folder)
    catalog.record(fold(facts), Position())
    catalog.snapshot()
    catalog.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    folder = tmp_path / "catalog"
    record(
        folder,
        *life("old", NOW_MS - 7_200_000),
        *life("slow", NOW_MS - 60_000, ttft_ms=100),
        *life("bad", NOW_MS - 30_000, state="failed"),
        *life("other", NOW_MS - 20_000, model="llama"),
        *life("waiting", NOW_MS - 10_000)[:1],
    )
    return folder


@pytest.fixture
def history(folder: Path) -> History:
    return History(folder, clock_ms=lambda: NOW_MS)


def ids(records: Sequence[dict[str, Any]]) -> list[str]:
    return [record["request_id"] for record in records]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(), ["old", "slow", "bad", "other", "waiting"]),
        (Wanted(limit=2), ["other", "waiting"]),
        (Wanted(model="llama"), ["other"]),
        (Wanted(state="failed"), ["bad"]),
        (Wanted(since_ms=30_000), ["bad", "other", "waiting"]),
        (Wanted(slow_ms=100), ["slow", "waiting"]),
        (Wanted(slow_ms=10_001), []),
        (Wanted(state="finished", since_ms=100_000, model="m"), ["slow"]),
    ],
)
def test_requests_are_chosen_by_what_is_wanted(history: History, wanted: Wanted, found: list[str]) -> None:
    assert ids(history.requests(wanted)) == found


def test_a_model_that_nobody_asked_for_suggests_the_nearest(history: History) -> None:
    with pytest.raises(ForPeople, match="did you mean llama"):
        history.requests(Wanted(model="lama"))


def test_a_known_model_without_a_wanted_request_is_no_mistake(history: History) -> None:
    assert history.requests(Wanted(model="llama", state="failed")) == []


@pytest.mark.parametrize(
    ("text", "ms"), [("5ms", 5), ("30s", 30_000), ("10m", 600_000), ("2h", 7_200_000), ("1d", 86_400_000)]
)
def test_a_time_is_a_number_and_a_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "10", "10x", "-1m", "1.5h", "m"])
def test_a_time_that_cannot_be_read_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ForPeople, match="10m"):
        duration_ms(text)


def follow(history: History, folder: Path, steps: list[Callable[[], None]], **options: Any) -> None:
    """Follows while each step happens in turn, then Ctrl-C."""

    def wait(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    with pytest.raises(KeyboardInterrupt):
        show_requests(history, Wanted(limit=1), follow=True, wait=wait, clock_ms=lambda: NOW_MS, **options)


def test_following_tells_every_change_once(
    history: History, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        lambda: None,
        lambda: record(folder, *life("waiting", NOW_MS - 10_000)),
        lambda: record(folder, *life("new", NOW_MS)[:2]),
    ]
    follow(history, folder, steps, as_json=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["request_id"], one["state"]) for one in told] == [
        ("waiting", "offered"),
        ("waiting", "finished"),
        ("new", "claimed"),
    ]


def test_a_change_is_one_line_for_people(history: History, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow(
        history, folder, [lambda: record(folder, *life("waiting", NOW_MS - 10_000, state="failed"))], as_json=False
    )
    line = capsys.readouterr().out.splitlines()[-1]
    assert "waiting  m  failed  (stop)  1234 tokens in 150 ms  first after 50 ms  why\\nnot" in line


def test_requests_as_a_table_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requests", "--failed"]) == 0
    headings, row = capsys.readouterr().out.splitlines()
    assert "ttft ms" in headings
    assert "bad" in row
    assert "1,234" in row
    assert main(["requests", "--failed", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["request_id"], found["num_output_tokens"], found["ttft_ms"]) == ("bad", 1234, 50)


def test_that_there_is_no_such_request_is_said_and_no_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["requests", "--state", "cancelled"]) == 0
    assert "no such request" in capsys.readouterr().err
    assert main(["requests", "--state", "cancelled", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_sql_gives_a_table_or_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "SELECT model, count(*) AS n FROM requests GROUP BY 1 ORDER BY 1"]) == 0
    assert capsys.readouterr().out == "model  n\nllama  1\nm      4\n"
    assert main(["sql", "--json", "SELECT sum(num_requests) AS n FROM usage"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"n": 5}]


def test_sql_that_writes_or_is_wrong_is_one_line_on_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "DROP VIEW requests"]) == 1
    assert capsys.readouterr().err.startswith("tokenferry: only one statement that reads")
    assert main(["sql", "SELECT colour FROM requests"]) == 1
    assert "colour" in capsys.readouterr().err


def test_an_export_names_its_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "out"), "--json"]) == 0
    assert sorted(Path(path).stem for path in json.loads(capsys.readouterr().out)) == [
        *("attempts", "minutes", "models", "requests", "workers")
    ]
    assert (tmp_path / "out" / "minutes.parquet").exists()


@pytest.mark.parametrize("command", [["requests"], ["sql", "FROM usage"], ["export", "out"]])
def test_without_a_catalog_every_command_says_so(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    assert main(command) == 1
    assert "no catalog snapshot" in capsys.readouterr().err
