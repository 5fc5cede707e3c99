"""Request bodies, read by a table of fields: the check, the documentation and the schema come from the same table.

Owns what a table says about a field, and how bytes become checked values. Refuses to know which fields there are.
Pure: bytes in, values out. Fields that are not in the table are ignored, and an explicit null is the same as an
absent field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from app.contract.kinds import Kind, Neutral
from app.errors import ApiError, malformed

Policy = Literal["applied", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """`refused` fields take only their neutral values; `ignored` fields are checked and then not used."""

    kind: Kind
    policy: Policy = "applied"
    default: Any = None
    is_required: bool = False
    is_extension: bool = False
    """Not OpenAI's, but known from other servers."""
    note: str = ""
    """For people: what it does here that is not obvious, or why it does nothing."""


def refused(kind: Kind, *neutral: Any, why: str) -> Field:
    return Field(Neutral(kind, neutral, why), "refused", note=why)


def ignored(kind: Kind, why: str) -> Field:
    return Field(kind, "ignored", note=why)


def read_body(body: bytes, fields: Mapping[str, Field]) -> dict[str, Any]:
    """The value of every field in the table. Raises ApiError."""
    raw = _json_object(body)
    values = {}
    for name, field in fields.items():
        value = raw.get(name)
        if value is not None:
            values[name] = field.kind.read(value, name)
        elif field.is_required:
            raise ApiError(400, f"{name} is required.", code="missing_required_parameter", param=name)
        else:
            values[name] = field.default
    return values


def _json_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise malformed("The request body is empty; it must be a JSON object.")
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raw = _lenient(body, error)
    if not isinstance(raw, dict):
        raise malformed("The request body must be a JSON object.")
    return raw


def _lenient(body: bytes, strict_error: orjson.JSONDecodeError) -> Any:
    """NaN, the infinities, huge numbers and lone surrogates parse here, so that the field that has them is named."""
    try:
        return json.loads(body.decode(), parse_int=_integer)
    except (ValueError, RecursionError):
        raise malformed(f"The request body is not valid JSON: {strict_error}") from None


def _integer(digits: str) -> float:
    """Python refuses to read a number of thousands of digits; no field takes one that is nearly as long."""
    return int(digits) if len(digits) < 400 else float(digits)
