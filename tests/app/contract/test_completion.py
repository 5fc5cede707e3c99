"""The contract of legacy completions: prompts in four shapes, and what this endpoint has of its own."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from openai.types import completion_create_params

from app.contract.completion import COMPLETION_FIELDS, CompletionCall, parse_completion
from app.errors import ApiError


def parse(**fields: Any) -> CompletionCall:
    return parse_completion(orjson.dumps({"model": "m", "prompt": "hi", **fields}))


def refusal(literal: str) -> ApiError:
    """`literal`: fields as JSON, without the braces."""
    with pytest.raises(ApiError) as caught:
        parse_completion(f'{{"model":"m","prompt":"hi",{literal}}}'.encode())
    error = caught.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    orjson.loads(error.render())
    return error


def test_the_least_request_has_openai_defaults() -> None:
    assert parse() == CompletionCall(model="m", prompts=("hi",), max_tokens=16)


def test_every_field_that_openai_documents_is_in_the_table() -> None:
    documented = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    extensions = {name for name, field in COMPLETION_FIELDS.items() if field.is_extension}
    assert documented == set(COMPLETION_FIELDS) - extensions


@pytest.mark.parametrize("name", sorted(COMPLETION_FIELDS.keys() - {"model", "prompt"}))
def test_an_explicit_null_is_the_same_as_an_absent_field(name: str) -> None:
    assert parse(**{name: None}) == parse()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a"] * 128, ("a",) * 128),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("5", "prompt"),
        ("true", "prompt"),
        ("{}", "prompt"),
        ("[]", "prompt"),
        ("[[]]", "prompt[0]"),
        ("[[1],[]]", "prompt[1]"),
        ('["a",1]', "prompt[1]"),
        ('[1,"a"]', "prompt[1]"),
        ('[[1],"a"]', "prompt[1]"),
        ('["a",[1]]', "prompt[1]"),
        ("[-1]", "prompt[0]"),
        ("[1.0]", "prompt[0]"),
        ("[true]", "prompt[0]"),
        ("[null]", "prompt[0]"),
        ("[NaN]", "prompt[0]"),
        ("[2147483648]", "prompt[0]"),
        ("[[1,2,1e999]]", "prompt[0][2]"),
        ('["\\ud83d"]', "prompt[0]"),
        (json.dumps(["a"] * 129), "prompt"),
    ],
)
def test_a_prompt_of_another_shape_is_refused_at_its_place(prompt: str, param: str) -> None:
    assert refusal(f'"prompt":{prompt}').param == param


def test_a_prompt_is_required() -> None:
    error = refusal('"prompt":null')
    assert (error.param, error.code) == ("prompt", "missing_required_parameter")


def test_no_tokens_at_all_may_be_asked_for() -> None:
    assert parse(max_tokens=0).max_tokens == 0
    assert refusal('"max_tokens":-1').param == "max_tokens"


def test_log_probabilities_are_a_number_from_0_to_5() -> None:
    assert parse().num_logprobs is None
    assert parse(logprobs=0).num_logprobs == 0
    assert parse(logprobs=5).num_logprobs == 5
    assert refusal('"logprobs":6').param == "logprobs"
    assert refusal('"logprobs":true').param == "logprobs"


def test_echo_with_log_probabilities_of_the_prompt_is_refused() -> None:
    error = refusal('"echo":true,"logprobs":0')
    assert (error.param, error.code) == ("logprobs", "unsupported_value")
    assert "echo" in error.message
    assert parse(echo=True).echo


@pytest.mark.parametrize("fields", ['"best_of":2', '"best_of":3,"n":2', '"best_of":1,"n":2', '"best_of":0'])
def test_choosing_the_best_of_several_is_refused(fields: str) -> None:
    assert refusal(fields).param == "best_of"


def test_best_of_n_of_n_is_all_of_them() -> None:
    assert parse(best_of=2, n=2) == parse(n=2)
    assert parse(best_of=1) == parse()


def test_a_suffix_is_refused() -> None:
    assert refusal('"suffix":"x"').param == "suffix"
    assert parse(suffix="") == parse()


def test_prompts_and_choices_together_are_limited() -> None:
    assert parse(prompt=["a"] * 64, n=2).num_choices == 128
    assert refusal('"prompt":["a","b","c"],"n":43').param == "n"


def test_stream_options_need_stream() -> None:
    assert refusal('"stream_options":{"include_usage":true}').param == "stream_options"
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage


def test_what_chat_has_alone_is_no_field_here() -> None:
    assert not {"messages", "tools", "response_format", "top_logprobs"} & COMPLETION_FIELDS.keys()
