"""The kinds of value that a request field can have: each checks one JSON value and describes itself as JSON Schema.

Owns the wording of type and range errors. Refuses to know which fields exist (`app.contract.chat`). `read` gives the
checked value or raises `ApiError` naming `param`; a bool is never a number, and NaN and the infinities are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from app.errors import invalid

INT64 = (-(2**63), 2**63 - 1)
INT32_MAX = 2**31 - 1


class Kind(Protocol):
    def read(self, value: Any, param: str) -> Any: ...
    def schema(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Boolean:
    def read(self, value: Any, param: str) -> bool:
        if not isinstance(value, bool):
            raise invalid(param, f"{param} must be true or false.", "invalid_type")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    def read(self, value: Any, param: str) -> int:
        wanted = f"{param} must be an integer from {self.low} to {self.high}."
        # JSON with an integer beyond 64 bits arrives as a float.
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(param, wanted, "invalid_type")
        if not self.low <= value <= self.high:
            raise invalid(param, wanted)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` (not `low` itself if `above`) to `high`."""

    low: float
    high: float
    above: bool = False

    def read(self, value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(param, f"{param} must be a number.", "invalid_type")
        # NaN is in no range.
        if not self.low <= value <= self.high or (self.above and value == self.low):
            span = f"greater than {self.low:g} and at most" if self.above else f"from {self.low:g} to"
            raise invalid(param, f"{param} must be a number {span} {self.high:g}.")
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    max_length: int = INT32_MAX
    min_length: int = 0

    def read(self, value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise invalid(param, f"{param} must be a string.", "invalid_type")
        if not self.min_length <= len(value) <= self.max_length:
            raise invalid(param, f"{param} must have from {self.min_length} to {self.max_length} characters.")
        if not value.isascii():
            check_unicode(value, param)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": self.min_length, "maxLength": self.max_length}


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    def read(self, value: Any, param: str) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise invalid(param, f"{param} must be one of {', '.join(self.values)}.")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class TextOrTexts:
    """One string, or a list of at most `max_items` of them; read as a tuple."""

    item: Text
    max_items: int

    def read(self, value: Any, param: str) -> tuple[str, ...]:
        if isinstance(value, str):
            return (self.item.read(value, param),)
        if not isinstance(value, list):
            raise invalid(param, f"{param} must be a string or a list of strings.", "invalid_type")
        if len(value) > self.max_items:
            raise invalid(param, f"{param} must have at most {self.max_items} strings.")
        return tuple(self.item.read(entry, f"{param}[{number}]") for number, entry in enumerate(value))

    def schema(self) -> dict[str, Any]:
        item = self.item.schema()
        return {"anyOf": [item, {"type": "array", "items": item, "maxItems": self.max_items}]}


@dataclass(frozen=True, slots=True)
class Pairs:
    """An object of at most `max_pairs` short strings."""

    max_pairs: int
    key: Text
    value: Text

    def read(self, value: Any, param: str) -> Mapping[str, str]:
        if not isinstance(value, dict):
            raise invalid(param, f"{param} must be an object.", "invalid_type")
        if len(value) > self.max_pairs:
            raise invalid(param, f"{param} must have at most {self.max_pairs} entries.")
        for name, entry in value.items():
            if not isinstance(entry, str):
                raise invalid(param, f"The values of {param} must be strings.", "invalid_type")
            for what, text, limit in (("keys", name, self.key.max_length), ("values", entry, self.value.max_length)):
                if len(text) > limit:
                    raise invalid(param, f"The {what} of {param} must have at most {limit} characters.")
                check_unicode(text, param)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "maxProperties": self.max_pairs, "additionalProperties": self.value.schema()}


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """An object of token ids, spelled as strings, to numbers; read as (token id, bias) pairs, each id once."""

    max_pairs: int
    bias: Number

    def read(self, value: Any, param: str) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict):
            raise invalid(param, f"{param} must be an object of token ids to numbers.", "invalid_type")
        if len(value) > self.max_pairs:
            raise invalid(param, f"{param} must have at most {self.max_pairs} entries.")
        pairs: dict[int, float] = {}
        for name, bias in value.items():
            if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= INT32_MAX):
                raise invalid(param, f"The keys of {param} must be token ids.")
            pairs[int(name)] = self.bias.read(bias, f"{param}.{name}")
        return tuple(pairs.items())

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "maxProperties": self.max_pairs, "additionalProperties": self.bias.schema()}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids; read as a tuple. Whether the model has them is known elsewhere."""

    min_items: int = 1

    def read(self, value: Any, param: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise invalid(param, f"{param} must be a list of token ids.", "invalid_type")
        if len(value) < self.min_items:
            raise invalid(param, f"{param} must have at least {self.min_items} token.")
        for number, token_id in enumerate(value):
            if type(token_id) is not int or not 0 <= token_id <= INT32_MAX:
                raise invalid(f"{param}[{number}]", f"{param}[{number}] must be a token id, a whole number from 0.")
        return tuple(value)

    def schema(self) -> dict[str, Any]:
        item = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
        return {"type": "array", "items": item, "minItems": self.min_items}


@dataclass(frozen=True, slots=True)
class Prompts:
    """One text, one list of token ids, or a list of `1..max_items` of either kind; read as a tuple of prompts."""

    max_items: int

    def read(self, value: Any, param: str) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (_TEXT.read(value, param),)
        if not isinstance(value, list):
            raise invalid(param, f"{param} must be a text, a list of token ids, or a list of these.", "invalid_type")
        if not value:
            raise invalid(param, f"{param} must not be an empty list.")
        if not isinstance(value[0], (str, list)):
            return (_TOKEN_IDS.read(value, param),)
        if len(value) > self.max_items:
            raise invalid(param, f"{param} must have at most {self.max_items} prompts.")
        kind: Kind = _TEXT if isinstance(value[0], str) else _TOKEN_IDS
        return tuple(kind.read(entry, f"{param}[{number}]") for number, entry in enumerate(value))

    def schema(self) -> dict[str, Any]:
        text, tokens = _TEXT.schema(), _TOKEN_IDS.schema()
        size = {"minItems": 1, "maxItems": self.max_items}
        return {"anyOf": [text, tokens, *({"type": "array", "items": item, **size} for item in (text, tokens))]}


_TEXT = Text()
_TOKEN_IDS = TokenIds()


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with known fields, each optional; others are ignored, and null is the same as absent."""

    fields: Mapping[str, Kind]

    def read(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(param, f"{param} must be an object.", "invalid_type")
        return {
            name: kind.read(value[name], f"{param}.{name}")
            for name, kind in self.fields.items()
            if value.get(name) is not None
        }

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": {name: kind.schema() for name, kind in self.fields.items()}}


@dataclass(frozen=True, slots=True)
class Anything:
    """A value that is not looked at."""

    def read(self, value: Any, param: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Neutral:
    """A documented field that is not applied: only the values that ask for nothing are taken."""

    kind: Kind
    neutral: tuple[Any, ...]
    why: str

    def read(self, value: Any, param: str) -> Any:
        value = self.kind.read(value, param)
        if value not in self.neutral:
            raise invalid(param, f"This value of {param} is not supported here. {self.why}", "unsupported_value")
        return value

    def schema(self) -> dict[str, Any]:
        return {**self.kind.schema(), "enum": list(self.neutral)} if self.neutral else {"type": "null"}


def check_unicode(text: str, param: str) -> None:
    """JSON can spell half of a surrogate pair, which no text contains."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(param, f"{param} has a lone surrogate and is not valid Unicode.") from None
