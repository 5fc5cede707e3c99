"""Choices of a completion in OpenAI's older JSON (`app.render.chunks.Shape`).

Owns what differs from a chat: plain text, the prompt in front of it, and log probabilities as parallel lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from app.dialect.parts import AnswerPart, Content
from app.render.logprobs import Entry, TokenNames, finite
from app.render.spec import AnswerSpec


class CompletionShape:
    chunk_object = "text_completion"
    whole_object = "text_completion"
    around_content = (b'"text":', b"")

    def __init__(self, names: TokenNames, spec: AnswerSpec) -> None:
        self._names = names
        self._spec = spec

    def opening(self, choice: int) -> bytes:
        """The prompt, as text and as tokens, where it is wanted; there is no role to tell."""
        echo = self._echo(choice)
        if self._spec.shows_token_ids:
            return _text(echo) + b',"prompt_token_ids":' + orjson.dumps(self._prompt_token_ids(choice))
        return _text(echo) if echo else b""

    def about_prompt(self) -> dict[str, Any]:
        return {}

    def member(self, parts: Sequence[AnswerPart]) -> bytes:
        return _text(_content(parts))

    def logprobs(self, entries: Sequence[Entry]) -> bytes:
        name = self._names.text
        top = [{name(token_id): finite(logprob) for token_id, logprob in entry.logprobs.top} for entry in entries]
        for shown, entry in zip(top, entries, strict=True):
            # OpenAI shows the token that was chosen, too, where it is none of the likeliest.
            shown.setdefault(name(entry.token_id), finite(entry.logprobs.logprob))
        lists = {
            "tokens": [name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprobs.logprob) for entry in entries],
            "top_logprobs": top if self._spec.num_logprobs else None,
            "text_offset": [entry.offset for entry in entries],
        }
        return orjson.dumps(lists)

    def whole(self, choice: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        prompt = {"prompt_token_ids": self._prompt_token_ids(choice)} if self._spec.shows_token_ids else {}
        return {"text": self._echo(choice) + _content(parts), **prompt}

    def _prompt_token_ids(self, choice: int) -> tuple[int, ...]:
        return self._spec.prompt_token_ids[choice // self._spec.n]

    def _echo(self, choice: int) -> str:
        return self._spec.echo[choice // self._spec.n] if self._spec.echo else ""


def _content(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def _text(text: str) -> bytes:
    return b'"text":%b' % orjson.dumps(text)
