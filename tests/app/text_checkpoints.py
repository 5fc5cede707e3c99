"""Checkpoints for the text tests: a cut-down SmolLM2, a trained SentencePiece model, and Hugging Face directories."""

from __future__ import annotations

import io
import json
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sentencepiece

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.config import ModelConfig
from decode.checkpoint.gguf import GgufTokenizer
from decode.checkpoint.hf import HfTokenizerFiles
from decode.checkpoint.names import ModelError, resolve
from tasks.process.settings import Settings
from tests.app.corpus import TEXTS

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set text = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'"
    " + message.content | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = """{{ bos_token }}
{%- set start = '' %}
{%- if messages[0].role == 'system' %}{% set start = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 is even) %}{{ raise_exception('must alternate') }}{% endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {%- set text = message.content | trim %}
    {{- '<start_of_turn>' + role + '\n' + (start if loop.first else '') + text + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
USER_DEFINED = ("\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "<table>", "</table>")


def golden(name: str) -> Any:
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def checkpoint_of(
    tokenizer: GgufTokenizer | HfTokenizerFiles,
    chat_template: str | None,
    eos_token_ids: tuple[int, ...] = (),
    max_model_len: int = 8192,
) -> Checkpoint:
    """A checkpoint as far as text goes; of its configuration it has two numbers, and no tensors."""
    vocab_size = len(tokenizer.tokens) if isinstance(tokenizer, GgufTokenizer) else 1000
    return Checkpoint(
        path=Path("none"),
        naming="gguf",
        config=cast(ModelConfig, SimpleNamespace(vocab_size=vocab_size, max_model_len=max_model_len)),
        eos_token_ids=eos_token_ids,
        bos_token_id=None,
        chat_template=chat_template,
        tokenizer=tokenizer,
        tensors={},
    )


def pulled_model(name: str) -> Path:
    """The file of a published model; skips the test if nobody has pulled it."""
    try:
        return resolve(name, Settings.from_env(os.environ).cache_dir)
    except ModelError as error:
        pytest.skip(str(error))


@cache
def smollm2() -> GgufTokenizer:
    """SmolLM2's tokenizer with the part of its vocabulary that the corpus can reach."""
    stored = golden("smollm2")["tokenizer"]
    tokens = [f"[absent {token_id}]" for token_id in range(stored["num_tokens"])]
    types = [5] * len(tokens)
    for token_id, token, kind in stored["tokens"]:
        tokens[token_id], types[token_id] = token, kind
    return GgufTokenizer(
        kind="gpt2",
        pre=stored["pre"],
        tokens=tokens,
        token_types=types,
        merges=stored["merges"],
        scores=None,
        add_bos_token=False,
        add_space_prefix=False,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        padding_token_id=2,
    )


@cache
def trained(add_space_prefix: bool) -> tuple[sentencepiece.SentencePieceProcessor, GgufTokenizer]:
    """A small SentencePiece model in Gemma's style: the reference, and the same as GGUF metadata."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXTS * 3 for line in text.splitlines() if line]),
        model_writer=file,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_space_prefix,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        control_symbols=["<start_of_turn>", "<end_of_turn>", "<mask>"],
        user_defined_symbols=list(USER_DEFINED),
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ids = range(reference.get_piece_size())
    tokens = [reference.id_to_piece(i) for i in ids]
    types = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in ids
    ]
    types = [4 if token in USER_DEFINED else kind for token, kind in zip(tokens, types, strict=True)]
    return reference, GgufTokenizer(
        kind="llama",
        pre="default",
        # GGUF files have spaces in the user-defined pieces.
        tokens=[token.replace("▁", " ") if kind == 4 else token for token, kind in zip(tokens, types, strict=True)],
        token_types=types,
        merges=[],
        scores=[reference.get_score(i) for i in ids],
        add_bos_token=True,
        add_space_prefix=add_space_prefix,
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        padding_token_id=0,
    )


def _added(token_id: int, content: str, **options: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags, **options}


def llama3_directory(directory: Path, **changes: Any) -> HfTokenizerFiles:
    """A Llama 3 style tokenizer.json over SmolLM2's vocabulary; `changes` replace parts of the file."""
    source = smollm2()
    vocab = {token: token_id for token_id, token in enumerate(source.tokens)}
    size = len(vocab)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    added = [_added(size + n, name) for n, name in enumerate(names)]
    added.append(_added(size + 5, "<|mark|>", lstrip=True, rstrip=True))
    added.append(_added(size + 6, "<think>", special=False))
    added.append(_added(size + 7, "    ", special=False))
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": names[0], "type_id": 0}}
    spec = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {names[0]: {"id": names[0], "ids": [size], "tokens": [names[0]]}},
        },
        "decoder": to_bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": source.merges, "ignore_merges": True, "unk_token": None},
    }
    config = {"bos_token": names[0], "eos_token": {"content": "<|eot_id|>", "lstrip": False}, "model_max_length": 9}
    return _write(directory, spec | changes, config)


def metaspace_directory(directory: Path, scheme: str) -> HfTokenizerFiles:
    """A Llama 2 style tokenizer.json: SentencePiece's way, in `tokenizers`' parts."""
    characters = sorted(
        {character for text in TEXTS for character in text if character.isascii() and character > " "}
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    merges = [("h", "e"), ("▁", "w"), ("l", "l"), ("he", "ll"), ("▁", "hell")]
    pieces += [left + right for left, right in merges]
    spec = {
        "added_tokens": [_added(n, pieces[n]) for n in range(3)],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([] if scheme == "never" else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]),
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: n for n, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": "<unk>",
        },
    }
    return _write(directory, spec, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})


def _write(directory: Path, spec: dict[str, Any], config: dict[str, Any]) -> HfTokenizerFiles:
    file = directory / "tokenizer.json"
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    file.write_text(json.dumps({"version": "1.0"} | absent | spec))
    return HfTokenizerFiles(file, config)
