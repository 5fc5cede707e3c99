"""Stop strings, matched on text that arrives in pieces.

Owns one answer's hold-back: which text is safe to send, and where the answer ends. Refuses to know about tokens
and bytes (`app.text.detokenizer`) and about what is done when a stop string is found.

The answer ends at the stop string that is *complete* first; of several that are complete at the same character,
the longest one counts. That choice depends only on the text, never on how it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Finds the first complete stop string in a text that is pushed piece by piece.

    Invariant: what was returned so far, plus the held-back text, is the whole text pushed so far, until a match;
    the held-back text is the longest suffix that is a proper prefix of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not stop or not all(stop):
            raise ValueError("stop strings must be non-empty")
        self.matched = False
        self._stop = tuple(dict.fromkeys(stop))
        self._max_held = max(map(len, self._stop)) - 1
        first_characters = "".join(sorted({s[0] for s in self._stop}))
        self._may_start = re.compile(f"[{re.escape(first_characters)}]")
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters of the held-back text."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Takes more text; returns what can be sent. After a match nothing is ever returned again."""
        if self.matched:
            return ""
        text = self._held + text
        # PERF: most pieces contain no first character of any stop string and leave at once.
        if not self._may_start.search(text):
            self._held = ""
            return text
        cut = self._match_start(text)
        if cut is not None:
            self.matched = True
            self._held = ""
            return text[:cut]
        hold = self._hold_start(text)
        self._held = text[hold:]
        return text[:hold]

    def finish(self) -> str:
        """The text that was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _match_start(self, text: str) -> int | None:
        """Where the stop string that is complete first begins, or None."""
        matches = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        return min(matches)[1] if matches else None

    def _hold_start(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string; len(text) if there is none."""
        for candidate in self._may_start.finditer(text, max(0, len(text) - self._max_held)):
            suffix = text[candidate.start() :]
            if any(s.startswith(suffix) for s in self._stop):
                return candidate.start()
        return len(text)
