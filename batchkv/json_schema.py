"""What can be said of a JSON schema before it is compiled: that it is one, how deep it is, whether anything ends it."""

from __future__ import annotations

import json
from typing import Any, Literal

_MAX_DEPTH = 100  # of its JSON; compilers of schemas recurse
_MAX_CHARACTERS = 1 << 18  # 256 Ki; for objects of a thousand properties


def parse_schema(text: str) -> dict[str, Any] | Literal[True]:
    """The schema that a text holds.

    Raises:
        ValueError: it is no JSON, no schema, false, too deep or too long, or endless: nothing finite can be written
            for it. The message quotes nothing of the text.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, must have at most {_MAX_CHARACTERS}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels") from None
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("it is no object")
    if schema is False:
        raise ValueError("it is false: nothing meets it")
    if _is_deeper(schema, _MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if not _has_end(schema):
        raise ValueError("it is endless: what it requires refers back to itself")
    return schema


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [child for item in layer for child in _children(item)]
    return bool(layer)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _has_end(schema: dict[str, Any] | bool) -> bool:
    """Whether a finite value can meet the schema, as far as `$ref` decides: what else it says is left to the compiler.

    The references that have an end are found in rounds, each on the ground of those found before.
    """
    targets = {ref: _target(schema, ref) for ref in _references(schema)}
    ending: set[str] = set()
    while True:
        found = {ref for ref, target in targets.items() if ref not in ending and _ends(target, ending)}
        if not found:
            return _ends(schema, ending)
        ending |= found


def _references(schema: Any) -> set[str]:
    waiting, found = [schema], set()
    while waiting:
        value = waiting.pop()
        waiting.extend(_children(value))
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            found.add(value["$ref"])
    return found


def _target(schema: Any, reference: str) -> Any:
    """What a reference within the schema points to; of any other, true: the compiler has its own opinion of it."""
    if not reference.startswith("#") or (reference != "#" and reference[1] != "/"):
        return True
    value = schema
    for part in reference[2:].split("/") if len(reference) > 1 else []:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or key not in value:
            return True
        value = value[key]
    return value


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a schema has an end if of all references only those in `ending` have one."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options and not any(_ends(option, ending) for option in options):
            return False
    return all(_ends(part, ending) for part in _needed(schema))


def _needed(schema: dict[str, Any]) -> list[Any]:
    """The schemas of parts that every value has."""
    needed = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type", "object") == "object" and isinstance(properties, dict) and isinstance(required, list):
        needed = needed + [properties[name] for name in required if isinstance(name, str) and name in properties]
    if schema.get("type", "array") == "array" and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
        first = schema.get("prefixItems")
        needed = needed + (first[: schema["minItems"]] if isinstance(first, list) else [schema.get("items", True)])
    return needed
