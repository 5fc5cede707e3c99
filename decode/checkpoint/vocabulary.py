"""The vocabulary of a checkpoint as bytes: what each token adds to the output.

Owns how token strings become bytes, for the tokenizers that a GGUF file or a Hugging Face directory carries. Refuses
to encode text and to know what tokens may come from a message (`app.text.tokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.gguf import CONTROL, UNKNOWN, UNUSED, USER_DEFINED, GgufTokenizer
from decode.checkpoint.hf import HfTokenizerFiles

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyError(ValueError):
    """The tokenizer is of a kind whose tokens cannot be read; the message says which."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`token_bytes[i]` is the text of token i, empty where it has none. `names`: what control tokens are called."""

    token_bytes: Sequence[bytes]
    names: Mapping[int, str]
    """Of the tokens without text, those that the checkpoint gives a name."""
    eos_token_ids: tuple[int, ...]


def checkpoint_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """As many tokens as the model has logits. Raises VocabularyError, and OSError where a file cannot be read."""
    source = checkpoint.tokenizer
    if isinstance(source, GgufTokenizer):
        names, to_bytes = dict(enumerate(source.tokens)), gguf_token_bytes(source)
    else:
        spec = read_tokenizer_json(source)
        names, to_bytes = _hf_names(spec), hf_token_bytes(spec, str(source.tokenizer_json))
    token_bytes = [to_bytes(token_id) for token_id in range(checkpoint.config.vocab_size)]
    control = {i: name for i, name in names.items() if name and i < len(token_bytes) and not token_bytes[i]}
    return Vocabulary(token_bytes, control, checkpoint.eos_token_ids)


def gguf_token_bytes(source: GgufTokenizer) -> Callable[[int], bytes]:
    """What a token adds to the output: nothing for special tokens and for ids that do not exist."""
    spelling = {"gpt2": byte_level_bytes, "llama": sentencepiece_bytes}.get(source.kind)
    if spelling is None:
        raise VocabularyError(f'GGUF tokenizer kind {source.kind!r} is not supported, only "gpt2" and "llama"')
    to_bytes, tokens, types = spelling, source.tokens, source.token_types

    def token_bytes(token_id: int) -> bytes:
        if not 0 <= token_id < len(tokens):
            return b""
        kind = types[token_id]
        if kind in (UNKNOWN, CONTROL, UNUSED):
            return b""
        return tokens[token_id].encode() if kind == USER_DEFINED else to_bytes(tokens[token_id])

    return token_bytes


def read_tokenizer_json(files: HfTokenizerFiles) -> dict[str, Any]:
    """Raises VocabularyError: the file is missing or not JSON."""
    try:
        spec = orjson.loads(files.tokenizer_json.read_bytes())
    except OSError as error:
        raise VocabularyError(f"{files.tokenizer_json} cannot be read: {error}") from error
    except ValueError as error:
        raise VocabularyError(f"{files.tokenizer_json} is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise VocabularyError(f"{files.tokenizer_json} does not hold an object")
    return spec


def hf_token_bytes(spec: Mapping[str, Any], where: str) -> Callable[[int], bytes]:
    """The same for the contents of a `tokenizer.json`."""
    names, to_bytes = _hf_names(spec), DecoderRules.of(spec.get("decoder"), where).to_bytes
    spelled = to_bytes if to_bytes is sentencepiece_bytes else str.encode  # `▁▁` is two spaces, added or not
    added = {t["id"]: b"" if t["special"] else spelled(t["content"]) for t in spec.get("added_tokens") or []}

    def token_bytes(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id]
        name = names.get(token_id)
        return b"" if name is None else to_bytes(name)

    return token_bytes


def _hf_names(spec: Mapping[str, Any]) -> dict[int, str]:
    """An added token's name belongs to its own id alone."""
    added = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
    names = {token_id: name for name, token_id in spec["model"]["vocab"].items() if name not in added}
    return names | {token_id: name for name, token_id in added.items()}


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How token strings become bytes: in the byte alphabet, or SentencePiece's way."""

    to_bytes: Callable[[str], bytes]
    strip_leading_space: bool
    """The tokenizer puts a space before every text, so a decoded answer loses one."""

    @staticmethod
    def of(decoder: Mapping[str, Any] | None, where: str) -> DecoderRules:
        """Of the decoder in a `tokenizer.json`, which `where` names. Raises VocabularyError."""
        parts = [] if decoder is None else decoder.get("decoders", [decoder])
        types = {part["type"] for part in parts}
        if "ByteLevel" in types:
            return DecoderRules(byte_level_bytes, False)
        if types & {"ByteFallback", "Metaspace"}:
            strips = any(
                (part["type"] == "Strip" and part["content"] == " " and part["start"] > 0)
                or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
                for part in parts
            )
            return DecoderRules(sentencepiece_bytes, strips)
        raise VocabularyError(
            f"{where}: decoder {sorted(types)} is not supported, only ByteLevel and SentencePiece kinds"
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if visible in Latin-1, else 256, 257, ... in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token written in GPT-2's byte alphabet; a token outside of it stands for itself."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece piece: `<0xE2>` is one byte, `▁` is a space."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
