"""The one kind of failure that a command tells as a line instead of a traceback."""

from __future__ import annotations


class ForPeople(RuntimeError):
    """Something on this machine is in the way; the message says what, and what to do about it."""
