"""Who is let in, and from which pages: API keys and cross-origin requests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from falcon.asgi import Request

from app.http.api_keys import KeyFile, KeyFileError, key_name
from tests.app.web import Exchange, Web

PAGE = "http://localhost:3000"
GOOD = {"authorization": "Bearer sk-alice"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may\n\nsk-alice  Alice B.\nsk-nameless\n\tsk-tab\tTab\n")
    return path


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)
    # A new time of change, however coarse the file system's clock is.
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))


class TestKeyFile:
    def test_a_line_is_a_key_and_a_name(self, path: Path) -> None:
        keys = KeyFile(path)
        assert keys.name_of("sk-alice") == "Alice B."
        assert keys.name_of("sk-tab") == "Tab"

    def test_a_key_without_a_name_is_named_by_its_digest(self, path: Path) -> None:
        name = KeyFile(path).name_of("sk-nameless")
        assert name is not None
        assert name.startswith("key-")
        assert "nameless" not in name

    @pytest.mark.parametrize(
        "key", ["", "sk-alic", "sk-alice ", "Alice B.", "#", "# who may", "sk-\u00e4", "sk-\udcff"]
    )
    def test_anything_else_is_nobodys(self, path: Path, key: str) -> None:
        assert KeyFile(path).name_of(key) is None

    def test_a_changed_file_is_read_again(self, path: Path) -> None:
        keys = KeyFile(path)
        rewrite(path, "sk-bob Bob")
        assert (keys.name_of("sk-alice"), keys.name_of("sk-bob")) == (None, "Bob")

    def test_a_file_that_lost_its_keys_lets_nobody_in(self, path: Path) -> None:
        keys = KeyFile(path)
        rewrite(path, "")
        assert keys.name_of("sk-alice") is None

    def test_a_file_that_is_gone_or_broken_changes_nothing_until_it_is_back(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = KeyFile(path)
        path.unlink()
        assert keys.name_of("sk-alice") == "Alice B."
        rewrite(path, "sk-bob\nsk-bob again")
        assert keys.name_of("sk-alice") == "Alice B."
        rewrite(path, "sk-bob Bob!!!!!!!!!!!!!!")
        assert keys.name_of("sk-bob") == "Bob!!!!!!!!!!!!!!"
        assert "line 2" in caplog.text
        assert "sk-bob" not in caplog.text

    @pytest.mark.parametrize("text", ["", "# nothing\n", "sk-a\nsk-a\n", "sk-\u00e4\n", "sk-a\x00\n"])
    def test_a_file_that_cannot_be_used_is_refused_at_the_start(self, path: Path, text: str) -> None:
        path.write_text(text)
        with pytest.raises(KeyFileError, match="keys"):
            KeyFile(path)

    def test_a_file_that_is_no_text_is_refused_at_the_start(self, path: Path) -> None:
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(KeyFileError, match="cannot be read"):
            KeyFile(path)


class TestApiKeys:
    async def test_a_request_with_a_valid_key_is_let_in_in_its_name(self, path: Path) -> None:
        web = Web(keys=KeyFile(path))
        exchange = await web.request("GET", "/v1/models", headers=GOOD)
        assert exchange.status == 200
        assert key_name(Request(exchange.scope, None)) == "Alice B."  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": "Bearer "},
            {"authorization": "sk-alice"},
            {"authorization": "Basic sk-alice"},
            {"authorization": "Bearer sk-mallory"},
            {"authorization": "Bearer sk-\u00e4"},
            {"authorization": "Bearer " + "x" * 60_000},
        ],
    )
    @pytest.mark.parametrize("path_", ["/v1/chat/completions", "/v1/models", "/nothing"])
    async def test_any_other_is_refused_in_openai_s_shape_and_says_how(
        self, path: Path, headers: dict[str, str], path_: str
    ) -> None:
        web = Web(keys=KeyFile(path))
        exchange = await web.request("POST", path_, b"{}", headers)
        assert exchange.status == 401
        assert (exchange.error["type"], exchange.error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert exchange.headers["www-authenticate"] == "Bearer"
        assert exchange.headers["x-request-id"].startswith("req-")

    async def test_the_scheme_is_known_in_any_case(self, path: Path) -> None:
        web = Web(keys=KeyFile(path))
        headers = {"authorization": "bearer  sk-alice "}
        assert (await web.request("GET", "/v1/models", headers=headers)).status == 200

    async def test_health_needs_no_key(self, path: Path) -> None:
        web = Web(keys=KeyFile(path))
        web.worker()
        assert (await web.request("GET", "/livez")).status == 200
        assert (await web.request("GET", "/readyz")).status == 200

    async def test_without_a_key_file_everybody_is_let_in(self, web: Web) -> None:
        exchange = await web.request("GET", "/v1/models", headers={"authorization": "Bearer local"})
        assert exchange.status == 200
        assert key_name(Request(exchange.scope, None)) == ""  # type: ignore[arg-type]


async def preflight(web: Web, path: str = "/v1/chat/completions", origin: str = PAGE, **headers: str) -> Exchange:
    known = {"origin": origin, "access-control-request-method": "POST", **headers}
    return await web.request("OPTIONS", path, headers=known)


class TestCors:
    async def test_a_browser_may_ask_from_any_page(self, web: Web) -> None:
        wanted = "authorization,content-type,x-stainless-lang"
        exchange = await preflight(web, **{"access-control-request-headers": wanted})
        assert exchange.status in (200, 204)
        assert exchange.body == b""
        assert exchange.headers["access-control-allow-origin"] == "*"
        assert "POST" in exchange.headers["access-control-allow-methods"]
        assert exchange.headers["access-control-allow-headers"] == wanted
        assert int(exchange.headers["access-control-max-age"]) > 0

    async def test_a_preflight_needs_no_key(self, path: Path) -> None:
        web = Web(keys=KeyFile(path))
        exchange = await preflight(web)
        assert exchange.headers["access-control-allow-origin"] == "*"
        assert "authorization" in exchange.headers["access-control-allow-headers"]

    async def test_names_of_headers_that_are_none_are_not_repeated(self, web: Web) -> None:
        exchange = await preflight(web, **{"access-control-request-headers": "x\u00e4; evil"})
        assert exchange.headers["access-control-allow-headers"] == "authorization, content-type"

    async def test_a_page_may_read_errors_too(self, path: Path) -> None:
        web = Web(keys=KeyFile(path))
        for method, where, status in (
            ("POST", "/v1/chat/completions", 401),
            ("GET", "/nothing", 401),
        ):
            exchange = await web.request(method, where, b"{", {"origin": PAGE})
            assert exchange.status == status
            assert exchange.headers["access-control-allow-origin"] == "*"
            assert "www-authenticate" in exchange.headers["access-control-expose-headers"]
        for method, where, status in (
            ("POST", "/v1/chat/completions", 400),
            ("GET", "/nothing", 404),
            ("PUT", "/v1/models", 405),
        ):
            exchange = await web.request(method, where, b"{", {"origin": PAGE, **GOOD})
            assert exchange.status == status
            assert exchange.headers["access-control-allow-origin"] == "*"

    async def test_a_page_may_read_a_stream(self, web: Web) -> None:
        web.worker()
        exchange = await web.post(
            {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}, origin=PAGE
        )
        assert exchange.status == 200
        assert exchange.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in exchange.headers["access-control-expose-headers"]

    async def test_credentials_are_never_allowed(self, web: Web) -> None:
        assert "access-control-allow-credentials" not in (await preflight(web)).headers

    async def test_listed_origins_are_allowed_one_by_one(self) -> None:
        web = Web(cors_origins=("https://chat.example", PAGE))
        exchange = await preflight(web)
        assert exchange.headers["access-control-allow-origin"] == PAGE
        assert exchange.headers["vary"] == "origin"
        for origin in ("http://localhost:3001", "null", "*", PAGE.upper()):
            exchange = await preflight(web, origin=origin)
            assert not [name for name in exchange.headers if name.startswith("access-control")]
            assert exchange.headers["vary"] == "origin"

    async def test_it_can_be_switched_off(self) -> None:
        web = Web(cors_origins=())
        exchange = await preflight(web)
        assert not [name for name in exchange.headers if name.startswith("access-control")]

    async def test_without_an_origin_there_is_nothing_to_say(self, web: Web) -> None:
        exchange = await web.request("GET", "/v1/models")
        assert not [name for name in exchange.headers if name.startswith("access-control")]

    async def test_an_unknown_path_has_no_preflight(self, web: Web) -> None:
        exchange = await preflight(web, "/nothing")
        assert exchange.status == 404
        assert "access-control-allow-methods" not in exchange.headers
