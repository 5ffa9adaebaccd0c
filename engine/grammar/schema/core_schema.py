"""Rewrites a schema as a core schema, which has only the few keywords that the grammar engines enforce exactly.

CoreWriter first builds a graph of claim sets. A claim set is a set of claims, each of which says that a value fits a
subschema, or does not (see constraints.py). Each claim set becomes a union of typed schemas. A typed schema has one
type, and its parts, such as the items of an array, are claim sets again. A typed schema uses only these keywords:

    all types  type, enum
    numbers    minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf
    strings    minLength, maxLength, pattern, format, and allOf of these
    arrays     minItems, maxItems, prefixItems, items
    objects    properties, required, patternProperties, additionalProperties, minProperties, maxProperties

Invariant: the core schema may allow less than the given schema (whole numbers are written without a point), but never
more.
"""

from dataclasses import dataclass
from typing import Any

from graftwork.engine.grammar.schema.array_schemas import array_schemas
from graftwork.engine.grammar.schema.constraints import Alternative, Among, Claim, ClaimSet
from graftwork.engine.grammar.schema.errors import UnenforcedKeywords, refused
from graftwork.engine.grammar.schema.instance_check import Fitting
from graftwork.engine.grammar.schema.json_values import (
    ALL_TYPES,
    ARRAY,
    BOOLEAN,
    NULL,
    NUMBERS,
    OBJECT,
    STRING,
    canonical,
    identity,
    is_writable,
)
from graftwork.engine.grammar.schema.limits import LintLimits
from graftwork.engine.grammar.schema.narrowing import listed_values
from graftwork.engine.grammar.schema.normalise import SchemaExpander
from graftwork.engine.grammar.schema.object_schemas import object_schemas
from graftwork.engine.grammar.schema.scalar_schemas import number_schemas, string_schemas
from graftwork.engine.grammar.schema.schema_document import Schema, SchemaDocument

ANY_VALUE: ClaimSet = frozenset()


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """A schema for values of one type, with claim sets in place of its subschemas. A claim set is a set of claims. A
    claim says that a value fits a subschema, or does not.

    `keywords` are the keywords of the schema.
    """

    keywords: dict[str, Any]
    needs: tuple[ClaimSet, ...] = ()
    """Claim sets that some value must be able to meet. If no value can meet one of them, no value fits this schema."""


class CoreWriter:
    """Expands a schema into claim sets, and writes them as a core schema. A claim set is a set of claims. A claim
    says that a value fits a subschema, or does not.
    """

    def __init__(
        self, root: Schema, limits: LintLimits, unenforced: UnenforcedKeywords, *, lists_controls: bool = True
    ) -> None:
        """With `lists_controls`, values that the schema lists may contain control characters, which JSON writes as
        \\u00XX.
        """
        self._unenforced = unenforced
        self._lists_controls = lists_controls
        self._limits = limits
        self._expander = SchemaExpander(SchemaDocument(root), limits, unenforced)
        self._fitting = Fitting(self._expander, unenforced)
        self._unions: dict[ClaimSet, list[TypedSchema]] = {}
        self._num_nodes = 0

    def write(self) -> dict[str, Any]:
        """Returns the core schema: the schema with only the keywords that the grammar engines enforce exactly.

        Raises InvalidRequest if no value fits the schema, or if the core schema would exceed the limits.
        """
        root: ClaimSet = frozenset({Claim("#")})
        try:
            self._collect(root)
        except RecursionError:
            raise refused("#", "its references follow one another too far.") from None
        alive = self._alive()
        if root not in alive:
            raise refused("#", "no value fits this schema.")
        return _Printer(self._unions, alive).document(root)

    # ---- the graph --------------------------------------------------------------------------------------------

    def _collect(self, root: ClaimSet) -> None:
        waiting = [root]
        while waiting:
            claim_set = waiting.pop()
            if claim_set in self._unions:
                continue
            self._unions[claim_set] = union = self._union(claim_set)
            self._num_nodes += len(union)
            if self._num_nodes > self._limits.nodes:
                raise refused("#", f"it multiplies out to more than {self._limits.nodes} places.")
            waiting += [part for typed in union for part in claim_sets_in(typed.keywords)]

    def _union(self, claim_set: ClaimSet) -> list[TypedSchema]:
        pointer = min((claim.pointer for claim in claim_set), default="#")
        alternatives = self._expander.alternatives_of(claim_set, pointer)
        if any(alternative.types == ALL_TYPES and not alternative.demands for alternative in alternatives):
            return [TypedSchema({})]
        found: list[TypedSchema] = []
        for alternative in alternatives:
            found += [typed for typed in self._typed(alternative, pointer) if typed not in found]
        return found

    def _typed(self, alternative: Alternative, pointer: str) -> list[TypedSchema]:
        if any(demand.holds for demand in alternative.of(Among)):
            return self._listed(alternative)
        barred = [value for demand in alternative.of(Among) for value in demand.values]
        found: list[TypedSchema] = []
        for constant, type_name in ((None, NULL), (False, BOOLEAN), (True, BOOLEAN)):
            if type_name in alternative.types and identity(constant) not in {identity(value) for value in barred}:
                found.append(TypedSchema({"enum": [constant]}))
        if {NULL, BOOLEAN} <= alternative.types and not barred:
            found = [TypedSchema({"type": NULL}), TypedSchema({"type": BOOLEAN})]
        if alternative.types & NUMBERS:
            found += [TypedSchema(one) for one in number_schemas(alternative, barred, self._unenforced)]
        if STRING in alternative.types:
            found += [TypedSchema(one) for one in string_schemas(alternative, barred, self._unenforced)]
        if ARRAY in alternative.types:
            found += [TypedSchema(one, needs) for one, needs in array_schemas(alternative, barred, self._unenforced)]
        if OBJECT in alternative.types:
            objects = object_schemas(alternative, barred, self._expander, self._fitting, self._unenforced)
            found += [TypedSchema(one, needs) for one, needs in objects]
        return found

    def _listed(self, alternative: Alternative) -> list[TypedSchema]:
        others = Alternative(alternative.types, tuple(one for one in alternative.demands if not isinstance(one, Among)))
        listed = [one for one in listed_values(alternative) or () if self._lists_controls or is_writable(one)]
        values = [one for one in listed if self._fitting.is_met(one, others)]
        return [TypedSchema({"enum": values})] if values else []

    def _alive(self) -> set[ClaimSet]:
        """Returns the claim sets that some finite value meets.

        The search repeats until it finds no further claim set (a least fixed point).
        """
        alive, known = {ANY_VALUE}, 0
        while known < len(alive):
            known = len(alive)
            for claim_set in reversed(self._unions):  # a claim set was found before the claim sets in it
                if claim_set not in alive and any(alive.issuperset(typed.needs) for typed in self._unions[claim_set]):
                    alive.add(claim_set)
        return alive


