"""The text edge of the scripted model: bytes are tokens, and every other token is written as its number."""

from __future__ import annotations

from collections.abc import Sequence

from app.dialect.conversation import ChatMessage, Piece, text_of
from app.text.edge import TextEdge
from app.text.templates import ChatFormat
from decode.checkpoint.names import SCRIPTED_EOS_TOKEN_ID, SCRIPTED_FIRST_BYTE, SCRIPTED_VOCAB_SIZE


def scripted_text_edge() -> TextEdge:
    """The text edge of the scripted engine: prompts are UTF-8 bytes (ids 0 to 255), output id N reads `<N>`.

    Ids from 1000 on are single bytes of the output, which a prompt can dictate (`decode.scripted`).
    The rendering is one line per message, `role: content`, and an opening `assistant:`.
    """

    def render(messages: Sequence[ChatMessage]) -> list[Piece]:
        return [*(Piece(f"{m.role}: {m.content}\n", False) for m in messages), Piece("assistant:", True)]

    def encode(text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(token_id: int) -> bytes:
        byte = token_id - SCRIPTED_FIRST_BYTE
        return bytes([byte]) if 0 <= byte < 256 else b"<%d>" % token_id

    return TextEdge(
        format=ChatFormat(render),
        encode_pieces=lambda pieces: encode(text_of(pieces)),
        encode=encode,
        token_bytes=token_bytes,
        eos_token_ids=[SCRIPTED_EOS_TOKEN_ID],
        vocab_size=SCRIPTED_VOCAB_SIZE,
    )
