"""Finds all subschemas of a JSON Schema by JSON pointer, and the targets of its references.

Knows which values are subschemas, so that an `$id` inside an `enum` is read as data. Never follows a reference out of
the document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from graftwork.engine.grammar.schema.errors import refused

Schema = bool | dict[str, Any]

_ONE = ("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains", "not", "if",
        "then", "else", "items", "additionalItems", "contentSchema")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")


class Dialect(IntEnum):
    """The drafts (versions) of JSON Schema, oldest first. A document that names no draft is read as the newest."""

    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019 = 8
    DRAFT2020 = 9


_DIALECTS = {
    "json-schema.org/draft-04/schema": Dialect.DRAFT4,
    "json-schema.org/draft-06/schema": Dialect.DRAFT6,
    "json-schema.org/draft-07/schema": Dialect.DRAFT7,
    "json-schema.org/schema": Dialect.DRAFT7,
    "json-schema.org/draft/2019-09/schema": Dialect.DRAFT2019,
    "json-schema.org/draft/2020-12/schema": Dialect.DRAFT2020,
}


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def under(pointer: str, *names: str | int) -> str:
    return "/".join([pointer, *(escaped(str(name)) for name in names)])


@dataclass(frozen=True, slots=True)
class Place:
    """One subschema, and the base URI against which its references are resolved."""

    schema: Schema
    base: str
    dialect: Dialect


class SchemaDocument:
    """Holds all subschemas of one document, by JSON pointer.

    If a reference leads to a value that no keyword marks as a subschema, this value becomes a subschema too.
    """

    def __init__(self, root: Schema) -> None:
        """Finds all subschemas of `root`.

        Raises InvalidRequest if a subschema is neither an object nor a boolean, or has an unknown dialect.
        """
        self._places: dict[str, Place] = {}
        self._targets: dict[str, str] = {}
        """The JSON pointers of schemas with an `$id` or an anchor, by absolute URI. An anchor is the part after the
        `#`.
        """
        self._dynamic: dict[str, list[str]] = {}
        self.has_unevaluated = False
        self._visit(root, "#", "", Dialect.DRAFT2020)

    def place(self, pointer: str) -> Place:
        return self._places[pointer]

    def __contains__(self, pointer: str) -> bool:
        return pointer in self._places

    def target(self, pointer: str, keyword: str) -> str:
        """Returns the JSON pointer of the subschema to which a reference leads.

        The reference is the value of `keyword` (such as `$ref`) in the subschema at `pointer`. Raises InvalidRequest if
        the reference leads to nothing in the document.
        """
        place = self._places[pointer]
        assert isinstance(place.schema, dict)
        at, reference = under(pointer, keyword), place.schema[keyword]
        if not isinstance(reference, str):
            raise refused(at, "a reference is a text.")
        if keyword == "$dynamicRef":
            reference = self._static(at, reference)
        base, fragment = urldefrag(urljoin(place.base, reference))
        whole = f"{base}#{unquote(fragment)}"
        if whole in self._targets:
            return self._targets[whole]
        if base not in self._targets or (fragment and not fragment.startswith("/")):
            raise refused(at, f"{reference!r} is not in this document; only what is can be referred to.")
        found = self._targets[base] + unquote(fragment)
        if found not in self._places:
            self._visit_unknown(found, at)
        return found

    def _static(self, at: str, reference: str) -> str:
        """Returns a `$dynamicRef`, which is then resolved like a `$ref`.

        Raises InvalidRequest if several subschemas have its anchor.
        """
        name = urldefrag(reference)[1]
        if len(self._dynamic.get(name, [])) > 1:
            raise refused(at, "several places answer to this dynamic reference.")
        return reference

    def _visit_unknown(self, pointer: str, at: str) -> None:
        """Adds the target of a reference to the subschemas, although no keyword marks it as one.

        Such a target is, for example, the value of an unknown keyword. Raises InvalidRequest if it is no schema.
        """
        value: Any = self._places["#"].schema
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = dict(zip(map(str, range(len(value))), value, strict=True))
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, bool | dict):
            raise refused(at, "it leads to no schema.")
        root = self._places["#"]
        self._visit(value, pointer, root.base, root.dialect)

    # ---- reading ----------------------------------------------------------------------------------------------

    def _visit(self, schema: Any, pointer: str, base: str, dialect: Dialect) -> None:
        waiting: list[tuple[Any, str, str, Dialect]] = [(schema, pointer, base, dialect)]
        while waiting:
            schema, pointer, base, dialect = waiting.pop()
            if not isinstance(schema, bool | dict):
                raise refused(pointer, "a schema is an object or a boolean.")
            if isinstance(schema, dict):
                dialect = _dialect(schema, pointer, dialect)
                self.has_unevaluated |= "unevaluatedProperties" in schema or "unevaluatedItems" in schema
                base = self._register(schema, pointer, base, dialect)
                waiting += [(one, at, base, dialect) for one, at in _subschemas(schema, pointer)]
            elif pointer == "#":
                self._targets[""] = self._targets["#"] = pointer
            self._places[pointer] = Place(schema, base, dialect)

    def _register(self, schema: dict[str, Any], pointer: str, base: str, dialect: Dialect) -> str:
        name = schema.get("id" if dialect == Dialect.DRAFT4 else "$id")
        hidden = dialect <= Dialect.DRAFT7 and "$ref" in schema  # old drafts ignore it beside a reference
        if isinstance(name, str) and not hidden:
            resource, fragment = urldefrag(urljoin(base, name))
            if fragment:  # an anchor, in the form of the old drafts
                self._add_target(f"{resource}#{fragment}", pointer)
            else:
                base = resource
                self._add_target(base, pointer)
                self._add_target(f"{base}#", pointer)
        elif pointer == "#":
            self._targets[base] = self._targets[f"{base}#"] = pointer
        if pointer == "#":
            self._targets.setdefault("", pointer)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._add_target(f"{base}#{anchor}", pointer)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(pointer)
        if schema.get("$recursiveAnchor") is True:
            raise refused(under(pointer, "$recursiveAnchor"), "recursive anchors are not served.")
        return base

    def _add_target(self, uri: str, pointer: str) -> None:
        if self._targets.setdefault(uri, pointer) != pointer:
            raise refused(pointer, f"{uri!r} names two places.")


def _dialect(schema: dict[str, Any], pointer: str, dialect: Dialect) -> Dialect:
    uri = schema.get("$schema")
    if uri is None:
        return dialect
    known = _DIALECTS.get(str(uri).removesuffix("#").removeprefix("http://").removeprefix("https://"))
    if known is None:
        raise refused(under(pointer, "$schema"), f"the dialect {uri!r} is not known; drafts 4 to 2020-12 are.")
    return known


def _subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[Any, str]]:
    for keyword in _ONE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield schema[keyword], under(pointer, keyword)
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((one, under(pointer, keyword, index)) for index, one in enumerate(schema[keyword]))
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            for name, one in schema[keyword].items():
                if not (keyword == "dependencies" and isinstance(one, list)):
                    yield one, under(pointer, keyword, name)
