"""Tools, the choice among them, the response format, calls in the history: what is taken, which place is named."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.answers.rules import AnswerRules, rules_of
from app.contract.chat import ChatCall, parse_chat
from app.contract.tools import AUTO, MAX_TOOLS, ToolChoice
from app.dialect.conversation import ChatMessage, ToolCall
from app.dialect.formats import LLAMA3
from app.errors import ApiError
from app.grammar.schema import any_object
from app.text.templates import ChatFormat

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def parse(**fields: Any) -> ChatCall:
    return parse_chat(orjson.dumps({"model": "m", "messages": HELLO, **fields}))


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    orjson.loads(caught.value.render())
    return caught.value


def rules(**fields: Any) -> AnswerRules:
    return rules_of(parse(**fields), ChatFormat(lambda messages: []))


class TestTools:
    def test_a_tool_is_its_name_its_definition_and_what_its_arguments_follow(self) -> None:
        [read] = parse(tools=[tool(description="Now.", strict=True, made_up=1)]).tools
        assert read.name == "weather"
        assert read.definition == tool(description="Now.", strict=True)
        assert read.arguments_schema["required"] == ["city"]

    @pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
    def test_a_function_without_parameters_takes_none(self, parameters: Any) -> None:
        [read] = parse(tools=[tool(parameters=parameters)]).tools
        assert (read.arguments_schema["properties"], read.arguments_schema["additionalProperties"]) == ({}, False)

    def test_there_are_128_at_most(self) -> None:
        assert len(parse(tools=[tool(f"f{n}") for n in range(MAX_TOOLS)]).tools) == MAX_TOOLS
        assert refusal(tools=[tool(f"f{n}") for n in range(MAX_TOOLS + 1)]).param == "tools"

    @pytest.mark.parametrize(
        ("entry", "param"),
        [
            (5, "tools[0]"),
            ({}, "tools[0].type"),
            ({"type": "custom", "custom": {"name": "x"}}, "tools[0].type"),
            ({"type": "function"}, "tools[0].function"),
            ({"type": "function", "function": {}}, "tools[0].function.name"),
            (tool(""), "tools[0].function.name"),
            (tool("a b"), "tools[0].function.name"),
            (tool("a" * 65), "tools[0].function.name"),
            (tool("<|im_end|>"), "tools[0].function.name"),
            (tool(description=5), "tools[0].function.description"),
            (tool(strict="yes"), "tools[0].function.strict"),
            (tool(parameters=[]), "tools[0].function.parameters"),
            (tool(parameters={"type": "string"}), "tools[0].function.parameters.type"),
            (tool(parameters={"type": "strin"}), "tools[0].function.parameters.type"),
            (tool(parameters={"properties": {"a": {"type": "x"}}}), "tools[0].function.parameters"),
            (tool(strict=True, parameters={"type": "object", "not": {}}), "tools[0].function.parameters"),
        ],
    )
    def test_what_is_no_tool_is_refused_naming_its_place(self, entry: Any, param: str) -> None:
        assert refusal(tools=[entry]).param == param

    def test_together_they_have_a_largest_size(self) -> None:
        long = {"type": "object", "description": "x" * 60_000, "properties": {}}
        assert len(parse(tools=[tool(f"f{n}", parameters=long) for n in range(4)]).tools) == 4
        assert refusal(tools=[tool(f"f{n}", parameters=long) for n in range(5)]).param == "tools"

    def test_names_are_different(self) -> None:
        assert refusal(tools=[tool(), tool("b"), tool()]).param == "tools[2].function.name"

    def test_a_schema_that_is_not_strict_may_have_what_cannot_be_enforced(self) -> None:
        loose = {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}, "not": {"const": 1}}
        assert parse(tools=[tool(parameters=loose)]).tools


class TestToolChoice:
    @pytest.mark.parametrize(
        ("value", "choice"),
        [
            (None, AUTO),
            ("auto", AUTO),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            (
                {"type": "function", "function": {"name": "weather"}},
                ToolChoice("required", ("weather",), is_named=True),
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("b")]}},
                ToolChoice("auto", ("b",)),
            ),
        ],
    )
    def test_a_choice_is_a_mode_and_names(self, value: Any, choice: ToolChoice) -> None:
        assert parse(tools=[tool(), tool("b")], tool_choice=value).tool_choice == choice

    @pytest.mark.parametrize(
        ("value", "param"),
        [
            ("any", "tool_choice"),
            (5, "tool_choice"),
            ({}, "tool_choice"),
            ({"type": "function"}, "tool_choice"),
            ({"type": "function", "function": {"name": "made_up"}}, "tool_choice"),
            ({"type": "function", "function": {"name": ""}}, "tool_choice.function.name"),
            ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "x"}}, "tool_choice.allowed_tools.mode"),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
                "tool_choice.allowed_tools.tools",
            ),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
                "tool_choice.allowed_tools.tools[0]",
            ),
        ],
    )
    def test_any_other_choice_is_refused(self, value: Any, param: str) -> None:
        assert refusal(tools=[tool()], tool_choice=value).param == param

    def test_a_call_cannot_be_demanded_without_tools(self) -> None:
        assert refusal(tool_choice="required").param == "tool_choice"
        assert parse(tool_choice="none").tools == ()


class TestResponseFormat:
    def test_text_is_no_schema(self) -> None:
        assert parse(response_format={"type": "text"}).json_schema is None

    def test_json_object_is_any_object(self) -> None:
        assert parse(response_format={"type": "json_object"}).json_schema == any_object()
        assert parse(response_format=named()).json_schema == any_object()

    @pytest.mark.parametrize("strict", [True, False, None])
    def test_a_schema_is_enforced_whether_or_not_it_is_strict(self, strict: bool | None) -> None:
        schema = parse(response_format=named(schema=SCHEMA, strict=strict)).json_schema
        assert schema is not None
        assert schema["properties"] == SCHEMA["properties"]
        assert "lenient" not in orjson.dumps(schema).decode()

    @pytest.mark.parametrize(
        ("value", "param"),
        [
            ("json_object", "response_format"),
            ({}, "response_format.type"),
            ({"type": "xml"}, "response_format.type"),
            ({"type": "json_schema"}, "response_format.json_schema"),
            ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "response_format.json_schema.name"),
        ],
    )
    def test_any_other_format_is_refused(self, value: Any, param: str) -> None:
        assert refusal(response_format=value).param == param

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"schema": []}, "response_format.json_schema.schema"),
            ({"schema": {"type": "x"}}, "response_format.json_schema.schema"),
            ({"strict": "yes"}, "response_format.json_schema.strict"),
            ({"description": 1}, "response_format.json_schema.description"),
            ({"name": "a b"}, "response_format.json_schema.name"),
        ],
    )
    def test_a_bad_schema_is_refused_naming_its_place(self, fields: Any, param: str) -> None:
        assert refusal(response_format=named(**fields)).param == param

    def test_a_keyword_that_cannot_be_enforced_is_named(self) -> None:
        error = refusal(response_format=named(schema={"type": "array", "uniqueItems": True}))
        assert (error.param, error.code) == ("response_format.json_schema.schema", "unsupported_schema")
        assert "uniqueItems" in error.message


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


class TestRules:
    def test_a_plain_request_has_none(self) -> None:
        assert rules() == AnswerRules()

    def test_a_schema_makes_a_grammar(self) -> None:
        assert "city" in rules(response_format=named(schema=SCHEMA)).grammar

    def test_without_a_choice_calls_are_free_but_follow_a_grammar_once_begun(self) -> None:
        found = rules(tools=[tool()])
        assert (found.tool_format, found.tool_names, found.is_tool_forced) == ("hermes", ("weather",), False)
        assert found.are_calls_enforced
        assert len(found.shown_tools) == 1

    def test_tools_that_must_not_be_called_are_not_shown(self) -> None:
        assert rules(tools=[tool()], tool_choice="none") == AnswerRules()

    def test_of_allowed_tools_all_are_shown_and_some_can_be_called(self) -> None:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("b")]}}
        found = rules(tools=[tool(), tool("b")], tool_choice=choice)
        assert (len(found.shown_tools), found.tool_names, found.is_tool_forced) == (2, ("b",), False)
        assert "weather" not in found.grammar

    def test_a_function_that_is_named_is_forced(self) -> None:
        choice = {"type": "function", "function": {"name": "b"}}
        found = rules(tools=[tool(), tool("b")], tool_choice=choice)
        assert (found.tool_names, found.is_tool_forced) == (("b",), True)

    def test_the_format_of_calls_is_the_models(self) -> None:
        found = rules_of(parse(tools=[tool()]), ChatFormat(lambda messages: [], LLAMA3, reasoning="think"))
        assert (found.tool_format, found.reasoning_format) == ("llama3", "think")

    def test_many_large_tools_are_no_reason_to_refuse_unless_they_must_be_called(self) -> None:
        many = [
            tool(f"f{n}", parameters={"properties": {f"property_{n}_{i}": {"type": "string"} for i in range(100)}})
            for n in range(40)
        ]
        found = rules(tools=many)
        assert (found.grammar, found.are_calls_enforced, len(found.tool_names)) == ("", False, 40)
        with pytest.raises(ApiError) as caught:
            rules(tools=many, tool_choice="required")
        assert caught.value.param == "tools"


class TestHistory:
    CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Paris"}'}}  # noqa: RUF012

    def message(self, **fields: Any) -> ChatMessage:
        [message] = parse(messages=[fields]).messages
        return message

    @pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
    def test_a_turn_of_calls_may_have_no_content(self, content: Any) -> None:
        assert self.message(role="assistant", tool_calls=[self.CALL], **content) == ChatMessage(
            "assistant", "", (ToolCall("c1", "weather", '{"city":  "Paris"}'),)
        )

    def test_a_turn_of_calls_may_have_content(self) -> None:
        parts = [{"type": "text", "text": "So: "}]
        assert self.message(role="assistant", tool_calls=[self.CALL], content=parts).content == "So: "

    def test_earlier_thoughts_are_kept_apart(self) -> None:
        assert self.message(role="assistant", content="Yes.", reasoning_content="Hm.").reasoning == "Hm."
        assert self.message(role="assistant", content="Yes.", reasoning_content=None).reasoning == ""
        error = refusal(messages=[{"role": "assistant", "content": "Yes.", "reasoning_content": 5}])
        assert error.param == "messages[0].reasoning_content"

    def test_the_content_of_a_result_may_be_a_list_of_parts(self) -> None:
        parts = [{"type": "text", "text": "Rainy"}]
        plain = self.message(role="tool", tool_call_id="c1", content="Rainy")
        assert self.message(role="tool", tool_call_id="c1", content=parts) == plain
        assert plain.tool_call_id == "c1"

    @pytest.mark.parametrize(
        ("calls", "param"),
        [
            ("x", "messages[0].tool_calls"),
            ([5], "messages[0].tool_calls[0]"),
            ([{"type": "custom"}], "messages[0].tool_calls[0].type"),
            ([{"id": "c"}], "messages[0].tool_calls[0].function"),
            ([{"function": {"name": "f", "arguments": "{}"}}], "messages[0].tool_calls[0].id"),
            ([{"id": "c", "function": {"arguments": "{}"}}], "messages[0].tool_calls[0].function.name"),
            ([{"id": "c", "function": {"name": "f"}}], "messages[0].tool_calls[0].function.arguments"),
            (
                [{"id": "c", "function": {"name": "f", "arguments": {}}}],
                "messages[0].tool_calls[0].function.arguments",
            ),
        ],
    )
    def test_what_is_no_call_is_refused_naming_its_place(self, calls: Any, param: str) -> None:
        assert refusal(messages=[{"role": "assistant", "tool_calls": calls}]).param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(["type", "properties", "items", "anyOf", "$ref", "enum", "minimum", "multipleOf", "pattern"])
SCHEMAS = st.recursive(
    st.sampled_from(["object", "string", "number", 5, -1, None, True, "(", "#/x", "#", 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


def params_of_refusal(**fields: Any) -> list[str]:
    """The field that a request is refused for; empty if it is taken."""
    try:
        rules_of(parse(**fields), ChatFormat(lambda messages: []))
    except ApiError as error:
        return [str(error.param)]
    return []


@given(schema=SCHEMAS | JSON, is_strict=st.booleans())
def test_any_schema_is_taken_or_refused_naming_it(schema: Any, is_strict: bool) -> None:
    for param in params_of_refusal(response_format=named(schema=schema)):
        assert param.startswith("response_format.json_schema.schema")
    for param in params_of_refusal(tools=[tool(parameters=schema, strict=is_strict)]):
        assert param.startswith("tools[0].function.parameters")


@given(value=JSON)
def test_any_value_of_these_fields_is_taken_or_refused_naming_it(value: Any) -> None:
    for name in ("tools", "tool_choice", "response_format"):
        for param in params_of_refusal(**{name: value}):
            assert param.startswith(name)
