"""Grammars, tried on text: what an answer can and cannot say."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from app.dialect.calls import ToolCallParser
from app.dialect.formats import FORMATS, GEMMA, HERMES, LLAMA3, ToolFormat
from app.dialect.parts import ToolArguments, ToolStart
from app.dialect.reasoning import ReasoningFormat
from app.errors import ApiError
from app.grammar.grammars import (
    MAX_CALLS,
    calls_grammar,
    calls_or_json_grammar,
    check_grammar,
    check_schema,
    free_grammar,
    json_grammar,
)
from app.grammar.schema import MAX_DEPTH, any_object, read_object_schema, read_schema

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a"]}
TOOLS = [("weather", read_schema(CITY, "p")), ("add", read_schema(NUMBERS, "p"))]
CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Paris"}}',
    "gemma": '{"name": "weather", "parameters": {"city": "Paris"}}',
}
THOUGHTS: dict[ReasoningFormat, str] = {
    "": "",
    "think": "<think>\nHm: <tool_call> {\n</think>\n\n",
    "think-open": "\nHm: <tool_call> {\n</think>\n\n",
}

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
every_reasoning = pytest.mark.parametrize("reasoning", THOUGHTS)


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def matcher(grammar: str) -> LLMatcher:
    found = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def verdict(grammar: str, text: str) -> str:
    """complete, open (it may go on, and must), or what was refused."""
    match = matcher(grammar)
    num_taken = match.try_consume_tokens(list(text.encode()))
    if num_taken < len(text.encode()):
        return f"refused behind {text.encode()[:num_taken].decode(errors='replace')!r}"
    return "complete" if match.is_accepting() else "open"


def takes(grammar: str, text: str) -> bool:
    return verdict(grammar, text) == "complete"


def schema_takes(schema: Any, text: str) -> bool:
    return takes(json_grammar(read_schema(schema, "schema"), ""), text)


def written(grammar: str, seed: int) -> str:
    """A complete text that follows the grammar, chosen at random."""
    match, draw, text = matcher(grammar), random.Random(seed), bytearray()
    while not (match.is_stopped() or (match.is_accepting() and draw.random() < 0.5)):
        mask = match.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
        ascii_first = [i for i in allowed if 32 <= i < 127] or allowed
        closing = [i for i in ascii_first if chr(i) in '"}],' and draw.random() < 0.6]
        token = draw.choice(closing or ascii_first)
        assert match.consume_token(token)
        text.append(token)
    return text.decode()


class TestJson:
    def test_an_enum_is_enforced(self) -> None:
        assert schema_takes(CITY, '{"city": "Rome"}')
        assert not schema_takes(CITY, '{"city": "Berlin"}')

    def test_white_space_is_bounded(self) -> None:
        for text in ('{"a": 1, "b": 2}', '{"a":1,"b":2}'):
            assert schema_takes(NUMBERS, text)
        for text in ('{ "a": 1}', '{"a":  1}', '{"a":\n1}', '{"a" : 1}', '{"a": 1 }', '\n{"a": 1}', '{"a": 1}\n'):
            assert not schema_takes(NUMBERS, text)

    @pytest.mark.parametrize("schema", [{}, {"title": "Anything"}])
    def test_a_schema_that_asks_for_nothing_is_an_object(self, schema: Any) -> None:
        assert schema_takes(schema, '{"a": [1, "x", null, {"b": {}}], "c": -2.5}')
        assert not schema_takes(schema, "1")
        assert read_schema(schema, "s") == any_object()

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "number"},
            {"type": "number", "minimum": 0},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6},
            {"type": "integer"},
            {"type": "integer", "minimum": 5},
            {"type": "integer", "exclusiveMaximum": 5},
            {"type": ["number", "null"]},
            {"minimum": 1},
            {"type": "array", "items": {"type": "number"}, "minItems": 1},
            {"type": "array", "minItems": 1},
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"a": True}, "required": ["a"]},
            {"type": "object"},
        ],
    )
    def test_a_number_comes_to_an_end(self, schema: Any) -> None:
        grammar = json_grammar(read_schema(schema, "s"), "")
        prefix = {"array": "[", "object": '{"a": '}.get(str(schema.get("type")), "")
        for digits in ("7" * 40, "-" + "7" * 40, "7." + "7" * 40, "0." + "0" * 40):
            assert verdict(grammar, prefix + digits).startswith("refused")

    def test_fractions_and_large_numbers_are_numbers(self) -> None:
        for text in ("0", "-12.5", "123456789012345", "0.000000001", "3.141592653"):
            assert schema_takes({"type": "number"}, text)
        for text in ("9007199254740991", "-1"):
            assert schema_takes({"type": "integer"}, text)

    def test_an_object_has_no_other_properties_than_those_that_are_named(self) -> None:
        assert not schema_takes(NUMBERS, '{"a": 1, "c": 1}')
        assert schema_takes({**NUMBERS, "additionalProperties": True}, '{"a": 1, "c": [1]}')
        assert not schema_takes({"type": "object", "properties": {}}, '{"a": 1}')

    def test_an_object_that_is_pieced_together_has_the_properties_of_all_pieces(self) -> None:
        pieces = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
        assert schema_takes({"allOf": pieces}, '{"a": 1, "b": 2}')
        referring = {**pieces[0], "$ref": "#/$defs/b", "$defs": {"b": pieces[1]}}
        assert schema_takes(referring, '{"a": 1, "b": 2}') or schema_takes(referring, '{"b": 2, "a": 1}')

    def test_schemas_of_pydantic_are_taken(self) -> None:
        node = {
            "$defs": {
                "Node": {
                    "properties": {
                        "name": {"title": "Name", "type": "string"},
                        "child": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                    },
                    "required": ["name", "child"],
                    "title": "Node",
                    "type": "object",
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/Node",
        }
        assert schema_takes(node, '{"name": "a", "child": {"name": "b", "child": null}}')

    @pytest.mark.parametrize(
        ("schema", "keyword"),
        [
            ({"not": {}}, "not"),
            ({"if": {"type": "string"}, "then": {}}, "if"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"type": "object", "properties": {"a": {"contains": {"type": "string"}, "type": "array"}}}, "contains"),
            ({"type": "strin"}, "type"),
            ({"type": "string", "format": "made-up"}, "format"),
            ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
            ({"type": "string", "pattern": "["}, "pattern"),
            ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
            ({"$ref": "#/$defs/none"}, "$ref"),
            ({"$ref": "https://example.com/schema"}, "$ref"),
            ({"type": "object", "required": "a"}, "required"),
            ({"enum": 5}, "enum"),
            ({"enum": []}, "anyOf"),
            ({"type": "number", "multipleOf": 123456789}, "multipleOf"),
            ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
            ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required"),
            ({"minimum": "a"}, "minimum"),
            ({"$ref": "#"}, "nothing can follow"),
            ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
        ],
    )
    def test_a_schema_that_cannot_be_enforced_is_refused_naming_the_keyword(self, schema: Any, keyword: str) -> None:
        with pytest.raises(ApiError, match=keyword.replace("$", r"\$")) as caught:
            check_schema(read_schema(schema, "the_schema"), "the_schema")
        assert caught.value.status == 400
        assert str(caught.value.param).startswith("the_schema")

    @pytest.mark.parametrize("value", [None, [], "x", 5, True])
    def test_a_schema_is_an_object(self, value: Any) -> None:
        with pytest.raises(ApiError, match="must be a JSON Schema"):
            read_schema(value, "p")

    def test_a_client_cannot_loosen_the_grammar(self) -> None:
        schema = {**NUMBERS, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
        assert not schema_takes(schema, '{"a":    1}')

    def test_what_the_library_does_not_know_is_left_out_where_a_schema_is_not_strict(self) -> None:
        loose = {
            "properties": {"a": {"type": "string", "format": "path"}, "b": {"type": "number", "multipleOf": 12345}}
        }
        schema = read_object_schema(loose, "p", drops_unsupported=True) | {"x-guidance": {"lenient": True}}
        check_schema(schema, "p")
        assert takes(json_grammar(schema, ""), '{"a": "/x", "b": 1.5}')
        with pytest.raises(ApiError):
            check_schema(read_object_schema(loose, "p"), "p")


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, Any] = {
    "deep": nested(MAX_DEPTH + 1),
    "very deep": nested(400),
    "deep in what is not looked at": {"default": nested(400), "type": "string"},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "long": {"type": "string", "description": "x" * 100_000},
    "many values": {"enum": [f"value {i}" for i in range(20_000)]},
    "many branches": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]}
            for i in range(8)
        ]
    },
    "multiples": {"type": "integer", "multipleOf": 123456789123},
    "long pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){25}$", "minLength": 100, "maxLength": 100_000},
    "not a number": {"type": "number", "minimum": float("nan")},
    "half a character": {"type": "string", "const": "\ud83d"},
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_a_bomb_is_refused(bomb: Any) -> None:
    started = time.thread_time()
    with pytest.raises(ApiError) as caught:
        check_schema(read_schema(bomb, "p"), "p")
    assert caught.value.status == 400
    assert time.thread_time() - started < 0.5


class TestCalls:
    @every_format
    @every_reasoning
    def test_a_demanded_call_is_made_and_follows_its_schema(
        self, format: ToolFormat, reasoning: ReasoningFormat
    ) -> None:
        grammar = calls_grammar(format, TOOLS, reasoning, is_parallel=True)
        assert check_grammar(grammar) == ""
        thoughts, call = THOUGHTS[reasoning], CALL[format.name]
        assert takes(grammar, thoughts + call)
        for text in ("Hello", f"Hi {call}", call.replace("Paris", "Berlin"), call.replace("weather", "made_up"), ""):
            assert not takes(grammar, thoughts + text)

    @every_format
    @every_reasoning
    def test_an_answer_is_free_until_a_call_begins(self, format: ToolFormat, reasoning: ReasoningFormat) -> None:
        grammar = free_grammar(format, TOOLS, reasoning, is_parallel=True)
        assert check_grammar(grammar) == ""
        thoughts, call = THOUGHTS[reasoning], CALL[format.name]
        for text in (call, "Hello.", '{"a": 1} <b>', "1 < 2", call + format.separator + call, ""):
            assert takes(grammar, thoughts + text)
        for text in (call.replace("Paris", "Berlin"), call.replace("weather", "made_up")):
            assert not takes(grammar, thoughts + text)

    def test_text_may_surround_marked_calls(self) -> None:
        grammar = free_grammar(HERMES, TOOLS, "", is_parallel=True)
        assert takes(grammar, f"Let me see: {CALL['hermes']} and\n{CALL['hermes']} so.")

    def test_gemma_may_put_a_fence_around_a_call(self) -> None:
        grammar = free_grammar(GEMMA, TOOLS, "", is_parallel=True)
        assert takes(grammar, f"```json\n{CALL['gemma']}\n```")
        assert takes(grammar, '```json\n{"city": 1}\n```')

    @every_format
    @pytest.mark.parametrize("grammar_of", [calls_grammar, free_grammar])
    def test_without_parallel_calls_there_is_one_at_most(self, format: ToolFormat, grammar_of: Any) -> None:
        grammar = grammar_of(format, TOOLS, "", is_parallel=False)
        call = CALL[format.name]
        assert takes(grammar, call)
        assert not takes(grammar, call + format.separator + call)

    @every_format
    def test_calls_come_to_an_end(self, format: ToolFormat) -> None:
        for grammar_of in (calls_grammar, free_grammar):
            grammar = grammar_of(format, TOOLS, "", is_parallel=True)
            calls = [CALL[format.name]] * (MAX_CALLS + 1)
            assert takes(grammar, format.separator.join(calls[:-1]))
            assert not takes(grammar, format.separator.join(calls))

    @every_format
    def test_json_of_a_schema_and_calls_can_be_the_choice(self, format: ToolFormat) -> None:
        schema = read_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "p")
        grammar = calls_or_json_grammar(format, TOOLS, schema, "", is_parallel=True)
        assert check_grammar(grammar) == ""
        assert takes(grammar, CALL[format.name])
        assert takes(grammar, '{"n": 1}')
        assert not takes(grammar, CALL[format.name].replace("Paris", "Berlin"))
        assert not takes(grammar, "Hello")


@every_reasoning
def test_json_comes_behind_what_is_thought(reasoning: ReasoningFormat) -> None:
    grammar = json_grammar(read_schema(CITY, "p"), reasoning)
    assert check_grammar(grammar) == ""
    assert takes(grammar, THOUGHTS[reasoning] + '{"city": "Paris"}')
    assert not takes(grammar, THOUGHTS[reasoning] + "Paris")


def test_grammars_have_a_largest_size() -> None:
    many = [(f"f{i}", {"type": "object", "properties": {"x" * 3000: {"type": "string"}}}) for i in range(100)]
    assert "bytes" in check_grammar(free_grammar(HERMES, many, "", is_parallel=True))


@given(format=st.sampled_from([HERMES, LLAMA3, GEMMA]), seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_whatever_follows_the_grammar_is_read_as_calls(format: ToolFormat, seed: int) -> None:
    grammar = calls_grammar(format, TOOLS, "", is_parallel=True)
    text = written(grammar, seed)
    parser = ToolCallParser(format, [name for name, _ in TOOLS], str, is_enforced=True)
    parts = [*parser.push(text), *parser.finish()]
    assert {type(part) for part in parts} == {ToolStart, ToolArguments}
    names = [part.name for part in parts if isinstance(part, ToolStart)]
    for part in parts:
        if isinstance(part, ToolArguments):
            arguments = json.loads(part.text)
            assert set(arguments) <= ({"city"} if names[part.index] == "weather" else {"a", "b"})
