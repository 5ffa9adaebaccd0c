"""Rewrites a schema as a core schema, which has only the few keywords that the grammar engines enforce exactly.

CoreWriter first builds a graph of goals. A goal is a set of claims, each of which says that a value fits a subschema,
or does not (see constraints.py). Each goal becomes a union of typed schemas. A typed schema has one type, and its
parts, such as the items of an array, are goals again. A typed schema uses only these keywords:

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
from graftwork.engine.grammar.schema.constraints import Among, Branch, Claim, Goal
from graftwork.engine.grammar.schema.errors import Gaps, refused
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
from graftwork.engine.grammar.schema.normalise import Brancher
from graftwork.engine.grammar.schema.object_schemas import object_schemas
from graftwork.engine.grammar.schema.scalar_schemas import number_schemas, string_schemas
from graftwork.engine.grammar.schema.schema_document import Schema, SchemaDocument

ANY_VALUE: Goal = frozenset()


@dataclass(frozen=True, slots=True)
class TypedSchema:
    """A schema for values of one type, with goals in place of its subschemas. A goal is a set of claims. A claim says
    that a value fits a subschema, or does not.

    `keywords` are the keywords of the schema.
    """

    keywords: dict[str, Any]
    needs: tuple[Goal, ...] = ()
    """Goals that some value must be able to meet. If no value can meet one of them, no value fits this schema."""


class CoreWriter:
    """Expands a schema into goals, and writes them as a core schema. A goal is a set of claims. A claim says that a
    value fits a subschema, or does not.
    """

    def __init__(self, root: Schema, limits: LintLimits, gaps: Gaps, *, lists_controls: bool = True) -> None:
        """With `lists_controls`, values that the schema lists may contain control characters, which JSON writes as \\u00XX."""
        self._gaps = gaps
        self._lists_controls = lists_controls
        self._limits = limits
        self._brancher = Brancher(SchemaDocument(root), limits, gaps)
        self._fitting = Fitting(self._brancher, gaps)
        self._unions: dict[Goal, list[TypedSchema]] = {}
        self._num_nodes = 0

    def write(self) -> dict[str, Any]:
        """Returns the core schema: the schema with only the keywords that the grammar engines enforce exactly.

        Raises InvalidRequest if no value fits the schema, or if the core schema would exceed the limits.
        """
        root: Goal = frozenset({Claim("#")})
        try:
            self._collect(root)
        except RecursionError:
            raise refused("#", "its references follow one another too far.") from None
        alive = self._alive()
        if root not in alive:
            raise refused("#", "no value fits this schema.")
        return _Printer(self._unions, alive).document(root)

    # ---- the graph --------------------------------------------------------------------------------------------

    def _collect(self, root: Goal) -> None:
        waiting = [root]
        while waiting:
            goal = waiting.pop()
            if goal in self._unions:
                continue
            self._unions[goal] = union = self._union(goal)
            self._num_nodes += len(union)
            if self._num_nodes > self._limits.nodes:
                raise refused("#", f"it multiplies out to more than {self._limits.nodes} places.")
            waiting += [part for typed in union for part in goals_in(typed.keywords)]

    def _union(self, goal: Goal) -> list[TypedSchema]:
        pointer = min((claim.pointer for claim in goal), default="#")
        branches = self._brancher.branches_of(goal, pointer)
        if any(branch.types == ALL_TYPES and not branch.demands for branch in branches):
            return [TypedSchema({})]
        found: list[TypedSchema] = []
        for branch in branches:
            found += [typed for typed in self._typed(branch, pointer) if typed not in found]
        return found

    def _typed(self, branch: Branch, pointer: str) -> list[TypedSchema]:
        if any(demand.holds for demand in branch.of(Among)):
            return self._listed(branch)
        barred = [value for demand in branch.of(Among) for value in demand.values]
        found: list[TypedSchema] = []
        for constant, type_name in ((None, NULL), (False, BOOLEAN), (True, BOOLEAN)):
            if type_name in branch.types and identity(constant) not in {identity(value) for value in barred}:
                found.append(TypedSchema({"enum": [constant]}))
        if {NULL, BOOLEAN} <= branch.types and not barred:
            found = [TypedSchema({"type": NULL}), TypedSchema({"type": BOOLEAN})]
        if branch.types & NUMBERS:
            found += [TypedSchema(one) for one in number_schemas(branch, barred, self._gaps)]
        if STRING in branch.types:
            found += [TypedSchema(one) for one in string_schemas(branch, barred, self._gaps)]
        if ARRAY in branch.types:
            found += [TypedSchema(one, needs) for one, needs in array_schemas(branch, barred, self._gaps)]
        if OBJECT in branch.types:
            objects = object_schemas(branch, barred, self._brancher, self._fitting, self._gaps)
            found += [TypedSchema(one, needs) for one, needs in objects]
        return found

    def _listed(self, branch: Branch) -> list[TypedSchema]:
        others = Branch(branch.types, tuple(one for one in branch.demands if not isinstance(one, Among)))
        listed = [one for one in listed_values(branch) or () if self._lists_controls or is_writable(one)]
        values = [one for one in listed if self._fitting.is_met(one, others)]
        return [TypedSchema({"enum": values})] if values else []

    def _alive(self) -> set[Goal]:
        """Returns the goals (sets of claims) that some finite value meets.

        The search repeats until it finds no further goal (a least fixed point).
        """
        alive, known = {ANY_VALUE}, 0
        while known < len(alive):
            known = len(alive)
            for goal in reversed(self._unions):  # a goal was found before the goals that it contains
                if goal not in alive and any(alive.issuperset(typed.needs) for typed in self._unions[goal]):
                    alive.add(goal)
        return alive


def goals_in(keywords: dict[str, Any]) -> list[Goal]:
    """Returns all goals that stand for subschemas in the keywords of a typed schema. A goal is a set of claims. A claim
    says that a value fits a subschema, or does not.
    """
    return [goal for keyword, part in keywords.items() if keyword != "enum" for goal in _goals_at(part)]


def _goals_at(part: Any) -> list[Goal]:
    match part:
        case frozenset():
            return [part]
        case dict():
            return [goal for one in part.values() for goal in _goals_at(one)]
        case list():
            return [goal for one in part for goal in _goals_at(one)]
        case _:
            return []


class _Printer:
    """Writes the core schema. A goal (a set of claims) that contains no other goal is written inline.

    All other goals may form a cycle, so they go to `$defs`.
    """

    def __init__(self, unions: dict[Goal, list[TypedSchema]], alive: set[Goal]) -> None:
        self._unions = unions
        self._alive = alive
        self._names: dict[Goal, str] = {}
        self._waiting: list[Goal] = []
        self._definitions: dict[str, Any] = {}
        self._small = {goal for goal, union in unions.items() if not any(goals_in(typed.keywords) for typed in union)}

    def document(self, root: Goal) -> dict[str, Any]:
        self._name(root)
        while self._waiting:
            goal = self._waiting.pop()
            self._definitions[self._names[goal]] = self._whole(goal)
        top: dict[str, Any] = self._definitions.pop(self._names[root])
        uses_itself = f'"$ref":"#/$defs/{self._names[root]}"' in canonical([self._definitions, top])
        if uses_itself:
            self._definitions[self._names[root]] = top
            top = {"$ref": f"#/$defs/{self._names[root]}"}
        return top | ({"$defs": self._definitions} if self._definitions else {})

    def _name(self, goal: Goal) -> str:
        if goal not in self._names:
            self._names[goal] = f"g{len(self._names)}"
            self._waiting.append(goal)
        return self._names[goal]

    def _whole(self, goal: Goal) -> dict[str, Any]:
        union = [typed for typed in self._unions[goal] if all(need in self._alive for need in typed.needs)]
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
