"""Errors that a client is told about, and the one place where they become OpenAI's JSON.

Owns `ApiError` and the table of what an unfinished answer means to the client. Refuses to know how a response is
sent. The error object always has its four fields, and never a number that JSON does not have: values are not echoed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.dialect.conversation import PromptError, PromptTooLong
from bridge.streams.events import StreamLost
from tasks.protocol.contract import TerminalEvent


@dataclass(slots=True)
class ApiError(Exception):
    """One refusal, as the client sees it. `param` names the request field at fault, where there is one."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def render(self) -> bytes:
        return orjson.dumps(self.body())


def invalid(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    """A request field with a value that it cannot have."""
    return ApiError(400, message, code=code, param=param)


def malformed(message: str, code: str = "invalid_json") -> ApiError:
    """A body that is no request at all."""
    return ApiError(400, message, code=code)


def body_too_large(max_bytes: int) -> ApiError:
    # NOTE: the connection is kept: the HTTP server reads the rest and drops it, so that a client which sends first
    # and reads later sees this answer, and not a reset.
    return ApiError(413, f"The request body is larger than the limit of {max_bytes} bytes.", code="body_too_large")


def model_not_found(model: str, served: Iterable[str]) -> ApiError:
    name, known = model[:256], sorted(served)
    near = difflib.get_close_matches(name, known, 1, cutoff=0.4)
    hint = f" Did you mean `{near[0]}`?" if near else f" Served here: {', '.join(f'`{one}`' for one in known)}."
    message = f"The model `{name}` does not exist or is not served here.{hint if known else ''}"
    return ApiError(404, message, code="model_not_found", param="model")


def prompt_refused(error: PromptError) -> ApiError:
    """For messages or a text that cannot be a prompt of the model."""
    if isinstance(error, PromptTooLong):
        return context_length_exceeded(error.limit, error.num_tokens, 0, error.param, more_than="more than ")
    return invalid(error.param, error.message)


def context_length_exceeded(
    limit: int, num_prompt_tokens: int, num_requested: int, param: str = "messages", *, more_than: str = ""
) -> ApiError:
    """`num_requested` output tokens were asked for explicitly; 0 if the client left that open."""
    asked = f"your {param} {'has' if param == 'prompt' else 'have'} {more_than}{num_prompt_tokens} tokens"
    if num_requested:
        asked = (
            f"you asked for {num_prompt_tokens + num_requested} tokens "
            f"({num_prompt_tokens} in the {param}, {num_requested} in the completion)"
        )
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, {asked}. Please shorten them.",
        code="context_length_exceeded",
        param=param,
    )


def queue_full(retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        "Too many requests are waiting already. Please retry later.",
        type="rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(max(1, retry_after_s))},
    )


def unavailable(code: str, message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, headers={"retry-after": str(max(1, retry_after_s))})


def no_worker(model: str) -> ApiError:
    return unavailable("no_worker", f"No worker is serving the model `{model}` at the moment. Please retry shortly.")


def queue_unreachable() -> ApiError:
    return unavailable("queue_unreachable", "The queue cannot be reached at the moment. Please retry shortly.")


def idempotency_conflict() -> ApiError:
    # The openai client repeats a 409 by itself, which cannot help here.
    return ApiError(
        409,
        "This Idempotency-Key was used for another request before. Use a new key for each request.",
        code="idempotency_conflict",
        param="Idempotency-Key",
        headers={"x-should-retry": "false"},
    )


def completion_not_found(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no completion `{request_id[:100]}`: it never was, or the time for which answers are kept is over.",
        code="completion_not_found",
        param="completion_id",
    )


def completion_not_stored(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"The completion `{request_id[:100]}` is not stored. Only what was asked for with store: true is.",
        code="completion_not_stored",
        param="completion_id",
    )


def completion_not_over(request_id: str) -> ApiError:
    return ApiError(
        409,
        f"The completion `{request_id[:100]}` is still being generated. Cancel it first, or wait for its end.",
        code="completion_in_progress",
        param="completion_id",
        headers={"x-should-retry": "false"},
    )


def shutting_down() -> ApiError:
    return unavailable("shutting_down", "This server is shutting down. Please retry.")


def internal_error() -> ApiError:
    return ApiError(500, "The server had an error while processing your request.", "server_error", "internal_error")


class ShuttingDown(Exception):
    """What open answers are failed with when the drain budget is over."""

    reason = "shutdown"


# What a request that did not finish means: reason of its terminal entry -> status, code, message.
_ENDINGS: Mapping[str, tuple[int, str]] = {
    "no_worker": (503, "No worker took the request in time. Please retry."),
    "first_token_deadline": (503, "The first token did not come in time. Please retry."),
    "poison": (500, "The workers that processed this request kept failing."),
    "engine_error": (500, "The worker had an error while generating."),
    "shutdown": (503, "The server shut down before the answer was complete. Please retry."),
    "disconnect": (499, "The request was cancelled because its client disconnected."),
    "stopped": (499, "The request was stopped."),
    "no_reader": (499, "The request was cancelled because nobody was reading it."),
}


def ended_early(end: TerminalEvent) -> ApiError:
    """For a terminal entry whose state is not "finished"."""
    status, message = _ENDINGS.get(
        end.reason, (500, f"The request was {end.state} before the answer was complete ({end.reason}).")
    )
    return _retryable(ApiError(status, end.message or message, "server_error", end.reason or end.state))


def failed_here(error: Exception) -> ApiError:
    """For an answer that this process could not complete."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ShuttingDown):
        return shutting_down()
    if isinstance(error, StreamLost):
        return unavailable("stream_lost", f"The answer was lost: {error}. Please retry.")
    return internal_error()


def _retryable(error: ApiError) -> ApiError:
    if error.status == 503:
        error.headers = {"retry-after": "1"}
    return error
