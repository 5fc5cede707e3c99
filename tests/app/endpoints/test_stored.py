"""Stored completions: what `store: true` keeps, and the list, the messages, the metadata and the end of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai import OpenAI

from app.http.api_keys import KeyFile
from app.text.scripted import scripted_text_edge
from tasks.protocol import keys
from tests.app.web import HELLO, MODEL, Exchange, Web
from tokenferry.cell.one_process import LocalServer, open_server

LIST = "/v1/chat/completions"
ID = "chatcmpl-1"


async def stored(web: Web, *, wanted: bool = True, auth: str = "", **fields: Any) -> str:
    """A finished answer. Returns its id."""
    worker = web.worker()
    headers = {"authorization": f"Bearer {auth}"} if auth else {}
    body = {"model": MODEL, "messages": HELLO, "store": wanted, **fields}
    exchange = await web.post(body, **headers)
    name = f"chatcmpl-{web.num_ids}"
    for number in range(fields.get("n", 1)):
        choice = f"{name}.{number}" if number else name
        worker.claim(choice)
        worker.append(choice, 0, 101, 102, end="length")
    await web.turn()
    assert exchange.status == 200
    return name


async def ids(web: Web, query: str = "") -> list[str]:
    exchange = await web.get(f"{LIST}?{query}")
    assert exchange.status == 200, exchange.body
    return [item["id"] for item in exchange.json["data"]]


async def update(web: Web, name: str, body: Any) -> Exchange:
    headers = {"content-type": "application/json"}
    return await web.request("POST", f"{LIST}/{name}", orjson.dumps(body), headers)


async def test_a_stored_answer_is_in_the_list_as_it_was_answered(web: Web) -> None:
    worker = web.worker()
    exchange = await web.chat(store=True, metadata={"a": "b"}, n=2)
    for choice in (ID, f"{ID}.1"):
        worker.claim(choice)
        worker.append(choice, 0, 101, end="length")
    await web.turn()
    listed = await web.get(LIST)
    assert listed.json["data"] == [exchange.json]
    assert exchange.json["metadata"] == {"a": "b"}
    about = {name: value for name, value in listed.json.items() if name != "data"}
    assert about == {"object": "list", "first_id": ID, "last_id": ID, "has_more": False}
    one = await web.get(f"{LIST}/{ID}")
    assert one.json == {**exchange.json, "status": "completed"}


async def test_what_is_not_stored_or_not_finished_is_not_in_the_list(web: Web) -> None:
    await stored(web, wanted=False)
    await web.chat(store=True)
    exchange = await web.get(LIST)
    assert exchange.json == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert "metadata" not in (await web.get(f"{LIST}/{ID}")).json


async def test_a_streamed_answer_is_stored_too_and_so_is_one_that_met_a_stop_string(web: Web) -> None:
    worker = web.worker()
    await web.chat(store=True, stream=True)
    await web.chat(store=True, stop="<102>")
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, 101, end="length")
    worker.claim("chatcmpl-2")
    worker.append("chatcmpl-2", 0, 101, 102)
    await web.turn()
    data = (await web.get(LIST)).json["data"]
    found = {item["id"]: item["choices"][0] for item in data}
    assert found["chatcmpl-1"]["message"]["content"] == found["chatcmpl-2"]["message"]["content"] == "<101>"
    assert found["chatcmpl-2"]["finish_reason"] == "stop"


async def test_pages_have_the_limit_the_order_and_the_place_that_were_asked_for(web: Web) -> None:
    names = [await stored(web) for _ in range(5)]
    everything = await ids(web)
    assert sorted(everything) == names
    assert await ids(web, "order=desc") == everything[::-1]
    first = (await web.get(f"{LIST}?limit=2")).json
    assert (first["first_id"], first["last_id"], first["has_more"]) == (*everything[:2], True)
    assert await ids(web, f"limit=3&after={everything[1]}") == everything[2:]
    assert not (await web.get(f"{LIST}?limit=3&after={everything[1]}")).json["has_more"]
    assert await ids(web, f"limit=1&order=desc&after={everything[1]}") == everything[:1]


async def test_the_list_can_be_searched_by_model_and_by_metadata(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.endpoints.stored.CHUNK", 2)
    names = [await stored(web, metadata={"k": str(number % 2), "j j": "=&"}) for number in range(6)]
    assert sorted(await ids(web, "metadata%5Bk%5D=1")) == names[1::2]
    assert sorted(await ids(web, "metadata[k]=0&metadata[j%20j]=%3D%26")) == names[::2]
    assert await ids(web, "metadata[k]=2") == []
    assert await ids(web, "metadata[k]=") == []
    assert sorted(await ids(web, f"model={MODEL}")) == names
    assert await ids(web, "model=other") == []
    page = (await web.get(f"{LIST}?metadata[k]=1&limit=2")).json
    assert page["has_more"]
    assert len(await ids(web, f"metadata[k]=1&after={page['last_id']}")) == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=", "limit"),
        ("limit=%D9%A1", "limit"),
        ("order=up", "order"),
        ("after=chatcmpl-7", "after"),
        ("after=", "after"),
        ("metadata=x", "metadata"),
        ("metadata[]=x", "metadata"),
        ("metadata[a][b]=x", "metadata"),
    ],
)
async def test_a_search_that_has_no_meaning_is_400_and_named(web: Web, query: str, param: str) -> None:
    name = await stored(web)
    exchange = await web.get(f"{LIST}?{query}")
    assert (exchange.status, exchange.error["param"]) == (400, param)
    if param != "metadata":
        exchange = await web.get(f"{LIST}/{name}/messages?{query}")
        assert (exchange.status, exchange.error["param"]) == (400, param)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
]


async def test_the_messages_of_a_stored_answer_are_those_that_it_answers(web: Web) -> None:
    name = await stored(web, messages=CONVERSATION)
    listed = (await web.get(f"{LIST}/{name}/messages")).json
    assert (listed["object"], listed["has_more"]) == ("list", False)
    expected = [{**CONVERSATION[0], "content": "Be brief"}, *CONVERSATION[1:]]
    assert listed["data"] == [
        {"id": f"{name}-{number}", **message, "content_parts": None} for number, message in enumerate(expected)
    ]
    page = (await web.get(f"{LIST}/{name}/messages?order=desc&limit=2&after={name}-3")).json
    assert [item["id"] for item in page["data"]] == [f"{name}-2", f"{name}-1"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (f"{name}-2", f"{name}-1", True)


async def test_new_metadata_takes_the_place_of_the_old(web: Web) -> None:
    name = await stored(web, metadata={"a": "b"})
    exchange = await update(web, name, {"metadata": {"c": "d"}})
    assert (exchange.status, exchange.json["id"], exchange.json["metadata"]) == (200, name, {"c": "d"})
    assert await ids(web, "metadata[c]=d") == [name]
    assert await ids(web, "metadata[a]=b") == []
    assert (await update(web, name, {"metadata": {}})).json["metadata"] == {}


@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"metadata": "x"}, {"metadata": {"a": 1}}])
async def test_metadata_that_is_none_is_400_and_named(web: Web, body: Any) -> None:
    exchange = await update(web, await stored(web), body)
    assert (exchange.status, exchange.error["param"]) == (400, "metadata")


async def test_a_deleted_answer_is_gone(web: Web) -> None:
    name = await stored(web, n=2)
    exchange = await web.request("DELETE", f"{LIST}/{name}")
    assert (exchange.status, exchange.json) == (
        200,
        {"object": "chat.completion.deleted", "id": name, "deleted": True},
    )
    assert await ids(web) == []
    for path in (f"{LIST}/{name}", f"{LIST}/{name}/messages"):
        again = await web.get(path)
        assert (again.status, again.error["code"]) == (404, "completion_not_found")
    assert (await web.request("DELETE", f"{LIST}/{name}")).status == 404
    assert (await update(web, name, {"metadata": {}})).status == 404
    assert not web.redis.exists(keys.request(name), keys.out(name), keys.request(f"{name}.1"))


async def test_an_answer_that_is_still_generated_is_not_deleted(web: Web) -> None:
    web.worker()
    await web.chat(store=True)
    exchange = await web.request("DELETE", f"{LIST}/{ID}")
    assert (exchange.status, exchange.error["code"]) == (409, "completion_in_progress")
    assert exchange.headers["x-should-retry"] == "false"
    await web.request("POST", f"{LIST}/{ID}/cancel")
    assert (await web.request("DELETE", f"{LIST}/{ID}")).status == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/messages"), ("DELETE", ""), ("POST", "")])
async def test_what_is_not_stored_is_404_and_says_why(web: Web, method: str, path: str) -> None:
    name = await stored(web, wanted=False)
    body, headers = (b'{"metadata":{}}', {"content-type": "application/json"}) if method == "POST" else (b"", {})
    exchange = await web.request(method, f"{LIST}/{name}{path}", body, headers)
    assert (exchange.status, exchange.error["code"]) == (404, "completion_not_stored")
    assert "store: true" in exchange.error["message"]
    assert (await web.get(f"{LIST}/{name}")).status == 200


async def test_stored_answers_are_shown_to_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-ann Ann\nsk-bob Bob\n")
    web = Web(keys=KeyFile(file))
    name = await stored(web, auth="sk-ann")
    ann, bob = ({"authorization": f"Bearer {key}"} for key in ("sk-ann", "sk-bob"))
    assert (await web.get(LIST, **ann)).json["first_id"] == name
    assert (await web.get(LIST, **bob)).json["data"] == []
    assert (await web.get(f"{LIST}/{name}/messages", **bob)).status == 404
    assert (await web.request("DELETE", f"{LIST}/{name}", b"", bob)).status == 404
    assert (await web.get(f"{LIST}/{name}/messages", **ann)).status == 200


async def test_what_a_model_answered_that_is_not_served_here_is_not_listed(web: Web) -> None:
    name = await stored(web)
    other = Web(beside=web, text_edges={"other": scripted_text_edge()})
    assert await ids(other) == []
    exchange = await update(other, name, {"metadata": {"a": "b"}})
    assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")
    assert (await web.get(f"{LIST}/{name}")).json["metadata"] == {}


async def test_a_damaged_answer_does_not_spoil_the_list(web: Web) -> None:
    first, second = await stored(web), await stored(web)
    [(_, fields)] = web.redis.xrange(keys.out(first), count=1)
    web.redis.delete(keys.out(first))
    web.redis.xadd(keys.out(first), {**fields, b"i": b"1"})
    assert (await web.get(f"{LIST}/{first}")).status == 503
    assert await ids(web) == [second]


async def test_an_answer_of_another_version_does_not_spoil_the_list(web: Web) -> None:
    names = [await stored(web), await stored(web)]
    web.records.stored.amend(names[0], b"{}")
    assert await ids(web) == names[1:]


# -- the openai client, over a socket


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server(MODEL, environ={}, scripted_step_ms=0, store_max=5) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="local", max_retries=0) as made:
        yield made


def test_the_openai_client_lists_reads_changes_and_deletes(client: OpenAI) -> None:
    made = [
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"say {number}"}],
            max_tokens=4,
            store=True,
            metadata={"even": str(number % 2 == 0)},
        )
        for number in range(5)
    ]
    listed = list(client.chat.completions.list(limit=2))
    assert sorted(one.id for one in listed) == sorted(one.id for one in made)
    texts = {one.id: one.choices[0].message.content for one in made}
    assert {one.id: one.choices[0].message.content for one in listed} == texts
    even = list(client.chat.completions.list(metadata={"even": "True"}, model=MODEL, order="desc", limit=1))
    assert {one.id for one in even} == {made[0].id, made[2].id, made[4].id}
    one = made[0].id
    assert client.chat.completions.retrieve(one).choices[0].message.content == texts[one]
    [message] = client.chat.completions.messages.list(one)
    assert (message.id, message.content) == (f"{one}-0", "say 0")
    assert client.chat.completions.update(one, metadata={"new": "yes"}).metadata == {"new": "yes"}
    assert [found.id for found in client.chat.completions.list(metadata={"new": "yes"})] == [one]
    deleted = client.chat.completions.delete(one)
    assert (deleted.id, deleted.deleted) == (one, True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(one)


def test_the_openai_client_deletes_all_while_it_goes_through_the_list(client: OpenAI) -> None:
    for _ in range(3):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1, store=True
        )
    for found in client.chat.completions.list(limit=1):
        client.chat.completions.delete(found.id)
    assert list(client.chat.completions.list()) == []


def test_no_more_than_the_bound_is_listed(client: OpenAI) -> None:
    made = [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=1, store=True
        ).id
        for _ in range(7)
    ]
    assert [one.id for one in client.chat.completions.list()] == made[2:]
    for name in made:
        client.chat.completions.delete(name)
