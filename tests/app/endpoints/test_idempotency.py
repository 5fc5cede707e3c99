"""A request that is sent again with its key joins the first one; another one under that key is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import TimeoutError

from app.http.api_keys import KeyFile
from tests.app.web import BODY, ID, MODEL, Web, end_of

KEY = {"idempotency_key": "k1"}


async def post_and_leave(web: Web) -> None:
    web.worker()
    exchange = await web.post(BODY, **KEY)
    exchange.leave()
    await web.settle()


def waited_for_ms(web: Web) -> int:
    """A time at which a client that leaves now has been waited for."""
    redis: Any = web.redis
    now_s: int = redis.time()[0]
    return (now_s + 11) * 1000


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_request_joins_the_first_one_from_its_start(web: Web, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    worker, first = await web.claimed_post(body, **KEY)
    worker.append(ID, 0, 101)
    await web.turn()
    other = Web(beside=web)
    second = await other.post(body, **KEY)
    await other.turn()
    assert web.records.num_waiting(MODEL) == 0
    worker.append(ID, 1, 102, end="length")
    await web.turn()
    await other.turn()
    assert "x-idempotent-replay" not in first.headers
    assert (second.headers["x-idempotent-replay"], second.headers["x-request-id"]) == ("true", ID)
    if stream:
        assert second.text == first.text == "<101><102>"
        assert second.events[-1] == first.events[-1]
        return
    assert second.json == first.json


async def test_after_the_end_the_answer_is_given_again(web: Web) -> None:
    worker, first = await web.claimed_post(BODY, **KEY)
    worker.append(ID, 0, 101, end="length")
    await web.turn()
    second = await web.post(BODY, **KEY)
    await web.turn()
    assert second.json == first.json
    assert second.headers["x-idempotent-replay"] == "true"


async def test_another_body_under_the_same_key_is_409_and_not_sent_again(web: Web) -> None:
    web.worker()
    await web.post(BODY, **KEY)
    for other in ({**BODY, "stream": True}, {**BODY, "seed": 1}):
        exchange = await web.post(other, **KEY)
        assert (exchange.status, exchange.error["code"]) == (409, "idempotency_conflict")
        assert exchange.headers["x-should-retry"] == "false"
    assert web.records.num_waiting(MODEL) == 1


async def test_another_key_is_another_request(web: Web) -> None:
    web.worker()
    await web.post(BODY, **KEY)
    await web.post(BODY, idempotency_key="k2")
    assert web.records.num_waiting(MODEL) == 2


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_that_is_none_is_400_and_named(web: Web, key: str) -> None:
    web.worker()
    exchange = await web.post(BODY, idempotency_key=key)
    assert (exchange.status, exchange.error["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_lost_its_connection_joins_its_first_request_when_it_comes_again(
    web: Web, stream: bool
) -> None:
    body = {**BODY, "stream": stream}
    worker, first = await web.claimed_post(body, **KEY)
    worker.append(ID, 0, 101)
    await web.turn()
    first.leave()
    await web.settle()
    assert end_of(web) == ("streaming", "")
    second = await web.post(body, **KEY)
    worker.append(ID, 1, 102, end="length")
    await web.turn()
    assert second.content(stream) == "<101><102>"


async def test_a_client_that_never_comes_again_is_waited_for_and_then_its_request_ends(web: Web) -> None:
    await post_and_leave(web)
    assert end_of(web) == ("offered", "")
    redis: Any = web.redis
    [(_, due_ms)] = redis.zrange("tf:due", 0, -1, withscores=True)
    later_ms = waited_for_ms(web)
    assert due_ms <= later_ms
    web.records.look(ID, False, later_ms)
    assert end_of(web) == ("cancelled", "disconnect")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_request_is_generated_anew_when_it_comes_again(web: Web, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    worker, first = await web.claimed_post(body, **KEY)
    web.records.close(ID, "failed", "engine_error", "broken")
    await web.turn()
    if not stream:
        assert first.status == 500
    second = await web.post(body, **KEY)
    assert "x-idempotent-replay" not in second.headers
    worker.claim("chatcmpl-2")
    worker.append("chatcmpl-2", 0, 101, end="length")
    await web.turn()
    assert second.content(stream) == "<101>"
    third = await web.post(body, **KEY)
    await web.turn()
    assert third.headers["x-request-id"] == "chatcmpl-2"


async def test_a_request_that_ended_for_want_of_its_client_is_generated_anew(web: Web) -> None:
    await post_and_leave(web)
    web.records.look(ID, False, waited_for_ms(web))
    assert end_of(web) == ("cancelled", "disconnect")
    await web.post(BODY, **KEY)
    assert end_of(web, "chatcmpl-2") == ("offered", "")


async def test_a_stopped_request_is_joined(web: Web) -> None:
    web.worker()
    await web.post({**BODY, "background": True}, **KEY)
    await web.request("POST", f"/v1/chat/completions/{ID}/cancel")
    again = await web.post({**BODY, "background": True}, **KEY)
    assert (again.json["id"], again.headers["x-idempotent-replay"]) == (ID, "true")


@pytest.mark.parametrize("key", [{}, KEY])
async def test_a_request_that_reaches_redis_after_its_client_was_told_of_the_failure_is_not_made(
    web: Web, key: dict[str, str]
) -> None:
    web.worker()
    submit = web.submitter.submit
    late: list[Any] = []

    def stall(*args: Any, **options: Any) -> object:
        late.append(lambda: submit(*args, **options))
        raise TimeoutError

    web.submitter.submit = stall  # type: ignore[method-assign,assignment]
    first = await web.post(BODY, **key)
    assert (first.status, first.error["code"]) == (503, "queue_unreachable")
    await web.settle()
    assert not late[0]().created
    assert end_of(web) == ("cancelled", "not_accepted")
    assert web.records.num_waiting(MODEL) == 0
    web.submitter.submit = submit  # type: ignore[method-assign]
    await web.post(BODY, **key)
    assert end_of(web, "chatcmpl-2") == ("offered", "")


async def test_a_request_in_the_background_is_joined_too(web: Web) -> None:
    body = {**BODY, "background": True}
    worker, _ = await web.claimed_post(body, **KEY)
    worker.append(ID, 0, 101, end="length")
    again = await web.post(body, **KEY)
    assert (again.json["id"], again.json["status"]) == (ID, "completed")
    assert again.headers["x-idempotent-replay"] == "true"


async def test_a_client_that_joins_while_the_first_one_is_being_left_is_a_reader(web: Web) -> None:
    web.worker()
    await web.post(BODY, **KEY)
    submit = web.submitter.submit

    def submit_and_leave(*args: Any, **options: Any) -> object:
        submitted = submit(*args, **options)
        web.records.detach([ID], "reader-1")
        return submitted

    web.submitter.submit = submit_and_leave  # type: ignore[method-assign,assignment]
    await web.post(BODY, **KEY)
    assert web.records.open_of("reader-1") == [ID]


async def test_several_choices_are_joined_whole(web: Web) -> None:
    worker = web.worker()
    body = {**BODY, "n": 2, "stream": True}
    await web.post(body, **KEY)
    second = await web.post(body, **KEY)
    for number, request_id in enumerate((ID, f"{ID}.1")):
        worker.claim(request_id)
        worker.append(request_id, 0, number, end="length")
    await web.turn()
    await web.turn()
    assert [second.text_of(number) for number in range(2)] == ["<0>", "<1>"]


async def test_a_lost_reply_is_made_good_by_sending_the_request_again(web: Web) -> None:
    worker = web.worker()
    submit = web.submitter.submit

    def submit_and_lose_the_reply(*args: Any, **options: Any) -> object:
        submit(*args, **options)
        raise TimeoutError

    web.submitter.submit = submit_and_lose_the_reply  # type: ignore[method-assign,assignment]
    first = await web.post(BODY, **KEY)
    assert (first.status, first.error["code"]) == (503, "queue_unreachable")
    assert web.records.open_of("reader-1") == [], "until then nobody reads it"
    assert end_of(web) == ("offered", "")
    web.submitter.submit = submit  # type: ignore[method-assign]
    second = await web.post(BODY, **KEY)
    worker.claim(ID)
    worker.append(ID, 0, 101, end="length")
    await web.turn()
    assert second.json["id"] == ID
    assert web.records.num_waiting(MODEL) == 0


@pytest.fixture
def two_keys(tmp_path: Path) -> KeyFile:
    path = tmp_path / "keys"
    path.write_text("sk-a Alice\nsk-b Bob\n")
    return KeyFile(path)


async def test_a_key_means_something_to_its_own_client_only(two_keys: KeyFile) -> None:
    web = Web(keys=two_keys)
    web.worker()
    await web.post(BODY, authorization="Bearer sk-a", **KEY)
    other = await web.post({**BODY, "background": True}, authorization="Bearer sk-b", **KEY)
    assert (other.status, other.json["id"]) == (200, "chatcmpl-2")
    assert web.records.num_waiting(MODEL) == 2


async def test_an_answer_is_known_to_its_own_client_only(two_keys: KeyFile) -> None:
    web = Web(keys=two_keys)
    web.worker()
    path = f"/v1/chat/completions/{ID}"
    await web.post({**BODY, "background": True}, authorization="Bearer sk-a")
    assert (await web.get(path, authorization="Bearer sk-a")).status == 200
    for refused in (
        await web.get(path, authorization="Bearer sk-b"),
        await web.get(f"{path}?stream=true", authorization="Bearer sk-b"),
        await web.request("POST", f"{path}/cancel", headers={"authorization": "Bearer sk-b"}),
    ):
        assert (refused.status, refused.error["code"]) == (404, "completion_not_found")
    assert end_of(web) == ("offered", "")
