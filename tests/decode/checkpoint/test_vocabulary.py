"""`decode.checkpoint.vocabulary`: the bytes and names of every token of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.gguf import GgufTokenizer
from decode.checkpoint.hf import HfTokenizerFiles
from decode.checkpoint.vocabulary import VocabularyError, checkpoint_vocabulary, gguf_token_bytes, read_tokenizer_json
from tests.decode.tiny_models import write_gguf, write_hf

SPEC: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "Ġb": 1, "<s>": 2, "<tool>": 3, "Ã©": 4}, "merges": []},
    "added_tokens": [
        {"id": 2, "content": "<s>", "special": True},
        {"id": 3, "content": "<tool>", "special": False},
        {"id": 6, "content": "<end>", "special": True},
    ],
    "decoder": {"type": "ByteLevel"},
}


def hf(tmp_path: Path, spec: dict[str, Any]) -> Path:
    directory = write_hf("llama", tmp_path)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    return directory


def test_a_hugging_face_vocabulary_has_as_many_tokens_as_the_model_has_logits(tmp_path: Path) -> None:
    vocabulary = checkpoint_vocabulary(open_checkpoint(hf(tmp_path, SPEC)))
    assert vocabulary.token_bytes[:7] == [b"a", b" b", b"", b"<tool>", "é".encode(), b"", b""]
    assert len(vocabulary.token_bytes) == 320
    assert not any(vocabulary.token_bytes[7:])
    assert vocabulary.names == {2: "<s>", 6: "<end>"}
    assert vocabulary.eos_token_ids == (2,)


def test_sentencepiece_tokens_are_read_their_way(tmp_path: Path) -> None:
    spec = SPEC | {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}
    spec["model"] = {"vocab": {"▁a": 0, "<0xE2>": 1}}
    vocabulary = checkpoint_vocabulary(open_checkpoint(hf(tmp_path, spec)))
    assert vocabulary.token_bytes[:2] == [b" a", b"\xe2"]


def test_an_added_run_of_spaces_is_spaces_where_sentencepiece_spells_them(tmp_path: Path) -> None:
    spec = {
        "model": {"vocab": {"a": 0, "▁▁": 1}},
        "added_tokens": [{"id": 1, "content": "▁▁", "special": False}],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
    }
    vocabulary = checkpoint_vocabulary(open_checkpoint(hf(tmp_path, spec)))
    assert vocabulary.token_bytes[:2] == [b"a", b"  "]


def test_a_gguf_vocabulary_is_that_of_its_metadata(tmp_path: Path) -> None:
    types = [3, 3, 3, *[1] * 317]
    metadata = {"tokenizer.ggml.token_type": types}
    vocabulary = checkpoint_vocabulary(open_checkpoint(write_gguf("llama", tmp_path / "m.gguf", metadata=metadata)))
    assert vocabulary.names == {0: "<0>", 1: "<1>", 2: "<2>"}
    assert vocabulary.token_bytes[:4] == [b"", b"", b"", b"<3>"]


def test_a_kind_that_is_not_known_is_named(tmp_path: Path) -> None:
    source = GgufTokenizer("rwkv", "default", ["a"], [1], [], None, None, None, None, None, None, None)
    with pytest.raises(VocabularyError, match="'rwkv' is not supported"):
        gguf_token_bytes(source)
    with pytest.raises(VocabularyError, match=r"decoder \['WordPiece'\] is not supported"):
        checkpoint_vocabulary(open_checkpoint(hf(tmp_path, SPEC | {"decoder": {"type": "WordPiece"}})))


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "not hold an obj")]
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(VocabularyError, match=f"tokenizer.json.*{reason}"):
        read_tokenizer_json(HfTokenizerFiles(file, {}))
