"""Whose files go when the disk tier needs room.

A party's limit is the most that it may have; its reserve is what others cannot take from it. What lies between is
borrowed, and borrowed room is what goes: the files of parties over their limit first, then the least recently used
file of any party that keeps its reserve without it, then one that reaches into the reserve of a party that has more,
and what a party has within its reserve only for its own newer pages.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from graftwork.engine.kv.disk.file_format import PageRun

Owner = bytes | None
"""None owns what nobody can read."""


class OwnerAccounts:
    """The bytes, limit and reserve of every party."""

    def __init__(self, shared_reserve_bytes: int = 0) -> None:
        """`shared_reserve_bytes` are parted equally among the parties that are there."""
        self.total = 0
        self._shared_reserve_bytes = shared_reserve_bytes
        self._bytes: defaultdict[Owner, int] = defaultdict(int)
        self._limits: dict[Owner, int] = {}
        self._reserves: dict[Owner, int] = {}

    def bytes_of(self, owner: Owner) -> int:
        return self._bytes.get(owner, 0)

    def bytes_by_owner(self) -> defaultdict[Owner, int]:
        """A copy."""
        return self._bytes.copy()

    def change(self, owner: Owner, num_bytes: int) -> None:
        """Add to what an owner has; a negative number takes away."""
        self.total += num_bytes
        self._bytes[owner] += num_bytes
        if self._bytes[owner] == 0:
            del self._bytes[owner]

    def set_limit(self, owner: Owner, num_bytes: int | None) -> None:
        """None lifts the limit."""
        if num_bytes is None:
            self._limits.pop(owner, None)
        else:
            self._limits[owner] = num_bytes

    def set_reserve(self, owner: Owner, num_bytes: int) -> None:
        self._reserves[owner] = num_bytes

    def is_over_limit(self, owner: Owner, num_bytes: int) -> bool:
        """Whether `num_bytes` is more than an owner may have."""
        return owner in self._limits and num_bytes > self._limits[owner]

    def reserve_of(self, owner: Owner) -> int:
        """Bytes that others cannot take from an owner."""
        parties = len(self._bytes) - (None in self._bytes)
        shared = 0 if owner is None else self._shared_reserve_bytes // max(parties, 1)
        return max(self._reserves.get(owner, 0), shared)

    def check_integrity(self, bytes_by_owner: Mapping[Owner, int]) -> None:
        """Compare with a recount."""
        assert dict(bytes_by_owner) == dict(self._bytes), "an owner's bytes are miscounted"
        assert sum(bytes_by_owner.values()) == self.total, "the total is miscounted"


class VictimChoice:
    """One search for room: notes which files it would remove, and changes nothing."""

    def __init__(
        self, accounts: OwnerAccounts, queues: Mapping[Owner, OrderedDict[str, PageRun]], kept: Collection[str]
    ) -> None:
        """`queues` has each party's files, least recently used first; those named in `kept` stay."""
        self.victims: list[PageRun] = []
        self._accounts = accounts
        self._bytes = accounts.bytes_by_owner()
        self._total = accounts.total
        self._rest: dict[Owner, Iterator[PageRun]] = {
            owner: (run for run in queue.values() if run.name not in kept) for owner, queue in queues.items()
        }
        self._oldest = {owner: next(rest, None) for owner, rest in self._rest.items()}

    def make_room(self, owner: Owner, num_bytes: int, max_bytes: int) -> bool:
        """Note victims until `owner` can have `num_bytes` more; False if all that may go is not enough."""
        while self._accounts.is_over_limit(owner, self._bytes[owner] + num_bytes):
            if not self._take_oldest(lambda other: other == owner):
                return False
        while self._total + num_bytes > max_bytes:
            if not self._take_for(owner):
                return False
        return True

    def enforce_limits(self) -> None:
        """Note victims until no party has more than its limit."""
        while self._take_oldest(self._is_over_limit):
            pass

    def _take_for(self, owner: Owner) -> bool:
        return (
            self._take_oldest(self._is_over_limit)
            or self._take_oldest(self._can_spare)
            or self._take_oldest(self._is_borrowing)
            or self._take_oldest(lambda other: other == owner)
        )

    def _is_over_limit(self, owner: Owner) -> bool:
        return self._accounts.is_over_limit(owner, self._bytes[owner])

    def _can_spare(self, owner: Owner) -> bool:
        """Whether an owner keeps its reserve without its oldest file."""
        oldest = self._oldest[owner]
        return oldest is not None and self._bytes[owner] - oldest.num_bytes >= self._accounts.reserve_of(owner)

    def _is_borrowing(self, owner: Owner) -> bool:
        return self._bytes[owner] > self._accounts.reserve_of(owner)

    def _take_oldest(self, may_lose: Callable[[Owner], bool]) -> bool:
        """Note the least recently used file of the parties that may lose one."""
        oldest = [run for owner, run in self._oldest.items() if run is not None and may_lose(owner)]
        if not oldest:
            return False
        victim = min(oldest, key=lambda run: run.used_at_ns)
        self.victims.append(victim)
        self._bytes[victim.owner] -= victim.num_bytes
        self._total -= victim.num_bytes
        self._oldest[victim.owner] = next(self._rest[victim.owner], None)
        return True
