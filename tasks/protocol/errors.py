"""The refusals of the request record, as exceptions. Each says what the caller must do about it.

`decode` and `app` have their own errors; `contract.ContractError` is for bytes that cannot be read.
"""

from __future__ import annotations


class ProtocolRefusal(Exception):
    """A script refused to move a request record. Nothing was changed."""


class QueueFull(ProtocolRefusal):
    """The queue bound of the model is reached. Tell the client to come back later (429 with Retry-After)."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already")
        self.num_waiting = num_waiting


class NoWorker(ProtocolRefusal):
    """No live worker serves the model. Tell the client that the service is unavailable (503)."""

    def __init__(self, model: str) -> None:
        super().__init__(f"no live worker for model {model!r}")
        self.model = model


class IdempotencyConflict(ProtocolRefusal):
    """The idempotency key belongs to a request with another body. Tell the client that it has to choose (409)."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"this idempotency key belongs to {request_id}, whose body was another one")
        self.request_id = request_id


class Stale(ProtocolRefusal):
    """This assignment is not (or no longer) on offer: claimed, re-offered, ended, unknown. Drop the message."""


class FingerprintMismatch(ProtocolRefusal):
    """The request has tokens made by workers of another fingerprint. Leave it to them: give the message back."""

    def __init__(self, required: str) -> None:
        super().__init__(f"only workers with fingerprint {required} may continue this request")
        self.required = required
