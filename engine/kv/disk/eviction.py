"""Chooses the page files to remove when the disk store needs room.

Each file is charged to one domain (usually one tenant). The limit of a domain is the largest total size of its files,
in bytes. The reserve of a domain is a number of bytes: while the domain's files take no more than this, no file of the
domain is removed to make room for another domain.

Files are removed until there is enough room. The next file is always the first that exists in this list:

    1. the oldest file among the domains that are over their limit
    2. the oldest file among the domains that have at least their reserve even after that file is removed
    3. the oldest file among the domains that have more bytes than their reserve
    4. the oldest file of the domain that needs room

"Oldest" means least recently used. This module never reads, writes or removes a file.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from graftwork.engine.kv.disk.file_format import PageFile

FileDomain = bytes | None
"""The digest of a domain (usually one tenant); None for files whose domain cannot be read."""


class DomainUsage:
    """Records three numbers of bytes for each domain (usually one tenant): the size of its files, its limit and its
    reserve.

    The limit is the largest size that its files may have. The reserve is the size up to which its files are not removed
    to make room for other domains.
    """

    def __init__(self, shared_reserve_bytes: int = 0) -> None:
        """`shared_reserve_bytes` are divided equally among the domains that have files."""
        self.total = 0
        self._shared_reserve_bytes = shared_reserve_bytes
        self._bytes: defaultdict[FileDomain, int] = defaultdict(int)
        self._limits: dict[FileDomain, int] = {}
        self._reserves: dict[FileDomain, int] = {}

    def bytes_of(self, domain: FileDomain) -> int:
        return self._bytes.get(domain, 0)

    def bytes_by_domain(self) -> defaultdict[FileDomain, int]:
        """Returns the total size of the files of each domain (usually one tenant), in bytes. The caller may change the
        result.
        """
        return self._bytes.copy()

    def add_bytes(self, domain: FileDomain, num_bytes: int) -> None:
        """Adds `num_bytes` to the counted size of the files of `domain` (usually one tenant). A negative number
        subtracts.
        """
        self.total += num_bytes
        self._bytes[domain] += num_bytes
        if self._bytes[domain] == 0:
            del self._bytes[domain]

    def set_limit(self, domain: FileDomain, num_bytes: int | None) -> None:
        """Sets the largest total size of the files of `domain` (usually one tenant), in bytes. None removes the limit."""
        if num_bytes is None:
            self._limits.pop(domain, None)
        else:
            self._limits[domain] = num_bytes

    def set_reserve(self, domain: FileDomain, num_bytes: int) -> None:
        self._reserves[domain] = num_bytes

    def is_over_limit(self, domain: FileDomain, num_bytes: int) -> bool:
        """Returns whether files with a total size of `num_bytes` exceed the limit of `domain` (usually one tenant).

        Returns False if the domain has no limit.
        """
        return domain in self._limits and num_bytes > self._limits[domain]

    def reserve_of(self, domain: FileDomain) -> int:
        """Returns the reserve of `domain` (usually one tenant), in bytes.

        While the domain's files take no more bytes than this, none of them is removed to make room for other domains.
        """
        domains = len(self._bytes) - (None in self._bytes)
        shared = 0 if domain is None else self._shared_reserve_bytes // max(domains, 1)
        return max(self._reserves.get(domain, 0), shared)

    def check_integrity(self, bytes_by_domain: Mapping[FileDomain, int]) -> None:
        """Raises AssertionError if the counted bytes of a domain (usually one tenant) are wrong.

        `bytes_by_domain` is the true total size of the files of each domain.
        """
        assert dict(bytes_by_domain) == dict(self._bytes), "a domain's bytes are miscounted"
        assert sum(bytes_by_domain.values()) == self.total, "the total is miscounted"


class VictimSearch:
    """Chooses the files that must be removed (the victims) to make room in the disk store. Removes no file itself."""

    def __init__(
        self, usage: DomainUsage, queues: Mapping[FileDomain, OrderedDict[str, PageFile]], kept: Collection[str]
    ) -> None:
        """`queues` holds the files of each domain, least recently used first.

        Files named in `kept` are never chosen.
        """
        self.victims: list[PageFile] = []
        self._usage = usage
        self._bytes = usage.bytes_by_domain()
        self._total = usage.total
        self._rest: dict[FileDomain, Iterator[PageFile]] = {
            domain: (file for file in queue.values() if file.name not in kept) for domain, queue in queues.items()
        }
        self._oldest = {domain: next(rest, None) for domain, rest in self._rest.items()}

    def make_room(self, domain: FileDomain, num_bytes: int, max_bytes: int) -> bool:
        """Adds files to `victims` until their removal makes room for a new file of `num_bytes` bytes in `domain`
        (usually one tenant).

        There is room if, with the new file, the domain is within its limit and all files together take at most
        `max_bytes` bytes. Returns False if too few files may be removed.
        """
        while self._usage.is_over_limit(domain, self._bytes[domain] + num_bytes):
            if not self._choose_oldest(lambda other: other == domain):
                return False
        while self._total + num_bytes > max_bytes:
            if not self._choose_for(domain):
                return False
        return True

    def enforce_limits(self) -> None:
        """Adds files to `victims` until every domain (usually one tenant) would be within its limit without these
        files.
        """
        while self._choose_oldest(self._is_over_limit):
            pass

    def _choose_for(self, domain: FileDomain) -> bool:
        return (
            self._choose_oldest(self._is_over_limit)
            or self._choose_oldest(self._keeps_reserve_without_oldest)
            or self._choose_oldest(self._is_over_reserve)
            or self._choose_oldest(lambda other: other == domain)
        )

    def _is_over_limit(self, domain: FileDomain) -> bool:
        return self._usage.is_over_limit(domain, self._bytes[domain])

    def _keeps_reserve_without_oldest(self, domain: FileDomain) -> bool:
        """Returns whether a domain still has its whole reserve after its oldest file is removed."""
        oldest = self._oldest[domain]
        return oldest is not None and self._bytes[domain] - oldest.num_bytes >= self._usage.reserve_of(domain)

    def _is_over_reserve(self, domain: FileDomain) -> bool:
        return self._bytes[domain] > self._usage.reserve_of(domain)

    def _choose_oldest(self, may_lose: Callable[[FileDomain], bool]) -> bool:
        """Adds the oldest file of all domains for which `may_lose` is true as a victim.

        Returns False if there is none.
        """
        oldest = [file for domain, file in self._oldest.items() if file is not None and may_lose(domain)]
        if not oldest:
            return False
        victim = min(oldest, key=lambda file: file.used_at_ns)
        self.victims.append(victim)
        self._bytes[victim.domain] -= victim.num_bytes
        self._total -= victim.num_bytes
        self._oldest[victim.domain] = next(self._rest[victim.domain], None)
        return True
