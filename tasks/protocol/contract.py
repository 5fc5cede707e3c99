"""The wire between processes: the closed set of frozen types that cross Redis, and their one codec.

Owns the job, the stream events and the worker description, and how each becomes bytes. Refuses to know where the
bytes are kept (`tasks.protocol.keys`) and who may change them (`tasks.scripts`). A record of another codec version,
or one that is damaged, raises `ContractError`: it is never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson

from decode.engine.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CODEC_VERSION = 2

EndState = Literal["finished", "cancelled", "failed"]
Priority = Literal["priority", "default", "flex"]


class ContractError(ValueError):
    """Bytes from Redis that this version cannot read; the message says which field and why."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What a worker needs to generate one answer. Token ids only: text lives in the web process."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    created_ms: int
    priority: Priority = "default"
    traceparent: str = ""
    """The span that the spans of the worker belong to (W3C Trace Context); empty: none are made."""


class TokenEvent(NamedTuple):
    """Output tokens `index`, `index + 1`, ... of one request, in order.

    `logprobs`: one for each token if the job asked for them, else empty.

    PERF: one is made for every streamed token, which costs half of what a frozen dataclass does.
    """

    index: int  # type: ignore[assignment]  # a tuple's method of that name is not needed
    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminalEvent:
    """The end of one request; there is exactly one. `index` is the number of output tokens before it.

    `reason` is "stop" or "length" when finished (stop: an EOS token, or a stop string found by the web process);
    otherwise a short code such as "disconnect", "poison", "engine_error", with a `message` for people.
    """

    index: int
    attempt: int
    state: EndState
    reason: str
    message: str = ""
    worker: str = ""
    num_cached_tokens: int = 0


StreamEvent = TokenEvent | TerminalEvent


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says about itself once, when it joins (the fixed part of its lease)."""

    worker: str
    pid: int
    host: str
    device: str
    model: str
    fingerprint: str
    variant: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    started_ms: int
    architecture: str = ""
    """The family of the checkpoint, for people."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says about itself with every heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    last_step_ms: int = 0
    """When the engine last finished a step, or was last seen idle (epoch milliseconds)."""


def values_of(one: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass as they are.

    PERF: `asdict` copies a prompt token by token, 1.0 ms for each thousand.
    """
    return {each.name: getattr(one, each.name) for each in fields(one)}


def encode_job(job: GenerationJob) -> bytes:
    values = {"v": CODEC_VERSION, **values_of(job)}
    if not job.traceparent:
        del values["traceparent"]
    return orjson.dumps(values)


def decode_job(data: bytes) -> GenerationJob:
    """Raises ContractError: not JSON, another codec version, a field missing or unknown."""
    raw = _load(data, "job")
    try:
        raw["sampling"]["stop_token_ids"] = tuple(raw["sampling"]["stop_token_ids"])
        raw["sampling"]["logit_bias"] = tuple((token, bias) for token, bias in raw["sampling"]["logit_bias"])
        raw["sampling"] = SamplingParams(**raw["sampling"])
        raw["prompt_token_ids"] = tuple(raw["prompt_token_ids"])
        return GenerationJob(**raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"job: {error}") from error


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, little endian, so that a script can cut by index with `string.sub`."""
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise ContractError(f"tokens: {len(data)} bytes is not a multiple of 4")
    return (
        tuple(memoryview(data).cast("I"))
        if _LITTLE
        else tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
    )


def pack_step(tokens: Sequence[tuple[int, int, int]]) -> bytes:
    """An entry of a worker's log: (slot, index, token id) each, twelve bytes, little endian."""
    return pack_tokens([number for token in tokens for number in token])


def unpack_step(data: bytes) -> Iterable[tuple[int, int, int]]:
    """(slot, index, token id) each. Raises ContractError."""
    if len(data) % _STEP_BYTES:
        raise ContractError(f"step: {len(data)} bytes is not a multiple of {_STEP_BYTES}")
    numbers = unpack_tokens(data)
    return zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)


_STEP_BYTES = 12
_LOGPROB = Struct("<f")
_TOP = Struct("<If")


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    """The same number of bytes for each token (all have as many `top`), so that a script can cut by index."""
    return b"".join(
        _LOGPROB.pack(one.logprob) + b"".join(_TOP.pack(token, logprob) for token, logprob in one.top)
        for one in logprobs
    )


