"""What may be asked of a request record, and what it answers: the frozen types of `tasks.protocol.record`.

Owns the types and their meaning. Refuses to know how anything is asked: that is
`tasks.protocol.record.RequestRecords`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tasks.protocol.contract import EndState, GenerationJob

State = Literal["offered", "claimed", "streaming", "finished", "cancelled", "failed"]
RefusalReason = Literal["stale", "closed", "gap", "missing"]

STATES: tuple[str, ...] = get_args(State)
END_STATES: frozenset[str] = frozenset({"finished", "cancelled", "failed"})


@dataclass(frozen=True, slots=True)
class Idempotency:
    """`key` names one request of one client (scoped by the caller to the client), `digest` is that of its body."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked, and how: for the catalog alone, nothing else depends on it. Empty where it is not known."""

    api_key: str = ""
    """The name of the API key."""
    end_user: str = ""
    """Whom the client names as its own user (OpenAI's `user`)."""
    kind: str = ""
    """Of answer: "chat" or "completion"."""
    is_streamed: bool = False


UNKNOWN = Origin()


@dataclass(frozen=True, slots=True)
class Storing:
    """An answer is to be stored once it has finished: for whom, and what it answers."""

    owner: str
    messages: bytes


@dataclass(frozen=True, slots=True)
class Messages:
    """What a submit puts into Dramatiq's queues, in the same instant: for each choice the id of a message, and it."""

    place: str
    """`tasks.protocol.submit.place_of` has its parts."""
    items: Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Submitted:
    request_id: str
    """That of choice 0: of the request as it was submitted first, if this one only joins it."""
    attempt: int
    created: bool
    """False: a request of this id or idempotency key was there already, and has another reader now."""


@dataclass(frozen=True, slots=True)
class Claimed:
    job: GenerationJob
    token_ids: tuple[int, ...]
    """The output tokens that earlier attempts have published; generate from here on."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """How a worker ends a request; see `contract.TerminalEvent`."""

    state: EndState
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Append:
    """Output tokens `first_index`, ... of an assignment; with `terminal`, they are the last (there may be none)."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    terminal: Terminal | None = None
    logprobs: bytes = b""
    """`contract.pack_logprobs` of the tokens, or nothing."""


@dataclass(frozen=True, slots=True)
class Appended:
    next_index: int


@dataclass(frozen=True, slots=True)
class Refused:
    """stale: another attempt is the active one; closed: the request has ended; gap: tokens before these are missing;
    missing: no such record. In each case the worker must abort the sequence and write no more."""

    reason: RefusalReason


AppendResult = Appended | Refused


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """What a worker that has a log says of one engine step, beside the appends to the requests' own streams."""

    worker: str
    rev: str
    """The last that it was told; another one means that something it holds has ended or was moved."""
    number: int
    packed: bytes
    """`contract.pack_step` of the tokens that go into the log only."""
    slots: Mapping[tuple[str, int], int]
    """Of the appends after which the tokens of their attempt (request id, attempt) may go into the log."""


@dataclass(frozen=True, slots=True)
class Published:
    rev: str
    """To be sent with the next step."""
    is_undisturbed: bool
    """`LoggedStep.rev` was the right one: its tokens are in the log. Otherwise nothing of them was written."""
    results: Sequence[AppendResult]


@dataclass(frozen=True, slots=True)
class Reoffer:
    """A new attempt is on offer; enqueue it (`Submitter.requeue`)."""

    request_id: str
    attempt: int
    queue: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request was ended instead: "poison", "no_worker" or "first_token_deadline"."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was ended because nobody had come back to read it."""

    request_id: str
    reason: str


Outlook = Reoffer | Failed | Cancelled | None
"""What became of a request that was looked at or given back; None: nothing."""


@dataclass(frozen=True, slots=True)
class RecordState:
    """The facts of a record. Times are epoch milliseconds, 0 where it has not happened."""

    state: State
    attempt: int
    model: str
    worker: str
    """The worker that holds the request, or that held it when it ended; empty while it is offered."""
    next_index: int
    reason: str
    fingerprint: str
    num_cached_tokens: int
    submitted_ms: int
    offered_ms: int
    claimed_ms: int
    first_token_ms: int
    ended_ms: int

    @property
    def is_over(self) -> bool:
        return self.state in END_STATES
