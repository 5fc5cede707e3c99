"""The contract of a chat request: what is taken, what is refused, and which field is named."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.contract.chat import CHAT_FIELDS, ChatCall, parse_chat
from app.dialect.conversation import ChatMessage
from app.errors import ApiError

HELLO = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> ChatCall:
    return parse_chat(orjson.dumps({"model": "m", "messages": HELLO, **fields}))


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    error = caught.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert b"NaN" not in error.render()
    return error


def raw_refusal(name: str, literal: str) -> ApiError:
    body = f'{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"{name}":{literal}}}'
    with pytest.raises(ApiError) as caught:
        parse_chat(body.encode())
    orjson.loads(caught.value.render())
    return caught.value


def test_the_least_request_has_openai_defaults() -> None:
    assert parse() == ChatCall(
        model="m",
        messages=(ChatMessage("user", "hi"),),
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        seed=None,
        stop=(),
        stream=False,
        include_usage=False,
        top_k=0,
        min_p=0.0,
        ignore_eos=False,
        min_tokens=0,
    )


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS.keys() - {"model", "messages"}))
def test_an_explicit_null_is_the_same_as_an_absent_field(name: str) -> None:
    assert parse(**{name: None}) == parse()


def test_unknown_fields_are_ignored() -> None:
    assert parse(made_up=[1, {"x": None}]) == parse()


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_required_field_must_be_there(name: str) -> None:
    error = refusal(**{name: None})
    assert (error.param, error.code) == (name, "missing_required_parameter")


@pytest.mark.parametrize(
    ("name", "literal"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-Infinity"),
        ("temperature", "1e999"),
        ("temperature", "-0.1"),
        ("temperature", "2.1"),
        ("temperature", '"0.7"'),
        ("temperature", "true"),
        ("temperature", "[0.7]"),
        ("top_p", "0"),
        ("top_p", "NaN"),
        ("top_p", "1.01"),
        ("top_p", "false"),
        ("min_p", "-0.5"),
        ("min_p", "1.5"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("presence_penalty", "10"),
        ("presence_penalty", "NaN"),
        ("frequency_penalty", "-2.1"),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "1.5"),
        ("max_tokens", "true"),
        ("max_tokens", '"5"'),
        ("max_tokens", "100000000000000000000000000"),
        ("max_completion_tokens", "0"),
        ("max_completion_tokens", "Infinity"),
        ("min_tokens", "-1"),
        ("seed", "9223372036854775808"),
        ("seed", "-9223372036854775809"),
        ("seed", "1.0"),
        ("seed", "true"),
        ("stop", '["a","b","c","d","e"]'),
        ("stop", "1"),
        ("stop", '{"a":1}'),
        ("stop", '""'),
        ("stream", "1"),
        ("stream", '"true"'),
        ("stream_options", "true"),
        ("ignore_eos", "0"),
        ("n", "0"),
        ("n", "129"),
        ("n", "true"),
        ("model", "5"),
        ("model", '""'),
        ("logprobs", "1"),
        ("top_logprobs", "21"),
        ("top_logprobs", "5"),
        ("logit_bias", "[]"),
        ("logit_bias", '{"x":1}'),
        ("logit_bias", '{"-1":1}'),
        ("logit_bias", '{"9999999999":1}'),
        ("logit_bias", '{"\u0661":1}'),
        ("logit_bias", json.dumps({str(number): 1 for number in range(1025)})),
        ("presence_penalty", "2.1"),
        ("background", '"yes"'),
        ("return_token_ids", "1"),
        ("response_format", '"json_object"'),
        ("tools", "{}"),
        ("tool_choice", '"required"'),
        ("modalities", '["text","audio"]'),
        ("audio", "{}"),
        ("web_search_options", "{}"),
        ("user", "5"),
        ("metadata", "[]"),
        ("service_tier", '"gold"'),
        ("parallel_tool_calls", "1"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused_naming_the_field(name: str, literal: str) -> None:
    error = raw_refusal(name, literal)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", name)
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "literal", "param"),
    [
        ("stop", '["a", 1]', "stop[1]"),
        ("stop", '["a", ""]', "stop[1]"),
        ("metadata", '{"a": 1}', "metadata"),
        ("messages", "{}", "messages"),
        ("messages", '"hi"', "messages"),
        ("messages", "[]", "messages"),
        ("messages", "[1]", "messages[0]"),
        ("messages", '[{"content":"x"}]', "messages[0].role"),
        ("messages", '[{"role":"robot","content":"x"}]', "messages[0].role"),
        ("messages", '[{"role":["user"],"content":"x"}]', "messages[0].role"),
        ("messages", '[{"role":"user"}]', "messages[0].content"),
        ("messages", '[{"role":"user","content":null}]', "messages[0].content"),
        ("messages", '[{"role":"assistant","content":null}]', "messages[0].content"),
        ("messages", '[{"role":"assistant","content":null,"tool_calls":[]}]', "messages[0].content"),
        ("messages", '[{"role":"user","content":5}]', "messages[0].content"),
        ("messages", '[{"role":"user","content":[]}]', "messages[0].content"),
        ("messages", '[{"role":"user","content":["x"]}]', "messages[0].content[0]"),
        ("messages", '[{"role":"user","content":[{"type":"text"}]}]', "messages[0].content[0].text"),
        ("messages", '[{"role":"user","content":[{"type":"text","text":NaN}]}]', "messages[0].content[0].text"),
        (
            "messages",
            '[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]',
            "messages[0].content[0].type",
        ),
        ("messages", '[{"role":"user","content":[{"type":"refusal","refusal":"x"}]}]', "messages[0].content[0].type"),
        ("messages", '[{"role":"user","content":"x","name":5}]', "messages[0].name"),
        ("messages", '[{"role":"tool","content":"x"}]', "messages[0].tool_call_id"),
        ("messages", '[{"role":"user","content":"\\ud83d"}]', "messages[0].content"),
        ("stream_options", '{"include_usage":1}', "stream_options.include_usage"),
        ("logit_bias", '{"5":100.5}', "logit_bias.5"),
        ("logit_bias", '{"5":NaN}', "logit_bias.5"),
    ],
)
def test_a_value_inside_is_named_by_its_place(name: str, literal: str, param: str) -> None:
    assert raw_refusal(name, literal).param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("n", 128),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("logit_bias", {"50256": -100}),
        ("logprobs", True),
        ("background", True),
        ("top_logprobs", 0),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("modalities", ["text"]),
        ("parallel_tool_calls", True),
        ("metadata", {"a": "b"}),
        ("user", "u"),
        ("store", True),
        ("service_tier", "auto"),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "s"),
    ],
)
def test_every_documented_field_has_values_that_are_taken(name: str, value: Any) -> None:
    parse(**{name: value})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": 1}, "The values of metadata must be strings."),
        ({"a": None}, "The values of metadata must be strings."),
        ({"a": "x" * 513}, "The values of metadata must have at most 512 characters."),
        ({"x" * 65: "a"}, "The keys of metadata must have at most 64 characters."),
        ({str(number): "a" for number in range(17)}, "metadata must have at most 16 entries."),
    ],
)
def test_metadata_is_told_what_of_it_is_wrong(metadata: dict[str, Any], message: str) -> None:
    error = refusal(metadata=metadata)
    assert (error.param, error.message) == ("metadata", message)


def test_stop_is_one_string_or_up_to_four() -> None:
    assert parse(stop="a").stop == ("a",)
    assert parse(stop=["a", "b", "c", "d"]).stop == ("a", "b", "c", "d")


def test_an_empty_list_of_stop_strings_is_none() -> None:
    assert parse(stop=[]).stop == ()


def test_stream_options_need_stream() -> None:
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(stream_options={"include_usage": True}, stream=False).param == "stream_options"
    assert parse(stream_options={"include_usage": True}, stream=True).include_usage
    assert not parse(stream_options={"include_usage": None}, stream=True).include_usage


@pytest.mark.parametrize(("asked", "read"), [(None, 0), (-1, 0), (0, 0), (40, 40)])
def test_top_k_is_off_as_other_servers_write_it_too(asked: int | None, read: int) -> None:
    assert parse(top_k=asked).top_k == read


def test_min_tokens_cannot_be_more_than_the_limit() -> None:
    assert refusal(min_tokens=6, max_tokens=5).param == "min_tokens"
    assert parse(min_tokens=5, max_tokens=5).min_tokens == 5


def test_log_probabilities_are_asked_for_with_and_without_others_beside_them() -> None:
    assert parse().num_logprobs is None
    assert parse(logprobs=True).num_logprobs == 0
    assert parse(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert refusal(top_logprobs=5, logprobs=False).param == "top_logprobs"


def test_biases_are_read_as_numbers_of_tokens() -> None:
    assert parse(logit_bias={"7": -100, "8": 0.5}).logit_bias == ((7, -100.0), (8, 0.5))


def test_list_content_is_joined_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    for role in ("system", "developer", "user", "assistant"):
        [message] = parse(messages=[{"role": role, "content": parts}]).messages
        assert message == ChatMessage(role, "a b")


def test_an_assistant_turn_may_be_a_refusal() -> None:
    parts = [{"type": "refusal", "refusal": "no"}]
    assert parse(messages=[{"role": "assistant", "content": parts}]).messages[0].content == "no"


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS))
def test_every_field_describes_itself_as_json_schema(name: str) -> None:
    orjson.dumps(CHAT_FIELDS[name].kind.schema())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.sampled_from(sorted(CHAT_FIELDS)), value=JSON)
def test_any_value_in_any_field_is_taken_or_refused_naming_it(name: str, value: Any) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, name: value})
    param: str | None = name
    try:
        parse_chat(body.encode())
    except ApiError as error:
        param = error.param
    assert param is not None
    assert param.startswith(name)


@given(body=st.binary(max_size=64))
def test_any_bytes_are_refused_in_shape(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    orjson.loads(caught.value.render())
