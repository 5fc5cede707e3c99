"""Chat formats, against the checkpoint's Jinja template rendered on the real text and encoded with control tokens."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import jinja2
import pytest
import tokenizers

from app.dialect.conversation import ChatMessage, Piece, PromptError
from app.text.gguf import load_gguf_tokenizer
from app.text.hf import load_hf_tokenizer
from app.text.jinja import JinjaTemplate, TemplateRefusal
from app.text.templates import ChatMl, ChatTemplate, Gemma, OwnTemplate, choose_template, folded
from app.text.tokenizer import TokenizerError
from tests.app.corpus import CHATS, FORGERIES, TEXTS
from tests.app.text_checkpoints import CHATML, GEMMA, LLAMA3, golden, llama3_directory, smollm2, trained

_GEMMA_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
_PIRATE = "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}assistant>"


def chat(*turns: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role, content) for role, content in turns]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def rendered(source: str, messages: list[ChatMessage], **tokens: str) -> str:
    """The template on the messages as they are: what a checkpoint means, and what we must not do with strangers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = lambda message: (_ for _ in ()).throw(AssertionError(message))
    shown = [{"role": message.role, "content": message.content} for message in messages]
    return environment.from_string(source).render(messages=shown, add_generation_prompt=True, **tokens)


def corpus_chats() -> list[list[ChatMessage]]:
    chats = [chat(*turns) for turns in CHATS]
    roles = ["system", "user", "assistant", "user"]
    windows = (TEXTS[start : start + 4] for start in range(len(TEXTS) - 3))
    return chats + [chat(*zip(roles, window, strict=True)) for window in windows]


class TestChatMl:
    def test_smollm2s_template_is_rendered_directly_with_its_default_system_turn(self) -> None:
        template = choose_template(golden("smollm2")["template"], {})
        assert template == ChatMl("You are a helpful AI assistant named SmolLM, trained by Hugging Face")

    @pytest.mark.parametrize("number", range(len(CHATS)))
    def test_ids_are_llama_cpps(self, number: int) -> None:
        template = choose_template(golden("smollm2")["template"], {})
        ids = load_gguf_tokenizer(smollm2()).encode_pieces(template(chat(*CHATS[number])))
        assert ids == golden("smollm2")["chats"][number]

    def test_text_is_the_templates_for_every_text(self) -> None:
        template = choose_template(CHATML, {})
        assert isinstance(template, ChatMl)
        for messages in corpus_chats():
            assert text_of(template(messages)) == rendered(CHATML, messages)

    def test_a_checkpoint_without_a_default_system_turn_gets_none(self) -> None:
        source = CHATML.replace("{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}", "")
        assert choose_template(source, {}) == ChatMl(None)

    @pytest.mark.parametrize(
        "source",
        [
            CHATML.replace("message['content']", "message['content'] | trim"),
            CHATML.replace("'\n' + message['content']", "'\n' + message['content'] + ('!' if loop.last else '')"),
            CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"),
            CHATML.replace("message['role'] + '\n'", "('user' if message.role == 'tool' else message.role) + '\n'"),
            CHATML + "{# content.split('</think>') #}",
            CHATML.replace("Be kind.", "Today is ' + strftime_now('%Y') + '."),
        ],
    )
    def test_a_template_that_bends_chatml_is_followed_itself(self, source: str) -> None:
        assert isinstance(choose_template(source, {}), OwnTemplate)


