"""The suite itself: the judges can condemn, the seed repeats the schedule, and the proxy does what it is told."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError

from tasks.process.clients import connect
from tasks.protocol import keys
from tests.conftest import RedisServer
from tests.faults.client import HOST, Ask, Seen
from tests.faults.driver import gap_after
from tests.faults.oracle import MAX_TOKENS, Oracle, story
from tests.faults.persistent import ask_with_habit
from tests.faults.proxy import Link, Proxy
from tests.faults.schedule import draw_ask, draw_faults
from tests.faults.verdict import Broken, judge_client, judge_record
from tests.tasks.cell import Cell
from tokenferry.cell.valkey import Valkey

NOTHING: frozenset[str] = frozenset()


def good(oracle: Oracle, num_tokens: int = 5) -> Seen:
    """What a client sees of an undisturbed answer."""
    wanted = Ask(story(1), num_tokens)
    answer = oracle.answer(wanted.content, num_tokens)
    texts = [f"<{token}>" for token in answer.token_ids]
    seen = Seen(wanted, 0, end="done", status=200, is_marked_done=True)
    seen.texts[0], seen.finish_reasons[0] = answer.text, [answer.finish_reason]
    seen.ids = [(str(n), {0: len("".join(texts[: n + 1]))}) for n in range(num_tokens)]
    return seen


def without_the_last_token(seen: Seen) -> None:
    seen.texts[0] = seen.text[:-5]


def without_the_second_token(seen: Seen) -> None:
    seen.texts[0] = seen.text[:5] + seen.text[10:]


def with_a_token_twice(seen: Seen) -> None:
    seen.texts[0] = seen.text[:5] + seen.text


def with_two_tokens_exchanged(seen: Seen) -> None:
    seen.texts[0] = seen.text[5:10] + seen.text[:5] + seen.text[10:]


def with_a_wrong_id(seen: Seen) -> None:
    seen.ids[2] = ("3", seen.ids[2][1])


def without_a_mark_at_the_end(seen: Seen) -> None:
    seen.is_marked_done = False


def with_two_ends(seen: Seen) -> None:
    seen.finish_reasons[0] *= 2


def that_hung(seen: Seen) -> None:
    seen.end = "hung"


def with_an_error(seen: Seen) -> None:
    seen.end, seen.error_code = "error", "stream_lost"


def that_broke(seen: Seen) -> None:
    seen.end = "cut"


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (without_the_last_token, "lost"),
        (without_the_second_token, "lost"),
        (with_a_token_twice, "repeated"),
        (with_two_tokens_exchanged, "reordered"),
        (with_a_wrong_id, "reordered"),
        (without_a_mark_at_the_end, "end"),
        (with_two_ends, "end"),
        (that_hung, "hung"),
        (with_an_error, "end"),
        (that_broke, "end"),
    ],
)
def test_every_fault_of_an_answer_is_condemned(oracle: Oracle, spoil: Callable[[Seen], None], kind: str) -> None:
    seen = good(oracle)
    assert judge_client(seen, oracle, NOTHING) is None
    spoil(seen)
    broken = judge_client(seen, oracle, NOTHING)
    assert broken is not None
    assert broken.kind == kind


def test_an_error_that_a_fault_explains_passes_with_what_came_before_it(oracle: Oracle) -> None:
    seen = good(oracle)
    with_an_error(seen)
    without_the_last_token(seen)
    seen.ids.pop()
    assert judge_client(seen, oracle, frozenset({"stream_lost"})) is None


def test_a_stream_in_redis_needs_the_right_tokens_and_one_end(oracle: Oracle, fake_server: RedisServer) -> None:
    cell = Cell(fake_server)
    content = story(1)
    known = oracle.token_ids(content)
    for request_id, tokens in (("right", known[:3]), ("wrong", (1, *known[1:3])), ("open", known[:3])):
        cell.submit(request_id)
        cell.claim(request_id)
        cell.append(0, *tokens, request_id=request_id, end="" if request_id == "open" else "length")

    def judged(request_id: str) -> Broken | None:
        return judge_record(cell.redis, request_id, content, oracle)

    assert judged("right") is None
    assert judged("unknown") is None
    cell.records.forestall(["given up"])
    assert judged("given up") is None
    assert (wrong := judged("wrong")) is not None
    assert wrong.kind == "reordered"
    assert (still_open := judged("open")) is not None
    assert still_open.kind == "end"
    cell.redis.delete(keys.out("right"))
    assert judged("right") is not None


def test_the_seed_repeats_faults_and_requests(oracle: Oracle) -> None:
    def drawn(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [*draw_faults(rng, 60, 1.0), *(draw_ask(rng, oracle) for _ in range(50))]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert {type(one) for one in drawn(3)} == {type(drawn(3)[0]), Ask}


def test_a_shorter_answer_is_the_beginning_of_a_longer_one(oracle: Oracle) -> None:
    long = oracle.answer(story(2), MAX_TOKENS)
    assert long.text.startswith(oracle.answer(story(2), 20).text)
    cut = oracle.answer(story(2), MAX_TOKENS, (f"<{long.token_ids[5]}>",))
    assert (cut.text, cut.finish_reason) == (oracle.answer(story(2), 5).text, "stop")
    assert oracle.answer(story(2, 7), MAX_TOKENS).finish_reason == "stop"


def test_a_gap_ends_with_the_longest_silence_after_the_moment() -> None:
    seen = Seen(Ask("", 1), 0, arrivals_s=[1.0, 1.1, 1.25, 2.0, 2.1])
    assert gap_after(seen, 1.2) == pytest.approx(0.8)
    assert gap_after(seen, 0.5) == pytest.approx(1.5)
    assert gap_after(seen, 3.0) is None


def whole(request_id: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": "a story"}, "finish_reason": "stop"}
    return {"id": request_id, "choices": [choice], "usage": {"completion_tokens": 1}}


@dataclass(frozen=True)
class Said:
    """What a server answers: nothing at all without a status, no body after the head when it is cut off."""

    to: str = "POST"
    status: int = 0
    request_id: str = ""
    state: str = ""
    is_replay: bool = False
    is_cut: bool = False

    def encode(self) -> bytes:
        if not self.status:
            return b""
        body: dict[str, Any] = whole(self.request_id) | ({"status": self.state} if self.state else {})
        if self.status != 200 or self.state in ("failed", "cancelled"):
            body["error"] = {"code": "shutting_down"}
        data = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {self.status} -", f"x-request-id: {self.request_id}", f"content-length: {len(data)}"]
        if self.is_replay:
            lines.append("x-idempotent-replay: true")
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if self.is_cut else data)


def code_of_retry(*answers: Said) -> str:
    """What a client with an idempotency key finds wrong with a server that says just this."""
    script = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        said = next(script)
        assert request.startswith(said.to), request
        writer.write(said.encode())
        await writer.drain()
        writer.close()

    async def test() -> Seen:
        async with await asyncio.start_server(serve, HOST, 0) as server:
            port = server.sockets[0].getsockname()[1]
            wanted = Ask(story(1), 4, is_streamed=False, habit="retry")
            return await ask_with_habit([port], 0, wanted, random.Random(1), limit_s=10)

    seen = asyncio.run(test())
    assert next(script, None) is None
    assert seen.end == "done"
    return seen.error_code


CUT_OFF = Said(status=200, request_id="one", is_cut=True)
ANOTHER = Said(status=200, request_id="two", is_replay=True)


@pytest.mark.parametrize("state", ["queued", "in_progress", "completed"])
def test_a_repeat_that_joins_another_answer_than_the_one_that_stands_is_doubled(state: str) -> None:
    looked = Said("GET /v1/chat/completions/one ", 200, "one", state)
    assert code_of_retry(CUT_OFF, ANOTHER, looked) == "doubled"


@pytest.mark.parametrize(
    "looked", [Said("GET", 200, "one", "failed"), Said("GET", 200, "one", "cancelled"), Said("GET", 404)]
)
def test_a_repeat_may_join_another_answer_once_the_first_is_given_up(looked: Said) -> None:
    assert code_of_retry(CUT_OFF, ANOTHER, looked) == ""


def test_a_web_process_that_says_nothing_about_the_first_answer_is_asked_again() -> None:
    looked = Said("GET", 200, "one", "completed")
    assert code_of_retry(CUT_OFF, ANOTHER, Said("GET"), Said("GET", 503), looked) == "doubled"


def test_the_id_of_a_refused_request_is_not_that_of_an_answer() -> None:
    assert code_of_retry(Said(status=503, request_id="refused"), Said(), ANOTHER) == ""


def test_a_repeat_that_joins_the_first_answer_is_right() -> None:
    assert code_of_retry(CUT_OFF, Said(status=200, request_id="one", is_replay=True)) == ""


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="tf-") as folder, Valkey(Path(folder)) as valkey:
        with Proxy(valkey.socket) as running:
            yield running


@pytest.fixture
def link(proxy: Proxy) -> Link:
    return proxy.link("a")


@pytest.fixture
def client(link: Link) -> Iterator[Redis]:
    """Never sends anything twice."""
    with connect(link.url, use="blocking") as made:
        yield made
        made.connection_pool.disconnect()


def test_a_link_passes_everything_on(client: Redis) -> None:
    client.set("key", b"x" * 1_000_000)
    assert client.get("key") == b"x" * 1_000_000


def test_a_stalled_link_holds_what_is_sent_until_it_flows(link: Link, client: Redis) -> None:
    client.ping()
    link.stall()
    threading.Timer(0.2, link.flow).start()
    assert client.incr("stalled") == 1


def test_a_cut_link_breaks_connections_and_takes_new_ones(link: Link, client: Redis) -> None:
    with client.monitor():
        link.cut()
    assert client.ping()


def test_a_link_that_refuses_is_a_server_that_is_away(link: Link, client: Redis) -> None:
    link.refuse()
    with pytest.raises(ConnectionError):
        client.ping()
    link.accept()
    assert client.ping()


def test_a_lost_reply_is_lost_once_after_the_command_was_done(link: Link, client: Redis) -> None:
    loss = link.lose_reply(b"INCRBY", "cut")
    client.set("other", 1)
    with pytest.raises((ConnectionError, TimeoutError)):
        client.incr("lost")
    assert loss.happened.is_set()
    assert client.incr("lost") == 2
