"""Which sessions the engine has seen, and which pages their histories run through.

Owns the count of sessions by page key: it does not matter on which tier a page is, or whether it is anywhere.
Never holds a page: a session's claim on memory is a rank, not a hold.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import SessionKey
from graftwork.engine.kv.index.radix_tree import Lease, Owner


@dataclass(slots=True, eq=False)
class SessionRecord:
    """What is remembered of one session."""

    owner: Owner
    scope: bytes
    """Of its last request: another one means another adapter."""
    keys: tuple[PageKey, ...] = ()
    """Of the whole pages of its history, from the root down."""
    left: dict[PageKey, None] = field(default_factory=dict)
    """Of pages that it has made, and that are not, or no longer, part of its history; the oldest first."""
    lease: Lease | None = None
    waiting_since: float | None = None
    tools: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        """What it counts against the bound of the table."""
        return 1 + len(self.keys) + len(self.left)


_MOST_LEFT_SHARE = 1 / 8
"""Of the table: what one session may have left behind and still be remembered for."""


@dataclass(slots=True)
class SessionTable:
    """Records by session, least recently used first; bounded by their number and the pages that they name."""

    max_keys: int
    _records: "OrderedDict[tuple[Owner, SessionKey], SessionRecord]" = field(default_factory=OrderedDict)
    _counts: dict[PageKey, int] = field(default_factory=dict)
    _num_keys: int = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_reached(self) -> int:
        """Different pages that histories run through, wherever they are."""
        return len(self._counts)

    def find(self, owner: Owner, session: SessionKey) -> SessionRecord | None:
        """The record of a session, if it is remembered; marks it used."""
        record = self._records.get((owner, session))
        if record is not None:
            self._records.move_to_end((owner, session))
        return record

    def note(self, owner: Owner, session: SessionKey, scope: bytes, keys: Iterable[PageKey]) -> tuple[PageKey, ...]:
        """A session has made pages that may, or may not, become part of its history.

        Returns the keys that no session reaches any more, because records had to be forgotten.
        """
        record = self._record(owner, session, scope)
        self._leave(record, (key for key in keys if key not in self._counts))
        return self._forget_oldest((owner, session))

    def follow(self, owner: Owner, session: SessionKey, scope: bytes, keys: Iterable[PageKey]) -> "Followed":
        """A session's history now runs through `keys`; what it left and nobody else reaches is superseded."""
        record = self._record(owner, session, scope)
        old, record.keys, record.scope = record.keys, tuple(keys), scope
        self._count(record.keys, 1)
        self._count(old, -1)
        self._num_keys += len(record.keys) - len(old)
        superseded = tuple(key for key in old if key not in self._counts)
        own = [key for key in record.left if key in self._counts]
        self._num_keys -= len(own)
        for key in own:
            del record.left[key]
        self._leave(record, superseded)
        return Followed(record, superseded + self._forget_oldest((owner, session)))

    def remove(self, owner: Owner, session: SessionKey) -> tuple[PageKey, ...]:
        """Forget a session; returns the keys of its pages that no other session reaches."""
        record = self._records.pop((owner, session), None)
        if record is None:
            return ()
        self._num_keys -= record.weight
        self._count(record.keys, -1)
        return tuple(key for key in (*record.keys, *record.left) if key not in self._counts)

    def remove_owner(self, owner: Owner) -> None:
        """Forget every session of a party."""
        for other, session in list(self._records):
            if other == owner:
                self.remove(other, session)

    def _record(self, owner: Owner, session: SessionKey, scope: bytes) -> SessionRecord:
        record = self.find(owner, session)
        if record is None:
            record = self._records[owner, session] = SessionRecord(owner, scope)
            self._num_keys += record.weight
        return record

    def _leave(self, record: SessionRecord, keys: Iterable[PageKey]) -> None:
        """A session has left pages behind; of too many, the oldest are forgotten."""
        num_left = len(record.left)
        record.left.update(dict.fromkeys(keys))
        while len(record.left) > _MOST_LEFT_SHARE * self.max_keys:
            del record.left[next(iter(record.left))]
        self._num_keys += len(record.left) - num_left

    def reaches(self, key: PageKey) -> bool:
        """Whether some session's history runs through a page."""
        return key in self._counts

    def _count(self, keys: Iterable[PageKey], change: int) -> None:
        for key in keys:
            number = self._counts.get(key, 0) + change
            if number:
                self._counts[key] = number
            else:
                del self._counts[key]

    def _forget_oldest(self, but: tuple[Owner, SessionKey]) -> tuple[PageKey, ...]:
        superseded: tuple[PageKey, ...] = ()
        while self._num_keys > self.max_keys and len(self._records) > 1:
            oldest = next(iter(self._records))
            if oldest == but:
                self._records.move_to_end(but)
                continue
            superseded += self.remove(*oldest)
        return superseded

    def check_integrity(self) -> None:
        """Recount the sessions of every page."""
        counts: dict[PageKey, int] = {}
        for record in self._records.values():
            for key in record.keys:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._counts, "the sessions of a page were counted wrongly"
        assert sum(record.weight for record in self._records.values()) == self._num_keys


@dataclass(frozen=True, slots=True)
class Followed:
    """What following a session's history has changed."""

    record: SessionRecord
    superseded: tuple[PageKey, ...]
    """Keys that no session reaches any more."""
