"""`decode.engine.grammar`: which tokens a grammar lets through, where it ends, and what cannot be followed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.vocabulary import Vocabulary, VocabularyError, checkpoint_vocabulary
from decode.engine.engine import Engine, EngineConfig
from decode.engine.grammar import GrammarMatcher, Grammars
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import InvalidGrammar
from decode.scripted import ScriptedRunner
from tests.models import smollm2_path

EOS, END_OF_TURN, TOOL = 0, 1, 2
WORDS = [b"true", b"false", b'{"', b'":', b'", "', b"\xc3", b"\xa9"]
TOKENS = [b"", b"", b"", b"", *WORDS, *(bytes([byte]) for byte in range(128))]
VOCABULARY = Vocabulary(TOKENS, {EOS: "<eos>", END_OF_TURN: "<end_of_turn>", TOOL: "<tool>"}, (EOS, END_OF_TURN))
PARAMS = SamplingParams(max_tokens=100, stop_token_ids=(EOS, END_OF_TURN))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY)


def ids(text: str | bytes) -> list[int]:
    """One token a byte."""
    return [
        TOKENS.index(bytes([byte]), 4 + len(WORDS)) for byte in (text.encode() if isinstance(text, str) else text)
    ]


def matcher(grammars: Grammars, grammar: str, text: str = "", **changes: object) -> GrammarMatcher:
    params = replace(PARAMS, grammar=grammar, **changes)  # type: ignore[arg-type]
    return grammars.matcher("a", params, ids(text))


def allowed(matcher: GrammarMatcher) -> set[int]:
    mask = matcher.mask()
    assert mask.dtype == np.int32
    assert mask.shape == (-(-len(TOKENS) // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[len(TOKENS) :].any()
    return set(bits.nonzero()[0].tolist())


def texts(matcher: GrammarMatcher) -> set[bytes]:
    return {TOKENS[token] for token in allowed(matcher)}


def test_tokens_are_allowed_by_their_bytes(grammars: Grammars) -> None:
    assert texts(matcher(grammars, 'start: "true" | "false" | "tea"')) == {b"true", b"t", b"f", b"false"}


def test_a_character_may_be_cut_into_its_bytes(grammars: Grammars) -> None:
    follower = matcher(grammars, "start: /[é]x?/")
    assert texts(follower) == {b"\xc3"}
    follower.accept(TOKENS.index(b"\xc3"))
    assert texts(follower) == {b"\xa9"}


def test_the_output_so_far_decides(grammars: Grammars) -> None:
    whole = matcher(grammars, 'start: "a" ("b" | "c") "d"', "ac")
    stepwise = matcher(grammars, 'start: "a" ("b" | "c") "d"')
    for token in ids("ac"):
        stepwise.prepare()
        stepwise.accept(token)
    assert allowed(whole) == allowed(stepwise) == set(ids("d"))


def test_text_without_a_choice_is_cut_into_the_longest_tokens(grammars: Grammars) -> None:
    assert texts(matcher(grammars, 'start: "true!"')) == {b"true"}


def test_tokens_without_text_have_names(grammars: Grammars) -> None:
    follower = matcher(grammars, 'start: <tool> "x"')
    assert allowed(follower) == {TOOL}
    follower.accept(TOOL)
    assert texts(follower) == {b"x"}


def test_stop_tokens_are_allowed_where_the_grammar_may_end(grammars: Grammars) -> None:
    assert allowed(matcher(grammars, "start: /[0-9]+/")) == set(ids("0123456789"))
    assert allowed(matcher(grammars, "start: /[0-9]+/", "12")) == {EOS, END_OF_TURN, *ids("0123456789")}


def test_nothing_but_a_stop_token_follows_a_complete_output(grammars: Grammars) -> None:
    assert allowed(matcher(grammars, 'start: "ab"', "ab")) == {EOS, END_OF_TURN}


def test_only_the_stop_tokens_of_the_request_end_its_output(grammars: Grammars) -> None:
    assert allowed(matcher(grammars, 'start: "ab"', "ab", stop_token_ids=(END_OF_TURN, 9999, -1))) == {END_OF_TURN}
    assert allowed(matcher(grammars, 'start: "ab"', "ab", stop_token_ids=tuple(ids("!")))) == set(ids("!"))


def test_a_stop_token_with_a_text_of_its_own_ends_nothing_in_the_middle(grammars: Grammars) -> None:
    (q,) = ids("q")

    def may_end(text: str) -> bool:
        follower = matcher(grammars, 'start: "<" /[a-z]+/ ">"?', text, stop_token_ids=(q,), min_tokens=3)
        return q in allowed(follower)

    assert not may_end("<")
    assert not may_end("<a")  # the grammar may end here, but the output is too short
    assert may_end("<ab")


def test_an_output_goes_on_to_its_least_length_unless_it_is_complete(grammars: Grammars) -> None:
    digits = set(ids("0123456789"))
    assert allowed(matcher(grammars, "start: /[0-9]+/", "12", min_tokens=3)) == digits
    assert allowed(matcher(grammars, "start: /[0-9]+/", "123", min_tokens=3)) == {EOS, END_OF_TURN} | digits
    assert allowed(matcher(grammars, 'start: "ab"', "ab", min_tokens=3)) == {EOS, END_OF_TURN}


def test_a_mask_stays_until_a_token_is_accepted(grammars: Grammars) -> None:
    follower = matcher(grammars, "start: /[ab]+/")
    assert follower.mask() is follower.mask()
    follower.prepare()
    first = follower.mask()
    follower.accept(*ids("a"))
    assert follower.mask() is not first


def test_a_schema_is_followed_token_by_token(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    compact = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    grammar = json.dumps({"grammars": [{"json_schema": schema | compact}]})
    follower = matcher(grammars, grammar)
    text = b""
    while EOS not in allowed(follower):
        token = min(allowed(follower), key=lambda token: (-len(TOKENS[token]), token))
        text += TOKENS[token]
        follower.accept(token)
    assert json.loads(text) in ({"a": True}, {"a": False})


@given(st.lists(st.sampled_from("abc-"), max_size=8), st.integers(0, 3))
def test_a_mask_is_a_function_of_the_output_tokens(text: list[str], min_tokens: int) -> None:
    grammars = _SHARED
    params = {"min_tokens": min_tokens}
    stepwise = matcher(grammars, "start: /[abc]*/ (/-+/ /[ab]{1,3}/)?", **params)
    for index, letter in enumerate(text):
        (token,) = ids(letter)
        if token not in allowed(stepwise):
            with pytest.raises(InvalidGrammar, match=f"output token {index} does not follow it"):
                matcher(grammars, "start: /[abc]*/ (/-+/ /[ab]{1,3}/)?", "".join(text), **params)
            return
        stepwise.accept(token)
    again = matcher(grammars, "start: /[abc]*/ (/-+/ /[ab]{1,3}/)?", "".join(text), **params)
    assert allowed(again) == allowed(stepwise)


_SHARED = Grammars(lambda: VOCABULARY)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: nowhere", "unknown name"),
        ("start: (", "Expected"),
        ('{"grammars":[{"json_schema":{"type":"circle"}}]}', "circle"),
        ('{"grammars":', "EOF"),
        ("start: <nobody>", "nobody"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(
    grammars: Grammars, grammar: str, reason: str
) -> None:
    with pytest.raises(InvalidGrammar, match=f"^a: grammar: .*{reason}"):
        matcher(grammars, grammar)
    assert texts(matcher(grammars, 'start: "ok"')) == {b"o"}


def test_a_grammar_that_nothing_can_end_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidGrammar, match="stop_token_ids"):
        matcher(grammars, 'start: "a"', stop_token_ids=(99_999,))


def test_a_vocabulary_that_cannot_be_read_is_the_reason() -> None:
    def broken() -> Vocabulary:
        raise VocabularyError("kind 'rwkv' is not supported")

    with pytest.raises(InvalidGrammar, match="rwkv"):
        matcher(Grammars(broken), 'start: "a"')


def test_the_vocabulary_is_read_once() -> None:
    calls = []

    def read() -> Vocabulary:
        calls.append(1)
        return VOCABULARY

    grammars = Grammars(read)
    grammars.load()
    for _ in range(3):
        matcher(grammars, 'start: "a"')
    assert calls == [1]


def test_an_output_that_no_token_continues_says_so(grammars: Grammars) -> None:
    follower = matcher(grammars, 'start: "a" /[ÿ]/', "a")
    follower.accept(TOKENS.index(b"\xc3"))
    assert allowed(follower) == {EOS, END_OF_TURN}
    assert follower.failure


def test_more_grammars_than_are_kept_still_work() -> None:
    grammars = Grammars(lambda: VOCABULARY)
    for number in range(70):
        assert texts(matcher(grammars, f'start: "{number}a"', str(number))) == {b"a"}
    assert len(grammars._compiled) == 64


def engine_of(grammars: Grammars | None) -> Engine:
    config = EngineConfig(
        num_blocks=64, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=16, fingerprint="f", block_size=4
    )
    return Engine(ScriptedRunner(num_blocks=64, block_size=4), config, grammars)


def test_an_engine_without_a_vocabulary_refuses_grammars() -> None:
    with pytest.raises(InvalidGrammar, match="no vocabulary"):
        engine_of(None).add(Sequence("a", [5], replace(PARAMS, grammar='start: "a"')))


def compiled(engine: Engine) -> Engine:
    """With every grammar there, so that the next step schedules all."""
    wait([matcher for _, matcher in engine._compiling.values()])
    return engine


def test_a_grammar_that_does_not_compile_fails_its_sequence_alone() -> None:
    engine = engine_of(_SHARED)
    engine.add(Sequence("a", [5], replace(PARAMS, grammar="start: (")))
    engine.add(Sequence("b", [7, 8, 9], SamplingParams(max_tokens=2)))
    failed, going_on = compiled(engine).step()
    assert (failed.sequence_id, failed.token_ids, failed.finish_reason) == ("a", (), None)
    assert failed.failure is not None
    assert failed.failure.startswith("a: grammar: ")
    assert (going_on.sequence_id, going_on.failure) == ("b", None)
    engine.check_integrity()


class Held(Grammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: VOCABULARY)
        self.go_on = threading.Event()

    def matcher(self, sequence_id: str, sampling: SamplingParams, output_token_ids: list[int]) -> GrammarMatcher:
        assert self.go_on.wait(10)
        return super().matcher(sequence_id, sampling, output_token_ids)


def test_others_go_on_while_a_grammar_is_compiled_and_it_joins_them_then() -> None:
    grammars = Held()
    engine = engine_of(grammars)
    engine.add(Sequence("a", [5], replace(PARAMS, max_tokens=2, grammar="start: /[ab]{9}/")))
    engine.add(Sequence("b", [7, 8, 9], SamplingParams(max_tokens=9)))
    for _ in range(3):
        assert [output.sequence_id for output in engine.step()] == ["b"]
        engine.check_integrity()
    assert (engine.load().num_waiting, engine.load().num_running) == (1, 1)
    grammars.go_on.set()
    assert {output.sequence_id for output in compiled(engine).step()} == {"a", "b"}


def test_the_blocks_of_a_sequence_whose_grammar_is_compiled_are_claimed() -> None:
    grammars = Held()
    engine = engine_of(grammars)
    assert engine.can_accept()
    engine.add(Sequence("a", [5] * 196, replace(PARAMS, max_tokens=2, grammar="start: /[ab]{9}/")))
    assert not engine.can_accept(), "49 of 64 blocks are claimed, and a share is 16"
    grammars.go_on.set()
    assert engine.abort("a")
    assert engine.can_accept()


def test_what_else_goes_wrong_while_a_grammar_is_compiled_ends_its_sequence_alone() -> None:
    class Broken(Grammars):
        def matcher(self, sequence_id: str, sampling: SamplingParams, output_token_ids: list[int]) -> GrammarMatcher:
            raise ZeroDivisionError("inside the library")

    engine = engine_of(Broken(lambda: VOCABULARY))
    engine.add(Sequence("a", [5], replace(PARAMS, grammar="start: /[ab]/")))
    engine.add(Sequence("b", [7, 8, 9], SamplingParams(max_tokens=2)))
    failed, going_on = compiled(engine).step()
    assert "ZeroDivisionError" in str(failed.failure)
    assert (going_on.sequence_id, going_on.failure) == ("b", None)
    engine.check_integrity()


def test_a_step_with_nothing_but_a_grammar_to_wait_for_returns() -> None:
    grammars = Held()
    engine = engine_of(grammars)
    engine.add(Sequence("a", [5], replace(PARAMS, max_tokens=1, grammar="start: /[ab]{9}/")))
    assert engine.step() == []
    assert engine.has_unfinished
    grammars.go_on.set()
    while engine.has_unfinished:
        outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["length"]


def test_a_sequence_is_aborted_while_its_grammar_is_compiled() -> None:
    grammars = Held()
    engine = engine_of(grammars)
    for name in ("a", "b"):
        engine.add(Sequence(name, [5], replace(PARAMS, max_tokens=1, grammar="start: /[ab]{9}/")))
    assert engine.abort("a")
    assert not engine.abort("a")
    grammars.go_on.set()
    while engine.has_unfinished:
        assert {output.sequence_id for output in engine.step()} <= {"b"}
    engine.check_integrity()


def test_a_sequence_whose_grammar_fails_ends_alone_and_says_why() -> None:
    engine = engine_of(_SHARED)
    failing = Sequence("a", [5, 6], replace(PARAMS, grammar="start: /[ab]+/"))
    engine.add(failing)
    engine.add(Sequence("b", [7, 8, 9], SamplingParams(max_tokens=3)))
    compiled(engine)._compiling["a"][1].result().failure = "too complex"
    outputs = {output.sequence_id: output for output in engine.step()}
    assert (outputs["a"].token_ids, outputs["a"].finish_reason, outputs["a"].failure) == ((), None, "too complex")
    assert (len(outputs["b"].token_ids), outputs["b"].failure) == (1, None)
    engine.check_integrity()
    while engine.has_unfinished:
        assert {output.sequence_id for output in engine.step()} == {"b"}


def test_masks_are_being_computed_while_the_model_runs() -> None:
    under_way: list[bool] = []

    class Runner(ScriptedRunner):
        def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            under_way.extend(item.sequence.grammar._next is not None for item in plan.scheduled)
            return super().execute(plan)

    engine = engine_of(_SHARED)
    engine._runner = Runner(num_blocks=64, block_size=4)
    engine.add(Sequence("a", [5], replace(PARAMS, max_tokens=2, grammar="start: /[ab]{9}/")))
    compiled(engine).step()
    engine.step()
    assert under_way == [True, True]


def test_the_vocabulary_of_a_real_checkpoint_follows_a_schema() -> None:
    vocabulary = checkpoint_vocabulary(open_checkpoint(smollm2_path()))
    assert len(vocabulary.token_bytes) == 49152
    assert vocabulary.names[2] == "<|im_end|>"
    grammar = (
        '{"grammars":[{"json_schema":{"type":"object","required":["name"],"properties":{"name":{"const":"é"}}}}]}'
    )
    params = SamplingParams(max_tokens=9, stop_token_ids=vocabulary.eos_token_ids, grammar=grammar)
    follower = Grammars(lambda: vocabulary).matcher("a", params, [])
    bits = np.unpackbits(follower.mask().view(np.uint8), bitorder="little")
    first = {vocabulary.token_bytes[token] for token in bits.nonzero()[0]}
    assert first
    assert all(text.startswith(b"{") for text in first)
