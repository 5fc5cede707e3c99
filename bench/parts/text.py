"""What the text edge costs: templating and tokenising a prompt, detokenising a stream, finding calls in it.

    python -m bench.parts.text PATH_OF_A_CHECKPOINT

Goals: below 2 ms from the bytes of a request of 1,000 tokens to its prompt, and to check one with tools; about 2 us
to detokenise one streamed token, and below 20 us to find tool calls and thoughts as well. Prints the least, the
median and the 95th percentile of single calls, so a busy machine shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import orjson

from app.answers.rules import rules_of
from app.contract.chat import parse_chat
from app.contract.generation import check_vocabulary
from app.dialect.calls import ToolCallParser
from app.dialect.conversation import ChatMessage
from app.dialect.formats import HERMES
from app.dialect.parts import AnswerPart, Content, TextMachine
from app.dialect.reasoning import ReasoningSplitter, ThinkThenAnswer
from app.text.edge import TextEdge, open_text_edge
from decode.checkpoint.checkpoint import open_checkpoint

_PROSE = (
    "The ferry left the harbour at 7:40, and 212 passengers watched the lights of the town (all of them!) go out.\n"
    "Überfahrt: 3 Stunden, 海は静かだった 🌊. `for token in stream: print(token)` – that's what they wrote.\n\n"
)


def main(path: str) -> None:
    started = time.perf_counter()
    edge = open_text_edge(open_checkpoint(path))
    print(f"open                            {(time.perf_counter() - started) * 1e3:9.1f} ms")
    chat = _chat_of(edge, 1000)
    num_tokens = len(edge.render_chat(chat))
    _report(f"render a chat of {num_tokens} tokens", _times(lambda: edge.render_chat(chat), 200))
    whole = _request_of(chat)
    _report(f"a request of {num_tokens} tokens, from bytes to prompt", _times(lambda: _prompt(whole, edge), 400))
    output = edge.encode(_PROSE * 8)
    for name, stop in (("no stop string", ()), ("4 stop strings", ("\nUser:", "###", "<end>", "\n\n\n"))):
        _report(f"push one token, {name}", _push_times(edge, output, stop))
    call = edge.encode(f'<tool_call>\n{{"name": "f", "arguments": {orjson.dumps({"text": [_PROSE] * 8}).decode()}}}')
    _report("push one token, calls looked for", _push_times(edge, output, (), _parser))
    _report("push one token of a call", _push_times(edge, call, (), _parser))
    _report("push one token after thoughts", _push_times(edge, output, (), _thinker))
    body = _request(5)
    _report("check a request with 5 tools", _times(lambda: rules_of(parse_chat(body), edge.format), 200))


def _request_of(chat: Sequence[ChatMessage]) -> bytes:
    """A request with these messages and the fields that clients send."""
    messages = [{"role": message.role, "content": message.content} for message in chat]
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["###"], "logit_bias": {"5": 1}}
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 100, "user": "u"}
    return orjson.dumps({"model": "m", "messages": messages, **sampling, **fields})


def _prompt(body: bytes, edge: TextEdge) -> list[int]:
    """All that is done to a request before it goes into the queue."""
    call = parse_chat(body)
    check_vocabulary(call, edge.vocab_size)
    return edge.render_chat(call.messages, rules_of(call, edge.format).shown_tools)


def _parser() -> TextMachine:
    return ToolCallParser(HERMES, ["f"], str, is_enforced=True)


def _thinker() -> TextMachine:
    return ThinkThenAnswer(ReasoningSplitter("think"), _parser())


def _request(num_tools: int) -> bytes:
    properties = {f"parameter_{n}": {"type": "string", "description": "What it is about."} for n in range(5)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": "What it does, in a sentence or two.",
                "parameters": {"type": "object", "properties": properties, "required": ["parameter_0"]},
            },
        }
        for n in range(num_tools)
    ]
    messages = [{"role": "user", "content": _PROSE * 8}]
    return orjson.dumps({"model": "m", "messages": messages, "tools": tools})


def _chat_of(edge: TextEdge, num_tokens: int) -> list[ChatMessage]:
    """A conversation of five turns that renders to about this many tokens."""
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    num_characters = 10
    while True:
        text = (_PROSE * (num_characters // len(_PROSE) + 1))[:num_characters]
        chat = [ChatMessage(role, text) for role in roles]
        if len(edge.render_chat(chat)) >= num_tokens:
            return chat
        num_characters += 10


class PlainText:
    """The machine that finds nothing: what a text costs without calls and thoughts."""

    has_tool_calls = False

    def push(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)


def _push_times(
    edge: TextEdge,
    token_ids: Sequence[int],
    stop: Sequence[str],
    new_machine: Callable[[], TextMachine] = PlainText,
) -> list[float]:
    """Seconds per token of whole answers that are pushed token by token."""
    steps = [(token_id,) for token_id in token_ids]

    def answer() -> None:
        detokenizer = edge.detokenizer(stop)
        machine = new_machine()
        for step in steps:
            machine.push(detokenizer.push(step))
        machine.push(detokenizer.finish())
        machine.finish()

    return [seconds / len(steps) for seconds in _times(answer, 200)]


def _report(what: str, times: list[float]) -> None:
    median, p95 = times[len(times) // 2], times[len(times) * 95 // 100]
    unit, scale = ("ms", 1e3) if median > 1e-4 else ("us", 1e6)
    least = f"{times[0] * scale:9.2f} {unit} least"
    print(f"{what:<52}{least} {median * scale:9.2f} {unit} median {p95 * scale:9.2f} {unit} p95")


if __name__ == "__main__":
    main(sys.argv[1])
