"""The dashboard over HTTP: its files, who may have its data, live pictures and timelines."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.exceptions import TimeoutError

from app.http.api_keys import KeyFile
from app.operator.dashboard import FILES
from app.operator.viewers import MAX_VIEWERS
from tests.app.web import MODEL, Exchange, Web

KEY = "Bearer sk-alice"


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    path = tmp_path / "keys"
    path.write_text("sk-alice Alice\n")
    return KeyFile(path)


def pictures(exchange: Exchange) -> list[Any]:
    blocks = exchange.body.decode().split("\n\n")[:-1]
    return [orjson.loads(block.removeprefix("data: ")) for block in blocks]


async def watch(web: Web, **headers: str) -> Exchange:
    return await web.get("/dashboard/events", **headers)


async def test_every_file_of_the_page_is_served_with_its_type_and_fences(web: Web) -> None:
    for path, (name, media_type) in FILES.items():
        exchange = await web.get(path)
        assert (exchange.status, exchange.headers["content-type"]) == (200, media_type)
        assert exchange.body == (files("app.operator") / "page" / name).read_bytes()
        assert "default-src 'none'" in exchange.headers["content-security-policy"]
        assert exchange.headers["x-content-type-options"] == "nosniff"


async def test_a_page_that_is_known_already_is_not_sent_again(web: Web) -> None:
    first = await web.get("/")
    again = await web.get("/", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    head = await web.request("HEAD", "/")
    assert (head.status, head.body) == (200, b"")


def test_the_page_is_made_of_its_own_files_alone() -> None:
    folder = files("app.operator") / "page"
    named = {name for name, _ in FILES.values()}
    assert {file.name for file in folder.iterdir()} == named
    for name in named:
        text = (folder / name).read_text()
        outside = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']*", text)
        assert outside == [], name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert not re.search(r"<[^>]+\s(on\w+|style)=", text), f"{name}: handlers and styles do not stand in the page"
        for link in re.findall(r"(?:from|href=|src=)\s*\"(/[^\"]*)\"", text):
            assert link in FILES or link == "/openapi.json", f"{name}: {link}"


async def test_the_page_needs_no_key_and_its_data_does(keys: KeyFile) -> None:
    web = Web(keys=keys)
    for path in FILES:
        assert (await web.get(path)).status == 200
    for path in ("/dashboard/events", "/dashboard/requests/chatcmpl-1"):
        assert (await web.get(path)).status == 401
    exchange = await watch(web, authorization=KEY)
    assert len(pictures(exchange)) == 1
    exchange.leave()
    await web.settle()


async def test_a_viewer_sees_workers_queues_and_requests_at_once(web: Web) -> None:
    worker = web.worker()
    await web.chat(stream=True, max_completion_tokens=9)
    await web.chat(stream=True)
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, 101, 102)
    [picture] = pictures(await watch(web))
    assert [(one["worker"], one["is_live"], one["num_held"]) for one in picture["workers"]] == [("w1", True, 1)]
    assert {queue["priority"]: queue["num_waiting"] for queue in picture["queues"]} == {
        "priority": 0,
        "default": 1,
        "flex": 0,
    }
    running, waiting = picture["requests"]
    assert (running["request_id"], running["state"], running["num_tokens"], running["max_tokens"]) == (
        "chatcmpl-1",
        "streaming",
        2,
        9,
    )
    assert (waiting["request_id"], waiting["state"]) == ("chatcmpl-2", "offered")


async def test_no_picture_has_a_text_of_a_client(web: Web) -> None:
    worker, exchange = await web.claimed_chat(
        messages=[{"role": "user", "content": "secret-plan"}], user="someone-private"
    )
    worker.append("chatcmpl-1", 0, 101, end="length")
    await web.turn()
    assert exchange.status == 200
    seen = (await watch(web)).body + (await web.get("/dashboard/requests/chatcmpl-1")).body
    assert b"secret-plan" not in seen
    assert b"someone-private" not in seen
    assert exchange.json["choices"][0]["message"]["content"].encode() not in seen


async def test_without_redis_viewers_are_told_so_and_stay(web: Web) -> None:
    def away(*args: object, **kwargs: object) -> None:
        raise TimeoutError("no answer")

    web.redis.pipeline = away  # type: ignore[assignment]
    exchange = await watch(web)
    assert pictures(exchange) == [{"error": "queue_unreachable"}]
    assert not exchange.is_over
    web.redis.hmget = away  # type: ignore[assignment]
    refused = await web.get("/dashboard/requests/chatcmpl-1")
    assert (refused.status, refused.error["code"]) == (503, "queue_unreachable")


async def test_who_leaves_makes_room_for_another(web: Web) -> None:
    viewers = [await watch(web) for _ in range(MAX_VIEWERS)]
    refused = await watch(web)
    assert (refused.status, refused.error["code"]) == (503, "too_many_viewers")
    assert int(refused.headers["retry-after"]) > 1
    viewers[5].leave()
    await web.settle()
    assert (await watch(web)).status == 200


async def test_the_drain_ends_viewers_and_lets_no_more_in(web: Web) -> None:
    exchange = await watch(web)
    await web.app.drain(budget_s=60)
    await web.settle()
    assert exchange.is_over
    refused = await watch(web)
    assert (refused.status, refused.error["code"]) == (503, "shutting_down")


async def test_a_timeline_has_every_fact_of_its_request_in_order(web: Web) -> None:
    worker = web.worker()
    exchange = await web.chat(max_completion_tokens=9)
    await web.chat(stream=True)
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, 101, 102, end="length", cached=16)
    await web.turn()
    assert exchange.status == 200
    life = (await web.get("/dashboard/requests/chatcmpl-1")).json
    assert [fact["kind"] for fact in life["facts"]] == ["submitted", "claimed", "first_token", "ended"]
    assert life["is_complete"]
    assert (life["record"]["state"], life["record"]["next_index"]) == ("finished", 2)
    assert life["facts"][0]["details"]["max_tokens"] == 9
    assert life["facts"][1]["worker"] == "w1"
    assert life["facts"][3]["details"] == {"reason": "length", "next_index": 2, "cached": 16}
    assert life["facts"][0]["model"] == MODEL


async def test_a_timeline_that_lost_its_beginning_says_so(web: Web) -> None:
    worker = web.worker()
    await web.chat(stream=True)
    web.redis.xtrim("tf:events", maxlen=0)
    worker.claim("chatcmpl-1")
    life = (await web.get("/dashboard/requests/chatcmpl-1")).json
    assert not life["is_complete"]
    assert [fact["kind"] for fact in life["facts"]] == ["claimed"]


async def test_a_request_that_nothing_is_kept_of_is_not_found(web: Web) -> None:
    for request_id in ("chatcmpl-none", "x" * 1000, "%3Cb%3E"):
        exchange = await web.get(f"/dashboard/requests/{request_id}")
        assert (exchange.status, exchange.error["code"]) == (404, "request_not_found")
