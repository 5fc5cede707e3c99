"""What a model thinks, told apart from its answer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dialect.calls import ToolCallParser
from app.dialect.formats import HERMES
from app.dialect.parts import AnswerPart, Content, Reasoning, ToolArguments, ToolStart
from app.dialect.reasoning import ReasoningFormat, ReasoningSplitter, ThinkThenAnswer, reasoning_format_of

FORMATS: list[ReasoningFormat] = ["think", "think-open"]


def read(pieces: Iterable[str], format: ReasoningFormat = "think") -> tuple[str, str]:
    """What was thought and what was said."""
    machine = ReasoningSplitter(format)
    parts: list[AnswerPart] = [part for piece in pieces for part in machine.push(piece)]
    parts += machine.finish()
    for first, second in pairwise(parts):
        assert not (isinstance(first, Content) and isinstance(second, Reasoning))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return thought, "".join(part.text for part in parts if isinstance(part, Content))


def test_a_block_at_the_start_is_what_was_thought() -> None:
    assert read(["<think>\nHm. 1 < 2\n</think>\n\n Yes. "]) == ("Hm. 1 < 2", " Yes. ")
    assert read(["\n<think>a</think>b"]) == ("a", "b")


def test_an_answer_without_a_block_is_content_as_it_is() -> None:
    for text in ("Hello <think>x</think>", " <thin", "<b>x</b>", " ", ""):
        assert read([text]) == ("", text if text != " <thin" else " ")


def test_a_block_that_the_prompt_has_opened_begins_at_once() -> None:
    assert read(["\nHm.\n</think>\n\nYes."], "think-open") == ("Hm.", "Yes.")
    assert read(["<think>\nHm.</think>Yes."], "think-open") == ("Hm.", "Yes.")
    assert read(["<thinking> hard</think>Yes."], "think-open") == ("<thinking> hard", "Yes.")


@pytest.mark.parametrize("format", FORMATS)
def test_a_block_that_is_not_closed_is_all_thought_without_half_a_mark(format: ReasoningFormat) -> None:
    for end in ("", "\n", " </thi", "\n</think"):
        assert read(["<think>a < b" + end], format) == ("a < b", "")


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_block_is_nothing(format: ReasoningFormat) -> None:
    assert read(["<think>\n\n</think>\n\nYes."], format) == ("", "Yes.")


def test_marks_in_the_answer_are_content() -> None:
    assert read(["<think>a</think>b <think>c</think>"]) == ("a", "b <think>c</think>")


def test_what_is_thought_is_passed_on_as_it_comes() -> None:
    machine = ReasoningSplitter("think")
    assert machine.push("<th") == []
    assert machine.push("ink>\nHm") == [Reasoning("Hm")]
    assert machine.push(". </th") == [Reasoning(".")]
    assert machine.push("at") == [Reasoning(" </that")]
    assert machine.push("</think>") == []
    assert machine.push("\n") == []
    assert machine.push("Yes") == [Content("Yes")]


def test_calls_are_looked_for_in_the_answer_and_not_in_the_thoughts() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    machine = ThinkThenAnswer(ReasoningSplitter("think"), ToolCallParser(HERMES, ["f"], str, is_enforced=True))
    parts = machine.push(f"<think>{call}</think>")
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == call
    assert not machine.has_tool_calls
    assert machine.push(f"\n{call}") == [ToolStart(0, "0", "f"), ToolArguments(0, "{}")]
    assert machine.has_tool_calls
    assert machine.finish() == []


def test_text_that_is_held_back_comes_out_at_the_end_of_a_thinking_answer() -> None:
    machine = ThinkThenAnswer(ReasoningSplitter("think"), ToolCallParser(HERMES, ["f"], str, is_enforced=True))
    assert [*machine.push("<"), *machine.finish()] == [Content("<")]


@pytest.mark.parametrize(
    ("source", "prompt", "format"),
    [
        ("{{ content }}", "<|im_start|>assistant\n", ""),
        ("{{ content.split('</think>') }}", "<|im_start|>assistant\n", "think"),
        ("{{ '<think>\n' }}", "<|Assistant|><think>\n", "think-open"),
    ],
)
def test_the_template_shows_how_its_model_thinks(source: str, prompt: str, format: str) -> None:
    assert reasoning_format_of(source, prompt) == format


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<thi", "</", "<", " \n", "\n" * 20, "Hm.", "é😀", "think>"])


@given(
    text=st.lists(FRAGMENTS, max_size=6).map("".join),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    format=st.sampled_from(FORMATS),
)
def test_the_parts_do_not_depend_on_how_the_text_was_cut(text: str, cuts: list[int], format: ReasoningFormat) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert read(pieces, format) == read([text], format) == read(text, format)
