"""Tool calls in the text of an answer: found, and taken apart while they are being written.

Owns `ToolCallParser`. Refuses to know tokens, JSON Schema (`app.grammar.grammars` makes calls follow it) and OpenAI's
chunks.

Promise: the parts do not depend on how the text was cut into pieces, except for where neighbouring text is cut. A
part of a mark never becomes content, unless it turns out to be none. The text of a call that is none after all (bad
JSON, a tool that was not offered) is content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Generator
from typing import Final

import orjson

from app.dialect.formats import ToolFormat
from app.dialect.parts import AnswerPart, Content, ToolArguments, ToolStart

MAX_LEADING_SPACE: Final = 16
"""White space that leads to a mark is not content. No more than this is held back for it."""
_SPACE: Final = " \t\n\r"
_MAX_DEPTH: Final = 128
_NAME_KEYS: Final = frozenset(["name", "function"])
_ARGUMENT_KEYS: Final = frozenset(["arguments", "parameters"])
_IGNORED_KEYS: Final = frozenset(["type", "id"])
_KEYS: Final = _NAME_KEYS | _ARGUMENT_KEYS | _IGNORED_KEYS
_ESCAPES: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LITERAL: Final = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERAL_CHARACTERS: Final = frozenset("0123456789+-.eEtrufalsn")

Reads = Generator[None, str, None]
"""Is sent one character after the other, and ends on the last one that belongs to it."""
ReadsOne = Generator[None, str, str]


def call_id_of(request_id: str, choice: int, index: int) -> str:
    """The same on every replay of an answer; no other call has it."""
    return "call_" + hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()


def start_of_prefix(text: str, mark: str) -> int:
    """Where the longest suffix of `text` begins that is a proper prefix of `mark`; len(text) if there is none."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return at
        at = text.find(mark[0], at + 1)
    return len(text)


def start_of_space(text: str, end: int) -> int:
    """Where the white space before `end` begins, as much of it as leads to a mark."""
    return max(len(text[:end].rstrip()), end - MAX_LEADING_SPACE)


def without_half_mark(text: str, mark: str) -> str:
    """The end of an answer, without the part of a mark that it was cut in (one or two characters may be anything)."""
    at = start_of_prefix(text, mark)
    return text[:at] if len(text) - at > 2 else text


class _Malformed(Exception):
    """The character that was sent last does not belong to a call."""


