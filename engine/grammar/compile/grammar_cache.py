"""Keeps compiled grammars, and the errors of those that were refused, for each domain apart.

A domain finds only what it has asked for itself, so that the time of its requests tells nothing of other domains.
Public grammars are the exception: all domains share them. Each domain has bounds of its own, and when all domains
together have too much, the domain with most gives way. Public grammars never give way to others.
Invariant: the result that was kept last stays.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from graftwork.engine.core.requests import GrammarKind, GrammarSource
from graftwork.engine.grammar.matching.matcher import CompiledPair
from graftwork.engine.grammar.schema.json_values import canonical
from graftwork.engine.grammar.schema.limits import CompileLimits
from graftwork.platform.errors import GraftworkError, InvalidRequest

Outcome = CompiledPair | GraftworkError


class GrammarKey(NamedTuple):
    """What a compiled grammar depends on, and who may find it."""

    domain: str | None
    """None for a public grammar."""
    digest: str


class PublicGrammars:
    """Which grammars are public: any JSON object, and the JSON schemas that the operator declares."""

    def __init__(self, schemas: frozenset[str] = frozenset()) -> None:
        self._schemas = schemas

    @classmethod
    def read(cls, folder: Path | None) -> "PublicGrammars":
        """Reads the schemas in the `.json` files of a folder. Raises InvalidRequest with the name of a bad file."""
        if folder is None:
            return cls()
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is no folder: name one with JSON schemas in .json files.")
        found = set()
        for path in sorted(folder.glob("*.json")):
            try:
                found.add(canonical(json.loads(path.read_text(encoding="utf-8"))))
            except ValueError as error:
                raise InvalidRequest(f"{path} holds no JSON schema: {error}.") from error
        return cls(frozenset(found))

    def __contains__(self, source: GrammarSource) -> bool:
        if source.kind is not GrammarKind.JSON_SCHEMA or not self._schemas:
            return source.kind is GrammarKind.JSON_OBJECT
        try:
            return canonical(json.loads(source.text)) in self._schemas
        except (ValueError, RecursionError):
            return False


class _Shelf:
    """The results of one domain, least recently used first."""

    def __init__(self) -> None:
        self.outcomes: OrderedDict[GrammarKey, Outcome] = OrderedDict()
        self.num_bytes = 0

    def fill(self, max_bytes: int, max_entries: int) -> float:
        """Returns how full it is: 1.0 is one of the bounds."""
        return max(self.num_bytes / max_bytes, len(self.outcomes) / max_entries)


class GrammarCache:
    """The results of compiles by key."""

    def __init__(self, limits: CompileLimits) -> None:
        self._limits = limits
        self._shelves: dict[str | None, _Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def __contains__(self, key: GrammarKey) -> bool:
        return key.domain in self._shelves and key in self._shelves[key.domain].outcomes

    def __iter__(self) -> Iterator[GrammarKey]:
        for shelf in self._shelves.values():
            yield from shelf.outcomes

    def get(self, key: GrammarKey) -> Outcome | None:
        """Returns a result, and marks it as just used. None if there is none."""
        if key not in self:
            return None
        outcomes = self._shelves[key.domain].outcomes
        outcomes.move_to_end(key)
        return outcomes[key]

    def peek(self, key: GrammarKey) -> Outcome | None:
        """Returns a result without marking it as used."""
        return self._shelves[key.domain].outcomes[key] if key in self else None

    def drop(self, key: GrammarKey) -> None:
        shelf = self._shelves[key.domain]
        shelf.num_bytes -= _weight(shelf.outcomes.pop(key))
        if not shelf.outcomes:
            del self._shelves[key.domain]

    def keep(self, key: GrammarKey, outcome: Outcome) -> None:
        """Adds a result, and drops others that are beyond a bound. Matchers in use keep alive what they need."""
        limits, shelf = self._limits, self._shelves.setdefault(key.domain, _Shelf())
        shelf.outcomes[key] = outcome
        shelf.num_bytes += _weight(outcome)
        while len(shelf.outcomes) > 1 and shelf.fill(limits.domain_cache_bytes, limits.domain_cache_entries) > 1:
            self.drop(next(iter(shelf.outcomes)))
        while (fullest := self._fullest(key)) is not None and self._is_over():
            self.drop(next(iter(fullest.outcomes)))

    def _private(self) -> list[_Shelf]:
        return [shelf for domain, shelf in self._shelves.items() if domain is not None]

    def _is_over(self) -> bool:
        private = self._private()
        num_bytes, num_entries = sum(one.num_bytes for one in private), sum(len(one.outcomes) for one in private)
        return num_bytes > self._limits.cache_bytes or num_entries > self._limits.cache_entries

    def _fullest(self, kept: GrammarKey) -> _Shelf | None:
        """Returns the fullest domain's shelf that holds more than the result just kept."""
        shelves = [shelf for shelf in self._private() if next(iter(shelf.outcomes)) != kept]
        limits = self._limits
        return max(shelves, key=lambda one: one.fill(limits.cache_bytes, limits.cache_entries), default=None)

    def check_integrity(self) -> None:
        for domain, shelf in self._shelves.items():
            assert shelf.outcomes
            assert all(key.domain == domain for key in shelf.outcomes)
            assert shelf.num_bytes == sum(map(_weight, shelf.outcomes.values()))


def _weight(outcome: Outcome) -> int:
    return 1024 if isinstance(outcome, GraftworkError) else outcome.num_bytes
