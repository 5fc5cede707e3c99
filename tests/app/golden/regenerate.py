"""Writes the golden token ids again, from another implementation: `llama-server` of llama.cpp.

    llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -c 256 --port 9000 &
    python -m tests.app.golden.regenerate smollm2 http://127.0.0.1:9000 SmolLM2-135M-Instruct.Q4_1.gguf

`smollm2.json` (SmolLM2 is Apache-2.0) also holds the part of the vocabulary that the corpus can reach, so that the
tests need no model: every merge whose result occurs in a text, and the control tokens.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.gguf import GgufTokenizer
from decode.checkpoint.vocabulary import BYTE_OF
from tests.app.corpus import CHATS, FORGERIES, TEXTS


def main(name: str, server: str, gguf: str) -> None:
    def ask(path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            server + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def ids(text: str, parse_special: bool) -> Any:
        return ask("/tokenize", content=text, add_special=False, parse_special=parse_special)["tokens"]

    checkpoint = open_checkpoint(gguf)
    golden: dict[str, Any] = {"texts": [ids(text, False) for text in [*TEXTS, *FORGERIES]]}
    if checkpoint.chat_template is not None:
        golden["template"] = checkpoint.chat_template
        chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
        golden["chats"] = [ids(ask("/apply-template", messages=chat)["prompt"], True) for chat in chats]
        golden["tokenizer"] = _reachable(checkpoint)
    Path(__file__).with_name(f"{name}.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


def _reachable(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer, cut down to the corpus; tokens as [id, text, type]."""
    source = checkpoint.tokenizer
    assert isinstance(source, GgufTokenizer)
    letter = {byte: character for character, byte in BYTE_OF.items()}
    texts = [*TEXTS, *FORGERIES, checkpoint.chat_template or "", *_contents(CHATS)]
    written = "\n".join("".join(letter[byte] for byte in text.encode()) for text in texts)
    merges = [merge for merge in source.merges if merge.replace(" ", "") in written]
    reachable = {
        *letter.values(),
        *(part for merge in merges for part in (*merge.split(" "), merge.replace(" ", ""))),
    }
    tokens = [
        [token_id, token, kind]
        for token_id, (token, kind) in enumerate(zip(source.tokens, source.token_types, strict=True))
        if kind != 1 or token in reachable
    ]
    return {"pre": source.pre, "num_tokens": len(source.tokens), "tokens": tokens, "merges": merges}


def _contents(chats: Iterable[list[tuple[str, str]]]) -> list[str]:
    return [f"{role}\n{content}" for chat in chats for role, content in chat]


if __name__ == "__main__":
    main(*sys.argv[1:])
