"""Tokenizers from GGUF metadata, against llama.cpp's ids and the sentencepiece library."""

from __future__ import annotations

import dataclasses

import pytest

from app.text.gguf import load_gguf_tokenizer
from app.text.tokenizer import TokenizerError
from decode.checkpoint.checkpoint import open_checkpoint
from tests.app.corpus import FORGERIES, TEXTS
from tests.app.text_checkpoints import golden, pulled_model, smollm2, trained


@pytest.mark.parametrize("number", range(len(TEXTS + FORGERIES)))
def test_byte_level_ids_are_llama_cpps(number: int) -> None:
    text = (TEXTS + FORGERIES)[number]
    assert load_gguf_tokenizer(smollm2()).encode_first(text) == golden("smollm2")["texts"][number]


def test_the_whole_smollm2_file_gives_llama_cpps_ids() -> None:
    checkpoint = open_checkpoint(pulled_model("smollm2-135m-instruct"))
    tokenizer = load_gguf_tokenizer(checkpoint.tokenizer)
    assert [tokenizer.encode_first(text) for text in TEXTS + FORGERIES] == golden("smollm2")["texts"]


def test_the_whole_gemma_file_gives_llama_cpps_ids() -> None:
    tokenizer = load_gguf_tokenizer(open_checkpoint(pulled_model("gemma-3-270m")).tokenizer)
    expected = golden("gemma3")["texts"]
    # llama.cpp takes user-defined tokens out before it writes spaces as "▁", does not know </s> as HTML, and lets a
    # message place an image: the sentencepiece library does neither, and we do not do the last.
    differs = {TEXTS.index("▁already▁has▁metaspace ▁ Ġ Ċ <0x41> <unk>"), len(TEXTS) + 2, len(TEXTS) + 4}
    for number, text in enumerate(TEXTS + FORGERIES):
        assert (tokenizer.encode_first(text) == expected[number]) == (number not in differs), text


@pytest.mark.parametrize("add_space_prefix", [False, True])
@pytest.mark.parametrize("text", TEXTS + FORGERIES)
def test_sentencepiece_ids_are_the_librarys(text: str, add_space_prefix: bool) -> None:
    reference, source = trained(add_space_prefix)
    assert load_gguf_tokenizer(source).encode_first(text) == reference.encode(text)


@pytest.mark.parametrize("text", FORGERIES)
def test_text_never_gives_a_control_token(text: str) -> None:
    for source in (smollm2(), trained(False)[1], dataclasses.replace(smollm2(), pre="llama-bpe")):
        ids = load_gguf_tokenizer(source).encode_first(text)
        assert not {source.token_types[token_id] for token_id in ids} & {2, 3}


def test_a_user_defined_sentencepiece_marker_is_a_control_token() -> None:
    source = trained(False)[1]
    mask = source.tokens.index("<mask>")
    types = [4 if token_id == mask else kind for token_id, kind in enumerate(source.token_types)]
    tokenizer = load_gguf_tokenizer(dataclasses.replace(source, token_types=types))
    assert mask not in tokenizer.encode_first("a <mask> b")
    assert tokenizer.control_tokens["<mask>"].token_id == mask


def test_a_user_defined_marker_is_a_control_token_and_a_user_defined_space_is_text() -> None:
    source = smollm2()
    tokens, types = list(source.tokens), list(source.token_types)
    first = types.index(5)
    for token_id, token in enumerate(("</think>", "    ", "<table>"), first):
        tokens[token_id], types[token_id] = token, 4
    tokenizer = load_gguf_tokenizer(dataclasses.replace(source, tokens=tokens, token_types=types))
    assert first not in tokenizer.encode_first("</think>")
    assert tokenizer.encode_first("a    <table>")[1:] == [first + 1, first + 2]
    assert [tokenizer.token_bytes(first + n) for n in range(3)] == [b"</think>", b"    ", b"<table>"]
    assert tokenizer.control_tokens["</think>"].token_id == first
    assert "    " not in tokenizer.control_tokens


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_give_the_text_back(text: str) -> None:
    for source in (smollm2(), trained(False)[1]):
        tokenizer = load_gguf_tokenizer(source)
        decoded = b"".join(map(tokenizer.token_bytes, tokenizer.encode_first(text))).decode()
        assert decoded == (text.replace("▁", " ") if source.kind == "llama" else text)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_decodes_as_the_library_does_with_its_leading_space(text: str) -> None:
    reference, source = trained(True)
    tokenizer = load_gguf_tokenizer(source)
    ids = reference.encode(text)
    decoded = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert tokenizer.strip_leading_space
    assert decoded.removeprefix(" ") == reference.decode(ids)


