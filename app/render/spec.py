"""What a web process has to know to render an answer, as data: kept with the request, so that any of them can.

Owns the spec of one answer and its bytes. Refuses to know tokens, and what it is rendered into (`app.render.choice`,
`app.render.chunks`). A spec of another version, or a damaged one, raises `SpecError`: it is never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson

from tasks.protocol.contract import values_of

SPEC_VERSION = 1

Kind = Literal["chat", "completion"]


class SpecError(ValueError):
    """Bytes that this version cannot read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """One answer: of `n` choices for each of `num_prompts` prompts (a chat has one)."""

    request_id: str
    kind: Kind
    created_s: int
    model: str
    system_fingerprint: str | None = None
    n: int = 1
    num_prompts: int = 1
    num_prompt_tokens: int = 0
    """Of all prompts together."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk has the usage so far."""
    stop: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    """End the output: they are no text, and do not count as tokens of the completion."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens to show beside each token; None: no log probabilities at all."""
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each prompt, where token ids are to be shown; empty: none are."""
    tool_format: str = ""
    """How the model spells tool calls (`app.dialect.calls`); empty: none are looked for."""
    tool_names: tuple[str, ...] = ()
    """What may be called."""
    are_calls_enforced: bool = False
    """A grammar sees to it that what begins as a call goes on as one."""
    forced_tool: bool = False
    """One function was demanded by its name: then an answer that calls it ends with "stop"."""
    reasoning_format: Literal["", "think", "think-open"] = ""
    """How the model marks what it thinks (`app.dialect.reasoning`); empty: it is not looked for."""
    echo: tuple[str, ...] = ()
    """Put before the choices, for each prompt its text; empty: nothing is."""
    service_tier: str = ""
    """Which one it was, if the request had asked for one."""
    store: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    background: bool = False
    owner: str = ""
    """The name of the API key that asked; the answer is shown to that name alone."""

    @property
    def num_choices(self) -> int:
        return self.n * self.num_prompts

    @property
    def choice_ids(self) -> tuple[str, ...]:
        """The request ids of the choices; the first is the answer's own."""
        return choice_ids(self.request_id, self.num_choices)

    @property
    def shows_token_ids(self) -> bool:
        return bool(self.prompt_token_ids)

    def encode(self) -> bytes:
        values = values_of(self)
        if not self.prompt_token_ids:
            # A process of before this field can read an answer that does without it.
            del values["prompt_token_ids"]
        return orjson.dumps({"v": SPEC_VERSION, **values})


def choice_ids(request_id: str, num_choices: int) -> tuple[str, ...]:
    return (request_id, *(f"{request_id}.{number}" for number in range(1, num_choices)))


def decode_spec(data: bytes) -> AnswerSpec:
    """Raises SpecError."""
    try:
        raw = orjson.loads(data)
        version = raw.pop("v")
        if version != SPEC_VERSION:
            raise SpecError(f"version {version}, this process knows {SPEC_VERSION}")
        for name in ("stop", "end_token_ids", "tool_names", "echo"):
            raw[name] = tuple(raw[name])
        raw["prompt_token_ids"] = tuple(map(tuple, raw.get("prompt_token_ids", ())))
        return AnswerSpec(**raw)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise SpecError(f"not the spec of an answer ({error})") from error
