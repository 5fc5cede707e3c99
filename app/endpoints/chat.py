"""`POST /v1/chat/completions`: one request from its bytes to what goes into the queue.

Owns the order of the steps; each step is somebody else's. `app.endpoints.intake` has what is the same for
completions, and `app.answers.delivery` takes over from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
from falcon.asgi import Request, Response

from app.answers.delivery import Answering
from app.answers.rules import AnswerRules, rules_of
from app.contract.chat import ChatCall, parse_chat
from app.contract.messages import shown
from app.dialect.conversation import PromptError
from app.endpoints.intake import Intake, generation_spec
from app.endpoints.stored import StoredCompletions
from app.errors import prompt_refused
from app.text.edge import TextEdge


@dataclass(frozen=True, slots=True)
class _Prepared:
    call: ChatCall
    edge: TextEdge
    rules: AnswerRules
    prompt_token_ids: list[int]
    messages: bytes
    """What is kept of a conversation that is to be stored."""


class ChatCompletions:
    def __init__(self, intake: Intake, answering: Answering, stored: StoredCompletions) -> None:
        self._intake = intake
        self._answering = answering
        self._stored = stored

    async def on_get(self, req: Request, resp: Response) -> None:
        await self._stored.show_list(req, resp)

    async def on_post(self, req: Request, resp: Response) -> None:
        taken = await self._intake.take(req, resp, "chatcmpl", self._parse)
        prepared = taken.value
        call, rules, prompts = prepared.call, prepared.rules, [prepared.prompt_token_ids]
        spec = replace(
            generation_spec("chat", taken, call, prepared.edge, prompts),
            tool_format=rules.tool_format,
            tool_names=rules.tool_names,
            are_calls_enforced=rules.are_calls_enforced,
            forced_tool=rules.is_tool_forced,
            reasoning_format=rules.reasoning_format,
            store=call.store,
        )
        ask = self._intake.ask(
            taken, call, prepared.edge, spec, prompts, grammar=rules.grammar, messages=prepared.messages
        )
        await self._answering.answer(req, resp, ask)

    def _parse(self, body: bytes) -> _Prepared:
        call = parse_chat(body)
        edge = self._intake.edge_for(call)
        rules = rules_of(call, edge.format)
        try:
            prompt_token_ids = edge.render_chat(call.messages, rules.shown_tools)
        except PromptError as error:
            raise prompt_refused(error) from error
        messages = orjson.dumps(shown(call.messages)) if call.store else b""
        return _Prepared(call, edge, rules, prompt_token_ids, messages)
