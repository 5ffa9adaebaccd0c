"""Checks that a schema's JSON is small enough to be read. The check takes one pass without recursion."""

from typing import Any

from graftwork.engine.grammar.schema.errors import refused
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.schema_document import under


def check_size(schema: Any, limits: LintLimits) -> None:
    """Checks how deep a schema is nested, and how many enum values, properties and optional properties it has.

    Raises InvalidRequest, which names the place where a limit is exceeded.
    """
    enum_values = properties = 0
    waiting: list[tuple[Any, str, int]] = [(schema, "#", 1)]
    while waiting:
        value, pointer, depth = waiting.pop()
        if depth > limits.depth:
            raise refused(pointer, f"it is nested more than {limits.depth} deep.")
        if isinstance(value, list):
            waiting += [(item, under(pointer, index), depth + 1) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            enum_values += _count(value.get("enum"))
            properties += _count(value.get("properties"))
            _check_optional(value, pointer, limits)
            waiting += [(item, under(pointer, key), depth + 1) for key, item in value.items()]
        if enum_values > limits.enum_values:
            raise refused(under(pointer, "enum"), f"more than {limits.enum_values} values are listed.")
        if properties > limits.properties:
            raise refused(under(pointer, "properties"), f"more than {limits.properties} properties are declared.")


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _check_optional(schema: dict[str, Any], pointer: str, limits: LintLimits) -> None:
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    properties = schema.get("properties")
    optional = len(properties.keys() - names) if isinstance(properties, dict) else 0
    if optional > limits.optional_properties:
        raise refused(
            under(pointer, "properties"),
            f"{optional} properties are optional; at most {limits.optional_properties} of one object may be.",
        )
