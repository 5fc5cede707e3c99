"""An answer that is left anywhere and continued is the one that was never left: for every cut, and every grouping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from app.render.chat import ChatShape
from app.render.choice import ChoiceText, text_machine
from app.render.chunks import ChunkStream
from app.render.logprobs import TokenNames
from app.render.spec import AnswerSpec
from app.render.whole import WholeChoice, completion
from app.text.detokenizer import Detokenizer, TokenTexts
from decode.engine.sampling import TokenLogprobs
from tasks.protocol.contract import TerminalEvent, TokenEvent

EOS = 0
TEXTS = TokenTexts(lambda token_id: b"" if token_id == EOS else bytes([token_id]))
NAMES = TokenNames(lambda token_id: bytes([token_id]))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'

Step = tuple[int, int]
"""(choice, tokens of it) that come together."""
Answer = tuple[AnswerSpec, list[bytes]]
"""What is asked for, and the output of every choice."""
Events = list[tuple[list[int], Any]]
"""The position and the data of each."""


@dataclass
class Seen:
    """What a client has of one choice."""

    roles: int = 0
    content: str = ""
    reasoning: str = ""
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index to id, name and arguments."""
    reasons: list[str] = field(default_factory=list)


def spec_of(**fields: Any) -> AnswerSpec:
    return AnswerSpec(
        request_id="chatcmpl-1", kind="chat", created_s=1, model="m", stream=True, end_token_ids=(EOS,), **fields
    )


def texts(spec: AnswerSpec, position: Sequence[int] | None = None) -> list[ChoiceText]:
    return [
        ChoiceText(
            spec,
            Detokenizer(TEXTS, spec.stop),
            text_machine(spec, number),
            -1 if position is None else position[number],
        )
        for number in range(spec.n)
    ]


def event(spec: AnswerSpec, index: int, token_ids: bytes) -> TokenEvent:
    logprobs = [TokenLogprobs(-index - offset, ()) for offset in range(len(token_ids))]
    return TokenEvent(index, 1, tuple(token_ids), tuple(logprobs) if spec.num_logprobs is not None else ())


def ending(output: bytes) -> TerminalEvent:
    return TerminalEvent(len(output), 1, "finished", "stop" if output[-1:] == bytes([EOS]) else "length")


def stream(
    spec: AnswerSpec, outputs: Sequence[bytes], steps: Sequence[Step], position: Sequence[int] | None = None
) -> Events:
    """The events of an answer whose choices come in these steps (and whatever is left, at the end, as one each)."""
    chunks = ChunkStream(spec, ChatShape(NAMES, spec), texts(spec, position), position)
    data = chunks.opening()
    places = [0] * spec.n
    is_over = [False] * spec.n
    for choice, size in [*steps, *((number, 10_000) for number in range(spec.n))]:
        output, at = outputs[choice], places[choice]
        if is_over[choice]:
            continue
        places[choice] = min(len(output), at + size)
        if output[at : places[choice]] and not chunks.is_satisfied(choice):
            data += chunks.tokens(choice, [event(spec, at, output[at : places[choice]])])
        if places[choice] == len(output):
            is_over[choice] = True
            data += chunks.ended(choice, ending(output))
    return events_in(data + chunks.closing())


def events_in(data: bytes) -> Events:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        id_line, data_line = block.split("\n")
        value = data_line.removeprefix("data: ")
        position = [int(index) for index in id_line.removeprefix("id: ").split(",")]
        found.append((position, value if value == "[DONE]" else orjson.loads(value)))
    return found


def seen_in(events: Events, num_choices: int) -> list[Seen]:
    seen = [Seen() for _ in range(num_choices)]
    for _, chunk in events:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            one, delta = seen[choice["index"]], choice["delta"]
            one.roles += "role" in delta
            one.content += delta.get("content") or ""
            one.reasoning += delta.get("reasoning_content") or ""
            one.logprobs += (choice["logprobs"] or {}).get("content", [])
            one.token_ids += choice.get("token_ids", [])
            one.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in delta.get("tool_calls", ()):
                known = one.calls.setdefault(call["index"], ["", "", ""])
                known[0] += call.get("id", "")
                known[1] += call["function"].get("name", "")
                known[2] += call["function"].get("arguments", "")
    return seen


