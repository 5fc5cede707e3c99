"""Tokenizers from tokenizer.json, against the `tokenizers` library on the unchanged file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from app.dialect.conversation import Piece
from app.text.hf import load_hf_tokenizer
from app.text.tokenizer import (
    ControlToken,
    Tokenizer,
    TokenizerError,
    is_plain_text_token,
)
from decode.checkpoint.hf import HfTokenizerFiles
from decode.checkpoint.vocabulary import byte_level_bytes, sentencepiece_bytes
from tests.app.corpus import FORGERIES, TEXTS
from tests.app.text_checkpoints import llama3_directory, metaspace_directory


def reference_of(files: HfTokenizerFiles) -> tokenizers.Tokenizer:
    reference = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
    reference.no_truncation()
    return reference


def test_byte_level_ids_are_the_librarys(tmp_path: Path) -> None:
    files = llama3_directory(tmp_path)
    tokenizer, reference = load_hf_tokenizer(files), reference_of(files)
    for text in TEXTS:
        assert tokenizer.encode_first(text) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == reference.encode(text).ids


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentencepiece_style_ids_and_texts_are_the_librarys(tmp_path: Path, scheme: str) -> None:
    files = metaspace_directory(tmp_path, scheme)
    tokenizer, reference = load_hf_tokenizer(files), reference_of(files)
    assert tokenizer.strip_leading_space == (scheme != "never")
    for text in ["hello world", " hell wood", "é 😀 hello", *TEXTS[:13]]:
        ids = tokenizer.encode_first(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        decoded = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert (decoded.removeprefix(" ") if tokenizer.strip_leading_space else decoded) == reference.decode(ids)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_scaffold_ids_are_the_librarys_for_the_whole_string(tmp_path: Path, scheme: str) -> None:
    files = metaspace_directory(tmp_path, scheme)
    text = "<s>hello world</s>hello</s> world<unk>"
    expected = reference_of(files).encode(text, add_special_tokens=False).ids
    assert load_hf_tokenizer(files).encode_pieces([Piece(text, True)]) == expected


def test_text_between_control_tokens_is_encoded_as_a_whole_wherever_it_came_from(tmp_path: Path) -> None:
    files = llama3_directory(tmp_path)
    text = "<|start_header_id|>user<|end_header_id|>\n\n\n\nHello there  <|mark|>  you<|eot_id|>"
    pieces = [
        Piece("<|start_header_id|>us", True),
        Piece("er", False),
        Piece("<|end_header_id|>\n\n", True),
        Piece("\n\nHel", False),
        Piece("lo there ", False),
        Piece(" <|mark|> ", True),
        Piece(" you", False),
        Piece("<|eot_id|>", True),
    ]
    expected = reference_of(files).encode(text, add_special_tokens=False).ids
    assert load_hf_tokenizer(files).encode_pieces(pieces) == expected


def test_control_tokens_are_not_recognised_across_the_edge_of_scaffold_and_text(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(llama3_directory(tmp_path))
    control = {token.token_id for token in tokenizer.control_tokens.values()}
    ids = tokenizer.encode_pieces([Piece("<|eot", True), Piece("_id|>", False), Piece("<|eot_id|>", False)])
    assert not control & set(ids)


@pytest.mark.parametrize("text", [*FORGERIES, "<|begin_of_text|>", "<think>"])
def test_text_never_gives_a_control_token(tmp_path: Path, text: str) -> None:
    tokenizer = load_hf_tokenizer(llama3_directory(tmp_path))
    control = {token.token_id for token in tokenizer.control_tokens.values()}
    assert not control & set(tokenizer.encode(text)[1:])


def test_control_tokens_are_taken_out_of_vocabulary_and_merges_too(tmp_path: Path) -> None:
    files = llama3_directory(tmp_path)
    spec = json.loads(files.tokenizer_json.read_text())
    size = max(spec["model"]["vocab"].values())
    spec["model"]["vocab"] |= {"<m": size + 100, "<m>": size + 101, "<m>!": size + 102}
    spec["model"]["merges"] = ["< m", "<m >", "<m> !", *spec["model"]["merges"]]
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": size + 101, "content": "<m>"})
    files.tokenizer_json.write_text(json.dumps(spec))
    tokenizer = load_hf_tokenizer(files)
    assert size + 101 in reference_of(files).encode("<m>!").ids
    assert not {size + 101, size + 102} & set(tokenizer.encode("<m>!"))


def test_a_control_token_that_is_a_word_of_the_vocabulary_is_taken_out_too(tmp_path: Path) -> None:
    files = llama3_directory(tmp_path)
    spec = json.loads(files.tokenizer_json.read_text())
    size = max(spec["model"]["vocab"].values())
    spec["model"]["vocab"]["zmark"] = size + 100
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": size + 100, "content": "zmark"})
    files.tokenizer_json.write_text(json.dumps(spec))
    tokenizer = load_hf_tokenizer(files)
    assert size + 100 in tokenizer.encode_pieces([Piece("zmark", True)])
    assert size + 100 not in tokenizer.encode_pieces([Piece("zmark", False)])


def test_the_longest_control_token_is_recognised() -> None:
    tokenizer = Tokenizer(
        encode_first=lambda text: [0] * len(text),
        encode_later=lambda text: [0] * len(text),
        token_bytes=lambda token_id: b"",
        control_tokens={"<a>": ControlToken(1), "<a>b": ControlToken(2)},
    )
    assert tokenizer.encode_pieces([Piece("<a>b<a>c", True)]) == [2, 1, 0]


def test_special_tokens_have_no_text_and_other_added_tokens_have_theirs(tmp_path: Path) -> None:
    files = llama3_directory(tmp_path)
    tokenizer, reference = load_hf_tokenizer(files), reference_of(files)
    for name in ("<|eot_id|>", "<think>", "    "):
        token_id = reference.token_to_id(name)
        assert tokenizer.token_bytes(token_id).decode() == reference.decode([token_id], skip_special_tokens=True)
    assert tokenizer.token_bytes(10**6) == b""


def test_template_tokens_come_from_either_form_of_the_configuration(tmp_path: Path) -> None:
    tokens = load_hf_tokenizer(llama3_directory(tmp_path)).template_tokens
    assert tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def test_a_configuration_that_asks_for_bos_is_followed_without_a_post_processor(tmp_path: Path) -> None:
    assert load_hf_tokenizer(metaspace_directory(tmp_path, "first")).prompt_prefix == (1,)
    files = metaspace_directory(tmp_path, "first")
    assert load_hf_tokenizer(HfTokenizerFiles(files.tokenizer_json, {"bos_token": "<s>"})).prompt_prefix == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "'Unigram' is not supported"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"decoder": None}, "decoder .* is not supported"),
        ({"pre_tokenizer": {"type": "Mystery"}}, "cannot be used"),
    ],
)
def test_kinds_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_hf_tokenizer(llama3_directory(tmp_path, **changes))


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(TokenizerError, match="is not JSON"):
        load_hf_tokenizer(HfTokenizerFiles(file, {}))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_hf_tokenizer(HfTokenizerFiles(tmp_path / "tokenizer.json", {}))


@pytest.mark.parametrize("content", ["\n\n", "    ", "▁▁", "\t", "<table>", "</h1>"])
def test_white_space_and_html_are_plain_text_tokens(content: str) -> None:
    assert is_plain_text_token(content)


@pytest.mark.parametrize("content", ["<think>", "</think>", "<tool_call>", "<|im_end|>", "<s >", "[INST]", "<pad>"])
def test_markers_are_not_plain_text_tokens(content: str) -> None:
    assert not is_plain_text_token(content)


@pytest.mark.parametrize(("token", "text"), [("Ġa", " a"), ("Ã©", "é"), ("Ċ", "\n"), ("世", "世")])
def test_byte_level_tokens_become_bytes(token: str, text: str) -> None:
    assert byte_level_bytes(token) == text.encode()


@pytest.mark.parametrize(("piece", "data"), [("<0xE2>", b"\xe2"), ("▁a", b" a"), ("<0xE2", b"<0xE2")])
def test_sentencepiece_pieces_become_bytes(piece: str, data: bytes) -> None:
    assert sentencepiece_bytes(piece) == data
