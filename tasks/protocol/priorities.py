"""The classes of requests, and which of them is served next.

Owns the rule: an offer counts as made `HEAD_START_MS` of its class later than it was, and the oldest comes first.
So a class is served before the ones below it, and an offer below that has waited for as long as the difference comes
before newer ones above: nothing starves, however many of a higher class keep coming. Re-offers come before all
classes. The script `fetch` does the same to the messages in the queues; this is its specification.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.protocol.contract import Priority

PRIORITIES: tuple[Priority, ...] = ("priority", "default", "flex")
"""The first of them first."""
HEAD_START_MS: Mapping[Priority, int] = {"priority": 0, "default": 5_000, "flex": 30_000}
"""Below the first-token deadline: who is served last is served before that, if anybody is."""


def up_to(priority: Priority) -> tuple[Priority, ...]:
    """This class and those above it: what its offers may have to wait for."""
    return PRIORITIES[: PRIORITIES.index(priority) + 1]


def served_first(oldest_offer_ms: Mapping[Priority, int]) -> Priority | None:
    """The class to serve next, of those that have an offer."""
    waiting = [priority for priority in PRIORITIES if priority in oldest_offer_ms]
    return min(waiting, key=lambda priority: oldest_offer_ms[priority] + HEAD_START_MS[priority], default=None)
