"""What the engine refuses, as types: every error a request or a device can cause, in one tree.

Owns the names and the figures they carry. Refuses to know how a refusal is worded to a client: the caller reads the
fields. A violated internal rule is an `IntegrityError` (a bug of ours), never one of the others.
What is wrong with a checkpoint is a `decode.checkpoint.config.CheckpointError`.
"""

from __future__ import annotations


class DecodeError(Exception):
    """Anything the engine refuses."""


class PromptTooLong(DecodeError):
    """The sequence can never run here: one more token than it has exceeds a limit.

    `limit` is "context" or "K/V cache". A continuation that exceeds the latter was begun by a worker that had more
    room, and may go on at one (`fits_elsewhere`); everything else can be refused.
    """

    def __init__(
        self, sequence_id: str, num_tokens: int, max_tokens: int, limit: str, *, is_continuation: bool = False
    ) -> None:
        super().__init__(
            f"{sequence_id}: {num_tokens} tokens and at least one new one exceed the {limit} of {max_tokens} tokens"
        )
        self.sequence_id = sequence_id
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        self.is_continuation = is_continuation

    @property
    def fits_elsewhere(self) -> bool:
        """Whether the model's context holds it and some worker held it before."""
        return self.is_continuation and self.limit == "K/V cache"


class EmptyPrompt(DecodeError):
    """There is no token to start from."""

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"{sequence_id}: the prompt holds no token")
        self.sequence_id = sequence_id


class TokenOutOfRange(DecodeError):
    """A token id that the model does not have; running it would spoil the step for everybody else."""

    def __init__(self, sequence_id: str, token_id: int, vocab_size: int) -> None:
        super().__init__(f"{sequence_id}: token id {token_id} is not in [0, {vocab_size})")
        self.sequence_id = sequence_id
        self.token_id = token_id
        self.vocab_size = vocab_size


class InvalidGrammar(DecodeError):
    """The sequence's grammar cannot be followed: it does not compile, or its output so far does not follow it."""

    def __init__(self, sequence_id: str, reason: str) -> None:
        super().__init__(f"{sequence_id}: grammar: {reason}")
        self.sequence_id = sequence_id
        self.reason = reason


class DuplicateSequence(DecodeError):
    """The engine already holds a live sequence of this id."""

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"{sequence_id}: already in the engine")
        self.sequence_id = sequence_id


class DeviceOutOfMemory(DecodeError):
    """The device could not hold one step. The engine is unchanged: shed work (`Engine.shed`) and step again."""


class IntegrityError(DecodeError):
    """Our own bookkeeping contradicts itself (leaked or doubly used blocks, a runner that answers out of shape)."""