def unpack_logprobs(data: bytes, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Raises ContractError: not a whole number of entries for each of `num_tokens` (at least 1)."""
    stride = len(data) // num_tokens
    if len(data) != stride * num_tokens or stride % _TOP.size != _LOGPROB.size:
        raise ContractError(f"logprobs: {len(data)} bytes for {num_tokens} tokens")
    return tuple(
        TokenLogprobs(
            _LOGPROB.unpack_from(data, start)[0],
            tuple(_TOP.iter_unpack(data[start + _LOGPROB.size : start + stride])),
        )
        for start in range(0, len(data), stride)
    )


def entry_id(index: int, attempt: int) -> str:
    """The stream entry id of output token `index` written by `attempt` (ids start at 1: 0-0 is not allowed)."""
    return f"{index + 1}-{attempt}"


def pack_source(worker: str, slot: int) -> bytes:
    """As the append script writes it: where the tokens after an entry are."""
    return slot.to_bytes(4, "little") + worker.encode()


def unpack_source(data: bytes) -> tuple[str, int]:
    """(worker, slot). Raises ContractError."""
    try:
        worker = data[4:].decode()
    except UnicodeDecodeError as error:
        raise ContractError(f"source: {data!r} names no worker") from error
    if not worker:
        raise ContractError(f"source: {data!r} names no worker")
    return worker, int.from_bytes(data[:4], "little")


def decode_entry(entry: bytes, fields: Mapping[bytes, bytes]) -> StreamEvent:
    """One stream entry to its event. Token entries hold field `t`, and `l` with log probabilities, and `s`
    (`pack_source`) where those after it are in a log first; the terminal entry holds field `e`.

    Raises ContractError.
    """
    first, _, attempt_text = entry.partition(b"-")
    index, attempt = int(first) - 1, int(attempt_text)
    if (tokens := fields.get(b"t")) is not None:
        token_ids = unpack_tokens(tokens)
        if (logprobs := fields.get(b"l")) is None:
            return TokenEvent(index, attempt, token_ids)
        return TokenEvent(index, attempt, token_ids, unpack_logprobs(logprobs, len(token_ids)))
    if (end := fields.get(b"e")) is None:
        raise ContractError(f"entry {entry!r}: neither tokens nor a terminal, fields {sorted(fields)!r}")
    raw = _load(end, "terminal")
    try:
        return TerminalEvent(index=index, attempt=attempt, **raw)
    except TypeError as error:
        raise ContractError(f"terminal: {error}") from error


def encode_terminal(
    state: EndState, reason: str, message: str = "", worker: str = "", num_cached_tokens: int = 0
) -> bytes:
    """The field `e` of a terminal entry; index and attempt are in the entry id."""
    return orjson.dumps(
        {
            "v": CODEC_VERSION,
            "state": state,
            "reason": reason,
            "message": message,
            "worker": worker,
            "num_cached_tokens": num_cached_tokens,
        }
    )


def encode_worker_info(info: WorkerInfo) -> bytes:
    return orjson.dumps({"v": CODEC_VERSION, **asdict(info)})


def decode_worker_info(data: bytes) -> WorkerInfo:
    try:
        return WorkerInfo(**_load(data, "worker"))
    except TypeError as error:
        raise ContractError(f"worker: {error}") from error


def encode_worker_load(load: WorkerLoad) -> bytes:
    return orjson.dumps({"v": CODEC_VERSION, **asdict(load)})


def decode_worker_load(data: bytes) -> WorkerLoad:
    try:
        return WorkerLoad(**_load(data, "load"))
    except TypeError as error:
        raise ContractError(f"load: {error}") from error


def _load(data: bytes, what: str) -> dict[str, Any]:
    try:
        raw = orjson.loads(data)
        version = raw.pop("v")
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ContractError(f"{what}: not a versioned record ({error})") from error
    if version != CODEC_VERSION:
        raise ContractError(f"{what}: codec version {version}, this process speaks {CODEC_VERSION}")
    return dict(raw)


_LITTLE = memoryview(b"\x01\x00\x00\x00").cast("I")[0] == 1
