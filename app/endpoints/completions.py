"""`POST /v1/completions`: one request from its bytes to what goes into the queue.

Owns the prompts: texts are encoded, tokens are taken as they are, and each has as many choices as were asked for. An
answer of no tokens is given at once. From there on `app.answers.delivery` takes over.
"""

from __future__ import annotations

from dataclasses import replace

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response

from app.answers.delivery import Answering
from app.contract.completion import CompletionCall, parse_completion
from app.contract.generation import check_token_ids
from app.dialect.conversation import PromptError
from app.endpoints.intake import Intake, generation_spec
from app.errors import invalid, prompt_refused
from app.render.chunks import ChunkStream
from app.render.spec import AnswerSpec
from app.render.whole import WholeChoice, completion
from app.text.edge import TextEdge
from tasks.protocol.contract import TerminalEvent


class Completions:
    def __init__(self, intake: Intake, answering: Answering) -> None:
        self._intake = intake
        self._answering = answering

    async def on_post(self, req: Request, resp: Response) -> None:
        taken = await self._intake.take(req, resp, "cmpl", self._parse)
        call, edge, prompts, echo = taken.value
        spec = replace(generation_spec("completion", taken, call, edge, prompts), echo=echo)
        if call.max_tokens == 0:
            self._answer_nothing(resp, spec)
            return
        await self._answering.answer(req, resp, self._intake.ask(taken, call, edge, spec, prompts))

    def _parse(self, body: bytes) -> tuple[CompletionCall, TextEdge, list[list[int]], tuple[str, ...]]:
        call = parse_completion(body)
        edge = self._intake.edge_for(call)
        prompts = []
        for number, prompt in enumerate(call.prompts):
            param = "prompt" if len(call.prompts) == 1 else f"prompt[{number}]"
            if isinstance(prompt, tuple):
                check_token_ids(prompt, edge.vocab_size, param)
            prompts.append(_encoded(edge, prompt))
            if not prompts[-1]:
                raise invalid(param, f"{param} has no tokens: there is nothing to continue.")
        echo = tuple(_echo(edge, prompt) for prompt in call.prompts) if call.echo else ()
        return call, edge, prompts, echo

    def _answer_nothing(self, resp: Response, spec: AnswerSpec) -> None:
        """No tokens were asked for, so no worker is."""
        shape = self._answering.shape(spec)
        texts = self._answering.choice_texts(spec)
        end = TerminalEvent(index=0, attempt=0, state="finished", reason="length")
        if spec.stream:
            chunks = ChunkStream(spec, shape, texts)
            parts = [chunks.opening(), *(chunks.ended(number, end) for number in range(len(texts))), chunks.closing()]
            resp.content_type = "text/event-stream; charset=utf-8"
            resp.set_header("cache-control", "no-cache")
            resp.data = b"".join(parts)
            return
        choices = [WholeChoice(text) for text in texts]
        for one in choices:
            one.end(end)
        resp.content_type = MEDIA_JSON
        resp.data = orjson.dumps(completion(spec, shape, choices))


def _encoded(edge: TextEdge, prompt: str | tuple[int, ...]) -> list[int]:
    if isinstance(prompt, tuple):
        return list(prompt)
    try:
        return edge.encode(prompt)
    except PromptError as error:
        raise prompt_refused(error) from error


def _echo(edge: TextEdge, prompt: str | tuple[int, ...]) -> str:
    return edge.decode(prompt) if isinstance(prompt, tuple) else prompt
