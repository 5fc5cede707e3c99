"""Which streams have to be read for whom, and what an entry gives to whom.

Owns the place of each feed: the index of its next token, the log that it follows, and whether it is live. Refuses to
read, and to know what becomes of the events. For one thread.

A worker puts the tokens of a step of all its sequences into one entry of its log; the request's own stream, `out`,
has them some steps later, and is the whole truth of what is over. A feed begins *catching up*: its `out` is read.
There, the first entry of an attempt says which slot of which log the rest is in, and the feed follows that. It is
*live* once the log has its next token: then its `out` is not read any more. It is catching up again when the log
skips tokens (those are in `out`, or will be within some steps), and when it is told that the attempt is over.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from bridge.streams.feed import Arrivals, Feed, LogPlace, layers_of
from bridge.streams.xread import Entries
from tasks.protocol import keys
from tasks.protocol.contract import ContractError, StreamEvent, TokenEvent, decode_entry, unpack_source, unpack_step

log = logging.getLogger(__name__)

START = b"0-0"
MAX_AHEAD = 256
"""Tokens kept for one feed until those before them are there. What is dropped comes again, by `out`."""


class _Log:
    __slots__ = ("followers", "position")

    def __init__(self) -> None:
        self.position = START
        self.followers: dict[int, list[Feed]] = {}


class Following:
    def __init__(self) -> None:
        self.feeds: dict[Feed, None] = {}
        self.layers: list[dict[bytes, Feed]] = [{}]
        """Those that are catching up, as of the last `arrange`."""
        self._logs: dict[bytes, _Log] = {}
        self._is_arranged = True

    @property
    def has_live(self) -> bool:
        """Whether there is anybody whose own stream is not read; as of the last `arrange`."""
        return len(self.feeds) > sum(map(len, self.layers))

    def logs(self) -> dict[bytes, bytes]:
        """The logs to read, each with the position after which to read it."""
        return {key: one.position for key, one in self._logs.items()}

    def arrange(self) -> bool:
        """Make `layers` anew; False if they are as they were."""
        if self._is_arranged:
            return False
        self._is_arranged = True
        self.layers = layers_of(feed for feed in self.feeds if not feed.is_live)
        return True

    def add(self, feed: Feed) -> None:
        self.feeds[feed] = None
        self._is_arranged = False
        before, feed.before = feed.before, None
        if before is not None and before.last_place is not None:
            self._follow(feed, before.last_place)

    def remove(self, feed: Feed) -> None:
        """Idempotent."""
        if feed in self.feeds:
            del self.feeds[feed]
            self._is_arranged = False
            self._leave(feed)

    def attempt_over(self, out_keys: Collection[bytes]) -> None:
        """What is to be known of these requests is in their own streams, or in another log."""
        for feed in self.feeds:
            if feed.key in out_keys:
                self._forget(feed)

    def take_out(self, feed: Feed, entries: Entries) -> list[StreamEvent]:
        """What entries of the request's own stream give to `feed`. Raises ContractError."""
        events: list[StreamEvent] = []
        for entry, fields in entries:
            by_name = _by_name(fields)
            event = decode_entry(entry, by_name)
            if isinstance(event, TokenEvent):
                self._note_place(feed, event.attempt, by_name.get(b"s"))
                next_index = event.index + len(event.token_ids)
                if next_index <= feed.next_index:
                    continue
                feed.next_index = next_index
                # A log that has fallen silent is not waited for; one that has not makes it live again at once.
                self._set_live(feed, False)
            events.append(event)
        feed.position = entries[-1][0]
        if feed.ahead and feed.ahead_index <= feed.next_index:
            events += self._close_up(feed)
        return events

    def take_log(self, key: bytes, entries: Entries) -> Arrivals:
        """What entries of a worker's log give to those that follow it."""
        worker_log = self._logs.get(key)
        if worker_log is None:
            return []
        worker_log.position = entries[-1][0]
        followers = worker_log.followers
        fresh: dict[Feed, list[int]] = {}
        is_readable = True
        try:
            for _, fields in entries:
                # PERF: with all streams of a process live, this loop is what a token costs the reader's thread.
                for slot, index, token_id in unpack_step(fields[1]):
                    for feed in followers.get(slot, ()):
                        if index == feed.next_index:
                            feed.next_index = index + 1
                            if feed in fresh:
                                fresh[feed].append(token_id)
                            else:
                                fresh[feed] = [token_id]
                            if not feed.is_live:
                                self._set_live(feed, True)
                        elif index > feed.next_index:
                            self._keep(feed, index, token_id)
        except ContractError as error:
            log.error("%s unreadable entry, given up: %s", key.decode(), error)
            is_readable = False
        arrivals: Arrivals = []
        for feed, token_ids in fresh.items():
            arrivals.append((feed, [_token_event(feed, token_ids)], feed.position))
        if not is_readable:
            for feed in [feed for feeds in followers.values() for feed in feeds]:
                self._forget(feed)
        return arrivals

    def _note_place(self, feed: Feed, attempt: int, packed: bytes | None) -> None:
        """An entry of `attempt` was read, with or without the place of the tokens after it."""
        known_attempt = 0 if feed.place is None else feed.place.attempt
        if packed is None:
            if known_attempt and attempt > known_attempt:
                self._forget(feed)
        elif attempt >= known_attempt:
            worker, slot = unpack_source(packed)
            place = LogPlace(attempt, keys.steps(worker).encode(), slot)
            if place != feed.place:
                self._leave(feed)
                self._follow(feed, place)

    def _keep(self, feed: Feed, index: int, token_id: int) -> None:
        """A token that is not the next."""
        self._set_live(feed, False)
        after = feed.ahead_index + len(feed.ahead)
        if not feed.ahead or index > after or len(feed.ahead) == MAX_AHEAD:
            # What the log skips goes to `out`, with all that was in the log before.
            feed.ahead, feed.ahead_index = [token_id], index
        elif index == after:
            feed.ahead.append(token_id)

    def _close_up(self, feed: Feed) -> list[StreamEvent]:
        """The gap before what was kept is filled."""
        fresh = feed.ahead[feed.next_index - feed.ahead_index :]
        feed.ahead = []
        self._set_live(feed, True)
        feed.next_index += len(fresh)
        return [_token_event(feed, fresh)] if fresh else []

    def _set_live(self, feed: Feed, is_live: bool) -> None:
        if feed.is_live != is_live:
            feed.is_live = is_live
            self._is_arranged = False

    def _follow(self, feed: Feed, place: LogPlace) -> None:
        feed.place = feed.last_place = place
        self._logs.setdefault(place.log, _Log()).followers.setdefault(place.slot, []).append(feed)

    def _leave(self, feed: Feed) -> None:
        """Until it follows something again it is catching up. A log that nobody follows is not read any more."""
        self._set_live(feed, False)
        feed.ahead = []
        if (place := feed.place) is None:
            return
        feed.place = None
        followers = self._logs[place.log].followers
        followers[place.slot].remove(feed)
        if not followers[place.slot]:
            del followers[place.slot]
        if not followers:
            del self._logs[place.log]

    def _forget(self, feed: Feed) -> None:
        """As `_leave`, and a feed that takes its place does not follow that either."""
        self._leave(feed)
        feed.last_place = None


def _token_event(feed: Feed, token_ids: list[int]) -> TokenEvent:
    """The last tokens that were handed over to `feed`."""
    assert feed.place is not None
    return TokenEvent(feed.next_index - len(token_ids), feed.place.attempt, tuple(token_ids))


def _by_name(fields: list[bytes]) -> dict[bytes, bytes]:
    # PERF: nearly every entry has one field; slices and a zip would cost a tenth of decoding it.
    return {fields[0]: fields[1]} if len(fields) == 2 else dict(zip(fields[::2], fields[1::2], strict=True))
