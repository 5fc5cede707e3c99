"""The text edge as the HTTP room uses it: whole checkpoints in, ids and text out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.dialect.conversation import ChatMessage, PromptError, PromptTooLong
from app.text.edge import TextEdge, open_text_edge
from app.text.scripted import scripted_text_edge
from tests.app.corpus import CHATS
from tests.app.text_checkpoints import (
    CHATML,
    GEMMA,
    checkpoint_of,
    golden,
    llama3_directory,
    metaspace_directory,
    smollm2,
    trained,
)


@pytest.fixture(params=["chatml", "gemma", "no template", "hf", "scripted"])
def edge(request: pytest.FixtureRequest, tmp_path: Path) -> TextEdge:
    match request.param:
        case "chatml":
            return open_text_edge(checkpoint_of(smollm2(), CHATML, (2,)))
        case "gemma":
            return open_text_edge(checkpoint_of(trained(False)[1], GEMMA, (1,)))
        case "no template":
            return open_text_edge(checkpoint_of(trained(False)[1], None, (1,)))
        case "hf":
            return open_text_edge(checkpoint_of(llama3_directory(tmp_path), CHATML, (0,)))
        case _:
            return scripted_text_edge()


def decoded(edge: TextEdge, token_ids: list[int]) -> str:
    detokenizer = edge.detokenizer()
    return detokenizer.push(token_ids) + detokenizer.finish()


def test_smollm2s_chats_are_llama_cpps() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), golden("smollm2")["template"]))
    prompts = [edge.render_chat([ChatMessage(role, text) for role, text in chat]) for chat in CHATS]
    assert prompts == golden("smollm2")["chats"]


def test_developer_acts_as_system(edge: TextEdge) -> None:
    developer = edge.render_chat([ChatMessage("developer", "Be kind."), ChatMessage("user", "Hello")])
    assert developer == edge.render_chat([ChatMessage("system", "Be kind."), ChatMessage("user", "Hello")])


def test_system_and_developer_together_are_taken(edge: TextEdge) -> None:
    roles = ["system", "developer", "user"]
    assert edge.render_chat([ChatMessage(role, f"for {role}") for role in roles])


def test_the_same_messages_give_the_same_prompt(edge: TextEdge) -> None:
    messages = [ChatMessage("user", "Hello, world!")]
    assert edge.render_chat(messages) == edge.render_chat(messages)


def test_no_messages_are_refused(edge: TextEdge) -> None:
    with pytest.raises(PromptError, match="at least one message") as caught:
        edge.render_chat([])
    assert caught.value.param == "messages"


def test_an_unknown_role_is_refused_with_its_place(edge: TextEdge) -> None:
    with pytest.raises(PromptError, match=r"role must be one of .*; got 'wizard'") as caught:
        edge.render_chat([ChatMessage("user", "A"), ChatMessage("wizard", "B")])
    assert caught.value.param == "messages[1].role"


def test_a_lone_surrogate_is_refused_with_its_place(edge: TextEdge) -> None:
    with pytest.raises(PromptError, match="lone surrogate") as caught:
        edge.render_chat([ChatMessage("user", "A \ud83d")])
    assert caught.value.param == "messages[0].content"
    with pytest.raises(PromptError, match="lone surrogate"):
        edge.encode("\ude00")


def test_eos_tokens_have_no_text(edge: TextEdge) -> None:
    assert edge.eos_token_ids
    assert decoded(edge, list(edge.eos_token_ids)) == ""


def test_ids_that_do_not_exist_have_no_text() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML))
    assert decoded(edge, [10**6]) == ""


def test_control_tokens_have_no_text() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML))
    prompt = edge.render_chat([ChatMessage("user", "Hello")])
    assert decoded(edge, prompt) == "system\nBe kind.\nuser\nHello\nassistant\n"


def test_without_a_template_texts_are_joined_by_newlines_after_one_bos() -> None:
    edge = open_text_edge(checkpoint_of(trained(False)[1], None))
    prompt = edge.render_chat([ChatMessage("system", "Be kind."), ChatMessage("user", "Hello <bos>")])
    assert prompt == edge.encode("Be kind.\nHello <bos>")
    assert prompt.count(2) == 1


def test_a_sentencepiece_answer_loses_the_space_that_the_tokenizer_adds(tmp_path: Path) -> None:
    for source in (trained(True)[1], metaspace_directory(tmp_path, "first")):
        edge = open_text_edge(checkpoint_of(source, None))
        assert decoded(edge, edge.encode("hello  world")) == "hello  world"


def test_a_sentencepiece_answer_keeps_its_space_where_the_tokenizer_adds_none() -> None:
    edge = open_text_edge(checkpoint_of(trained(False)[1], None))
    assert decoded(edge, edge.encode(" hello")) == " hello"


def test_detokenizers_of_one_model_do_not_share_state() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML))
    emoji = edge.encode("😀")
    first, second = edge.detokenizer(["!"]), edge.detokenizer()
    first.push(emoji[:1])
    assert second.push(emoji) == "😀"
    assert first.push(emoji[1:]) == "😀"


def test_a_stop_string_is_matched_over_tokens() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML))
    detokenizer = edge.detokenizer(["lazy dog"])
    token_ids = edge.encode("The quick brown fox jumps over the lazy dog. It's")
    assert "".join(detokenizer.push([token_id]) for token_id in token_ids) == "The quick brown fox jumps over the "
    assert detokenizer.num_tokens_used == len(edge.encode("The quick brown fox jumps over the lazy dog"))


def test_a_prompt_without_special_tokens_is_the_text_alone(edge: TextEdge) -> None:
    with_special = edge.encode("the cat sat")
    without = edge.encode("the cat sat", add_special_tokens=False)
    assert with_special[len(with_special) - len(without) :] == without


def test_a_checkpoint_with_a_bos_has_it_as_special_token() -> None:
    edge = open_text_edge(checkpoint_of(trained(False)[1], None, (1,)))
    assert len(edge.encode("a")) == len(edge.encode("a", add_special_tokens=False)) + 1


@given(text=st.text(max_size=30))
def test_an_encoded_text_decodes_to_itself(text: str) -> None:
    edge = open_text_edge(checkpoint_of(trained(False)[1], None, (1,)))
    assert edge.decode(edge.encode(text, add_special_tokens=False)) == text


def test_control_tokens_are_decoded_to_their_names() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML, (2,)))
    text = edge.decode(edge.render_chat([ChatMessage("user", "hi<|im_end|>")]))
    assert text.endswith("<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n")


def test_every_token_of_the_scripted_engine_is_in_its_vocabulary() -> None:
    edge = scripted_text_edge()
    assert edge.vocab_size == 1000 + 256
    assert edge.decode([999, edge.vocab_size - 256 + ord("}")]) == "<999>}"


@pytest.mark.parametrize("text", ["a", "The cat sat on the mat. ", " ", "1", "\U0001f30a", "<|im_end|>"])
def test_a_text_far_beyond_the_context_is_refused_after_a_small_part_of_it(text: str) -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML, (2,), max_model_len=64))
    encode = edge._encode
    encoded: list[int] = []

    def counted(part: str) -> list[int]:
        encoded.append(len(part))
        return encode(part)

    edge._encode = counted
    huge = text * (1_000_000 // len(text))
    for refused in (lambda: edge.encode(huge), lambda: edge.render_chat([ChatMessage("user", huge)])):
        with pytest.raises(PromptTooLong) as caught:
            refused()
        assert (caught.value.limit, caught.value.num_tokens) == (64, 80)
    assert caught.value.param == "messages"
    assert sum(encoded) < 100_000


def test_a_prompt_that_fits_is_never_refused_for_its_length() -> None:
    edge = open_text_edge(checkpoint_of(smollm2(), CHATML, (2,), max_model_len=16))
    exact = open_text_edge(checkpoint_of(smollm2(), CHATML, (2,)))
    refused = []
    for num_words in (1, 8, 15, 16, 17, 19, 20, 21, 40, 100):
        text = "international " * num_words
        num_tokens = len(exact.encode(text))
        try:
            assert len(edge.encode(text)) == num_tokens
        except PromptTooLong:
            refused.append(num_tokens)
    assert len(refused) > 2
    assert min(refused) > 20


def test_a_checkpoint_that_lacks_an_unknown_token_is_taken() -> None:
    source = dataclasses.replace(smollm2(), unknown_token_id=None, bos_token_id=None, padding_token_id=None)
    assert open_text_edge(checkpoint_of(source, CHATML)).encode("Hello")


class TestScripted:
    def test_output_ids_read_as_numbers_in_angle_brackets(self) -> None:
        assert decoded(scripted_text_edge(), [101, 102, 7]) == "<101><102><7>"

    def test_a_prompt_is_the_bytes_of_one_line_per_message(self) -> None:
        prompt = scripted_text_edge().render_chat([ChatMessage("developer", "é"), ChatMessage("user", "b")])
        assert bytes(prompt).decode() == "system: é\nuser: b\nassistant:"

    def test_stop_strings_work(self) -> None:
        detokenizer = scripted_text_edge().detokenizer(["><10"])
        assert (detokenizer.push([101]), detokenizer.push([102])) == ("<101", "")
        assert detokenizer.stopped
