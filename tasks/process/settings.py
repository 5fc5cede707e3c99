"""Settings: the environment, read once for each process into one frozen dataclass.

Owns the variables' names, defaults and limits. Refuses to guess: a bad value raises SettingsError, which names the
variable and says what is allowed. Only composition roots read settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Environ = Mapping[str, str]

VARIANTS = ("auto", "q4", "q8", "bf16", "fp32")
DEVICES = ("cpu", "cuda")
SWITCH = ("on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")
"""As a browser spells it: scheme, host and port in lower case, and nothing after."""


class SettingsError(ValueError):
    """An environment variable has a value that is not allowed; the message names it."""


@dataclass(frozen=True, slots=True)
class WebSettings:
    host: str
    port: int
    redis_url: str
    model: str
    """As asked for: a registry name, a path or a hub id (`decode.checkpoint.names` resolves it)."""
    cache_dir: Path
    max_waiting: int
    lease_ms: int
    stream_ttl_s: int
    first_token_deadline_s: int
    api_keys_file: Path | None
    """None: everybody is let in."""
    store_days: int
    store_max: int
    """Stored completions of one API key."""
    cors_origins: tuple[str, ...]
    """"*" is every origin; empty is none."""
    log_level: str
    log_format: str

    @classmethod
    def from_env(cls, environ: Environ) -> WebSettings:
        """Raises SettingsError."""
        return cls(
            host=_text(environ, "HOST", "127.0.0.1"),
            port=_integer(environ, "PORT", 8080, 0, 65535),
            redis_url=redis_url(environ),
            model=model(environ),
            cache_dir=cache_dir(environ),
            max_waiting=_integer(environ, "MAX_WAITING", 256, 1, 1_000_000),
            lease_ms=_lease_ms(environ),
            stream_ttl_s=_stream_ttl_s(environ),
            first_token_deadline_s=_first_token_deadline_s(environ),
            api_keys_file=_file(environ, "API_KEYS_FILE"),
            store_days=_integer(environ, "STORE_DAYS", 30, 1, 3650),
            store_max=_integer(environ, "STORE_MAX", 10_000, 1, 10_000_000),
            cors_origins=_cors_origins(environ),
            log_level=log_level(environ),
            log_format=log_format(environ),
        )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    redis_url: str
    model: str
    cache_dir: Path
    variant: str
    device: str
    num_threads: int
    """0: choose."""
    kv_cache_tokens: int
    max_model_len: int
    """0: the checkpoint's own."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_lookup: bool
    """Whether a sequence's tokens are drafted from what it has already, where that is exact."""
    lease_ms: int
    heartbeat_ms: int
    stall_limit_s: int
    stream_ttl_s: int
    scripted_step_ms: int
    """What a step of the scripted engine is declared to take."""
    log_level: str
    log_format: str

    @classmethod
    def from_env(cls, environ: Environ) -> WorkerSettings:
        """Raises SettingsError."""
        heartbeat_ms = _integer(environ, "HEARTBEAT_MS", 100, 10, 60_000)
        lease_ms = _lease_ms(environ)
        if lease_ms < 2 * heartbeat_ms:
            raise SettingsError(
                f"LEASE_MS must be at least twice HEARTBEAT_MS, not {lease_ms} with a heartbeat of {heartbeat_ms}"
            )
        max_num_seqs = _integer(environ, "MAX_NUM_SEQS", 32, 1, 4096)
        max_num_batched_tokens = _integer(environ, "MAX_NUM_BATCHED_TOKENS", max(512, max_num_seqs), 1, 1 << 20)
        if max_num_batched_tokens < max_num_seqs:
            raise SettingsError(
                f"MAX_NUM_BATCHED_TOKENS must be at least MAX_NUM_SEQS ({max_num_seqs}), not {max_num_batched_tokens}"
            )
        return cls(
            redis_url=redis_url(environ),
            model=model(environ),
            cache_dir=cache_dir(environ),
            variant=_choice(environ, "VARIANT", "auto", VARIANTS),
            device=_choice(environ, "DEVICE", "cpu", DEVICES),
            num_threads=_integer(environ, "NUM_THREADS", 0, 0, 1024),
            kv_cache_tokens=_integer(environ, "KV_CACHE_TOKENS", 65536, 16, 1 << 30),
            max_model_len=_integer(environ, "MAX_MODEL_LEN", 0, 0, 1 << 24),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prompt_lookup=_choice(environ, "PROMPT_LOOKUP", "on", SWITCH) == "on",
            lease_ms=lease_ms,
            heartbeat_ms=heartbeat_ms,
            stall_limit_s=_integer(environ, "STALL_LIMIT_S", 30, 1, 3600),
            stream_ttl_s=_stream_ttl_s(environ),
            scripted_step_ms=_integer(environ, "SCRIPTED_STEP_MS", 10, 0, 60_000),
            log_level=log_level(environ),
            log_format=log_format(environ),
        )


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    redis_url: str
    data_dir: Path
    catalog_days: int
    catalog_max_mb: int
    stream_ttl_s: int
    first_token_deadline_s: int
    log_level: str
    log_format: str

    @classmethod
    def from_env(cls, environ: Environ) -> BridgeSettings:
        """Raises SettingsError."""
        return cls(
            redis_url=redis_url(environ),
            data_dir=data_dir(environ),
            catalog_days=_integer(environ, "CATALOG_DAYS", 30, 1, 36_500),
            catalog_max_mb=_integer(environ, "CATALOG_MAX_MB", 1024, 16, 1 << 30),
            stream_ttl_s=_stream_ttl_s(environ),
            first_token_deadline_s=_first_token_deadline_s(environ),
            log_level=log_level(environ),
            log_format=log_format(environ),
        )


