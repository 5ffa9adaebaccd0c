"""Tests how a lease changes the order of eviction, while it lasts and after it."""

from collections.abc import Collection, Mapping

from graftwork.engine.core.prefix_keys import PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.ids import IsolationDomain
from tests.engine.tagged_kv_cache import TaggedKvCache

SCOPES = CacheScopes("sha256:model", "float32/2")
DOMAIN = IsolationDomain(b"x")


class LeasesByName:
    """A lease model in which a tool's name is the lease in seconds."""

    def lease_s(self, domain: str, tools: Mapping[str, float | None]) -> float:
        return max(float(tool) for tool in tools)

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        return 0.9

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Learns nothing."""

    def forget_domain(self, domain: str) -> None:
        """Nothing was learned."""


class LeasedSessions:
    """A device of six pages, and sessions of two pages that wait for tools."""

    def __init__(self, host: int = 20) -> None:
        self.cache = TaggedKvCache(device=6, host=host)
        self.session_cache = SessionCache(self.cache.kv_cache, SCOPES, LeasesByName(), self.cache.clock)

    def turn(self, name: str, tool: str | None) -> None:
        """Runs a session's turn. It then waits for a tool, or for nothing if `tool` is None."""
        path = self.path(name)
        allocation = self.cache.kv_cache.allocate_path(path, self.cache.kv_cache.match(path), len(path.token_ids))
        assert allocation is not None
        self.cache.fire_all()
        self.cache.compute(path, allocation)
        self.cache.kv_cache.insert(path, allocation.pages, SessionUse(SessionKey(name)))
        self.cache.kv_cache.set_history(path, SessionUse(SessionKey(name)))
        self.cache.kv_cache.release(allocation.pages)
        self.command(name, SessionVerb.HOLD, () if tool is None else (ToolWait(tool),))

    def command(self, name: str, verb: SessionVerb, waits: tuple[ToolWait, ...] = ()) -> None:
        """Runs one command and all copies that it begins."""
        path = self.path(name)
        self.session_cache.run(SessionCommand(verb, SessionKey(name), DOMAIN, (), tuple(path.token_ids), waits=waits))
        self.cache.fire_all()

    def path(self, name: str) -> TokenPath:
        return TokenPath(PrefixScope(SCOPES.scope(DOMAIN, ())), tuple(ord(letter) for letter in name.ljust(4)), DOMAIN)

    def is_on_device(self, name: str) -> bool:
        """Whether both pages of a session are on the device."""
        path = self.path(name)
        nodes = self.cache.kv_cache.page_store.tree.walk(path.scope, path.token_ids)
        return [node.device is not None for node in nodes] == [True, True]


def test_pages_under_a_lease_outlast_those_without_one() -> None:
    """A session without a lease is evicted before a leased one, although it was used later."""
    sessions = LeasedSessions()
    sessions.turn("old", "100")
    sessions.turn("new", None)

    sessions.turn("next", "100")
    sessions.turn("last", "100")

    assert sessions.is_on_device("old")
    assert not sessions.is_on_device("new")


def test_a_lease_that_has_run_out_protects_nothing() -> None:
    """After its lease has ended, a session's pages are evicted before those of a session whose lease lasts."""
    sessions = LeasedSessions()
    sessions.turn("long", "1000")
    sessions.turn("soon", "10")
    sessions.turn("else", "1000")

    sessions.cache.clock.advance(11)
    sessions.turn("last", "1000")

    assert sessions.is_on_device("long")
    assert not sessions.is_on_device("soon")


def test_a_session_about_to_continue_outlasts_all_that_wait() -> None:
    """A prefetched session keeps its pages, and a session whose tool is still running loses its own."""
    sessions = LeasedSessions()
    sessions.turn("back", None)
    sessions.turn("wait", "1000")
    sessions.turn("else", "1000")

    sessions.command("back", SessionVerb.PREFETCH)
    sessions.turn("last", "1000")

    assert sessions.is_on_device("back")
    assert not sessions.is_on_device("wait")


def test_the_lease_of_a_turn_ends_with_the_turn() -> None:
    """A session is protected until its turn ends, and not longer if it waits for no tool."""
    sessions = LeasedSessions()
    sessions.turn("wait", "1000")
    sessions.turn("else", "1000")
    sessions.turn("back", None)

    sessions.command("back", SessionVerb.PREFETCH)
    sessions.turn("next", "1000")  # at the cost of one that waits
    sessions.turn("back", None)
    sessions.turn("last", "1000")

    assert sessions.is_on_device("else")
    assert not sessions.is_on_device("back")


def test_a_suspended_session_without_room_on_the_host_is_evicted_first() -> None:
    """A suspended session loses its lease even if the host has no room for its pages, so it is evicted first."""
    sessions = LeasedSessions(host=0)
    for name in ("else", "gone", "idle", "next"):  # the last one at the cost of the first
        sessions.turn(name, "1000")
    sessions.turn("idle", None)

    sessions.command("gone", SessionVerb.SUSPEND)
    sessions.turn("last", "1000")

    assert not sessions.is_on_device("gone")
    assert sessions.is_on_device("idle")
