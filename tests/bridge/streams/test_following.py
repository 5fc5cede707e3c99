"""Places and logs, without any Redis: what is kept, what is forgotten, and when the list of streams changes."""

from __future__ import annotations

import pytest

from bridge.streams.feed import Feed
from bridge.streams.following import MAX_AHEAD, START, Following
from bridge.streams.xread import Entries
from tasks.protocol.contract import ContractError, TokenEvent, pack_source, pack_step, pack_tokens

LOG = b"tf:worker:w1:steps"


def feed_of(name: str = "a", next_index: int = 0, position: bytes = START, before: Feed | None = None) -> Feed:
    return Feed(name, position, next_index, lambda feed, events, position: None, lambda error: None, before)


def first_entry(slot: int = 7, attempt: int = 1) -> Entries:
    return [(b"1-%d" % attempt, [b"t", pack_tokens((10,)), b"s", pack_source("w1", slot)])]


def step(number: int, *tokens: tuple[int, int, int]) -> Entries:
    return [(b"%d-0" % number, [b"s", pack_step(tokens)])]


@pytest.fixture
def following() -> Following:
    return Following()


@pytest.fixture
def live(following: Following) -> Feed:
    """Has got tokens 0 and 1."""
    feed = feed_of()
    following.add(feed)
    following.take_out(feed, first_entry())
    following.take_log(LOG, step(1, (7, 1, 11)))
    following.arrange()
    assert feed.is_live
    return feed


def test_while_all_are_live_there_is_nothing_to_arrange(following: Following, live: Feed) -> None:
    assert following.layers == [{}]
    assert following.has_live
    for number in range(2, 5):
        assert following.take_log(LOG, step(number, (7, number, 10 + number)))
        assert not following.arrange()
    assert following.logs() == {LOG: b"4-0"}


def test_the_position_handed_over_with_tokens_of_a_log_is_that_of_the_own_stream(
    following: Following, live: Feed
) -> None:
    assert following.take_log(LOG, step(2, (7, 2, 12))) == [(live, [TokenEvent(2, 1, (12,))], b"1-1")]


def test_what_is_kept_for_one_who_is_behind_is_bounded_and_not_lost(following: Following, live: Feed) -> None:
    last = 2 * MAX_AHEAD + 7
    for index in range(3, last + 1):
        assert following.take_log(LOG, step(index, (7, index, index))) == []
        assert len(live.ahead) <= MAX_AHEAD
    own = [(b"3-1", [b"t", pack_tokens(range(2, live.ahead_index))])]
    events = following.take_out(live, own)
    assert [token for event in events for token in event.token_ids] == list(range(2, last + 1))  # type: ignore[union-attr]
    assert live.is_live


def test_what_was_kept_and_is_in_the_own_stream_by_now_is_handed_over_once(following: Following, live: Feed) -> None:
    following.take_log(LOG, step(2, (7, 3, 13), (7, 4, 14)))
    own = [(b"2-1", [b"t", pack_tokens((11, 12, 13))])]
    assert following.take_out(live, own) == [TokenEvent(1, 1, (11, 12, 13)), TokenEvent(4, 1, (14,))]
    assert following.take_log(LOG, step(3, (7, 5, 15))) == [(live, [TokenEvent(5, 1, (15,))], b"2-1")]


def test_what_was_kept_is_forgotten_when_the_attempt_is_over(following: Following, live: Feed) -> None:
    following.take_log(LOG, step(2, (7, 3, 13)))
    following.attempt_over({live.key})
    own = [(b"3-1", [b"t", pack_tokens((12,))])]
    assert following.take_out(live, own) == [TokenEvent(2, 1, (12,))]
    assert following.logs() == {}


def test_a_feed_follows_what_the_one_before_it_did(following: Following, live: Feed) -> None:
    following.remove(live)
    following.remove(live)
    assert following.logs() == {}
    following.add(after := feed_of(position=live.position, before=live))
    assert (after.place, following.logs()) == ((1, LOG, 7), {LOG: START})
    following.attempt_over({live.key})
    following.remove(after)
    following.add(feed_of(position=live.position, before=after))
    assert following.logs() == {}


def test_an_earlier_attempt_that_is_read_again_changes_nothing(following: Following) -> None:
    feed = feed_of()
    following.add(feed)
    following.take_out(feed, first_entry(slot=9, attempt=2))
    following.take_out(feed, first_entry(slot=7, attempt=1))
    assert feed.place == (2, LOG, 9)


def test_its_first_entry_read_again_changes_nothing(following: Following, live: Feed) -> None:
    following.take_log(LOG, step(2, (7, 3, 13)))
    following.take_out(live, first_entry())
    assert (live.place, live.ahead, following.logs()) == ((1, LOG, 7), [13], {LOG: b"2-0"})


def test_a_log_that_is_followed_no_more_gives_nothing(following: Following, live: Feed) -> None:
    following.remove(live)
    assert following.take_log(LOG, step(2, (7, 2, 12))) == []


def test_two_feeds_of_one_request_are_in_two_layers_until_they_are_live(following: Following) -> None:
    feeds = [feed_of(), feed_of()]
    for feed in feeds:
        following.add(feed)
    assert following.arrange()
    assert [list(layer.values()) for layer in following.layers] == [[feeds[0]], [feeds[1]]]
    for feed in feeds:
        following.take_out(feed, first_entry())
    assert len(following.take_log(LOG, step(1, (7, 1, 11)))) == 2
    assert following.arrange()
    assert following.layers == [{}]


def test_an_entry_that_is_none_is_refused(following: Following) -> None:
    following.add(feed := feed_of())
    with pytest.raises(ContractError):
        following.take_out(feed, [(b"1-1", [b"x", b"y"])])


def test_what_a_log_repeats_is_dropped(following: Following, live: Feed) -> None:
    assert following.take_log(LOG, step(2, (7, 0, 10), (7, 1, 11), (7, 2, 12))) == [
        (live, [TokenEvent(2, 1, (12,))], b"1-1")
    ]
    assert following.take_log(LOG, step(3, (7, 1, 11))) == []
    assert (live.next_index, live.is_live) == (3, True)


def test_what_the_own_stream_repeats_is_dropped(following: Following, live: Feed) -> None:
    assert following.take_out(live, [(b"2-1", [b"t", pack_tokens((11,))])]) == []
    assert (live.next_index, live.position, live.is_live) == (2, b"2-1", True)


def test_after_two_gaps_what_comes_after_the_second_is_kept(following: Following, live: Feed) -> None:
    following.take_log(LOG, step(3, (7, 3, 13)))
    following.take_log(LOG, step(5, (7, 5, 15), (7, 6, 16)))
    following.take_log(LOG, step(6, (7, 4, 14)))
    own = [(b"3-1", [b"t", pack_tokens((12, 13, 14))])]
    assert following.take_out(live, own) == [TokenEvent(2, 1, (12, 13, 14)), TokenEvent(5, 1, (15, 16))]