OUTPUTS = st.sampled_from(["plain", "é😀 und 海は", "a<b>c", "<<b", f"ok {CALL}", f"{CALL}\n{CALL}", "<tool", "x"])
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    n = draw(st.sampled_from([1, 3]))
    spec = spec_of(
        n=n,
        stop=draw(st.sampled_from([(), ("<b>",), ("b>c", "und")])),
        num_logprobs=draw(st.sampled_from([None, 0])),
        prompt_token_ids=draw(st.sampled_from([(), ((7, 8),)])),
        include_usage=draw(st.booleans()),
        continuous_usage=False,
        **draw(st.sampled_from([{}, {"tool_format": "hermes", "tool_names": ("f",)}])),
    )
    ending = st.sampled_from([b"", bytes([EOS]), "😀".encode()[:2]])
    outputs = [draw(OUTPUTS).encode() + draw(ending) for _ in range(n)]
    return spec, outputs


def within(spec: AnswerSpec, steps: Sequence[Step]) -> list[Step]:
    """The steps, of choices that there are."""
    return [(choice % spec.n, size) for choice, size in steps]


@given(answer=answers(), steps=STEPS, other_steps=STEPS, data=st.data())
def test_what_came_before_a_cut_and_what_is_sent_after_it_are_the_undisturbed_answer(
    answer: Answer, steps: list[Step], other_steps: list[Step], data: st.DataObject
) -> None:
    spec, outputs = answer
    undisturbed = stream(spec, outputs, within(spec, steps))
    whole = seen_in(undisturbed, spec.n)
    cut = data.draw(st.integers(1, len(undisturbed) - 1), label="events before the cut")
    before = undisturbed[:cut]
    after = stream(spec, outputs, within(spec, other_steps), before[-1][0])
    first, rest = seen_in(before, spec.n), seen_in(after, spec.n)
    has_all = all(one.reasons for one in first)
    for undivided, one, other in zip(whole, first, rest, strict=True):
        assert one.content + other.content == undivided.content
        assert one.logprobs + other.logprobs == undivided.logprobs
        assert one.token_ids + other.token_ids == undivided.token_ids
        merged = {index: list(call) for index, call in one.calls.items()}
        for index, call in other.calls.items():
            known = merged.get(index, ["", "", ""])
            merged[index] = [had + has for had, has in zip(known, call, strict=True)]
        assert merged == undivided.calls
        # Where nothing is left but the end, a client gets the whole of it.
        assert other.reasons if has_all else one.reasons + other.reasons == undivided.reasons
    assert after[-1][1] == "[DONE]"
    if spec.include_usage:
        assert after[-2][1]["usage"] == undisturbed[-2][1]["usage"]


@given(answer=answers(), steps=STEPS)
def test_the_same_answer_as_a_whole(answer: Answer, steps: list[Step]) -> None:
    spec, outputs = answer
    streamed = seen_in(stream(spec, outputs, within(spec, steps)), spec.n)
    choices = [WholeChoice(text) for text in texts(spec)]
    for gathered, output in zip(choices, outputs, strict=True):
        gathered.take([event(spec, 0, output), ending(output)])
    whole = orjson.loads(orjson.dumps(completion(spec, ChatShape(NAMES, spec), choices)))
    for number, (one, choice) in enumerate(zip(streamed, whole["choices"], strict=True)):
        message = choice["message"]
        assert choice["index"] == number
        assert one.content == (message["content"] or "")
        assert one.logprobs == ((choice["logprobs"] or {}).get("content") or [])
        assert one.token_ids == choice.get("token_ids", [])
        calls = [[call["id"], *call["function"].values()] for call in message.get("tool_calls", ())]
        assert calls == list(one.calls.values())
        assert one.reasons == [choice["finish_reason"]]
        assert one.roles == 1


@given(answer=answers(), steps=STEPS)
def test_log_probabilities_are_those_of_the_tokens_that_count(answer: Answer, steps: list[Step]) -> None:
    spec, outputs = answer
    events = stream(spec, outputs, within(spec, steps))
    for one, output in zip(seen_in(events, spec.n), outputs, strict=True):
        if spec.num_logprobs is None:
            assert one.logprobs == []
            continue
        shown = bytes([byte for entry in one.logprobs for byte in entry["bytes"]])
        assert output.removesuffix(bytes([EOS])).startswith(shown)
        if not spec.tool_format:
            assert shown.decode(errors="replace").startswith(one.content)
    if spec.include_usage and spec.num_logprobs is not None:
        shown_tokens = sum(len(one.logprobs) for one in seen_in(events, spec.n))
        assert events[-2][1]["usage"]["completion_tokens"] == shown_tokens


