"""Whose files go when the disk tier needs room.

A domain's limit is the most that it may have; its reserve is what others cannot take from it. What lies between is
borrowed, and borrowed room is what goes: the files of domains over their limit first, then the least recently used
file of any domain that keeps its reserve without it, then one that is_in_history into the reserve of a domain that has more,
and what a domain has within its reserve only for its own newer pages.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from graftwork.engine.kv.disk.file_format import PageFile

Domain = bytes | None
"""None owns what nobody can read."""


class DomainUsage:
    """The bytes, limit and reserve of every domain."""

    def __init__(self, shared_reserve_bytes: int = 0) -> None:
        """`shared_reserve_bytes` are parted equally among the domains that are there."""
        self.total = 0
        self._shared_reserve_bytes = shared_reserve_bytes
        self._bytes: defaultdict[Domain, int] = defaultdict(int)
        self._limits: dict[Domain, int] = {}
        self._reserves: dict[Domain, int] = {}

    def bytes_of(self, domain: Domain) -> int:
        return self._bytes.get(domain, 0)

    def bytes_by_domain(self) -> defaultdict[Domain, int]:
        """A copy."""
        return self._bytes.copy()

    def change(self, domain: Domain, num_bytes: int) -> None:
        """Add to what an domain has; a negative number takes away."""
        self.total += num_bytes
        self._bytes[domain] += num_bytes
        if self._bytes[domain] == 0:
            del self._bytes[domain]

    def set_limit(self, domain: Domain, num_bytes: int | None) -> None:
        """None lifts the limit."""
        if num_bytes is None:
            self._limits.pop(domain, None)
        else:
            self._limits[domain] = num_bytes

    def set_reserve(self, domain: Domain, num_bytes: int) -> None:
        self._reserves[domain] = num_bytes

    def is_over_limit(self, domain: Domain, num_bytes: int) -> bool:
        """Whether `num_bytes` is more than an domain may have."""
        return domain in self._limits and num_bytes > self._limits[domain]

    def reserve_of(self, domain: Domain) -> int:
        """Bytes that others cannot take from an domain."""
        domains = len(self._bytes) - (None in self._bytes)
        shared = 0 if domain is None else self._shared_reserve_bytes // max(domains, 1)
        return max(self._reserves.get(domain, 0), shared)

    def check_integrity(self, bytes_by_domain: Mapping[Domain, int]) -> None:
        """Compare with a recount."""
        assert dict(bytes_by_domain) == dict(self._bytes), "an domain's bytes are miscounted"
        assert sum(bytes_by_domain.values()) == self.total, "the total is miscounted"


class VictimSearch:
    """One search for room: notes which files it would remove, and changes nothing."""

    def __init__(
        self, accounts: DomainUsage, queues: Mapping[Domain, OrderedDict[str, PageFile]], kept: Collection[str]
    ) -> None:
        """`queues` has each domain's files, least recently used first; those named in `kept` stay."""
        self.victims: list[PageFile] = []
        self._accounts = accounts
        self._bytes = accounts.bytes_by_domain()
        self._total = accounts.total
        self._rest: dict[Domain, Iterator[PageFile]] = {
            domain: (file for file in queue.values() if file.name not in kept) for domain, queue in queues.items()
        }
        self._oldest = {domain: next(rest, None) for domain, rest in self._rest.items()}

    def make_room(self, domain: Domain, num_bytes: int, max_bytes: int) -> bool:
        """Note victims until `domain` can have `num_bytes` more; False if all that may go is not enough."""
        while self._accounts.is_over_limit(domain, self._bytes[domain] + num_bytes):
            if not self._take_oldest(lambda other: other == domain):
                return False
        while self._total + num_bytes > max_bytes:
            if not self._take_for(domain):
                return False
        return True

    def enforce_limits(self) -> None:
        """Note victims until no domain has more than its limit."""
        while self._take_oldest(self._is_over_limit):
            pass

    def _take_for(self, domain: Domain) -> bool:
        return (
            self._take_oldest(self._is_over_limit)
            or self._take_oldest(self._can_spare)
            or self._take_oldest(self._is_borrowing)
            or self._take_oldest(lambda other: other == domain)
        )

    def _is_over_limit(self, domain: Domain) -> bool:
        return self._accounts.is_over_limit(domain, self._bytes[domain])

    def _can_spare(self, domain: Domain) -> bool:
        """Whether an domain keeps its reserve without its oldest file."""
        oldest = self._oldest[domain]
        return oldest is not None and self._bytes[domain] - oldest.num_bytes >= self._accounts.reserve_of(domain)

    def _is_borrowing(self, domain: Domain) -> bool:
        return self._bytes[domain] > self._accounts.reserve_of(domain)

    def _take_oldest(self, may_lose: Callable[[Domain], bool]) -> bool:
        """Note the least recently used file of the domains that may lose one."""
        oldest = [file for domain, file in self._oldest.items() if file is not None and may_lose(domain)]
        if not oldest:
            return False
        victim = min(oldest, key=lambda file: file.used_at_ns)
        self.victims.append(victim)
        self._bytes[victim.domain] -= victim.num_bytes
        self._total -= victim.num_bytes
        self._oldest[victim.domain] = next(self._rest[victim.domain], None)
        return True
