"""The embedded Valkey: it keeps what it was told, comes back after a crash, and goes last."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tokenferry.cell.valkey import Valkey, ValkeyError, keep_running


def client(valkey: Valkey) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(valkey.socket), socket_timeout=5)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        threading.Event().wait(0.01)


class Running:
    """`keep_running` in a thread."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.stop = threading.Event()
        self.valkey = Valkey(folder)
        self.thread = threading.Thread(target=keep_running, args=(folder, self.stop, self.said.append))
        self.thread.start()
        wait_until(lambda: bool(self.said), "the server answers")

    def join(self) -> None:
        self.stop.set()
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    server = Running(tmp_path)
    yield server
    server.join()


def test_what_was_written_is_there_after_a_kill_and_a_restart(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey:
        with client(valkey) as first:
            first.set("key", "kept")
        valkey.kill()
        valkey.start()
        valkey.wait_until_ready()
        with client(valkey) as second:
            assert second.get("key") == b"kept"


def test_its_file_is_rewritten_before_reading_it_takes_long(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey, client(valkey) as one:
        assert one.config_get("auto-aof-rewrite-min-size") == {"auto-aof-rewrite-min-size": str(16 << 20)}


def test_it_never_evicts_and_listens_on_no_port(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey, client(valkey) as connection:
        settings = connection.config_get("*")
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["port"] == "0"
        assert settings["appendonly"] == "yes"


def test_a_path_too_long_for_a_socket_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ValkeyError, match=r"DATA_DIR .* too long"):
        Valkey(tmp_path / ("x" * 100))


def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").mkdir()
    with pytest.raises(ValkeyError, match=r"valkey\.log"), Valkey(tmp_path):
        pass


def test_a_killed_server_is_started_again(running: Running) -> None:
    with client(running.valkey) as connection:
        pid = connection.info("server")["process_id"]
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any("died" in line for line in running.said), "the death is reported")
    wait_until(running.valkey.answers, "the server answers again")
    with client(running.valkey) as connection:
        assert connection.info("server")["process_id"] != pid


def test_a_second_server_over_the_same_folder_is_refused(running: Running, tmp_path: Path) -> None:
    with pytest.raises(ValkeyError, match="another tokenferry runs over DATA_DIR"):
        keep_running(tmp_path, threading.Event(), print)


def test_it_goes_after_its_last_client(tmp_path: Path) -> None:
    server = Running(tmp_path)
    with client(server.valkey) as last:
        last.ping()
        server.stop.set()
        wait_until(lambda: not server.thread.is_alive() or bool(last.ping()), "still served")
        assert last.set("released", "yes")
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert not server.valkey.answers()
