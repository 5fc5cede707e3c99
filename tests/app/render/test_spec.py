"""The bytes of an answer's spec."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from app.render.spec import AnswerSpec, SpecError, decode_spec

SPEC = AnswerSpec(
    request_id="chatcmpl-1",
    kind="chat",
    created_s=1,
    model="m",
    system_fingerprint="fp",
    n=2,
    num_prompts=2,
    num_prompt_tokens=9,
    stream=True,
    stop=("a", "é"),
    end_token_ids=(2,),
    num_logprobs=0,
    echo=("x", "y"),
    metadata={"k": "v"},
    prompt_token_ids=((5, 6), (7,)),
)


def test_a_spec_comes_back_as_it_was() -> None:
    assert decode_spec(SPEC.encode()) == SPEC
    least = AnswerSpec(request_id="a", kind="completion", created_s=0, model="m")
    assert decode_spec(least.encode()) == least


def test_a_spec_of_before_token_ids_shows_none_and_one_without_them_is_as_it_was_then() -> None:
    before = orjson.loads(replace(SPEC, prompt_token_ids=()).encode())
    assert "prompt_token_ids" not in before
    read = decode_spec(orjson.dumps(before))
    assert not read.shows_token_ids
    assert SPEC.shows_token_ids


def test_the_choices_of_all_prompts_have_ids_of_their_own() -> None:
    assert SPEC.choice_ids == ("chatcmpl-1", "chatcmpl-1.1", "chatcmpl-1.2", "chatcmpl-1.3")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"v":1}',
        SPEC.encode()[:-1],
        orjson.dumps({**orjson.loads(SPEC.encode()), "v": 999}),
        orjson.dumps({**orjson.loads(SPEC.encode()), "more": 1}),
        orjson.dumps({**orjson.loads(SPEC.encode()), "stop": None}),
        orjson.dumps({**orjson.loads(SPEC.encode()), "prompt_token_ids": [5]}),
    ],
)
def test_bytes_of_another_version_or_damaged_ones_are_never_guessed_at(data: bytes) -> None:
    with pytest.raises(SpecError):
        decode_spec(data)
