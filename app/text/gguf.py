"""The tokenizer that a GGUF file carries in its metadata.

Owns how the two kinds are rebuilt: byte-level BPE ("gpt2": vocabulary, merges and the name of a pre-tokenizer)
through `tokenizers`, and SentencePiece ("llama": pieces with scores) through `sentencepiece`, from a model file
written in memory. Refuses to read files (`decode.checkpoint.checkpoint` does) and to guess: unknown kinds are errors.

SAFETY: what encodes text does not know the control tokens. In the SentencePiece model they have the type CONTROL,
which is never matched; from the BPE model they are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from app.text.tokenizer import ControlToken, Tokenizer, TokenizerError, encoder, is_plain_text_token
from decode.checkpoint.gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, GgufTokenizer
from decode.checkpoint.vocabulary import gguf_token_bytes

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _at_matches(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text at a pattern's matches, then writes the parts in the byte alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Pre:
    """A pre-tokenizer and the rules that GGUF files leave to its name."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    takes_whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, without going through the merges."""
    adds_bos: bool = False
    """Plain prompts begin with BOS, unless the file says otherwise."""
    composes: bool = False
    """Text is brought to Unicode's form NFC first."""


_SINGLE_DIGITS = _Pre(lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]))
_LLAMA3_RULES = _Pre(lambda: _at_matches(_LLAMA3), takes_whole_words=True, adds_bos=True)
_PRE_TOKENIZERS: dict[str, _Pre] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _Pre(_gpt2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_RULES),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Pre(lambda: _at_matches(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Pre(lambda: _at_matches(_QWEN2), composes=True)),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan"), _Pre(lambda: _at_matches(_QWEN2))),
    "tekken": _Pre(lambda: _at_matches(_TEKKEN), takes_whole_words=True, adds_bos=True),
}
"""By the names in `tokenizer.ggml.pre`. The names and patterns are those of the models that published them."""


def load_gguf_tokenizer(source: GgufTokenizer) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata. Raises `TokenizerError` if it is of a kind that is not supported."""
    match source.kind:
        case "gpt2":
            pre = _pre_tokenizer(source.pre)
            encode, bos_by_default = _byte_level_encoder(source, pre), pre.adds_bos
        case "llama":
            encode, bos_by_default = _sentencepiece_encoder(source), True
        case kind:
            raise TokenizerError(f'GGUF tokenizer kind {kind!r} is not supported, only "gpt2" and "llama"')
    tokens = source.tokens
    add_bos = bos_by_default if source.add_bos_token is None else source.add_bos_token
    return Tokenizer(
        encode_first=encode,
        encode_later=encode,
        token_bytes=gguf_token_bytes(source),
        control_tokens={
            tokens[i]: ControlToken(i) for i in range(len(tokens)) if _is_control(source, i) and tokens[i]
        },
        prompt_prefix=(source.bos_token_id,) if add_bos and source.bos_token_id is not None else (),
        strip_leading_space=source.kind == "llama" and _adds_space(source),
        template_tokens={
            f"{name}_token": tokens[token_id]
            for name, token_id in (
                ("bos", source.bos_token_id),
                ("eos", source.eos_token_id),
                ("unk", source.unknown_token_id),
                ("pad", source.padding_token_id),
            )
            if token_id is not None
        },
    )


def _is_control(source: GgufTokenizer, token_id: int) -> bool:
    kind = source.token_types[token_id]
    return kind == CONTROL or (kind == USER_DEFINED and not is_plain_text_token(source.tokens[token_id]))


def _adds_space(source: GgufTokenizer) -> bool:
    return source.add_space_prefix is not False


def _pre_tokenizer(name: str) -> _Pre:
    if (pre := _PRE_TOKENIZERS.get(name)) is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise TokenizerError(f"GGUF pre-tokenizer {name!r} is not supported (known: {known})")
    return pre


def _byte_level_encoder(source: GgufTokenizer, pre: _Pre) -> Callable[[str], list[int]]:
    vocab = {token: i for i, token in enumerate(source.tokens) if not _is_control(source, i)}
    pairs = (merge.split(" ", 1) for merge in source.merges)
    merges = [(l, r) for l, r in pairs if l in vocab and r in vocab and l + r in vocab]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.takes_whole_words))
    core.pre_tokenizer = pre.build()
    if pre.composes:
        core.normalizer = normalizers.NFC()
    shorthands = [t for t, kind in zip(source.tokens, source.token_types, strict=True) if kind == USER_DEFINED]
    core.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in shorthands if t in vocab])
    return encoder(core)


def _sentencepiece_encoder(source: GgufTokenizer) -> Callable[[str], list[int]]:
    if source.scores is None:
        raise TokenizerError('a GGUF tokenizer of kind "llama" needs tokenizer.ggml.scores')
    import sentencepiece  # not at the top: few models need it

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(_model_file(source, source.scores))
    except RuntimeError as error:
        raise TokenizerError(f"GGUF tokenizer metadata is not a usable SentencePiece model: {error}") from error
    encode: Callable[[str], list[int]] = processor.EncodeAsIds
    return encode


def _model_file(source: GgufTokenizer, scores: list[float]) -> bytes:
    """A SentencePiece model in protocol buffer encoding (sentencepiece_model.proto: the field numbers below)."""
    unknown = 0 if source.unknown_token_id is None else source.unknown_token_id
    pieces: list[bytes] = []
    seen: set[str] = set()
    num_byte_pieces = 0
    for i, (token, kind, score) in enumerate(zip(source.tokens, source.token_types, scores, strict=True)):
        if i == unknown:
            kind = UNKNOWN
        elif kind == UNKNOWN or _is_control(source, i):
            kind = CONTROL
        elif kind == USER_DEFINED:
            token = token.replace(" ", "▁")
        if not token or token in seen:  # the library wants unique names; nobody can write these
            token, kind = f"<id {i}>", UNUSED if kind == NORMAL else kind
        seen.add(token)
        num_byte_pieces += kind == BYTE
        name = token.encode()
        # Fields 1 piece, 2 score, 3 type.
        body = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(name)), name, struct.pack("<f", score), kind)
        pieces.append(b"\x0a%b%b" % (_varint(len(body)), body))  # field 1: pieces
    # Trainer: 3 model_type = BPE, 35 byte_fallback. Normaliser: 3 add_dummy_prefix, 4 remove_extra_whitespaces,
    # 5 escape_whitespaces.
    trainer = b"\x18\x02\x98\x02%c" % (num_byte_pieces == 256)
    normaliser = b"\x18%c\x20\x00\x28\x01" % _adds_space(source)
    return b"".join([*pieces, b"\x12%c%b" % (len(trainer), trainer), b"\x1a%c%b" % (len(normaliser), normaliser)])


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7)
