"""A client's JSON Schema, checked, and narrowed so that JSON that follows it comes to an end.

Owns the limits of a schema and what is narrowed: numbers have a bounded number of digits, objects have no other
properties than those that are named (where nothing says that they may), and "anything" is JSON of bounded depth. All
that follows the narrowed schema follows the client's. Refuses to know how a schema is enforced
(`app.grammar.grammars`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from app.errors import invalid

MAX_SCHEMA_BYTES: Final = 65_536
MAX_SUBSCHEMAS: Final = 500
MAX_DEPTH: Final = 32
_MAX_ANY_DEPTH: Final = 5
_MAX_MULTIPLE: Final = 1000

_SAFE_INTEGER: Final = 2**53 - 1
_LARGE: Final = 1e15
_FINEST: Final = 1e-9
"""Numbers have at most 15 digits before the point and 9 after it."""

_IN_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_PLACE: Final = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames")
_APART: Final = ("anyOf", "oneOf", "allOf", "$ref", "if", "dependentSchemas")
"""Keywords that bring further properties into the object that they stand in."""
_OBJECT: Final = frozenset(["properties", "patternProperties", "required", "minProperties", "maxProperties"])
_ARRAY: Final = frozenset(["items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"])
_STRING: Final = frozenset(["minLength", "maxLength", "pattern", "format"])
_NUMBER: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_MEANT_FOR: Final = (("object", {"properties"}), ("array", _ARRAY), ("string", _STRING), ("number", _NUMBER))
_CONSTRAINTS: Final = frozenset(
    [*_IN_LISTS, *_IN_PLACE, *_APART, *_OBJECT, *_ARRAY, *_STRING, *_NUMBER, "type", "enum", "const"]
) | {"dependentRequired", "unevaluatedProperties", "unevaluatedItems"}
_ANY: Final = "tokenferry-any-"

Schema = dict[str, Any]


def any_object() -> Schema:
    """What `{"type": "json_object"}` asks for."""
    return {"type": "object", "additionalProperties": _any(_MAX_ANY_DEPTH), "$defs": _definitions_of_any()}


def no_properties() -> Schema:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def read_schema(value: Any, param: str, *, drops_unsupported: bool = False) -> Schema:
    """The schema of an object or of any other value, narrowed. Raises ApiError naming `param` and the keyword.

    `drops_unsupported`: what `multipleOf` cannot do here is left out.
    """
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be a JSON Schema, which is an object.", "invalid_type")
    _check_size(value, param)
    if not _CONSTRAINTS & value.keys():
        return any_object()
    walk = _Walk(may_close=not _is_pieced_together(value), drops_unsupported=drops_unsupported)
    schema = walk.schema(value, param)
    if walk.uses_any:
        schema["$defs"] = {**(schema.get("$defs") or {}), **_definitions_of_any()}
    return schema


def read_object_schema(value: Any, param: str, *, drops_unsupported: bool = False) -> Schema:
    """The same where the value has to be an object, as the arguments of a function have to."""
    if isinstance(value, dict) and value.get("type", "object") not in ("object", ["object"]):
        raise invalid(f"{param}.type", f'{param}.type must be "object".')
    if value == {}:
        return no_properties()
    schema = read_schema(value, param, drops_unsupported=drops_unsupported)
    if not {"type", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        schema["type"] = "object"
    return schema


def _check_size(value: Any, param: str) -> None:
    if depth_exceeds(value, 2 * MAX_DEPTH):
        raise invalid(param, f"{param} is nested more than {MAX_DEPTH} deep.", "schema_too_large")
    try:
        num_bytes = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        raise invalid(param, f"{param} has a number or a text that JSON does not have.") from None
    if num_bytes > MAX_SCHEMA_BYTES:
        raise invalid(param, f"{param} must have at most {MAX_SCHEMA_BYTES} bytes.", "schema_too_large")


def depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _IN_MAPS:
        if isinstance(inner := schema.get(key), dict):
            yield from inner.values()
    for key in _IN_LISTS:
        if isinstance(inner := schema.get(key), list):
            yield from inner
    for key in _IN_PLACE:
        if key in schema:
            yield schema[key]


def _is_pieced_together(schema: Any) -> bool:
    """Whether an object's properties are named in more than one place, so that no place may exclude others."""
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or (schema.keys() & _APART and schema.keys() & _OBJECT):
        return True
    return any(_is_pieced_together(inner) for inner in _subschemas(schema))


def _any(depth: int) -> Schema:
    return {"$ref": f"#/$defs/{_ANY}{depth}"}


