"""Which sessions the engine has seen, and which pages their histories run through.

Owns the count of sessions by page key: it does not matter on which tier a page is, or whether it is anywhere.
Never holds a page: a session's claim on memory is a rank, not a hold.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import SessionKey
from graftwork.engine.kv.index.radix_tree import Domain, Lease


@dataclass(slots=True, eq=False)
class SessionRecord:
    """What is remembered of one session."""

    domain: Domain
    scope: bytes
    """Of its last request: another one means another adapter."""
    keys: tuple[PageKey, ...] = ()
    """Of the whole pages of its history, from the root down."""
    abandoned: dict[PageKey, None] = field(default_factory=dict)
    """Of pages that it has made, and that are not, or no longer, part of its history; the oldest first."""
    lease: Lease | None = None
    waiting_since: float | None = None
    tools: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        """What it counts against the bound of the table."""
        return 1 + len(self.keys) + len(self.abandoned)


_MAX_ABANDONED_SHARE = 1 / 8
"""Of the table: what one session may have left behind and still be remembered for."""


@dataclass(slots=True)
class SessionIndex:
    """Records by session, least recently used first; bounded by their number and the pages that they name."""

    max_keys: int
    _records: "OrderedDict[tuple[Domain, SessionKey], SessionRecord]" = field(default_factory=OrderedDict)
    _counts: dict[PageKey, int] = field(default_factory=dict)
    _num_keys: int = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_history_pages(self) -> int:
        """Different pages that histories run through, wherever they are."""
        return len(self._counts)

    def find(self, domain: Domain, session: SessionKey) -> SessionRecord | None:
        """The record of a session, if it is remembered; marks it used."""
        record = self._records.get((domain, session))
        if record is not None:
            self._records.move_to_end((domain, session))
        return record

    def add_pages(
        self, domain: Domain, session: SessionKey, scope: bytes, keys: Iterable[PageKey]
    ) -> tuple[PageKey, ...]:
        """A session has made pages that may, or may not, become part of its history.

        Returns the keys that no session is_in_history any more, because records had to be forgotten.
        """
        record = self._record(domain, session, scope)
        self._abandon(record, (key for key in keys if key not in self._counts))
        return self._forget_oldest((domain, session))

    def set_history(
        self, domain: Domain, session: SessionKey, scope: bytes, keys: Iterable[PageKey]
    ) -> "HistoryUpdate":
        """A session's history now runs through `keys`; what it left and nobody else is_in_history is superseded."""
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
        """Forget a session; returns the keys of its pages that no other session is_in_history."""
        record = self._records.pop((domain, session), None)
        if record is None:
            return ()
        self._num_keys -= record.weight
        self._count(record.keys, -1)
        return tuple(key for key in (*record.keys, *record.abandoned) if key not in self._counts)

    def remove_domain(self, domain: Domain) -> None:
        """Forget every session of a domain."""
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
        """A session has left pages behind; of too many, the oldest are forgotten."""
        num_abandoned = len(record.abandoned)
        record.abandoned.update(dict.fromkeys(keys))
        while len(record.abandoned) > _MAX_ABANDONED_SHARE * self.max_keys:
            del record.abandoned[next(iter(record.abandoned))]
        self._num_keys += len(record.abandoned) - num_abandoned

    def is_in_history(self, key: PageKey) -> bool:
        """Whether some session's history runs through a page."""
        return key in self._counts

    def _count(self, keys: Iterable[PageKey], change: int) -> None:
        for key in keys:
            number = self._counts.get(key, 0) + change
            if number:
                self._counts[key] = number
            else:
                del self._counts[key]

    def _forget_oldest(self, but: tuple[Domain, SessionKey]) -> tuple[PageKey, ...]:
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
class HistoryUpdate:
    """What following a session's history has changed."""

    record: SessionRecord
    superseded: tuple[PageKey, ...]
    """Keys that no session is_in_history any more."""
