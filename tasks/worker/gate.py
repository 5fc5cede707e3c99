"""How many more requests this worker may take: the gate between the queue and the engine.

Owns two counts: messages taken from the queue and not yet acknowledged, and those of them that the engine has not
seen yet. Refuses to know about Redis. The consumer waits here, the engine loop says what there is room for.
"""

from __future__ import annotations

import threading

from decode.engine.engine import Engine

MAX_UNSEEN = 8
"""Messages that may be on their way to the engine at once: as many as one step can start to prefill."""


class Gate:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_taken = 0
        self._num_unseen = 0
        self._room = 0
        self._is_closed = False

    def observe(self, engine: Engine) -> None:
        """Note what the engine has room for (on its thread; everything it was handed is in it)."""
        room = _room(engine)
        with self._changed:
            self._room = room
            self._changed.notify_all()

    def wait_open(self, timeout_s: float) -> bool:
        """Wait until one more message may be taken. False when the time is over or the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_unseen < self._room, timeout_s)
            return self.is_open_nowait

    @property
    def is_open_nowait(self) -> bool:
        return not self._is_closed and self._num_unseen < self._room

    @property
    def num_taken(self) -> int:
        """Messages taken and not acknowledged: what this worker holds, or is about to."""
        return self._num_taken

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def take(self) -> None:
        """A message was taken from the queue."""
        with self._changed:
            self._num_taken += 1
            self._num_unseen += 1

    def seen(self) -> None:
        """The engine knows about a message's request now, or never will: it counts as on its way no more."""
        with self._changed:
            self._num_unseen -= 1
            self._changed.notify_all()

    def give_back(self) -> None:
        """A message was acknowledged."""
        with self._changed:
            self._num_taken -= 1

    def close(self) -> None:
        """Take nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _room(engine: Engine) -> int:
    if not engine.can_accept():
        return 0
    load, config = engine.load(), engine.config
    num_slots = config.max_num_seqs - load.num_running - load.num_waiting
    share = max(1, load.num_blocks // config.max_num_seqs)
    return max(1, min(MAX_UNSEEN, num_slots, load.num_free_blocks // share))