def _definitions_of_any() -> Schema:
    """JSON of depth 0 (no objects and arrays), 1, ..."""
    plain: list[Schema] = [{"type": "string"}, _narrow_number({"type": "number"}), {"type": ["boolean", "null"]}]
    definitions: Schema = {f"{_ANY}0": {"anyOf": plain}}
    for depth in range(1, _MAX_ANY_DEPTH + 1):
        inner = _any(depth - 1)
        containers = [{"type": "object", "additionalProperties": inner}, {"type": "array", "items": inner}]
        definitions[f"{_ANY}{depth}"] = {"anyOf": [*plain, *containers]}
    return definitions


@dataclass(slots=True)
class _Walk:
    may_close: bool
    drops_unsupported: bool
    uses_any: bool = False
    num_subschemas: int = 0

    def schema(self, value: Any, param: str) -> Schema:
        """A copy, narrowed. What is wrong with it otherwise is for the library to say, which enforces it."""
        narrowed: Schema = {}
        for key, inner in value.items():
            place = f"{param}.{key}"
            if key in _IN_MAPS and isinstance(inner, dict):
                narrowed[key] = {name: self.inner(one, f"{place}.{name}") for name, one in inner.items()}
            elif key in _IN_LISTS and isinstance(inner, list):
                narrowed[key] = [self.inner(one, f"{place}[{number}]") for number, one in enumerate(inner)]
            elif key in _IN_PLACE:
                narrowed[key] = self.inner(inner, place)
            elif key != "x-guidance":
                narrowed[key] = inner
        self._infer_type(narrowed)
        self._bound_numbers(narrowed, param)
        self._bound_containers(narrowed)
        return narrowed

    def inner(self, value: Any, param: str) -> Any:
        self.num_subschemas += 1
        if self.num_subschemas > MAX_SUBSCHEMAS:
            raise invalid(param, f"A schema must have at most {MAX_SUBSCHEMAS} subschemas.", "schema_too_large")
        if value is True or (isinstance(value, dict) and not _CONSTRAINTS & value.keys()):
            self.uses_any = True
            return _any(_MAX_ANY_DEPTH)
        return self.schema(value, param) if isinstance(value, dict) else value

    def _infer_type(self, schema: Schema) -> None:
        """Keywords of one type alone are meant for that type."""
        if not {"type", "enum", "const", *_APART} & schema.keys():
            for name, keywords in _MEANT_FOR:
                if keywords & schema.keys():
                    schema["type"] = name
                    return

    def _bound_numbers(self, schema: Schema, param: str) -> None:
        self._check_multiple(schema, param)
        types = _types(schema)
        if not types & {"number", "integer"} or {"enum", "const"} & schema.keys():
            return
        if "number" in types:
            schema.update(_narrow_number(schema))
        elif not {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"} & schema.keys():
            schema.update(minimum=-_SAFE_INTEGER, maximum=_SAFE_INTEGER)
        elif not {"maximum", "exclusiveMaximum"} & schema.keys():
            schema["maximum"] = _SAFE_INTEGER
        elif not {"minimum", "exclusiveMinimum"} & schema.keys():
            schema["minimum"] = -_SAFE_INTEGER

    def _check_multiple(self, schema: Schema, param: str) -> None:
        """Multiples are told apart by remainders, of which there can be very many."""
        multiple = schema.get("multipleOf")
        if isinstance(multiple, bool) or not isinstance(multiple, (int, float)) or multiple <= 0:
            return
        digits = Decimal(str(multiple)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) <= _MAX_MULTIPLE:
            return
        if not self.drops_unsupported:
            raise invalid(f"{param}.multipleOf", f"{param}.multipleOf has too many digits.", "unsupported_schema")
        del schema["multipleOf"]

    def _bound_containers(self, schema: Schema) -> None:
        types = _types(schema)
        if "object" in types and not {"additionalProperties", "patternProperties", *_APART} & schema.keys():
            if "properties" not in schema:
                self.uses_any = True
                schema["additionalProperties"] = _any(_MAX_ANY_DEPTH)
            elif self.may_close:
                schema["additionalProperties"] = False
        if "array" in types and not {"items", "prefixItems", *_APART} & schema.keys():
            self.uses_any = True
            schema["items"] = _any(_MAX_ANY_DEPTH)


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    return {one for one in (types if isinstance(types, list) else [types]) if isinstance(one, str)}


def _narrow_number(schema: Mapping[str, Any]) -> Schema:
    narrowed = dict(schema)
    narrowed.setdefault("multipleOf", _FINEST)
    lower = schema.get("minimum", schema.get("exclusiveMinimum"))
    upper = schema.get("maximum", schema.get("exclusiveMaximum"))
    if lower is None and _is_below(-_LARGE, upper):
        narrowed["minimum"] = -_LARGE
    if upper is None and _is_below(lower, _LARGE):
        narrowed["maximum"] = _LARGE
    return narrowed


def _is_below(lower: Any, upper: Any) -> bool:
    """Also where there is no bound; what is no number is for the library to refuse."""
    return all(bound is None or isinstance(bound, (int, float)) for bound in (lower, upper)) and (
        lower is None or upper is None or lower < upper
    )
