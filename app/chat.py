"""`POST /v1/chat/completions`: one request from its bytes to what goes into the queue.

Owns the order of the steps; each step is somebody else's, and `app.answering` takes over from there. A large body, or
a long prompt, is parsed in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import orjson
from falcon.asgi import Request, Response

from app.admission import Ask
from app.answer_rules import AnswerRules, rules_of
from app.answer_spec import AnswerSpec
from app.answering import Answering, wishes_of
from app.errors import model_not_found, prompt_refused
from app.generation_in import GenerationCall, check_vocabulary
from app.openai_in import ChatCall, parse_chat
from app.openai_messages import shown
from app.request_body import json_body, parsed
from app.stored import StoredCompletions
from app.text_edge import PromptError, TextEdge


@dataclass(frozen=True, slots=True)
class ChatSettings:
    max_body_bytes: int


class ChatCompletions:
    def __init__(
        self,
        *,
        text_edges: Mapping[str, TextEdge],
        answering: Answering,
        stored: StoredCompletions,
        pool: Executor,
        settings: ChatSettings,
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._text_edges = text_edges
        self._answering = answering
        self._stored = stored
        self._pool = pool
        self._settings = settings
        self._new_id = new_id
        self._new_seed = new_seed
        self._clock = clock

    async def on_get(self, req: Request, resp: Response) -> None:
        await self._stored.show_list(req, resp)

    async def on_post(self, req: Request, resp: Response) -> None:
        self._answering.check_accepting()
        request_id = f"chatcmpl-{self._new_id()}"
        resp.set_header("x-request-id", request_id)
        body = await json_body(req, self._settings.max_body_bytes)
        wishes = wishes_of(req, body)
        self._answering.check_room(body, wishes)
        call, edge, rules, prompt_token_ids, messages = await parsed(body, self._parse, self._pool)
        now_s = self._clock()
        ask = Ask(
            spec=chat_spec(request_id, call, edge, rules, len(prompt_token_ids), int(now_s)),
            call=call,
            prompts=[prompt_token_ids],
            eos_token_ids=edge.eos_token_ids,
            seed=self._new_seed(),
            created_ms=int(now_s * 1000),
            grammar=rules.grammar,
            is_read=call.stream or not call.background,
            outlives_reader=call.background or wishes.outlives_reader,
            idempotency=wishes.idempotency,
            messages=messages,
        )
        await self._answering.answer(req, resp, ask)

    def _parse(self, body: bytes) -> tuple[ChatCall, TextEdge, AnswerRules, list[int], bytes]:
        call = parse_chat(body)
        edge = self._text_edges.get(call.model)
        if edge is None:
            raise model_not_found(call.model, self._text_edges)
        check_vocabulary(call, edge.vocab_size)
        rules = rules_of(call, edge.format)
        try:
            prompt_token_ids = edge.render_chat(call.messages, rules.shown_tools)
        except PromptError as error:
            raise prompt_refused(error) from error
        messages = orjson.dumps(shown(call.messages)) if call.store else b""
        return call, edge, rules, prompt_token_ids, messages


def chat_spec(
    request_id: str, call: ChatCall, edge: TextEdge, rules: AnswerRules, num_prompt_tokens: int, created_s: int
) -> AnswerSpec:
    return AnswerSpec(
        request_id=request_id,
        kind="chat",
        created_s=created_s,
        model=call.model,
        n=call.n,
        num_prompt_tokens=num_prompt_tokens,
        stream=call.stream,
        include_usage=call.include_usage,
        continuous_usage=call.continuous_usage,
        stop=call.stop,
        end_token_ids=() if call.ignore_eos else edge.eos_token_ids,
        num_logprobs=call.num_logprobs,
        tool_format=rules.tool_format,
        tool_names=rules.tool_names,
        are_calls_enforced=rules.are_calls_enforced,
        forced_tool=rules.is_tool_forced,
        reasoning_format=rules.reasoning_format,
        service_tier=tier_of(call),
        store=call.store,
        metadata=dict(call.metadata),
        background=call.background,
    )


def tier_of(call: GenerationCall) -> str:
    """The tier that the answer names: the one that was used, if the request had asked for any."""
    return {"auto": "", "priority": "priority", "flex": "flex"}.get(call.service_tier, "default")
