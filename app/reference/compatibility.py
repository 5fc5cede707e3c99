"""`docs/compatibility.md`: what this server does with every field of a request.

    python -m app.reference.compatibility > docs/compatibility.md

Owns the wording of the page; everything in it comes from the tables that check requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.contract.chat import CHAT_FIELDS
from app.contract.completion import COMPLETION_FIELDS
from app.contract.fields import Field
from app.endpoints.stored import UPDATE_FIELDS
from app.endpoints.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from app.reference.openapi import ERRORS, OPERATIONS

_HEAD = """\
# Compatibility

Written by `python -m app.reference.compatibility` from the tables that check requests. The same contract is served as
OpenAPI at `/openapi.json`.

- **applied**: it does what OpenAI says.
- **ignored**: it is checked, and then changes nothing.
- **refused**: only values that ask for nothing are taken; any other is a 400 whose `param` names the field.

An explicit null is the same as an absent field. A field that is in no table is ignored. A value of the wrong type or
out of range is a 400 with `param` and `code` `invalid_type` or `invalid_value`. *Extension* marks fields that OpenAI
does not have.
"""

_TABLES: Mapping[str, Mapping[str, Field]] = {
    "`POST /v1/chat/completions`": CHAT_FIELDS,
    "`POST /v1/chat/completions/{completion_id}`": UPDATE_FIELDS,
    "`POST /v1/completions`": COMPLETION_FIELDS,
    "`POST /tokenize`": TOKENIZE_FIELDS,
    "`POST /detokenize`": DETOKENIZE_FIELDS,
}


def page() -> str:
    parts = [_HEAD]
    for title, fields in _TABLES.items():
        rows = [_row(name, field) for name, field in fields.items()]
        parts.append(_table(title, ("field", "here", "values", "note"), rows))
    endpoints = [(f"`{operation.method.upper()} {operation.path}`", operation.summary) for operation in OPERATIONS]
    parts.append(_table("Endpoints", ("endpoint", "what it does"), endpoints))
    parts.append(_table("Errors", ("status", "meaning"), [(str(status), text) for status, text in ERRORS.items()]))
    return "\n".join(parts)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _row(name: str, field: Field) -> tuple[str, ...]:
    here = f"{field.policy}, extension" if field.is_extension else field.policy
    return f"`{name}`" + (" (required)" if field.is_required else ""), here, values(field.kind.schema()), field.note


def values(schema: Mapping[str, Any]) -> str:
    """A JSON Schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(values(option) for option in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"])
    match schema.get("type"):
        case "null":
            return "none"
        case "boolean":
            return "true, false"
        case "integer":
            return f"integer, {schema['minimum']} to {schema['maximum']}"
        case "number":
            low = (
                f"above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else f"{schema['minimum']:g}"
            )
            return f"number, {low} to {schema['maximum']:g}"
        case "string":
            limit = schema.get("maxLength", 2**31)
            return "string" if limit > 1 << 20 else f"string of at most {limit} characters"
        case "array":
            item = re.sub(r"object \(.*\)", "object", values(schema["items"]))
            most = f"at most {schema['maxItems']}: " if "maxItems" in schema else ""
            return f"list ({most}{item})"
        case "object":
            return "object" + (f" ({', '.join(schema['properties'])})" if schema.get("properties") else "")
    return "any"


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


if __name__ == "__main__":
    print(page(), end="")
