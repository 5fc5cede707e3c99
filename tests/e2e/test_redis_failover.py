"""The primary dies, a replica is promoted, and the address of REDIS_URL leads there: as with Sentinel and a proxy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tasks.process.clients import connect
from tests.e2e.harness import TestedCell
from tests.faults.proxy import HOST, Link, Proxy
from tokenferry.cell.valkey import Valkey

pytestmark = pytest.mark.e2e

NUM_TOKENS = 400
SEEN_BEFORE = 60


class Replicated:
    """A cell whose processes reach Redis by one address, and a replica that is up to date."""

    def __init__(self, stack: ExitStack) -> None:
        folder, other = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tf-"))) for _ in range(2))
        self._proxy = stack.enter_context(Proxy(folder / "redis.sock"))
        self._address: Link = self._proxy.link("REDIS_URL")
        environ = {"REDIS_URL": self._address.url, "SCRIPTED_STEP_MS": "5", "MAX_NUM_SEQS": "8"}
        self.cell = stack.enter_context(TestedCell(folder, num_workers=2, environ=environ))
        self.replica = stack.enter_context(Valkey(other))
        self._redis: Any = stack.enter_context(connect(self.replica.url, use="short"))
        self._redis.execute_command("REPLICAOF", HOST, str(self._proxy.link("replication").port))
        self.cell.wait_until(self._is_in_step, "the replica has everything")

    def _is_in_step(self) -> bool:
        return str(self._redis.info("replication")["master_link_status"]) == "up"

    def fail_over(self) -> None:
        self.cell.valkey.kill()
        self._address.refuse()
        self._redis.execute_command("REPLICAOF", "NO", "ONE")
        self._proxy.target = str(self.replica.socket)
        self._address.accept()


@pytest.fixture
def replicated() -> Iterator[Replicated]:
    with ExitStack() as stack:
        yield Replicated(stack)


def test_open_answers_go_on_at_the_promoted_replica(replicated: Replicated) -> None:
    cell = replicated.cell
    expected = cell.stream("a long story", NUM_TOKENS)
    text, num_events, finish_reason = "", 0, None
    with cell.open_stream("a long story", NUM_TOKENS) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
                num_events += 1
                if num_events == SEEN_BEFORE:
                    replicated.fail_over()
    assert (text, finish_reason) == (expected.text, "length")
    assert cell.stream("another one", 8).num_output_tokens == 8