def data_dir(environ: Environ) -> Path:
    """Where the embedded Valkey and the catalog keep their files."""
    return Path(_text(environ, "DATA_DIR", "./var")).expanduser().absolute()


def cache_dir(environ: Environ) -> Path:
    """Where pulled models and repacked weights are kept."""
    return Path(_text(environ, "TOKENFERRY_CACHE", "~/.cache/tokenferry")).expanduser().absolute()


def model(environ: Environ) -> str:
    return _text(environ, "MODEL", "smollm2-135m-instruct")


def num_workers(environ: Environ) -> int:
    """How many worker processes `tokenferry serve` starts. Raises SettingsError."""
    return _integer(environ, "WORKERS", 1, 0, 256)


def redis_url(environ: Environ) -> str:
    """REDIS_URL, or the embedded server's socket in DATA_DIR. Raises SettingsError."""
    url = _text(environ, "REDIS_URL", f"unix://{data_dir(environ) / 'redis.sock'}?db=0")
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise SettingsError(f"REDIS_URL must start with redis://, rediss:// or unix://, not {url!r}")
    return url


def _lease_ms(environ: Environ) -> int:
    return _integer(environ, "LEASE_MS", 500, 50, 600_000)


def _stream_ttl_s(environ: Environ) -> int:
    return _integer(environ, "STREAM_TTL_S", 600, 1, 604_800)


def _first_token_deadline_s(environ: Environ) -> int:
    return _integer(environ, "FIRST_TOKEN_DEADLINE_S", 60, 1, 86_400)


def log_level(environ: Environ) -> str:
    """Raises SettingsError."""
    return _choice(environ, "LOG_LEVEL", "info", LOG_LEVELS)


def log_format(environ: Environ) -> str:
    """Raises SettingsError."""
    return _choice(environ, "LOG_FORMAT", "text", LOG_FORMATS)


def _file(environ: Environ, name: str) -> Path | None:
    text = _text(environ, name, "")
    if not text:
        return None
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise SettingsError(f"{name} must be a file that exists, not {text!r}")
    return path


def _cors_origins(environ: Environ) -> tuple[str, ...]:
    text = _text(environ, "CORS_ORIGINS", "*")
    if text in ("*", "none"):
        return () if text == "none" else ("*",)
    origins = tuple(text.replace(",", " ").split())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                "CORS_ORIGINS must be *, none, or origins such as https://chat.example:8443 with commas between them,"
                f" not {origin!r}"
            )
    return origins


def _text(environ: Environ, name: str, default: str) -> str:
    return environ.get(name, "").strip() or default


def _integer(environ: Environ, name: str, default: int, low: int, high: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
        raise SettingsError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _choice(environ: Environ, name: str, default: str, allowed: tuple[str, ...]) -> str:
    text = _text(environ, name, default)
    if text not in allowed:
        raise SettingsError(f"{name} must be one of {', '.join(allowed)}, not {text!r}")
    return text
