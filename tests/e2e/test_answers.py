"""The life of an answer over real processes: choices, two web processes, and clients and web processes that go."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import TestedCell
from tokenferry.cell.group import HOST

pytestmark = pytest.mark.e2e

NUM_TOKENS = 150


@pytest.fixture(scope="module")
def cell(short_folder: Path) -> Iterator[TestedCell]:
    """Two web processes, and one scripted worker."""
    environ = {"SCRIPTED_STEP_MS": "10", "MAX_NUM_SEQS": "16"}
    with TestedCell(short_folder, num_workers=1, num_web=2, environ=environ) as running:
        yield running


def url(cell: TestedCell, web: int, path: str) -> str:
    return f"http://{HOST}:{cell.ports[web]}/v1/chat/completions{path}"


def ask(cell: TestedCell, web: int, headers: dict[str, str], **fields: Any) -> Any:
    """An open response to a chat request."""
    body = {"model": cell.model, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": NUM_TOKENS}
    data = json.dumps({**body, **fields}).encode()
    headers = {"content-type": "application/json", **headers}
    return urllib.request.urlopen(urllib.request.Request(url(cell, web, ""), data, headers), timeout=60)


def events_of(response: Any, count: int | None = None) -> list[tuple[str, Any]]:
    """(id, data) of the next events, all that there are unless `count` says how many."""
    found: list[tuple[str, Any]] = []
    name = ""
    for line in response:
        if line.startswith(b"id: "):
            name = line[4:].strip().decode()
        elif line.startswith(b"data: "):
            text = line[6:].strip()
            found.append((name, text.decode() if text == b"[DONE]" else json.loads(text)))
            if len(found) == count:
                break
    return found


def text_in(events: list[tuple[str, Any]], choice: int = 0) -> str:
    chunks = [chunk for _, chunk in events if chunk != "[DONE]"]
    deltas = [one["delta"] for chunk in chunks for one in chunk["choices"] if one["index"] == choice]
    return "".join(delta.get("content") or "" for delta in deltas)


def reasons_in(events: list[tuple[str, Any]]) -> list[str]:
    chunks = [chunk for _, chunk in events if chunk != "[DONE]"]
    return [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]


def undisturbed(cell: TestedCell) -> str:
    with ask(cell, 0, {}) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_the_openai_client_streams_three_choices(cell: TestedCell) -> None:
    whole = undisturbed(cell)
    messages: Any = [{"role": "user", "content": "tell me"}]
    stream = cell.shared_client.chat.completions.create(
        model=cell.model,
        messages=messages,
        max_completion_tokens=NUM_TOKENS,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, order, usage = ["", "", ""], [0, 0, 0], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason is not None
            order.append(choice.index)
    # Of the sampling parameters the scripted model honours few; the seed is none of them.
    assert texts == [whole] * 3
    assert reasons == [1, 1, 1]
    assert order != sorted(order), "the choices come interleaved"
    assert usage is not None
    assert usage.completion_tokens == 3 * NUM_TOKENS


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_lost_its_connection_reads_on_at_another_web_process(cell: TestedCell, n: int) -> None:
    whole = undisturbed(cell)
    with ask(cell, 0, {"X-Disconnect": "continue"}, stream=True, n=n) as response:
        before = events_of(response, 10 * n)
        request_id = before[0][1]["id"]
    headers = {"Last-Event-ID": before[-1][0]}
    with urllib.request.urlopen(
        urllib.request.Request(url(cell, 1, f"/{request_id}?stream=true"), headers=headers)
    ) as rest:
        after = events_of(rest)
    for choice in range(n):
        assert text_in(before, choice) + text_in(after, choice) == whole
    assert reasons_in(before) + reasons_in(after) == ["length"] * n
    assert after[-1][1] == "[DONE]"


def test_disconnect_stop_and_going_on_are_three_ends(cell: TestedCell) -> None:
    with ask(cell, 0, {}, stream=True, max_tokens=4000) as left:
        [(_, left_chunk)] = events_of(left, 1)
    with ask(cell, 0, {}, stream=True, max_tokens=4000) as stopped:
        [(_, stopped_chunk)] = events_of(stopped, 1)
        cancel = urllib.request.Request(url(cell, 1, f"/{stopped_chunk['id']}/cancel"), b"", method="POST")
        with urllib.request.urlopen(cancel) as reply:
            assert json.load(reply)["status"] == "cancelled"
        assert events_of(stopped)[-1][1]["error"]["code"] == "stopped"
    with ask(cell, 0, {"X-Disconnect": "continue"}, stream=True) as going_on:
        [(_, chunk)] = events_of(going_on, 1)
    ends = {}
    for name, one in (("left", left_chunk), ("stopped", stopped_chunk), ("going on", chunk)):
        cell.wait_until(lambda request_id=one["id"]: is_over(cell, request_id), f"{name} is over")  # type: ignore[misc]
        state = cell.records.state(one["id"])
        assert state is not None
        ends[name] = (state.state, state.reason)
    assert ends == {
        "left": ("cancelled", "disconnect"),
        "stopped": ("cancelled", "stopped"),
        "going on": ("finished", "length"),
    }


def test_a_request_in_the_background_is_polled_to_its_completion(cell: TestedCell) -> None:
    whole = undisturbed(cell)
    with ask(cell, 0, {}, background=True) as response:
        accepted = json.load(response)
    assert accepted["status"] in ("queued", "in_progress")  # a worker may have been faster than the reply
    seen: list[Any] = []

    def is_completed() -> bool:
        with urllib.request.urlopen(url(cell, 1, f"/{accepted['id']}")) as reply:
            seen.append(json.load(reply))
        return bool(seen[-1]["status"] == "completed")

    cell.wait_until(is_completed, "the answer is complete")
    assert seen[-1]["choices"][0]["message"]["content"] == whole
    assert all(whole.startswith(one["choices"][0]["message"]["content"]) for one in seen)


def is_over(cell: TestedCell, request_id: str) -> bool:
    state = cell.records.state(request_id)
    return state is not None and state.is_over


def test_a_killed_web_process_takes_its_requests_with_it_except_those_that_outlive_their_reader(
    cell: TestedCell,
) -> None:
    """The last test: it leaves one web process less."""
    whole = undisturbed(cell)
    with (
        ask(cell, 1, {}, stream=True, max_tokens=4000) as ending,
        ask(cell, 1, {"X-Disconnect": "continue"}, stream=True, store=True) as staying,
    ):
        [(_, ending_chunk)] = events_of(ending, 1)
        before = events_of(staying, 5)
        cell.kill("web.2")
    request_id = before[0][1]["id"]
    with urllib.request.urlopen(url(cell, 0, f"/{request_id}?stream=true&starting_after={before[-1][0]}")) as rest:
        after = events_of(rest)
    assert text_in(before) + text_in(after) == whole
    with urllib.request.urlopen(url(cell, 0, "")) as reply:
        [stored] = json.load(reply)["data"]
    assert (stored["id"], stored["choices"][0]["message"]["content"]) == (request_id, whole)
    cell.wait_until(lambda: is_over(cell, ending_chunk["id"]), "nobody reads it", timeout_s=8)
    state = cell.records.state(ending_chunk["id"])
    assert state is not None
    assert state.state == "cancelled"
    cell.wait_quiet()
    assert cell.stream_faults() == []
