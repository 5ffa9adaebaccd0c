"""Caches the results of compiles: compiled grammars, and the errors of grammars that were refused.

Each isolation domain (group of callers) finds only the results that it has asked for itself. So the time of its
requests says nothing about the grammars of other domains. Only public grammars are shared by all domains.

Each domain has its own limits, and so have the public grammars. If all domains together are above the cache's limits,
the domain that uses most of the cache loses its least recently used results. Public grammars are not affected.
Invariant: the result that was added last stays in the cache.
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
    """Identifies a compiled grammar in the cache."""

    domain: str | None
    """The isolation domain (group of callers) that may find the grammar; None for a public grammar."""
    digest: str
    """A hash of everything that the compiled grammar depends on."""


class PublicGrammars:
    """The grammars that all callers share: the grammar of any JSON object, and the JSON schemas of the operator."""

    def __init__(self, schemas: frozenset[str] = frozenset()) -> None:
        self._schemas = schemas

    @classmethod
    def read(cls, folder: Path | None) -> "PublicGrammars":
        """Reads the JSON schemas in the `.json` files of a folder. Without a folder there are no public schemas.

        Raises InvalidRequest if the folder does not exist or a file contains no JSON.
        """
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


class _DomainResults:
    """The results of one isolation domain (group of callers), or of public grammars; least recently used first."""

    def __init__(self) -> None:
        self.outcomes: OrderedDict[GrammarKey, Outcome] = OrderedDict()
        self.num_bytes = 0

    def fill(self, max_bytes: int, max_entries: int) -> float:
        """Returns which part of the limits is used, from 0. 1.0 means that one limit is reached."""
        return max(self.num_bytes / max_bytes, len(self.outcomes) / max_entries)


class GrammarCache:
    """Owns the results of all compiles, within the limits of CompileLimits."""

    def __init__(self, limits: CompileLimits) -> None:
        self._limits = limits
        self._results_by_domain: dict[str | None, _DomainResults] = {}

    @property
    def num_bytes(self) -> int:
        return sum(results.num_bytes for results in self._results_by_domain.values())

    def __contains__(self, key: GrammarKey) -> bool:
        return key.domain in self._results_by_domain and key in self._results_by_domain[key.domain].outcomes

    def __iter__(self) -> Iterator[GrammarKey]:
        for results in self._results_by_domain.values():
            yield from results.outcomes

    def get(self, key: GrammarKey) -> Outcome | None:
        """Returns a result and marks it as the most recently used. Returns None if it is not in the cache."""
        if key not in self:
            return None
        outcomes = self._results_by_domain[key.domain].outcomes
        outcomes.move_to_end(key)
        return outcomes[key]

    def peek(self, key: GrammarKey) -> Outcome | None:
        """Returns a result without marking it as used. Returns None if it is not in the cache."""
        return self._results_by_domain[key.domain].outcomes[key] if key in self else None

    def drop(self, key: GrammarKey) -> None:
        results = self._results_by_domain[key.domain]
        results.num_bytes -= _weight(results.outcomes.pop(key))
        if not results.outcomes:
            del self._results_by_domain[key.domain]

    def keep(self, key: GrammarKey, outcome: Outcome) -> None:
        """Adds a result, and drops the least recently used results above the limits.

        A matcher in use keeps its grammar alive.
        """
        limits, results = self._limits, self._results_by_domain.setdefault(key.domain, _DomainResults())
        results.outcomes[key] = outcome
        results.num_bytes += _weight(outcome)
        while len(results.outcomes) > 1 and results.fill(limits.domain_cache_bytes, limits.domain_cache_entries) > 1:
            self.drop(next(iter(results.outcomes)))
        while (fullest := self._fullest(key)) is not None and self._is_over():
            self.drop(next(iter(fullest.outcomes)))

    def _private(self) -> list[_DomainResults]:
        return [results for domain, results in self._results_by_domain.items() if domain is not None]

    def _is_over(self) -> bool:
        private = self._private()
        num_bytes, num_entries = sum(one.num_bytes for one in private), sum(len(one.outcomes) for one in private)
        return num_bytes > self._limits.cache_bytes or num_entries > self._limits.cache_entries

    def _fullest(self, kept: GrammarKey) -> _DomainResults | None:
        """Returns the results of the isolation domain (group of callers) that uses most of the cache.

        Leaves out a domain whose only result is `kept`. Returns None if no domain is left.
        """
        results = [results for results in self._private() if next(iter(results.outcomes)) != kept]
        limits = self._limits
        return max(results, key=lambda one: one.fill(limits.cache_bytes, limits.cache_entries), default=None)

    def check_integrity(self) -> None:
        for domain, results in self._results_by_domain.items():
            assert results.outcomes
            assert all(key.domain == domain for key in results.outcomes)
            assert results.num_bytes == sum(map(_weight, results.outcomes.values()))


def _weight(outcome: Outcome) -> int:
    return 1024 if isinstance(outcome, GraftworkError) else outcome.num_bytes
