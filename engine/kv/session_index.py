"""Records which sessions the engine has seen and which pages their histories contain.

Owns, for each page key, the number of sessions whose history contains the page. This number does not depend on where
the page is stored, or on whether it is stored at all. Never keeps a page allocated: a session only raises the rank of
its pages, so that they are evicted later.

Invariant: all records together have at most `max_keys` page keys, unless there is only one record.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import SessionKey
from graftwork.engine.kv.index.radix_tree import Domain, Lease


@dataclass(slots=True, eq=False)
class SessionRecord:
    """The engine's record of one session: the pages of its history, its lease and the tools that it waits for."""

    domain: Domain
    scope: bytes
    """The cache scope of the session's last request. Another scope means another adapter."""
    keys: tuple[PageKey, ...] = ()
    """The keys of the whole pages of the session's history, first page first."""
    abandoned: dict[PageKey, None] = field(default_factory=dict)
    """The keys of pages that the session has made or used and that are not in its history, oldest first."""
    lease: Lease | None = None
    waiting_since: float | None = None
    tools: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        """The size of the record: 1, plus 1 for each page key in it. The SessionIndex limits the sum of these sizes."""
        return 1 + len(self.keys) + len(self.abandoned)


_MAX_ABANDONED_SHARE = 1 / 8
"""Share of `max_keys` that the abandoned pages of one session may take."""


@dataclass(slots=True)
class SessionIndex:
    """Holds the records of sessions, least recently used first.

    The size of a record is its `weight`. If all records together are larger than `max_keys`, the least recently used
    records are removed. A single record may be larger than `max_keys`.
    """

    max_keys: int
    _records: "OrderedDict[tuple[Domain, SessionKey], SessionRecord]" = field(default_factory=OrderedDict)
    _counts: dict[PageKey, int] = field(default_factory=dict)
    _num_keys: int = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_history_pages(self) -> int:
        """The number of different pages in the histories of all sessions, whether the pages are cached or not."""
        return len(self._counts)

    def find(self, domain: Domain, session: SessionKey) -> SessionRecord | None:
        """Returns the record of a session, and marks this record as just used. Returns None if the session has no
        record.
        """
        record = self._records.get((domain, session))
        if record is not None:
            self._records.move_to_end((domain, session))
        return record

    def add_pages(
        self, domain: Domain, session: SessionKey, scope: bytes, keys: Iterable[PageKey]
    ) -> tuple[PageKey, ...]:
        """Records that a session has computed or used pages. They may become part of the session's history later.

        Old records of other sessions may be removed to make room. Returns the keys of pages that, because of this, are
        in no session's history any more.
        """
        record = self._record(domain, session, scope)
        self._abandon(record, (key for key in keys if key not in self._counts))
        return self._forget_oldest((domain, session))

    def set_history(
        self, domain: Domain, session: SessionKey, scope: bytes, keys: Iterable[PageKey]
    ) -> "HistoryUpdate":
        """Replaces the history of a session: `keys` are the keys of all its pages, first page first.

        Returns the session's record, and the keys of pages that are in no session's history any more.
        """
        record = self._record(domain, session, scope)
        old, record.keys, record.scope = record.keys, tuple(keys), scope
        self._count(record.keys, 1)
        self._count(old, -1)
        self._num_keys += len(record.keys) - len(old)
        superseded = tuple(key for key in old if key not in self._counts)
        own = [key for key in record.abandoned if key in self._counts]
        self._num_keys -= len(own)
        for key in own:
            del record.abandoned[key]
        self._abandon(record, superseded)
        return HistoryUpdate(record, superseded + self._forget_oldest((domain, session)))

    def remove(self, domain: Domain, session: SessionKey) -> tuple[PageKey, ...]:
        """Removes the record of a session. Returns the keys of its pages that are in no other session's history."""
        record = self._records.pop((domain, session), None)
        if record is None:
            return ()
        self._num_keys -= record.weight
        self._count(record.keys, -1)
        return tuple(key for key in (*record.keys, *record.abandoned) if key not in self._counts)

    def remove_domain(self, domain: Domain) -> None:
        """Removes the records of all sessions of a domain (usually one tenant)."""
        for other, session in list(self._records):
            if other == domain:
                self.remove(other, session)

    def _record(self, domain: Domain, session: SessionKey, scope: bytes) -> SessionRecord:
        record = self.find(domain, session)
        if record is None:
            record = self._records[domain, session] = SessionRecord(domain, scope)
            self._num_keys += record.weight
        return record

    def _abandon(self, record: SessionRecord, keys: Iterable[PageKey]) -> None:
        """Adds the keys of pages that a session made and does not use now.

        Forgets the oldest keys if there are too many.
        """
        num_abandoned = len(record.abandoned)
        record.abandoned.update(dict.fromkeys(keys))
        while len(record.abandoned) > _MAX_ABANDONED_SHARE * self.max_keys:
            del record.abandoned[next(iter(record.abandoned))]
        self._num_keys += len(record.abandoned) - num_abandoned

    def is_in_history(self, key: PageKey) -> bool:
        """Returns whether the history of at least one session contains the page with this key."""
        return key in self._counts

    def num_histories(self, key: PageKey) -> int:
        """Returns how many histories contain the page with this key."""
        return self._counts.get(key, 0)

    def _count(self, keys: Iterable[PageKey], change: int) -> None:
        for key in keys:
            number = self._counts.get(key, 0) + change
            if number:
                self._counts[key] = number
            else:
                del self._counts[key]

    def _forget_oldest(self, kept: tuple[Domain, SessionKey]) -> tuple[PageKey, ...]:
        superseded: tuple[PageKey, ...] = ()
        while self._num_keys > self.max_keys and len(self._records) > 1:
            oldest = next(iter(self._records))
            if oldest == kept:
                self._records.move_to_end(kept)
                continue
            superseded += self.remove(*oldest)
        return superseded

    def check_integrity(self) -> None:
        """Recounts, for each page, the sessions whose history contains it, and recounts the keys of all records."""
        counts: dict[PageKey, int] = {}
        for record in self._records.values():
            assert (record.waiting_since is None) == (not record.tools), "a session waits for no tool, or since no time"
            for key in record.keys:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._counts, "the sessions of a page were counted wrongly"
        assert sum(record.weight for record in self._records.values()) == self._num_keys


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """What `SessionIndex.set_history` returns: the session's record, and the pages that are in no session's history any
    more.
    """

    record: SessionRecord
    superseded: tuple[PageKey, ...]
    """Keys that were in some history before and are in none now."""
