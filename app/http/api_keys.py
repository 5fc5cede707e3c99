"""API keys: which requests are let in, and in whose name.

Owns the key file and the 401. Refuses to know what a key may do: every key may do everything. Without a key file
everybody is let in. Only digests of keys are kept, and comparing takes the same time whatever was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from falcon.asgi import Request, Response

from app.errors import ApiError

log = logging.getLogger(__name__)

KEY_NAME = "tokenferry.api_key_name"
"""Scope key of the name of the request's API key."""

OPEN_PATHS = ("/livez", "/readyz")

_Signature = tuple[int, int, int]


class KeyFileError(ValueError):
    """The key file cannot be used; the message says where and why, and never has a key in it."""


class KeyFile:
    """One key a line, and after white space the name of who uses it; `#` starts a comment line.

    The file is read again when it has changed. If it cannot be read then, the keys from before stay.
    """

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._signature = self._look()
        self._names = self._read()
        if not self._names:
            raise KeyFileError(f"{path} has no key in it, so nobody could be let in")

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None if it is nobody's."""
        self._reload()
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, name in self._names.items():
            # SAFETY: no early end, so the time does not tell which key was close.
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _reload(self) -> None:
        try:
            signature = self._look()
            if signature == self._signature:
                return
            self._signature = signature
            self._names = self._read()
        except KeyFileError as error:
            log.warning("the API keys from before stay: %s", error)
        else:
            log.info("%s read again: %d API keys", self._path, len(self._names))

    def _look(self) -> _Signature | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> Mapping[bytes, str]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"{self._path} cannot be read: {error}") from error
        names: dict[bytes, str] = {}
        for number, line in enumerate(text.split("\n"), start=1):
            words = line.split(maxsplit=1)
            if not words or words[0].startswith("#"):
                continue
            key, *name = words
            if not (key.isascii() and key.isprintable()):
                raise KeyFileError(f"{self._path}, line {number}: a key must be printable ASCII, as headers are")
            digest = hashlib.sha256(key.encode()).digest()
            if digest in names:
                raise KeyFileError(f"{self._path}, line {number}: this key is there twice")
            names[digest] = name[0].strip() if name else f"key-{digest.hex()[:8]}"
        return names


class ApiKeys:
    """Falcon middleware: a request without a valid key ends here."""

    def __init__(self, keys: KeyFile | None, open_paths: Sequence[str] = OPEN_PATHS) -> None:
        """`open_paths` need no key."""
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def process_request(self, req: Request, resp: Response) -> None:
        # A browser asks without a key whether it may ask with one.
        if self._keys is None or req.method == "OPTIONS" or req.path in self._open_paths:
            return
        scheme, _, key = (req.get_header("authorization") or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refusal("You did not provide an API key: it belongs in the header `Authorization: Bearer KEY`.")
        name = self._keys.name_of(key.strip())
        if name is None:
            raise _refusal("The API key in the header `Authorization` is not valid here.")
        req.scope[KEY_NAME] = name


def key_name(req: Request) -> str:
    """In whose name the request came; empty if the server has no API keys."""
    name: str = req.scope.get(KEY_NAME, "")
    return name


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
