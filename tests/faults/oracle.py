"""What the scripted model answers, known without any server: text, tokens and finish reason of every request here.

Owns the prompts. They come from a small set of stories, because the reference model is slow; a shorter answer is the
beginning of a longer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.dialect.conversation import ChatMessage
from app.text.scripted import scripted_text_edge
from decode.engine.sampling import SamplingParams
from decode.scripted import SCRIPTED_MAX_MODEL_LEN, generate

MAX_TOKENS = 160
"""The longest answer that a story is known for."""
NUM_STORIES = 48
END_MARK = "\x03"
"""Before a character N in the prompt: the model ends after N tokens by itself (`decode.scripted`)."""

_EDGE = scripted_text_edge()


@dataclass(frozen=True, slots=True)
class Answer:
    """How an undisturbed run answers."""

    token_ids: tuple[int, ...]
    """Of the engine; a stop string cuts the text earlier."""
    text: str
    finish_reason: str


class Oracle:
    """Answers are computed once for each prompt."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def token_ids(self, content: str) -> tuple[int, ...]:
        """MAX_TOKENS tokens of the answer, or fewer if the model ends by itself."""
        if content not in self._known:
            prompt = _EDGE.render_chat([ChatMessage("user", content)])
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop_token_ids=_EDGE.eos_token_ids)
            self._known[content] = tuple(generate(prompt, sampling, SCRIPTED_MAX_MODEL_LEN)[0])
        return self._known[content]

    def answer(self, content: str, max_tokens: int, stop: tuple[str, ...] = ()) -> Answer:
        assert max_tokens <= MAX_TOKENS
        known = self.token_ids(content)
        token_ids = known[:max_tokens]
        detokenizer = _EDGE.detokenizer(stop)
        text = detokenizer.push(list(token_ids)) + detokenizer.finish()
        is_ended = detokenizer.stopped or token_ids[-1] in _EDGE.eos_token_ids
        return Answer(token_ids, text, "stop" if is_ended else "length")


def story(number: int, ends_after: int | None = None) -> str:
    """The prompt of a story, with or without an end of its own."""
    text = f"story {number % NUM_STORIES}: " + "and then " * (number % 7)
    return text if ends_after is None else f"{text}{END_MARK}{chr(ends_after)}"
