"""Settings: the environment, read once for each process into one frozen dataclass.

Owns the variables' names, defaults and limits: a field is called as its variable, in small letters, and declares its
default and its check. A bad value raises SettingsError, which names the variable and says what is allowed. Only
composition roots read settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

S = TypeVar("S", bound="Settings")
T = TypeVar("T")

VARIANTS = ("auto", "q4", "q8", "bf16", "fp32")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")
"""As a browser spells it: scheme, host and port in lower case, and nothing after."""


class SettingsError(ValueError):
    """An environment variable has a value that is not allowed; the message names it."""


def setting(default: str, check: Callable[[str], T], variable: str = "") -> T:
    """`default` and values are texts; `check` raises ValueError, whose message goes on after "VARIABLE must"."""
    found: Any = field(metadata={"default": default, "check": check, "variable": variable})
    typed: T = found
    return typed


def variable_of(one: Field[Any]) -> str:
    return one.metadata["variable"] or one.name.upper()


def text(value: str) -> str:
    return value


def integer(low: int, high: int) -> Callable[[str], int]:
    def check(value: str) -> int:
        if not (value.isascii() and value.isdigit() and len(value) < 19 and low <= int(value) <= high):
            raise ValueError(f"be a whole number from {low} to {high}, not {value!r}")
        return int(value)

    return check


def choice(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"be one of {', '.join(allowed)}, not {value!r}")
        return value

    return check


def switch(value: str) -> bool:
    return choice("on", "off")(value) == "on"


def folder(value: str) -> Path:
    return Path(value).expanduser().absolute()


def file(value: str) -> Path | None:
    if not value:
        return None
    if not (path := folder(value)).is_file():
        raise ValueError(f"be a file that exists, not {value!r}")
    return path


def redis_url(value: str) -> str:
    if value and not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(f"start with redis://, rediss:// or unix://, not {value!r}")
    return value


def cors_origins(value: str) -> tuple[str, ...]:
    if value in ("*", "none"):
        return () if value == "none" else ("*",)
    origins = tuple(value.replace(",", " ").split())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"be *, none, or origins such as https://chat.example:8443 with commas between them, not {origin!r}"
            )
    return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What more than one kind of process reads."""

    redis_url: str = setting("", redis_url)
    """By default the embedded server's socket in `data_dir`."""
    data_dir: Path = setting("./var", folder)
    """Where the embedded Valkey and the catalog keep their files."""
    cache_dir: Path = setting("~/.cache/tokenferry", folder, "TOKENFERRY_CACHE")
    """Where pulled models and repacked weights are kept."""
    model: str = setting("smollm2-135m-instruct", text)
    """As asked for: a registry name, a path or a hub id (`decode.checkpoint.names` resolves it)."""
    workers: int = setting("1", integer(0, 256))
    """How many worker processes `tokenferry serve` starts."""
    stream_ttl_s: int = setting("600", integer(1, 604_800))
    first_token_deadline_s: int = setting("60", integer(1, 86_400))
    log_level: str = setting("info", choice("debug", "info", "warning", "error"))
    log_format: str = setting("text", choice("text", "json"))

    @classmethod
    def from_env(cls: type[S], environ: Mapping[str, str]) -> S:
        """Empty values are defaults. Raises SettingsError."""
        values = {}
        for one in fields(cls):
            value = environ.get(variable_of(one), "").strip() or one.metadata["default"]
            try:
                values[one.name] = one.metadata["check"](value)
            except ValueError as error:
                raise SettingsError(f"{variable_of(one)} must {error}") from None
        values["redis_url"] = values["redis_url"] or f"unix://{values['data_dir'] / 'redis.sock'}?db=0"
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings(Settings):
    host: str = setting("127.0.0.1", text)
    port: int = setting("8080", integer(0, 65535))
    max_waiting: int = setting("256", integer(1, 1_000_000))
    api_keys_file: Path | None = setting("", file)
    """None: everybody is let in."""
    store_days: int = setting("30", integer(1, 3650))
    store_max: int = setting("10000", integer(1, 10_000_000))
    """Stored completions of one API key."""
    cors_origins: tuple[str, ...] = setting("*", cors_origins)
    """"*" is every origin; empty is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(Settings):
    variant: str = setting("auto", choice(*VARIANTS))
    device: str = setting("cpu", choice("cpu", "cuda"))
    num_threads: int = setting("0", integer(0, 1024))
    """0: choose."""
    kv_cache_tokens: int = setting("65536", integer(16, 1 << 30))
    max_model_len: int = setting("0", integer(0, 1 << 24))
    """0: the checkpoint's own."""
    max_num_seqs: int = setting("32", integer(1, 4096))
    max_num_batched_tokens: int = setting("0", integer(0, 1 << 20))
    """0: 512, or `max_num_seqs` if that is more."""
    prompt_lookup: bool = setting("on", switch)
    """Whether a sequence's tokens are drafted from what it has already, where that is exact."""
    lease_ms: int = setting("500", integer(50, 600_000))
    heartbeat_ms: int = setting("100", integer(10, 60_000))
    stall_limit_s: int = setting("30", integer(1, 3600))
    scripted_step_ms: int = setting("10", integer(0, 60_000))
    """What a step of the scripted engine is declared to take."""

    def __post_init__(self) -> None:
        if self.lease_ms < 2 * self.heartbeat_ms:
            raise SettingsError(
                f"LEASE_MS must be at least twice HEARTBEAT_MS, not {self.lease_ms} with a heartbeat of"
                f" {self.heartbeat_ms}"
            )
        if not self.max_num_batched_tokens:
            object.__setattr__(self, "max_num_batched_tokens", max(512, self.max_num_seqs))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"MAX_NUM_BATCHED_TOKENS must be at least MAX_NUM_SEQS ({self.max_num_seqs}), not"
                f" {self.max_num_batched_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(Settings):
    catalog_days: int = setting("30", integer(1, 36_500))
    catalog_max_mb: int = setting("1024", integer(16, 1 << 30))