@given(answer=answers(), steps=STEPS)
def test_token_ids_are_those_of_the_tokens_that_count(answer: Answer, steps: list[Step]) -> None:
    spec, outputs = answer
    events = stream(spec, outputs, within(spec, steps))
    seen = seen_in(events, spec.n)
    told = [number for number, (_, chunk) in enumerate(events) if "prompt_token_ids" in chunk]
    if not spec.shows_token_ids:
        assert not told
        assert not any(one.token_ids for one in seen)
        return
    assert told == [0]
    for one, output in zip(seen, outputs, strict=True):
        counted = output.removesuffix(bytes([EOS]))
        ends_early = any(stop.encode() in counted for stop in spec.stop)
        shown = bytes(one.token_ids)
        assert counted.startswith(shown) if ends_early else counted == shown
    if spec.include_usage:
        num_shown = sum(len(one.token_ids) for one in seen)
        assert events[-2][1]["usage"]["completion_tokens"] == num_shown


def test_beyond_the_end_there_is_nothing_but_the_end() -> None:
    spec = spec_of(include_usage=True)
    events = stream(spec, [b"abc"], [], [99])
    assert [chunk if chunk == "[DONE]" else chunk["choices"] for _, chunk in events] == [
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
        [],
        "[DONE]",
    ]


def test_text_that_was_held_back_to_the_end_is_not_repeated() -> None:
    spec = spec_of(stop=("bcd",))
    events = stream(spec, [b"abc"], [])
    assert [(position, chunk["choices"][0]["delta"].get("content")) for position, chunk in events[:-1]] == [
        ([-1], ""),
        ([2], "a"),
        ([3], "bc"),
        ([4], None),
    ]
    assert seen_in(stream(spec, [b"abc"], [], [2]), 1)[0].content == "bc"
    assert seen_in(stream(spec, [b"abc"], [], [3]), 1)[0].content == ""


def test_an_id_names_the_place_in_every_choice() -> None:
    spec = spec_of(n=3)
    events = stream(spec, [b"ab", b"c", b"d"], [(1, 1), (0, 1)])
    assert [position for position, _ in events] == [
        [-1, -2, -2],
        [-1, -1, -2],
        [-1, -1, -1],
        [-1, 0, -1],
        [-1, 1, -1],
        [0, 1, -1],
        [1, 1, -1],
        [2, 1, -1],
        [2, 1, 0],
        [2, 1, 1],
        [2, 1, 1],
    ]


def test_after_a_cut_a_choice_that_has_nothing_new_yet_stays_where_the_client_has_it() -> None:
    """Else a client that is cut off again would get what it has of that choice once more."""
    spec = spec_of(n=2)
    outputs = [b"abcd", b"wxyz"]
    position = [1, 1]
    rest = stream(spec, outputs, [(0, 2), (1, 2), (0, 1)], position)
    assert next(place for place, _ in rest) == [2, 1]
    assert [one.content for one in seen_in(rest, 2)] == ["cd", "yz"]


def test_a_call_that_comes_in_one_step_is_one_chunk_with_all_of_it() -> None:
    spec = spec_of(tool_format="hermes", tool_names=("f",))
    [one] = seen_in(stream(spec, [CALL.encode()], []), 1)
    [(call_id, name, arguments)] = one.calls.values()
    assert (name, orjson.loads(arguments)) == ("f", {"a": "é"})
    assert call_id == seen_in(stream(spec, [CALL.encode()], [(0, 3)]), 1)[0].calls[0][0]
    assert one.reasons == ["length"]
    assert seen_in(stream(spec, [CALL.encode() + bytes([EOS])], []), 1)[0].reasons == ["tool_calls"]
    forced = spec_of(tool_format="hermes", tool_names=("f",), forced_tool=True)
    assert seen_in(stream(forced, [CALL.encode() + bytes([EOS])], []), 1)[0].reasons == ["stop"]


def test_usage_so_far_is_in_every_chunk_when_it_is_asked_for() -> None:
    spec = spec_of(n=2, include_usage=True, continuous_usage=True, num_prompt_tokens=7)
    events = stream(spec, [b"ab", b"c"], [(0, 1), (1, 1), (0, 1)])
    counts = [chunk["usage"]["completion_tokens"] for _, chunk in events[:-1]]
    assert counts == [0, 0, 1, 2, 2, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for _, chunk in events[:-1]} == {7}
