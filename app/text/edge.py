"""Everything textual about one model: messages to prompt token ids, output token ids to text.

Owns the choice of tokenizer and chat template for a checkpoint. Refuses to know about HTTP, OpenAI's JSON and
weights. One `TextEdge` is shared by all requests and threads of a web process; a `Detokenizer` belongs to one
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from app.dialect.conversation import ChatMessage, Piece, PromptError, PromptTooLong, Tool, text_of
from app.text.detokenizer import Detokenizer, TokenTexts
from app.text.gguf import load_gguf_tokenizer
from app.text.hf import load_hf_tokenizer
from app.text.templates import ChatFormat, choose_format
from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.gguf import GgufTokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool")

_LONG_CHARACTERS = 8
"""For each token of the context: texts longer than that are looked at before they are encoded."""
_PART_CHARACTERS = 16_384


class TextEdge:
    """Renders, encodes and decodes for one model.

    `eos_token_ids` end the output (they go into `SamplingParams.stop_token_ids`) and have no text. Token ids are
    below `vocab_size`.
    """

    def __init__(
        self,
        *,
        format: ChatFormat,
        encode_pieces: Callable[[Sequence[Piece]], list[int]],
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        max_model_len: int | None = None,
        prompt_prefix: Sequence[int] = (),
        control_texts: Mapping[int, str] | None = None,
        strip_leading_space: bool = False,
    ) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._prompt_prefix = list(prompt_prefix)
        self._control_texts = control_texts or {}
        self._token_bytes = token_bytes
        self.format = format
        """How the model's conversations, tool calls and thoughts are written."""
        self._encode_pieces = encode_pieces
        self._encode = encode
        self._texts = TokenTexts(token_bytes)
        self._texts.update(dict.fromkeys(self.eos_token_ids, ""))
        self._strip_leading_space = strip_leading_space

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """The prompt for these messages and tools, up to and including the opening of the assistant's turn.

        Text from a message, a call or a tool never becomes a control token. `developer` acts as `system`. Raises
        `PromptError`.
        """
        if not messages:
            raise PromptError("messages", "messages must contain at least one message")
        checked = [_checked(index, message) for index, message in enumerate(messages)]
        pieces = self.format(checked, tools)
        self._refuse_hopeless("messages", [piece.text for piece in pieces])
        return self._encode_pieces(pieces)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt for plain text, with a leading BOS where the checkpoint wants one. Raises `PromptError`."""
        _refuse_lone_surrogates("prompt", text)
        self._refuse_hopeless("prompt", [text])
        token_ids = self._encode(text)
        return token_ids if add_special_tokens else token_ids[len(self._prompt_prefix) :]

    def _refuse_hopeless(self, param: str, texts: Sequence[str]) -> None:
        """Raises `PromptTooLong` for texts far beyond the context, which would take seconds to encode.

        They are encoded in parts until it is clear. A cut adds a few tokens, so a quarter more than the context is
        asked for; what lies between is encoded as a whole, and measured exactly.
        """
        limit = self._max_model_len
        if limit is None or sum(map(len, texts)) <= limit * _LONG_CHARACTERS:
            return
        num_tokens = 0
        for part in _parts(texts):
            num_tokens += len(self._encode(part)) - len(self._prompt_prefix)
            if num_tokens > limit * 5 // 4:
                raise PromptTooLong(param, limit, limit * 5 // 4)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens as people want to see it: control tokens are shown by their names."""
        texts = self._control_texts
        data = b"".join(texts[i].encode() if i in texts else self._token_bytes(i) for i in token_ids)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strip_leading_space else text

    def token_name(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; of a control token its name."""
        text = self._control_texts.get(token_id)
        return self._token_bytes(token_id) if text is None else text.encode()

    def detokenizer(self, stop: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for one answer that ends before any of the `stop` strings (each must be non-empty)."""
        return Detokenizer(self._texts, stop, strip_leading_space=self._strip_leading_space)


def open_text_edge(checkpoint: Checkpoint) -> TextEdge:
    """The text edge of a checkpoint. Raises `TokenizerError` if its tokenizer or template cannot be used.

    Without a chat template a conversation becomes its texts, joined by newlines, as a plain prompt.
    """
    source = checkpoint.tokenizer
    tokenizer = load_gguf_tokenizer(source) if isinstance(source, GgufTokenizer) else load_hf_tokenizer(source)
    template = checkpoint.chat_template
    if template is None:
        format, encode_pieces = ChatFormat(_joined_texts), lambda pieces: tokenizer.encode(text_of(pieces))
    else:
        format, encode_pieces = choose_format(template, tokenizer.template_tokens), tokenizer.encode_pieces
    return TextEdge(
        format=format,
        encode_pieces=encode_pieces,
        encode=tokenizer.encode,
        token_bytes=tokenizer.token_bytes,
        eos_token_ids=checkpoint.eos_token_ids,
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=checkpoint.config.max_model_len,
        prompt_prefix=tokenizer.prompt_prefix,
        control_texts={token.token_id: text for text, token in tokenizer.control_tokens.items()},
        strip_leading_space=tokenizer.strip_leading_space,
    )


def _joined_texts(messages: Sequence[ChatMessage]) -> list[Piece]:
    return [Piece("\n".join(message.content for message in messages), False)]


def _checked(index: int, message: ChatMessage) -> ChatMessage:
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise PromptError(f"messages[{index}].role", f"role must be one of {roles}; got {message.role!r}")
    _refuse_lone_surrogates(f"messages[{index}].content", message.content)
    return replace(message, role="system") if message.role == "developer" else message


def _parts(texts: Sequence[str]) -> Iterable[str]:
    for text in texts:
        for start in range(0, len(text), _PART_CHARACTERS):
            yield text[start : start + _PART_CHARACTERS]


def _refuse_lone_surrogates(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(param, "text contains a lone surrogate and is not valid Unicode") from None
