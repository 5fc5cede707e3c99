"""`POST /v1/completions`: one request from its bytes to what goes into the queue.

Owns the prompts: texts are encoded, tokens are taken as they are, and each has as many choices as were asked for. An
answer of no tokens is given at once. From there on `app.answering` takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response

from app.admission import Ask
from app.answer_spec import AnswerSpec
from app.answering import Answering, wishes_of
from app.chat import tier_of
from app.completions_in import CompletionCall, parse_completion
from app.errors import invalid, model_not_found, prompt_refused
from app.generation_in import check_token_ids, check_vocabulary
from app.openai_out import ChunkStream, WholeChoice, completion
from app.request_body import json_body, parsed
from app.text_edge import PromptError, TextEdge
from tasks.contract import TerminalEvent


class Completions:
    def __init__(
        self,
        *,
        text_edges: Mapping[str, TextEdge],
        answering: Answering,
        pool: Executor,
        max_body_bytes: int,
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._text_edges = text_edges
        self._answering = answering
        self._pool = pool
        self._max_body_bytes = max_body_bytes
        self._new_id = new_id
        self._new_seed = new_seed
        self._clock = clock

    async def on_post(self, req: Request, resp: Response) -> None:
        self._answering.check_accepting()
        request_id = f"cmpl-{self._new_id()}"
        resp.set_header("x-request-id", request_id)
        body = await json_body(req, self._max_body_bytes)
        wishes = wishes_of(req, body)
        self._answering.check_room(body, wishes)
        call, edge, prompts, echo = await parsed(body, self._parse, self._pool)
        now_s = self._clock()
        spec = completion_spec(request_id, call, edge, prompts, echo, int(now_s))
        if call.max_tokens == 0:
            self._answer_nothing(resp, spec)
            return
        ask = Ask(
            spec=spec,
            call=call,
            prompts=prompts,
            eos_token_ids=edge.eos_token_ids,
            seed=self._new_seed(),
            created_ms=int(now_s * 1000),
            is_read=call.stream or not call.background,
            outlives_reader=call.background or wishes.outlives_reader,
            idempotency=wishes.idempotency,
        )
        await self._answering.answer(req, resp, ask)

    def _parse(self, body: bytes) -> tuple[CompletionCall, TextEdge, list[list[int]], tuple[str, ...]]:
        call = parse_completion(body)
        edge = self._text_edges.get(call.model)
        if edge is None:
            raise model_not_found(call.model, self._text_edges)
        check_vocabulary(call, edge.vocab_size)
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


def completion_spec(
    request_id: str,
    call: CompletionCall,
    edge: TextEdge,
    prompts: list[list[int]],
    echo: tuple[str, ...],
    created_s: int,
) -> AnswerSpec:
    return AnswerSpec(
        request_id=request_id,
        kind="completion",
        created_s=created_s,
        model=call.model,
        n=call.n,
        num_prompts=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        stream=call.stream,
        include_usage=call.include_usage,
        continuous_usage=call.continuous_usage,
        stop=call.stop,
        end_token_ids=() if call.ignore_eos else edge.eos_token_ids,
        num_logprobs=call.num_logprobs,
        echo=echo,
        service_tier=tier_of(call),
        metadata=dict(call.metadata),
        background=call.background,
    )


def _encoded(edge: TextEdge, prompt: str | tuple[int, ...]) -> list[int]:
    if isinstance(prompt, tuple):
        return list(prompt)
    try:
        return edge.encode(prompt)
    except PromptError as error:
        raise prompt_refused(error) from error


def _echo(edge: TextEdge, prompt: str | tuple[int, ...]) -> str:
    return edge.decode(prompt) if isinstance(prompt, tuple) else prompt
