"""The tokenizer of a Hugging Face directory: `tokenizer.json` and `tokenizer_config.json`.

Owns how that file becomes a `Tokenizer`: byte-pair models with a byte-level or a SentencePiece-like decoder. Refuses
other kinds by name, and to know about GGUF and templates.

SAFETY: the control tokens are taken out of the file's vocabulary, merges and added tokens before the library sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import tokenizers

from app.text.tokenizer import ControlToken, Tokenizer, TokenizerError, encoder, is_plain_text_token
from decode.checkpoint.hf import HfTokenizerFiles
from decode.checkpoint.vocabulary import DecoderRules, VocabularyError, hf_token_bytes, read_tokenizer_json


def load_hf_tokenizer(files: HfTokenizerFiles) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises `TokenizerError` for kinds that are not supported."""
    try:
        return _load(files, read_tokenizer_json(files))
    except VocabularyError as error:
        raise TokenizerError(str(error)) from error


def _load(files: HfTokenizerFiles, spec: dict[str, Any]) -> Tokenizer:
    model = spec["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise TokenizerError(
            f"{files.tokenizer_json}: tokenizer model {model.get('type')!r} is not supported, only BPE"
        )
    added = spec.get("added_tokens") or []
    prefix = _prompt_prefix(spec.get("post_processor"), added, files.config)
    control = {
        t["content"]: t for t in added if t["content"] and (t["special"] or not is_plain_text_token(t["content"]))
    }
    core, core_later = _without_control_tokens(spec, control.keys())
    where = str(files.tokenizer_json)
    return Tokenizer(
        encode_first=encoder(core),
        encode_later=encoder(core_later),
        token_bytes=hf_token_bytes(spec, where),
        control_tokens={
            text: ControlToken(t["id"], bool(t.get("lstrip")), bool(t.get("rstrip"))) for text, t in control.items()
        },
        prompt_prefix=prefix,
        strip_leading_space=DecoderRules.of(spec.get("decoder"), where).strip_leading_space,
        template_tokens={
            name: text
            for name, value in files.config.items()
            if name.endswith("_token") and (text := _content(value))
        },
    )


def _without_control_tokens(
    spec: dict[str, Any], control: Iterable[str]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The tokenizers for text that starts a prompt, and for later text, without any control token."""
    model = spec["model"]
    banned = set(control) - {model.get("unk_token")}
    added = [t for t in spec.get("added_tokens") or [] if t["content"] not in banned]
    vocab = {token: token_id for token, token_id in model["vocab"].items() if token not in banned}
    # The library numbers added tokens that are not in the vocabulary itself, by the vocabulary's size.
    vocab |= {t["content"]: t["id"] for t in added}
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]]
    merges = [(l, r) for l, r in merges if not (l in banned or r in banned or l + r in banned)]
    spec = {
        **spec,
        "model": {**model, "vocab": vocab, "merges": merges, "dropout": None},
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    serialised = orjson.dumps(spec).decode()
    try:
        core = tokenizers.Tokenizer.from_str(serialised)
        later = _later(spec)
        return core, core if later is None else tokenizers.Tokenizer.from_str(orjson.dumps(later).decode())
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer.json cannot be used: {error}") from error


def _later(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer for text after a control token, where a space is put before the first text only."""
    pre = spec.get("pre_tokenizer")
    if not pre or pre["type"] != "Metaspace" or pre.get("prepend_scheme") != "first":
        return None
    return {**spec, "pre_tokenizer": {**pre, "prepend_scheme": "never"}}


def _prompt_prefix(
    post_processor: dict[str, Any] | None, added: list[dict[str, Any]], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The special tokens that the post-processor puts before a single text, or BOS where the config asks for it."""
    ids = {t["content"]: t["id"] for t in added}
    processors = [] if post_processor is None else post_processor.get("processors", [post_processor])
    for processor in processors:
        if processor["type"] == "TemplateProcessing":
            prefix: list[int] = []
            for item in processor["single"]:
                if "Sequence" in item:
                    break
                prefix += processor["special_tokens"][item["SpecialToken"]["id"]]["ids"]
            return tuple(prefix)
    bos = _content(config.get("bos_token"))
    return (ids[bos],) if config.get("add_bos_token") and bos in ids else ()


def _content(value: object) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that holds its text."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
