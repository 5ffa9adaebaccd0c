"""Counts how the requests of single adapter versions end, for whoever compares two versions.

Owns the counts of the versions that are watched, in this process. Never decides which version is better, and never
stores anything. Use it in one event loop only.
Invariant: a request counts in the tallies that were open when it began, so a late end never counts in a newer one.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from graftwork.platform.activity.windows import bucket_of, percentile
from graftwork.platform.ids import TenantId


@dataclass(slots=True)
class Outcomes:
    """How the requests of one version ended."""

    requests: int = 0
    errors: int = 0
    """Requests that failed through the server's fault, such as a version whose files are damaged."""
    refusals: int = 0
    """Requests that the engine refused through no fault of the server, such as a schema that it cannot enforce."""
    first_tokens: dict[int, int] = field(default_factory=dict)
    """Requests by the bucket of their seconds to the first token; see `bucket_of`."""

    @classmethod
    def sum_of(cls, parts: Iterable["Outcomes"]) -> "Outcomes":
        total = cls()
        for part in parts:
            total.requests += part.requests
            total.errors += part.errors
            total.refusals += part.refusals
            for bucket, count in part.first_tokens.items():
                total.first_tokens[bucket] = total.first_tokens.get(bucket, 0) + count
        return total

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def refusal_rate(self) -> float:
        return self.refusals / self.requests if self.requests else 0.0

    @property
    def first_token_s(self) -> float | None:
        """The median of the seconds to the first token; None without any."""
        return percentile(self.first_tokens, 0.5)

    def note_first_token(self, seconds: float) -> None:
        bucket = bucket_of(seconds)
        self.first_tokens[bucket] = self.first_tokens.get(bucket, 0) + 1

    def note_failure(self, *, by_server: bool) -> None:
        if by_server:
            self.errors += 1
        else:
            self.refusals += 1


VersionKey = tuple[TenantId, str]
"""A tenant, and one of its adapter versions, such as `name@3`."""


class VersionOutcomes:
    """The tallies of the versions that are watched now. Several may watch one version, each with a tally of its own."""

    def __init__(self) -> None:
        self._tallies: dict[VersionKey, dict[Hashable, Outcomes]] = {}

    def watch(self, wanted: Iterable[tuple[VersionKey, Hashable]]) -> None:
        """Keeps a tally for each version and purpose in `wanted`, such as a step of a roll-out, and no others.

        A purpose that is new begins with an empty tally.
        """
        known, self._tallies = self._tallies, {}
        for key, purpose in wanted:
            self._tallies.setdefault(key, {})[purpose] = known.get(key, {}).get(purpose) or Outcomes()

    def of(self, key: VersionKey) -> tuple[Outcomes, ...]:
        """Returns all tallies of a version."""
        return tuple(self._tallies.get(key, {}).values())

    def counted(self, key: VersionKey, purpose: Hashable) -> Outcomes:
        """Returns one tally of a version. It is empty if nobody watches the version for this purpose."""
        return self._tallies.get(key, {}).get(purpose) or Outcomes()
