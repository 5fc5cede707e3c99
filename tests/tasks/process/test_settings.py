"""Settings: defaults, limits, and that a bad value names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode import factory
from tasks.process import settings
from tasks.process.settings import BridgeSettings, SettingsError, WebSettings, WorkerSettings


def test_an_empty_environment_gives_the_defaults() -> None:
    web, worker, bridge = WebSettings.from_env({}), WorkerSettings.from_env({}), BridgeSettings.from_env({})
    assert (web.host, web.port, web.max_waiting) == ("127.0.0.1", 8080, 256)
    assert (worker.model, worker.variant, worker.max_num_seqs) == ("smollm2-135m-instruct", "auto", 32)
    assert worker.prompt_lookup
    assert (worker.lease_ms, worker.heartbeat_ms, worker.stall_limit_s) == (500, 100, 30)
    assert bridge.data_dir == Path("var").absolute()
    assert web.redis_url == worker.redis_url == bridge.redis_url == f"unix://{Path('var').absolute()}/redis.sock?db=0"


def test_the_variants_that_may_be_set_are_those_that_an_engine_can_be_made_for() -> None:
    assert settings.VARIANTS == factory.VARIANTS


def test_an_empty_value_is_the_default() -> None:
    assert WebSettings.from_env({"PORT": " ", "HOST": ""}).port == 8080


def test_the_embedded_server_follows_the_data_folder() -> None:
    assert WebSettings.from_env({"DATA_DIR": "/somewhere"}).redis_url == "unix:///somewhere/redis.sock?db=0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("PORT", "8_080"),
        ("PORT", "\u0661"),
        ("MAX_WAITING", "0"),
        ("MAX_WAITING", "9" * 30),
        ("REDIS_URL", "http://x"),
        ("STREAM_TTL_S", "0"),
        ("STORE_DAYS", "0"),
        ("STORE_DAYS", "3651"),
        ("STORE_MAX", "0"),
        ("STORE_MAX", "many"),
        ("FIRST_TOKEN_DEADLINE_S", "1.5"),
        ("LOG_LEVEL", "loud"),
        ("LOG_FORMAT", "xml"),
        ("API_KEYS_FILE", "/no/such/file"),
        ("API_KEYS_FILE", "/"),
        ("CORS_ORIGINS", "chat.example"),
        ("CORS_ORIGINS", "https://chat.example/"),
        ("CORS_ORIGINS", "https://chat.example, *"),
        ("CORS_ORIGINS", "https://Chat.example"),
    ],
)
def test_a_bad_value_of_the_web_process_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} must"):
        WebSettings.from_env({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VARIANT", "int3"),
        ("DEVICE", "tpu"),
        ("NUM_THREADS", "-1"),
        ("KV_CACHE_TOKENS", "15"),
        ("MAX_MODEL_LEN", "many"),
        ("MAX_NUM_SEQS", "0"),
        ("HEARTBEAT_MS", "9"),
        ("STALL_LIMIT_S", "0"),
        ("LEASE_MS", "49"),
        ("WORKERS", "two"),
        ("SCRIPTED_STEP_MS", "-5"),
        ("PROMPT_LOOKUP", "yes"),
    ],
)
def test_a_bad_value_of_the_worker_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} must"):
        WorkerSettings.from_env({name: value})


def test_origins_are_any_none_or_a_list() -> None:
    def origins(value: str) -> tuple[str, ...]:
        return WebSettings.from_env({"CORS_ORIGINS": value}).cors_origins

    assert origins("") == origins("*") == ("*",)
    assert origins("none") == ()
    listed = "https://chat.example:8443, http://[::1]:3000,app://obsidian.md"
    assert origins(listed) == ("https://chat.example:8443", "http://[::1]:3000", "app://obsidian.md")


def test_a_key_file_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch()
    assert WebSettings.from_env({"API_KEYS_FILE": str(path)}).api_keys_file == path
    assert WebSettings.from_env({}).api_keys_file is None


def test_a_lease_must_outlast_a_missed_heartbeat() -> None:
    with pytest.raises(SettingsError, match=r"^LEASE_MS must be at least twice HEARTBEAT_MS"):
        WorkerSettings.from_env({"LEASE_MS": "150", "HEARTBEAT_MS": "100"})


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    assert WorkerSettings.from_env({"MAX_NUM_SEQS": "1000"}).max_num_batched_tokens == 1000
    with pytest.raises(SettingsError, match=r"^MAX_NUM_BATCHED_TOKENS must be at least MAX_NUM_SEQS"):
        WorkerSettings.from_env({"MAX_NUM_SEQS": "64", "MAX_NUM_BATCHED_TOKENS": "32"})


def test_drafts_can_be_turned_off() -> None:
    assert WorkerSettings.from_env({"PROMPT_LOOKUP": "on"}).prompt_lookup
    assert not WorkerSettings.from_env({"PROMPT_LOOKUP": "off"}).prompt_lookup