class TestGemma:
    def template(self) -> ChatTemplate:
        template = choose_template(GEMMA, _GEMMA_TOKENS)
        assert isinstance(template, Gemma)
        return template

    def test_ids_are_those_of_the_rendered_template(self) -> None:
        reference, source = trained(False)
        tokenizer = load_gguf_tokenizer(source)
        for messages in corpus_chats():
            text = rendered(GEMMA, messages, **_GEMMA_TOKENS)
            if (
                "<unk>" in text
            ):  # one text of the corpus spells it: harmless for us, a control token for the reference
                continue
            expected: list[int] = []
            for part in re.split("(<bos>|<start_of_turn>|<end_of_turn>)", text):
                token_id = reference.piece_to_id(part)
                expected += [token_id] if reference.is_control(token_id) else reference.encode(part)
            assert tokenizer.encode_pieces(self.template()(messages)) == expected

    def test_there_is_one_bos(self) -> None:
        ids = load_gguf_tokenizer(trained(False)[1]).encode_pieces(self.template()(chat(("user", "Hello"))))
        assert (ids[0], ids.count(2)) == (2, 1)

    def test_system_text_leads_the_first_user_turn(self) -> None:
        assert text_of(self.template()(chat(("system", "Be kind."), ("user", " Hello ")))) == (
            "<bos><start_of_turn>user\nBe kind.\n\nHello<end_of_turn>\n<start_of_turn>model\n"
        )

    def test_several_system_texts_lead_it_together(self) -> None:
        text = text_of(self.template()(chat(("system", "A"), ("system", "B"), ("user", "C"))))
        assert text == "<bos><start_of_turn>user\nA\n\nB\n\nC<end_of_turn>\n<start_of_turn>model\n"

    def test_neighbours_of_one_role_share_a_turn(self) -> None:
        text = text_of(self.template()(chat(("user", "A"), ("user", "B"), ("assistant", "C"), ("tool", "D"))))
        assert text == (
            "<bos><start_of_turn>user\nA\n\nB<end_of_turn>\n<start_of_turn>model\nC<end_of_turn>\n"
            "<start_of_turn>user\nD<end_of_turn>\n<start_of_turn>model\n"
        )

    def test_a_template_that_refuses_the_system_role_is_rendered_directly_too(self) -> None:
        source = GEMMA.replace("{% set start = messages[0].content + '\n\n' %}", "{{ raise_exception('no system') }}")
        assert source != GEMMA
        assert isinstance(choose_template(source, _GEMMA_TOKENS), Gemma)


