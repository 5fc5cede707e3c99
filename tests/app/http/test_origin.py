"""What a request tells the catalog about who asked, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.http.api_keys import KeyFile
from tasks.protocol import keys
from tests.app.web import HELLO, MODEL, NUM_PROMPT_TOKENS, Web


def submitted(web: Web) -> list[dict[str, Any]]:
    """The details of every fact of a submission."""
    entries: Any = web.redis.xrange(keys.EVENTS)
    return [json.loads(fields[b"d"]) for _, fields in entries if fields[b"k"] == b"submitted"]


async def test_a_plain_request_tells_what_it_is(web: Web) -> None:
    web.worker()
    await web.chat(max_tokens=7)
    assert submitted(web) == [
        {
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "max_tokens": 7,
            "class": "default",
            "answer": "chatcmpl-1",
            "choices": 1,
            "kind": "chat",
        }
    ]


async def test_the_key_the_user_the_class_and_the_ways_of_a_request_are_told(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-alice  Alice B.\n")
    web = Web(keys=KeyFile(tmp_path / "keys"))
    web.worker()
    body = {"model": MODEL, "messages": HELLO, "user": "u-1", "n": 2, "stream": True, "service_tier": "flex"}
    await web.post(body, authorization="Bearer sk-alice", idempotency_key="k")
    first, second = submitted(web)
    told = ("api_key", "end_user", "class", "stream", "idempotent", "choices", "answer")
    expected = ["Alice B.", "u-1", "flex", 1, 1, 2, "chatcmpl-1"]
    assert [first[name] for name in told] == expected
    assert [second[name] for name in told] == expected
