"""The contract of `POST /v1/completions`: OpenAI's JSON to one checked call, or an `ApiError`.

Owns what this endpoint has of its own: prompts in four shapes, echo, log probabilities in numbers, and an answer of
no tokens. Pure: bytes in, a value out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.contract.fields import Field, read_body, refused
from app.contract.generation import GENERATION_FIELDS, MAX_CHOICES, GenerationCall, generation_values
from app.contract.kinds import INT32_MAX, Boolean, Integer, Prompts, Text
from app.errors import invalid

DEFAULT_MAX_TOKENS = 16

COMPLETION_FIELDS: Mapping[str, Field] = {
    "model": GENERATION_FIELDS["model"],
    "prompt": Field(
        Prompts(MAX_CHOICES),
        is_required=True,
        note=f"A text, tokens, or a list of either: every prompt has n choices, together at most {MAX_CHOICES}.",
    ),
    **GENERATION_FIELDS,
    "max_tokens": Field(Integer(0, INT32_MAX), default=DEFAULT_MAX_TOKENS, note="0 generates nothing."),
    "echo": Field(Boolean(), default=False, note="The prompt is in front of the answer."),
    "logprobs": Field(Integer(0, 5), note="Of the generated tokens; so not together with echo."),
    "best_of": Field(Integer(1, MAX_CHOICES), "refused", note="Only the value of n: nothing is thrown away."),
    "suffix": refused(Text(), "", why="The models cannot write the middle of a text."),
    # OpenAI has these for chat only.
    "service_tier": replace(GENERATION_FIELDS["service_tier"], is_extension=True),
    "metadata": replace(GENERATION_FIELDS["metadata"], is_extension=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(GenerationCall):
    """One checked request. `max_tokens` is always set, and may be 0."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def parse_completion(body: bytes) -> CompletionCall:
    """Raises ApiError."""
    values = read_body(body, COMPLETION_FIELDS)
    n = values["n"]
    if values["best_of"] not in (None, n):
        raise invalid(
            "best_of", f"best_of must be the value of n ({n}): this server shows every choice.", "unsupported_value"
        )
    if values["echo"] and values["logprobs"] is not None:
        raise invalid(
            "logprobs",
            "logprobs may not be given together with echo: the log probabilities of a prompt are not computed.",
            "unsupported_value",
        )
    num_prompts = len(values["prompt"])
    if num_prompts * n > MAX_CHOICES:
        raise invalid("n", f"{num_prompts} prompts with {n} choices each are more than {MAX_CHOICES} choices.")
    return CompletionCall(
        prompts=values["prompt"],
        echo=values["echo"],
        num_logprobs=values["logprobs"],
        **generation_values(values, values["max_tokens"]),
    )
