"""Shapes of answers that need no server to show."""

from __future__ import annotations

import pytest

from app.errors import ApiError, ended_early, failed_here
from app.render.spec import AnswerSpec
from app.render.whole import usage
from bridge.streams.events import StreamLost
from tasks.protocol.contract import TerminalEvent


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    """After a failover the worker restores output tokens of an earlier attempt, too."""
    spec = AnswerSpec(request_id="a", kind="chat", created_s=0, model="m", num_prompt_tokens=10)
    end = TerminalEvent(5, 1, "finished", "stop", num_cached_tokens=12)
    assert usage(spec, [], {0: end})["prompt_tokens_details"]["cached_tokens"] == 10


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("no_worker", 503),
        ("first_token_deadline", 503),
        ("shutdown", 503),
        ("poison", 500),
        ("engine_error", 500),
        ("stopped", 499),
        ("made_up", 500),
    ],
)
def test_every_early_end_is_an_error_with_its_reason_as_code(reason: str, status: int) -> None:
    error = ended_early(TerminalEvent(0, 1, "failed", reason))
    assert (error.status, error.code, error.type) == (status, reason, "server_error")
    assert ("retry-after" in error.headers) == (status == 503)


def test_a_message_of_the_worker_is_passed_on() -> None:
    assert ended_early(TerminalEvent(0, 1, "failed", "engine_error", "out of memory")).message == "out of memory"


def test_what_failed_here_is_told_without_its_details() -> None:
    assert failed_here(ZeroDivisionError("secret")).code == "internal_error"
    assert failed_here(StreamLost("gap")).code == "stream_lost"
    error = ApiError(400, "x")
    assert failed_here(error) is error
