"""What the engine refuses, as types: every error a request or a device can cause, in one tree.

The type says what happened, the message has the figures. A violated internal rule is an `IntegrityError` (a bug of
ours), never one of the others. What is wrong with a checkpoint is a `decode.checkpoint.config.CheckpointError`.
"""

from __future__ import annotations


class DecodeError(Exception):
    """Anything the engine refuses."""


class PromptTooLong(DecodeError):
    """The sequence can never run here: one more token than it has exceeds a limit.

    `fits_elsewhere`: the K/V cache is the limit, and a worker that had more room began the sequence, so it may go on
    at such a worker. Everything else can be refused.
    """

    def __init__(self, message: str, *, fits_elsewhere: bool) -> None:
        super().__init__(message)
        self.fits_elsewhere = fits_elsewhere


class EmptyPrompt(DecodeError):
    """There is no token to start from."""


class TokenOutOfRange(DecodeError):
    """A token id that the model does not have; running it would spoil the step for everybody else."""


class InvalidGrammar(DecodeError):
    """The sequence's grammar cannot be followed: it does not compile, or its output so far does not follow it."""

    def __init__(self, sequence_id: str, reason: str) -> None:
        super().__init__(f"{sequence_id}: grammar: {reason}")


class DuplicateSequence(DecodeError):
    """The engine already holds a live sequence of this id."""


class DeviceOutOfMemory(DecodeError):
    """The device could not hold one step. The engine is unchanged: shed work (`Engine.shed`) and step again."""


class IntegrityError(DecodeError):
    """Our own bookkeeping contradicts itself (leaked or doubly used blocks, a runner that answers out of shape)."""
