"""Everything textual about one model: messages to prompt token ids, output token ids to text.

Owns the choice of tokenizer and chat template for a checkpoint. Refuses to know about HTTP, OpenAI's JSON and
weights. One `TextEdge` is shared by all requests and threads of a web process; a `Detokenizer` belongs to one
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.detokenizer import Detokenizer, TokenTexts
from app.gguf_tokenizer import load_gguf_tokenizer
from app.hf_tokenizer import load_hf_tokenizer
from app.prompt import ChatMessage, PromptError
from app.templates import choose_template
from app.tokenizer import TokenizerError
from decode.checkpoint import Checkpoint, GgufTokenizer

__all__ = [
    "ChatMessage",
    "Detokenizer",
    "PromptError",
    "TextEdge",
    "TokenizerError",
    "open_text_edge",
    "scripted_text_edge",
]

_ROLES = ("system", "developer", "user", "assistant", "tool")


class TextEdge:
    """Renders, encodes and decodes for one model.

    `eos_token_ids` end the output (they go into `SamplingParams.stop_token_ids`) and have no text.
    """

    def __init__(
        self,
        *,
        render: Callable[[Sequence[ChatMessage]], list[int]],
        encode: Callable[[str], list[int]],
        token_bytes: Callable[[int], bytes],
        eos_token_ids: Sequence[int],
        strip_leading_space: bool = False,
    ) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self._render = render
        self._encode = encode
        self._texts = TokenTexts(token_bytes)
        self._texts.update(dict.fromkeys(self.eos_token_ids, ""))
        self._strip_leading_space = strip_leading_space

    def render_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt for these messages, up to and including the opening of the assistant's turn.

        Text from a message never becomes a control token. `developer` acts as `system`. Raises `PromptError`.
        """
        if not messages:
            raise PromptError("messages", "messages must contain at least one message")
        return self._render([_checked(index, message) for index, message in enumerate(messages)])

    def encode(self, text: str) -> list[int]:
        """The prompt for plain text, with a leading BOS where the checkpoint wants one. Raises `PromptError`."""
        _refuse_lone_surrogates("prompt", text)
        return self._encode(text)

    def detokenizer(self, stop: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for one answer that ends before any of the `stop` strings (each must be non-empty)."""
        return Detokenizer(self._texts, stop, strip_leading_space=self._strip_leading_space)


def open_text_edge(checkpoint: Checkpoint) -> TextEdge:
    """The text edge of a checkpoint. Raises `TokenizerError` if its tokenizer or template cannot be used.

    Without a chat template a conversation becomes its texts, joined by newlines, as a plain prompt.
    """
    source = checkpoint.tokenizer
    tokenizer = load_gguf_tokenizer(source) if isinstance(source, GgufTokenizer) else load_hf_tokenizer(source)
    render: Callable[[Sequence[ChatMessage]], list[int]]
    if checkpoint.chat_template is None:

        def render(messages: Sequence[ChatMessage]) -> list[int]:
            return tokenizer.encode("\n".join(message.content for message in messages))

    else:
        template = choose_template(checkpoint.chat_template, tokenizer.template_tokens)

        def render(messages: Sequence[ChatMessage]) -> list[int]:
            return tokenizer.encode_pieces(template(messages))

    return TextEdge(
        render=render,
        encode=tokenizer.encode,
        token_bytes=tokenizer.token_bytes,
        eos_token_ids=checkpoint.eos_token_ids,
        strip_leading_space=tokenizer.strip_leading_space,
    )


SCRIPTED_EOS_TOKEN_ID = 2
"""The scripted engine's EOS (`decode.scripted`)."""


def scripted_text_edge() -> TextEdge:
    """The text edge of the scripted engine: prompts are UTF-8 bytes (ids 0 to 255), output id N reads `<N>`.

    The rendering is one line per message, `role: content`, and an opening `assistant:`.
    """

    def render(messages: Sequence[ChatMessage]) -> list[int]:
        return encode("".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant:")

    def encode(text: str) -> list[int]:
        return list(text.encode())

    return TextEdge(
        render=render,
        encode=encode,
        token_bytes=lambda token_id: b"<%d>" % token_id,
        eos_token_ids=[SCRIPTED_EOS_TOKEN_ID],
    )


def _checked(index: int, message: ChatMessage) -> ChatMessage:
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise PromptError(f"messages[{index}].role", f"role must be one of {roles}; got {message.role!r}")
    _refuse_lone_surrogates(f"messages[{index}].content", message.content)
    return ChatMessage("system", message.content) if message.role == "developer" else message


def _refuse_lone_surrogates(param: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(param, "text contains a lone surrogate and is not valid Unicode") from None
