"""What the generating endpoints do alike, between the socket and `app.answers.delivery`.

Owns how a body is taken in, which text edge serves it, and what every spec and every `Ask` say. Refuses to know what
kind of prompt a request has: `app.endpoints.chat` and `app.endpoints.completions` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from falcon.asgi import Request, Response

from app.answers.admission import Ask
from app.answers.delivery import Answering, Wishes, wishes_of
from app.contract.generation import GenerationCall, check_vocabulary
from app.errors import model_not_found
from app.http.body import json_body, parsed
from app.render.spec import AnswerSpec, Kind
from app.text.edge import TextEdge

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken(Generic[T]):
    """A request that was read and parsed."""

    request_id: str
    wishes: Wishes
    value: T
    now_s: float


class Intake:
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

    async def take(self, req: Request, resp: Response, id_prefix: str, parse: Callable[[bytes], T]) -> Taken[T]:
        """What there is no room for is refused before it is parsed; large bodies are parsed in a thread.

        Raises ApiError.
        """
        self._answering.check_accepting()
        request_id = f"{id_prefix}-{self._new_id()}"
        resp.set_header("x-request-id", request_id)
        body = await json_body(req, self._max_body_bytes)
        wishes = wishes_of(req, body)
        self._answering.check_room(body, wishes)
        value = await parsed(body, parse, self._pool)
        return Taken(request_id, wishes, value, self._clock())

    def edge_for(self, call: GenerationCall) -> TextEdge:
        """Raises ApiError: the model is not served here, or does not have a token that the call names."""
        edge = self._text_edges.get(call.model)
        if edge is None:
            raise model_not_found(call.model, self._text_edges)
        check_vocabulary(call, edge.vocab_size)
        return edge

    def ask(
        self,
        taken: Taken[T],
        call: GenerationCall,
        edge: TextEdge,
        spec: AnswerSpec,
        prompts: Sequence[list[int]],
        *,
        grammar: str = "",
        messages: bytes = b"",
    ) -> Ask:
        return Ask(
            spec=spec,
            call=call,
            prompts=prompts,
            eos_token_ids=edge.eos_token_ids,
            seed=self._new_seed(),
            created_ms=int(taken.now_s * 1000),
            grammar=grammar,
            is_read=call.stream or not call.background,
            outlives_reader=call.background or taken.wishes.outlives_reader,
            idempotency=taken.wishes.idempotency,
            messages=messages,
        )


def generation_spec(
    kind: Kind, taken: Taken[T], call: GenerationCall, edge: TextEdge, prompts: Sequence[list[int]]
) -> AnswerSpec:
    """What is in the spec of every answer; each kind adds its own."""
    return AnswerSpec(
        request_id=taken.request_id,
        kind=kind,
        created_s=int(taken.now_s),
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
        prompt_token_ids=tuple(map(tuple, prompts)) if call.return_token_ids else (),
        service_tier=_tier_of(call),
        metadata=dict(call.metadata),
        background=call.background,
    )


def _tier_of(call: GenerationCall) -> str:
    """The tier that the answer names: the one that was used, if the request had asked for any."""
    return {"auto": "", "priority": "priority", "flex": "flex"}.get(call.service_tier, "default")