def claim_sets_in(keywords: dict[str, Any]) -> list[ClaimSet]:
    """Returns all claim sets that stand for subschemas in the keywords of a typed schema. A claim set is a set of
    claims. A claim says that a value fits a subschema, or does not.
    """
    return [claim_set for keyword, part in keywords.items() if keyword != "enum" for claim_set in _claim_sets_at(part)]


def _claim_sets_at(part: Any) -> list[ClaimSet]:
    match part:
        case frozenset():
            return [part]
        case dict():
            return [claim_set for one in part.values() for claim_set in _claim_sets_at(one)]
        case list():
            return [claim_set for one in part for claim_set in _claim_sets_at(one)]
        case _:
            return []


class _Printer:
    """Writes the core schema. A claim set whose schema contains no other claim set is written inline.

    All other claim sets may form a cycle, so they go to `$defs`.
    """

    def __init__(self, unions: dict[ClaimSet, list[TypedSchema]], alive: set[ClaimSet]) -> None:
        self._unions = unions
        self._alive = alive
        self._names: dict[ClaimSet, str] = {}
        self._waiting: list[ClaimSet] = []
        self._definitions: dict[str, Any] = {}
        self._small = {
            claim_set
            for claim_set, union in unions.items()
            if not any(claim_sets_in(typed.keywords) for typed in union)
        }

    def document(self, root: ClaimSet) -> dict[str, Any]:
        self._name(root)
        while self._waiting:
            claim_set = self._waiting.pop()
            self._definitions[self._names[claim_set]] = self._whole(claim_set)
        top: dict[str, Any] = self._definitions.pop(self._names[root])
        uses_itself = f'"$ref":"#/$defs/{self._names[root]}"' in canonical([self._definitions, top])
        if uses_itself:
            self._definitions[self._names[root]] = top
            top = {"$ref": f"#/$defs/{self._names[root]}"}
        return top | ({"$defs": self._definitions} if self._definitions else {})

    def _name(self, claim_set: ClaimSet) -> str:
        if claim_set not in self._names:
            self._names[claim_set] = f"g{len(self._names)}"
            self._waiting.append(claim_set)
        return self._names[claim_set]

    def _whole(self, claim_set: ClaimSet) -> dict[str, Any]:
        union = [typed for typed in self._unions[claim_set] if all(need in self._alive for need in typed.needs)]
        written = [self._keywords(typed.keywords) for typed in union]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _keywords(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {key: part if key == "enum" else self._part(part) for key, part in keywords.items()}

    def _part(self, part: Any) -> Any:
        match part:
            case frozenset():
                if part not in self._alive:
                    return False
                return self._whole(part) if part in self._small else {"$ref": f"#/$defs/{self._name(part)}"}
            case dict():
                return {key: self._part(one) for key, one in part.items()}
            case list():
                return [self._part(one) for one in part]
            case _:
                return part
