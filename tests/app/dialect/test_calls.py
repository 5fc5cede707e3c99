"""Tool calls in answers: what is a call, what is text, and that it does not matter how the text was cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dialect.calls import ToolCallParser, call_id_of
from app.dialect.formats import FORMATS, GEMMA, HERMES, LLAMA3, ToolFormat
from app.dialect.parts import AnswerPart, Content, ToolArguments, ToolStart

NAMES = ("get_weather", "add", "now")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "now", "arguments": {}}'
BARE = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


def parser(format: ToolFormat = HERMES, is_enforced: bool = True) -> ToolCallParser:
    return ToolCallParser(format, NAMES, lambda index: f"call_{index}", is_enforced=is_enforced)


def read(pieces: Iterable[str], format: ToolFormat = HERMES, is_enforced: bool = True) -> list[AnswerPart]:
    """All parts of an answer that comes in these pieces."""
    machine = parser(format, is_enforced)
    parts = [part for piece in pieces for part in machine.push(piece)]
    parts += machine.finish()
    assert machine.has_tool_calls == any(isinstance(part, ToolStart) for part in parts)
    return parts


def joined(parts: Sequence[AnswerPart]) -> list[AnswerPart]:
    """The same with neighbouring text put together."""
    out: list[AnswerPart] = []
    for part in parts:
        match (out[-1] if out else None), part:
            case Content(before), Content(text):
                out[-1] = Content(before + text)
            case ToolArguments(index, before), ToolArguments(other, text) if index == other:
                out[-1] = ToolArguments(index, before + text)
            case _:
                out.append(part)
    return out


def whole(text: str, format: ToolFormat = HERMES, is_enforced: bool = True) -> list[AnswerPart]:
    return joined(read([text], format, is_enforced))


def call(index: int, name: str, arguments: str) -> list[AnswerPart]:
    return [ToolStart(index, f"call_{index}", name), ToolArguments(index, arguments)]


PARIS = call(0, "get_weather", '{"city": "Paris"}')

both = pytest.mark.parametrize("is_enforced", [True, False])


class TestMarkedCalls:
    @both
    def test_a_call_is_its_name_and_its_arguments_as_they_were_written(self, is_enforced: bool) -> None:
        assert whole(f"<tool_call>\n{WEATHER}\n</tool_call>", is_enforced=is_enforced) == PARIS

    @both
    def test_calls_are_numbered_from_zero(self, is_enforced: bool) -> None:
        text = f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{TIME}\n</tool_call>\n"
        assert whole(text, is_enforced=is_enforced) == [*PARIS, *call(1, "now", "{}")]

    @both
    @pytest.mark.parametrize("inside", [f"[{WEATHER},\n {TIME}]", f"{WEATHER}\n{TIME}"])
    def test_one_pair_of_marks_may_hold_several_calls(self, inside: str, is_enforced: bool) -> None:
        assert whole(f"<tool_call>{inside}</tool_call>", is_enforced=is_enforced) == [*PARIS, *call(1, "now", "{}")]

    def test_text_around_calls_is_content_without_the_space_that_leads_to_them(self) -> None:
        text = f"Let me look.\n\n<tool_call>{WEATHER}</tool_call>\nAnd <b>now</b>: \n<tool_call>{TIME}</tool_call>!"
        assert whole(text) == [
            Content("Let me look."),
            *PARIS,
            Content("\nAnd <b>now</b>:"),
            *call(1, "now", "{}"),
            Content("!"),
        ]

    def test_a_long_run_of_white_space_is_not_held_back_for_ever(self) -> None:
        machine = parser()
        assert machine.push("a" + "\n" * 100) == [Content("a" + "\n" * 84)]

    @both
    def test_the_closing_mark_may_be_missing_at_the_end(self, is_enforced: bool) -> None:
        for end in ("", "\n", "\n</tool_c"):
            assert whole(f"<tool_call>{WEATHER}{end}", is_enforced=is_enforced) == PARIS

    @both
    def test_arguments_may_come_before_the_name(self, is_enforced: bool) -> None:
        text = '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'
        assert whole(text, is_enforced=is_enforced) == PARIS

    @both
    def test_absent_arguments_are_empty_ones(self, is_enforced: bool) -> None:
        text = '<tool_call>{"type": "function", "name": "now"}</tool_call>'
        assert whole(text, is_enforced=is_enforced) == call(0, "now", "{}")

    @pytest.mark.parametrize(
        "arguments",
        [
            '{"a": "}{\\"</tool_call>\\\\", "b": [1, -2.5e+3, {"c": [ ] , "d": {}}], "e":null,"f" : true}',
            '{"text": "\\u00e9\\n日本 😀 <tool_call>"}',
            "{ }",
            '{"": ""}',
        ],
    )
    @both
    def test_arguments_may_be_any_json_object(self, arguments: str, is_enforced: bool) -> None:
        text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        assert whole(text, is_enforced=is_enforced) == call(0, "add", arguments)
        json.loads(arguments)

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            "<tool_call>hello</tool_call>",
            '<tool_call>"now"</tool_call>',
            "<tool_call>[]</tool_call>",
            "<tool_call>{}</tool_call>",
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": "made_up", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": 5}</tool_call>',
            '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": [1 2]}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": [1}}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {a: 1}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": "\n"}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": "\\u00g0"}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": nul}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {"a": {"b": 1}',
            '<tool_call>{"name": "now", "arguments": {}} and more</tool_call>',
            '<tool_call>{"name": "now", "arguments": {}, "name": "add"}</tool_call>',
            '<tool_call>{"name": "now", "arguments": {}, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "made_up": "x"}</tool_call>',
            '<tool_call>[{"name": "now", "arguments": {}} {"name": "now", "arguments": {}}]</tool_call>',
            '<tool_call>[{"name": "now", "arguments": {}}</tool_call>',
            '<tool_call>[{"name": "now", "arguments": {}}',
            '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 200 + "1" + "}" * 200 + "}</tool_call>",
        ],
    )
    def test_text_that_is_no_call_after_all_is_content(self, text: str) -> None:
        assert whole(text, is_enforced=False) == [Content(text)]

    def test_a_call_behind_text_that_is_none_is_found(self) -> None:
        text = f"<tool_call><tool_call>{WEATHER}</tool_call>"
        assert whole(text, is_enforced=False) == [Content("<tool_call>"), *PARIS]
        broken = '<tool_call>{"name": "now", "arguments": {"a": x <tool_call>'
        assert whole(broken + f"{WEATHER}</tool_call>", is_enforced=False) == [
            Content(broken.removesuffix(" <tool_call>")),
            *PARIS,
        ]

    def test_numbers_go_on_where_a_list_of_calls_was_taken_back(self) -> None:
        text = f"<tool_call>[{TIME}, x]</tool_call><tool_call>{WEATHER}</tool_call>"
        assert whole(text, is_enforced=False) == [Content(f"<tool_call>[{TIME}, x]</tool_call>"), *PARIS]

    def test_enforced_arguments_are_passed_on_while_they_are_written(self) -> None:
        machine = parser()
        assert machine.push('<tool_call>\n{"name": "get_weather", "argu') == []
        assert machine.push('ments": {"ci') == call(0, "get_weather", '{"ci')
        assert machine.push('ty": "Par') == [ToolArguments(0, 'ty": "Par')]
        assert machine.push('is"}}\n</tool') == [ToolArguments(0, 'is"}')]
        assert machine.push("_call>") == []
        assert machine.finish() == []

    def test_other_arguments_are_passed_on_once_the_call_is_complete(self) -> None:
        machine = parser(is_enforced=False)
        assert machine.push(f"<tool_call>{WEATHER}</tool_call") == []
        assert not machine.has_tool_calls
        assert machine.push(">") == PARIS

    def test_arguments_that_are_cut_by_the_end_stay_cut(self) -> None:
        text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'
        assert whole(text) == call(0, "get_weather", '{"city": "Par')

    def test_text_that_looks_like_a_mark_is_released_as_soon_as_it_is_none(self) -> None:
        machine = parser()
        assert machine.push("a <tool") == [Content("a")]
        assert machine.push("_") == []
        assert machine.push("box") == [Content(" <tool_box")]

    def test_half_a_mark_at_the_end_is_left_out(self) -> None:
        assert whole("So be it. <tool_cal") == [Content("So be it. ")]
        assert whole("1 <") == [Content("1 <")]


class TestBareCalls:
    @both
    @pytest.mark.parametrize("format", [LLAMA3, GEMMA])
    def test_an_answer_that_begins_with_a_call_is_one(self, format: ToolFormat, is_enforced: bool) -> None:
        assert whole(BARE, format, is_enforced) == PARIS
        assert whole(f"\n {BARE}\n", format, is_enforced) == PARIS

    @both
    @pytest.mark.parametrize("separator", ["; ", ";", "\n", ", ", ""])
    def test_several_calls_follow_each_other(self, separator: str, is_enforced: bool) -> None:
        assert whole(BARE + separator + TIME, LLAMA3, is_enforced) == [*PARIS, *call(1, "now", "{}")]

    def test_llamas_other_spelling_is_read(self) -> None:
        assert whole('{"type": "function", "name": "now", "parameters": {}}', LLAMA3) == call(0, "now", "{}")
        assert whole('{"type": "function", "function": "now", "parameters": {}}', LLAMA3) == call(0, "now", "{}")

    @both
    @pytest.mark.parametrize("fence", ["json", "tool_code", "tool_call"])
    def test_gemma_may_put_a_fence_around_calls(self, fence: str, is_enforced: bool) -> None:
        for inside, calls in ((BARE, PARIS), (f"[{BARE}, {TIME}]", [*PARIS, *call(1, "now", "{}")])):
            assert whole(f"```{fence}\n{inside}\n```", GEMMA, is_enforced) == calls

    @pytest.mark.parametrize(
        "text",
        [
            "Hello.",
            f"Call {BARE}",
            '{"city": "Paris"}',
            '{"name": "Bob", "parameters": {}}',
            '{"name": "now", "parameters": {"a": }}',
            '{"name": "now", "param',
            '[{"city": "Paris"}]',
            "```python\nprint(1)\n```",
            '```json\n{"city": 1}\n```',
            "  ",
            "",
        ],
    )
    @pytest.mark.parametrize("format", [LLAMA3, GEMMA])
    def test_any_other_answer_is_content(self, text: str, format: ToolFormat) -> None:
        assert whole(text, format, is_enforced=False) == ([Content(text)] if text else [])

    @both
    def test_text_behind_a_call_is_content(self, is_enforced: bool) -> None:
        assert whole(f"{BARE}\nThat is it: {BARE}", LLAMA3, is_enforced) == [
            *PARIS,
            Content(f"\nThat is it: {BARE}"),
        ]

    def test_an_answer_that_is_no_call_is_passed_on_as_it_comes(self) -> None:
        machine = parser(LLAMA3)
        assert machine.push('{"na') == []
        assert machine.push('ture": ') == [Content('{"nature": ')]
        assert machine.push("<tool_call> ") == [Content("<tool_call> ")]


def test_ids_of_calls_depend_on_the_request_the_choice_and_the_index_alone() -> None:
    ids = [call_id_of(request, choice, index) for request in "ab" for choice in (0, 1) for index in (0, 1)]
    assert len(set(ids)) == 8
    assert ids[0] == call_id_of("a", 0, 0)
    assert all(one.startswith("call_") and len(one) == 29 for one in ids)


FRAGMENTS = st.sampled_from(
    [
        f"<tool_call>\n{WEATHER}\n</tool_call>",
        f"<tool_call>[{WEATHER}, {TIME}]</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "\\u00e9 \\"x <tool_call>"}], "c": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, }}</tool_call>',
        BARE,
        TIME,
        "; ",
        "```json\n",
        "\n```",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "<",
        "[",
        '{"name": "',
        "Hello, world",
        " \n",
        "\n" * 20,
        "é😀",
    ]
)  # fmt: skip
ANSWERS = st.lists(FRAGMENTS, max_size=6).map("".join)


@given(
    text=ANSWERS,
    cuts=st.lists(st.integers(0, 400), max_size=12),
    format=st.sampled_from(sorted(FORMATS)),
    is_enforced=st.booleans(),
)
def test_the_parts_do_not_depend_on_how_the_text_was_cut(
    text: str, cuts: list[int], format: str, is_enforced: bool
) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    expected = whole(text, FORMATS[format], is_enforced)
    assert joined(read(pieces, FORMATS[format], is_enforced)) == expected
    assert joined(read(text, FORMATS[format], is_enforced)) == expected


@given(text=ANSWERS, format=st.sampled_from(sorted(FORMATS)))
def test_arguments_that_no_grammar_enforces_are_valid_json_or_none_at_all(text: str, format: str) -> None:
    for part in read(text, FORMATS[format], is_enforced=False):
        if isinstance(part, ToolArguments):
            assert isinstance(json.loads(part.text), dict)
        elif isinstance(part, ToolStart):
            assert part.name in NAMES