class ToolCallParser:
    """A `TextMachine`. `new_call_id` gives the id of call 0, 1, ...; `names` are the tools on offer.

    `is_enforced`: a grammar makes sure that what begins as a call goes on as one, so its arguments are passed on as
    they come. Otherwise a call is passed on once it is complete.
    """

    def __init__(
        self, format: ToolFormat, names: Collection[str], new_call_id: Callable[[int], str], *, is_enforced: bool
    ) -> None:
        self.has_tool_calls = False
        self._format = format
        self._names = frozenset(names)
        self._new_call_id = new_call_id
        self._is_enforced = is_enforced
        self._num_calls = 0
        self._num_committed_calls = 0
        self._out: list[AnswerPart] = []
        self._mark_start = format.opening[:1]
        self._held = ""
        """Text outside of calls that may be part of a mark, and white space that may lead to one."""
        self._block: Reads | None = None
        """Reads one or more calls, from behind their opening mark to their closing one."""
        self._raw = ""
        """Text of the block that is content if it is no call after all."""
        self._calls: list[AnswerPart] = []
        """Parts of the block that hold only if it is complete."""
        self._is_committed = False
        """Parts of the block have been passed on, so its text cannot become content any more."""
        self._may_end = False
        """The block is complete if the text ends here."""
        self._piece = ""
        self._at = 0
        self._raw_from = 0
        self._arguments_from = -1
        """Where the arguments that are being read begin in the piece; -1 outside of arguments."""
        self._early_arguments: str | None = None
        """Arguments that came before the name."""
        if not format.opening:
            self._begin(self._bare_calls())

    def push(self, text: str) -> list[AnswerPart]:
        # PERF: most text has nothing to do with calls.
        if self._block is None and not self._held and self._is_surely_content(text):
            return [Content(text)]
        while text:
            text = self._outside(text) if self._block is None else self._inside(text)
        return self._take_out()

    def finish(self) -> list[AnswerPart]:
        if self._block is None:
            rest = without_half_mark(self._held, self._format.opening) if self._held else ""
            if not (self.has_tool_calls and rest.isspace()):
                self._content(rest)
        elif self._may_end:
            self._commit()
        elif not self._is_committed:
            self._content(self._format.opening + self._raw)
        self._block, self._held = None, ""
        return self._take_out()

    def _take_out(self) -> list[AnswerPart]:
        out, self._out = self._out, []
        return out

    def _is_surely_content(self, text: str) -> bool:
        return bool(text) and (not self._mark_start or (self._mark_start not in text and not text[-1].isspace()))

    def _outside(self, text: str) -> str:
        """Content up to the next opening mark; gives the text behind the mark."""
        text = self._held + text
        opening = self._format.opening
        at = text.find(opening) if opening else -1
        if at >= 0:
            self._content(text[: start_of_space(text, at)])
            self._held = ""
            self._begin(self._marked_calls())
            return text[at + len(opening) :]
        safe = start_of_space(text, start_of_prefix(text, opening)) if opening else len(text)
        self._content(text[:safe])
        self._held = text[safe:]
        return ""

    def _begin(self, block: Reads) -> None:
        next(block)
        self._block = block
        self._raw = ""
        self._calls = []
        self._is_committed = self._may_end = False
        self._arguments_from, self._early_arguments = -1, None

    def _inside(self, text: str) -> str:
        """Reads on in the block; gives the text behind it, or the text that was no call after all."""
        assert self._block is not None
        send = self._block.send
        self._piece, self._raw_from = text, 0
        if self._arguments_from >= 0:
            self._arguments_from = 0
        try:
            for self._at, character in enumerate(text):
                send(character)
        except StopIteration:
            self._block = None
            self._commit()
            return text[self._at + 1 :]
        except _Malformed:
            return self._no_call()
        if self._arguments_from >= 0:
            self._pass_arguments(text[self._arguments_from :])
        self._raw += text[self._raw_from :]
        return ""

    def _no_call(self) -> str:
        """Gives the text to look at again, from where the block stopped being one."""
        self._block = None
        rest = self._piece[self._at :]
        if self._arguments_from >= 0:
            self._pass_arguments(self._piece[self._arguments_from : self._at])
        if self._is_committed:
            return rest
        self._calls, self._num_calls = [], self._num_committed_calls
        self._content(self._format.opening)
        return self._raw + self._piece[self._raw_from : self._at] + rest

    def _part(self, part: AnswerPart) -> None:
        self._calls.append(part)
        if self._is_enforced:
            self._commit()
            self._is_committed = True

    def _commit(self) -> None:
        """What was read so far holds, whatever comes next."""
        self.has_tool_calls = self.has_tool_calls or bool(self._calls)
        for part in self._calls:
            self._append(part)
        self._calls = []
        self._num_committed_calls = self._num_calls
        self._raw = ""
        self._raw_from = self._at + 1

    def _append(self, part: AnswerPart) -> None:
        match (self._out[-1] if self._out else None), part:
            case Content(before), Content(text):
                self._out[-1] = Content(before + text)
            case ToolArguments(index, before), ToolArguments(_, text):
                self._out[-1] = ToolArguments(index, before + text)
            case _:
                self._out.append(part)

    def _content(self, text: str) -> None:
        if text:
            self._append(Content(text))

    def _marked_calls(self) -> Reads:
        """An object, several of them, or a list of them; then the closing mark."""
        character = yield from self._space()
        is_list = character == "["
        if is_list:
            character = yield from self._space()
        while True:
            if character != "{":
                raise _Malformed
            yield from self._call()
            self._may_end = not is_list
            character = yield from self._space()
            if is_list and character == ",":
                character = yield from self._space()
            elif is_list or character != "{":
                break
            self._may_end = False
        if is_list:
            if character != "]":
                raise _Malformed
            self._may_end = True
            character = yield from self._space()
        for expected in self._format.closing[:-1]:
            if character != expected:
                raise _Malformed
            character = yield
        if character != self._format.closing[-1]:
            raise _Malformed

    def _bare_calls(self) -> Reads:
        """Objects from the start of the answer on, whatever separates them; each is complete for itself."""
        between = ";,"
        character = yield from self._space()
        if character == "`" and self._format.fences:
            yield from self._fence()
            between += "`"
            character = yield from self._space()
        if character == "[":
            between += "]"
            character = yield from self._space()
        while character == "{":
            self._may_end = False
            yield from self._call()
            self._commit()
            self._is_committed, self._may_end = False, True
            character = yield from self._space()
            while character in between:
                character = yield from self._space()
        raise _Malformed

    def _fence(self) -> Reads:
        line = "`"
        while line not in self._format.fences:
            line += yield
            if not any(fence.startswith(line) for fence in self._format.fences):
                raise _Malformed

    def _call(self) -> Reads:
        """The object of one call, behind its opening brace."""
        name: str | None = None
        has_arguments = False
        character = yield from self._space()
        while True:
            if character != '"':
                raise _Malformed
            key = yield from self._string()
            if key not in _KEYS:
                raise _Malformed
            if (yield from self._space()) != ":":
                raise _Malformed
            character = yield from self._space()
            if key in _ARGUMENT_KEYS and character == "{" and not has_arguments:
                has_arguments = True
                yield from self._arguments(name)
            elif character != '"':
                raise _Malformed
            elif key in _NAME_KEYS and name is None:
                name = yield from self._string()
                if name not in self._names:
                    raise _Malformed
            elif key in _IGNORED_KEYS:
                yield from self._string()
            else:
                raise _Malformed
            character = yield from self._space()
            if character == "}":
                break
            if character != ",":
                raise _Malformed
            character = yield from self._space()
        if name is None:
            raise _Malformed
        if self._early_arguments is not None or not has_arguments:
            self._start(name)
            self._part(ToolArguments(self._num_calls - 1, self._early_arguments or "{}"))
            self._early_arguments = None

    def _start(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._part(ToolStart(index, self._new_call_id(index), name))

    def _arguments(self, name: str | None) -> Reads:
        """The arguments, behind their opening brace; they are passed on with it, as they were written."""
        if name is None:
            self._early_arguments = ""
        else:
            self._start(name)
        self._arguments_from = self._at
        yield from self._object()
        begin, self._arguments_from = self._arguments_from, -1
        self._pass_arguments(self._piece[begin : self._at + 1])

    def _pass_arguments(self, text: str) -> None:
        if self._early_arguments is not None:
            self._early_arguments += text
        elif text:
            self._part(ToolArguments(self._num_calls - 1, text))

    def _object(self) -> Reads:
        """Any JSON object, behind its opening brace."""
        closing = ["}"]
        is_empty = True
        character = yield from self._space()
        while True:
            # At the first entry of a container or at its end, or behind a value.
            if character == closing[-1]:
                closing.pop()
                if not closing:
                    return
                is_empty = False
                character = yield from self._space()
                continue
            if not is_empty:
                if character != ",":
                    raise _Malformed
                character = yield from self._space()
            if closing[-1] == "}":
                if character != '"':
                    raise _Malformed
                yield from self._skip_string()
                if (yield from self._space()) != ":":
                    raise _Malformed
                character = yield from self._space()
            is_empty = character in "{["
            if is_empty:
                if len(closing) == _MAX_DEPTH:
                    raise _Malformed
                closing.append("}" if character == "{" else "]")
                character = yield from self._space()
            elif character == '"':
                yield from self._skip_string()
                character = yield from self._space()
            else:
                character = yield from self._literal(character)

    def _literal(self, character: str) -> ReadsOne:
        """A number, true, false or null; gives what comes behind it and the white space there."""
        literal = ""
        while character in _LITERAL_CHARACTERS:
            literal += character
            character = yield
        if not _LITERAL.fullmatch(literal):
            raise _Malformed
        return (yield from self._space()) if character in _SPACE else character

    def _string(self) -> ReadsOne:
        """The rest of a string, behind its opening quote; gives what it says. For short ones."""
        raw: list[str] = []
        yield from self._skip_string(raw)
        try:
            text: str = orjson.loads(f'"{"".join(raw)}"')
        except orjson.JSONDecodeError:
            raise _Malformed from None
        return text

    def _skip_string(self, raw: list[str] | None = None) -> Reads:
        while (character := (yield)) != '"':
            if character < " ":
                raise _Malformed
            if raw is not None:
                raw.append(character)
            if character == "\\":
                escape = yield
                if raw is not None:
                    raw.append(escape)
                if escape == "u":
                    for _ in range(4):
                        digit = yield
                        if digit not in _HEX:
                            raise _Malformed
                        if raw is not None:
                            raw.append(digit)
                elif escape not in _ESCAPES:
                    raise _Malformed

    def _space(self) -> ReadsOne:
        """Skips white space; gives the character behind it."""
        while (character := (yield)) in _SPACE:
            pass
        return character