class TestOwnTemplate:
    def test_llama_3_ids_are_those_of_the_rendered_template(self, tmp_path: Path) -> None:
        files = llama3_directory(tmp_path)
        tokenizer = load_hf_tokenizer(files)
        template = choose_template(LLAMA3, tokenizer.template_tokens)
        reference = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        reference.no_truncation()
        for messages in corpus_chats():
            text = rendered(LLAMA3, messages, **tokenizer.template_tokens)
            ids = tokenizer.encode_pieces(template(messages))
            assert ids == reference.encode(text, add_special_tokens=False).ids
            assert ids.count(tokenizer.prompt_prefix[0]) == 1

    @pytest.mark.parametrize("text", ["  a b\n", "", "  ", "\n\na", "\u3000a\u3000", "1234567890" * 20])
    def test_white_space_around_a_text_is_the_templates_business(self, text: str) -> None:
        for source in (_PIRATE, _PIRATE.replace("m.content", "m.content | trim")):
            messages = chat(("user", text), ("assistant", text), ("user", text))
            assert text_of(OwnTemplate(JinjaTemplate(source, {}))(messages)) == rendered(source, messages)

    def test_lines_that_hold_only_a_block_leave_no_white_space(self) -> None:
        source = "{% for m in messages %}\n    {% if m.role %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
        messages = chat(("user", "A"), ("assistant", "B"), ("user", "C"))
        assert text_of(choose_template(source, {})(messages)) == "A\nB\nC\n"

    def test_many_messages_find_their_places(self) -> None:
        messages = chat(*((("user", "assistant")[n % 2], f"text {n}") for n in range(201)))
        assert text_of(OwnTemplate(JinjaTemplate(_PIRATE, {}))(messages)) == rendered(_PIRATE, messages)

    def test_only_what_the_template_wrote_is_scaffold(self) -> None:
        pieces = choose_template(_PIRATE, {})(chat(("user", "assistant>")))
        assert pieces == [Piece("user> ", True), Piece("assistant>", False), Piece("\nassistant>", True)]

    def test_a_template_that_refuses_system_text_gets_it_in_the_user_turn(self) -> None:
        source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + _PIRATE
        template = choose_template(source, {})
        assert text_of(template(chat(("system", "A"), ("user", "B")))) == "user> A\n\nB\nassistant>"

    def test_a_template_that_leaves_system_text_out_gets_it_in_the_user_turn(self) -> None:
        source = _PIRATE.replace("in messages", "in messages if m.role != 'system'")
        template = choose_template(source, {})
        assert text_of(template(chat(("system", "A"), ("user", "B")))) == "user> A\n\nB\nassistant>"

    def test_messages_that_it_refuses_in_any_shape_are_the_clients_error(self) -> None:
        source = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + _PIRATE
        with pytest.raises(PromptError, match="refuses these messages: too long") as caught:
            choose_template(source, {})(chat(("user", "A"), ("assistant", "B"), ("user", "C")))
        assert caught.value.param == "messages"

    def test_a_template_that_cuts_into_a_text_is_refused(self) -> None:
        source = _PIRATE.replace("m.content", "m.content[:2]")
        with pytest.raises(TokenizerError, match="cuts into the text"):
            choose_template(source, {})

    def test_thoughts_are_dropped_from_earlier_answers_where_the_template_drops_them(self) -> None:
        source = (
            "{% for m in messages %}{% set text = m.content %}"
            "{% if m.role == 'assistant' and '</think>' in text %}"
            "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
            "{{ m.role }}> {{ text }}\n{% endfor %}assistant>"
        )
        answer = "<think>a</think>b</think>\n\nI am fine."
        messages = chat(("user", "x</think>y"), ("assistant", answer), ("user", "Good."))
        assert text_of(choose_template(source, {})(messages)) == rendered(source, [
            ChatMessage("user", "x</think>y"), *messages[1:]
        ])  # fmt: skip

    def test_templates_have_the_names_that_they_are_used_to(self) -> None:
        source = (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
            "{% generation %}{{ {'a': 'é<'} | tojson }}{% endgeneration %}{{ m.content }}{% endfor %}"
            "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}{{ bos_token }}"
        )
        pieces = choose_template(source, {"bos_token": "<s>"})(chat(("user", "A")))
        assert text_of(pieces) == f'{{"a": "é<"}}A{datetime.now():%Y}TrueTrue<s>'

    def test_the_sandbox_keeps_templates_from_python(self) -> None:
        source = "{{ messages.__class__.__mro__[1].__subclasses__() }}" + _PIRATE
        with pytest.raises(TokenizerError, match="unsafe"):
            choose_template(source, {})

    def test_a_template_cannot_change_the_messages(self) -> None:
        with pytest.raises(TokenizerError, match="unsafe"):
            choose_template("{% set _ = messages.append(1) %}" + _PIRATE, {})

    def test_a_template_that_is_not_jinja_is_refused(self) -> None:
        with pytest.raises(TokenizerError, match="not valid Jinja"):
            choose_template("{% for %}", {})

    def test_a_template_that_refuses_a_plain_message_is_refused(self) -> None:
        with pytest.raises(TokenizerError, match="refuses a plain user message: never"):
            choose_template("{{ raise_exception('never') }}", {})


@pytest.mark.parametrize("text", FORGERIES)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_message_text_adds_no_control_token(tmp_path: Path, text: str, role: str) -> None:
    chatml = load_gguf_tokenizer(smollm2()), choose_template(CHATML, {})
    gemma = load_gguf_tokenizer(trained(False)[1]), choose_template(GEMMA, _GEMMA_TOKENS)
    llama3 = load_hf_tokenizer(llama3_directory(tmp_path))
    for tokenizer, template in (chatml, gemma, (llama3, choose_template(LLAMA3, llama3.template_tokens))):
        control = {token.token_id for token in tokenizer.control_tokens.values()}
        hostile, harmless = (
            tokenizer.encode_pieces(template(chat(("user", content), (role, content), ("user", content))))
            for content in (text, "harmless")
        )
        assert [i for i in hostile if i in control] == [i for i in harmless if i in control]


def test_folding_keeps_every_text_in_order_in_alternating_turns() -> None:
    messages = chat(
        ("system", "A"), ("system", "B"), ("user", "C"), ("assistant", "D"), ("assistant", "E"), ("system", "F")
    )
    assert folded(messages) == chat(("user", "A\n\nB\n\nC"), ("assistant", "D\n\nE"), ("user", "F"))


def test_the_refusal_of_a_template_names_its_reason() -> None:
    template = JinjaTemplate("{{ raise_exception('because') }}", {})
    with pytest.raises(TemplateRefusal, match="because"):
        template(chat(("user", "A")))