def test_control_unknown_and_absent_tokens_have_no_bytes() -> None:
    tokenizer = load_gguf_tokenizer(trained(False)[1])
    ids = [tokenizer.control_tokens["<bos>"].token_id, 3, -1, 10**6]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b""] * 4


@pytest.mark.parametrize(
    ("kind", "pre", "add_bos_token", "prefix"),
    [
        ("gpt2", "smollm", None, ()),
        ("gpt2", "smollm", True, (1,)),
        ("gpt2", "llama-bpe", None, (1,)),
        ("gpt2", "llama-bpe", False, ()),
        ("llama", "default", None, (2,)),
        ("llama", "default", False, ()),
    ],
)
def test_plain_prompts_begin_with_bos_where_the_file_or_its_kind_says_so(
    kind: str, pre: str, add_bos_token: bool | None, prefix: tuple[int, ...]
) -> None:
    source = smollm2() if kind == "gpt2" else trained(False)[1]
    tokenizer = load_gguf_tokenizer(dataclasses.replace(source, pre=pre, add_bos_token=add_bos_token))
    assert tokenizer.prompt_prefix == prefix
    assert tokenizer.encode("Hello") == [*prefix, *tokenizer.encode_first("Hello")]


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "12345", ["12345"]),
        ("smollm", "12345", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("tekken", "fooBar", ["foo", "Bar"]),
        ("llama-bpe", "fooBar", ["fooBar"]),
        ("gpt-2", "a\n\nb", ["a", "\n", "\n", "b"]),
        ("qwen2", "a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_a_pre_tokenizer_cuts_as_its_name_says(pre: str, text: str, parts: list[str]) -> None:
    # Letters merge from the left, in the whole text and in each part, so the tokens are the parts.
    wholes = [part.replace("\n", "Ċ") for part in (text, *parts)]
    tokens = list(dict.fromkeys(whole[:end] for whole in (*wholes, *wholes[0]) for end in range(1, len(whole) + 1)))
    merges = [f"{token[:-1]} {token[-1]}" for token in tokens if len(token) > 1]
    source = dataclasses.replace(
        smollm2(), pre=pre, tokens=tokens, token_types=[1] * len(tokens), merges=merges, bos_token_id=None,
        eos_token_id=None, unknown_token_id=None, padding_token_id=None,
    )  # fmt: skip
    ids = load_gguf_tokenizer(source).encode_first(text)
    assert [tokens[token_id].replace("Ċ", "\n") for token_id in ids] == parts


def test_qwens_text_is_composed_first() -> None:
    tokenizer = load_gguf_tokenizer(dataclasses.replace(smollm2(), pre="qwen2"))
    assert tokenizer.encode_first("e\u0301") == tokenizer.encode_first("\u00e9")


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match="'mystery' is not supported"):
        load_gguf_tokenizer(dataclasses.replace(smollm2(), pre="mystery"))


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match="'bert' is not supported"):
        load_gguf_tokenizer(dataclasses.replace(smollm2(), kind="bert"))


def test_sentencepiece_without_scores_is_refused() -> None:
    with pytest.raises(TokenizerError, match="scores"):
        load_gguf_tokenizer(dataclasses.replace(trained(False)[1], scores=None))


def test_metadata_that_is_no_sentencepiece_model_is_refused() -> None:
    source = trained(False)[1]
    broken = dataclasses.replace(source, unknown_token_id=10**6, token_types=[1] * len(source.tokens))
    with pytest.raises(TokenizerError, match="not a usable SentencePiece model"):
        load_gguf_tokenizer(broken)


def test_empty_and_repeated_pieces_are_kept_apart() -> None:
    source = trained(False)[1]
    tokens = [*source.tokens, "", source.tokens[-1]]
    padded = dataclasses.replace(
        source, tokens=tokens, token_types=[*source.token_types, 1, 1], scores=[*(source.scores or []), 0.0, 0.0]
    )
    assert load_gguf_tokenizer(padded).encode_first("Hello") == load_gguf_tokenizer(source).encode_first("Hello")
