"""Tests the KV cache when room is short, one situation per test."""

from graftwork.engine.core.prefix_keys import PageKey, PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.session_index import SessionIndex
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.ids import IsolationDomain
from tests.engine.tagged_kv_cache import FakeDisk, FixedLeases, TaggedKvCache

SCOPES = CacheScopes("sha256:model", "float32/2")
ALICE, BOB = b"alice", b"bob"


class SmallKvCache:
    """A KV cache of a few pages of two tokens."""

    def __init__(self, *, device: int, host: int, disk_pages: int = 0, context: int = 4) -> None:
        self.cache = TaggedKvCache(device=device, host=host, context=context, disk=FakeDisk(max_pages=disk_pages))
        self.session_cache = SessionCache(self.cache.kv_cache, SCOPES, FixedLeases(), self.cache.clock)

    def path(self, domain: bytes, tokens: list[int]) -> TokenPath:
        return TokenPath(PrefixScope(SCOPES.scope(IsolationDomain(domain), ())), tokens, domain)

    def turn(self, domain: bytes, tokens: list[int], session: str | None = None) -> bool:
        """Runs a whole request with an empty answer. Returns whether there was room for it."""
        kv_cache, path = self.cache.kv_cache, self.path(domain, tokens)
        use = None if session is None else SessionUse(SessionKey(session))
        allocation = kv_cache.allocate_path(path, kv_cache.match(path), len(tokens), use)
        if allocation is None:
            return False
        self.cache.fire_all()
        self.cache.compute(path, allocation)
        kv_cache.insert(path, allocation.pages, use)
        if use is not None:
            kv_cache.set_history(path, use)
        kv_cache.release(allocation.pages)
        return True

    def command(self, verb: SessionVerb, domain: bytes, session: str, tokens: list[int], *tools: str) -> SessionMemory:
        waits = tuple(ToolWait(tool) for tool in tools)
        return self.session_cache.run(
            SessionCommand(verb, SessionKey(session), IsolationDomain(domain), (), tuple(tokens), 0, waits)
        )

    def device_tokens(self, domain: bytes, tokens: list[int]) -> int:
        return self.command(SessionVerb.READ, domain, "reader", tokens).device_tokens


def tokens_from(first: int, num_pages: int) -> list[int]:
    return [100 * first + place for place in range(2 * num_pages)]


def test_a_domain_without_room_on_the_host_does_not_block_others() -> None:
    """Alice's path fills the host and its rest finds no room; Bob's pages, which are queued after it, are still saved."""
    small = SmallKvCache(device=15, host=4, context=8)
    kv_cache, long = small.cache.kv_cache, tokens_from(1, 8)
    small.turn(ALICE, long, "a")
    small.command(SessionVerb.HOLD, ALICE, "a", long)
    small.cache.fire_all()
    small.turn(BOB, tokens_from(2, 4), "b")

    kv_cache.start_background_copies()
    kv_cache.start_background_copies()

    assert [plan.domain for plan, _ in small.cache.copies.under_way] == [BOB]


def test_an_expired_lease_is_no_better_than_none() -> None:
    """Pages with an expired lease are evicted before pages that were used later, even if nothing happened in between."""
    small = SmallKvCache(device=8, host=16)
    leased, recent = tokens_from(1, 4), tokens_from(2, 4)
    small.turn(ALICE, leased, "waits")
    small.command(SessionVerb.HOLD, ALICE, "waits", leased, "search")
    small.cache.fire_all()
    small.turn(ALICE, recent, "idle")
    small.command(SessionVerb.HOLD, ALICE, "idle", recent)
    small.cache.fire_all()

    small.cache.clock.advance(11)  # the lease was for ten seconds
    small.cache.kv_cache.start_background_copies()
    small.turn(ALICE, tokens_from(3, 4), "newcomer")

    assert small.device_tokens(ALICE, recent) == 8
    assert small.device_tokens(ALICE, leased) == 0


def test_prefetched_pages_stay_for_their_turn() -> None:
    """A prefetched session stays on the device while another request evicts a session that was used before it."""
    small = SmallKvCache(device=8, host=16)
    returning, idle = tokens_from(1, 3), tokens_from(2, 4)
    small.turn(ALICE, returning, "returns")
    small.command(SessionVerb.HOLD, ALICE, "returns", returning, "search")
    small.cache.fire_all()
    small.command(SessionVerb.SUSPEND, ALICE, "returns", returning)
    small.cache.fire_all()
    small.turn(ALICE, idle, "idle")
    small.command(SessionVerb.HOLD, ALICE, "idle", idle)
    small.cache.fire_all()

    small.command(SessionVerb.PREFETCH, ALICE, "returns", returning)
    small.cache.fire_all()
    small.turn(ALICE, tokens_from(3, 3), "newcomer")

    assert small.device_tokens(ALICE, returning) == 6


def test_a_prefetch_loads_what_there_is_room_for() -> None:
    """If other domains' reserves leave room for part of a path, that part is loaded and no page is evicted for the
    rest."""
    small = SmallKvCache(device=8, host=16)
    long = tokens_from(1, 6)
    small.turn(ALICE, long, "long")
    small.command(SessionVerb.SUSPEND, ALICE, "long", long)
    small.cache.fire_all()
    bobs = tokens_from(2, 2)
    small.turn(BOB, bobs, "bob")
    held = small.cache.kv_cache.allocate_pages(2, ALICE)
    assert held is not None

    small.command(SessionVerb.PREFETCH, ALICE, "long", long)
    small.cache.fire_all()

    assert small.device_tokens(BOB, bobs) == 4
    assert small.device_tokens(ALICE, long) == 8
    small.cache.kv_cache.release(held)
    small.cache.check()


def test_pages_on_their_way_from_disk_are_counted_there() -> None:
    """While a fetch runs, its pages are counted on disk and on no nearer tier."""
    small = SmallKvCache(device=8, host=0, disk_pages=100)
    tokens = tokens_from(1, 3)
    path = small.path(ALICE, tokens)
    small.cache.disk.pages = {key: key for key in small.cache.tags(path)}

    answer = small.command(SessionVerb.PREFETCH, ALICE, "s", tokens)

    assert (answer.device_tokens, answer.host_tokens, answer.disk_tokens) == (0, 0, 6)
    small.cache.fire_all()
    assert small.device_tokens(ALICE, tokens) == 6


def test_the_session_index_is_bounded() -> None:
    """The session index stays within its bound for any number of unfinished sessions and rewritten histories."""
    table = SessionIndex(max_keys=100)

    for number in range(1000):
        keys = [PageKey(b"%d-%d" % (number, page)) for page in range(5)]
        table.add_pages(ALICE, SessionKey(f"begun-{number}"), b"scope", keys)
        table.set_history(ALICE, SessionKey("rewritten"), b"scope", keys)
        table.check_integrity()

    assert len(table) <= 100
    assert table.is_in_history(PageKey(b"999-0"))
    assert len(table.remove(ALICE, SessionKey("rewritten"))) <= 100
