"""What a lease does to the order in which pages go, while it lasts and after."""

from collections.abc import Collection, Mapping

from graftwork.engine.core.prefix_keys import PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.ids import IsolationDomain
from tests.engine.kv_lab import KvLab

MAKER = CacheScopes("sha256:model", "float32/2")
DOMAIN = IsolationDomain(b"x")


class AdviceByName:
    """A tool's name is the seconds of its lease."""

    def lease_s(self, domain: str, tools: Mapping[str, float | None]) -> float:
        return max(float(tool) for tool in tools)

    def return_probability(self, domain: str, tools: Collection[str], waited_s: float, within_s: float) -> float:
        return 0.9

    def observe(self, domain: str, tool: str, seconds: float) -> None:
        """Nothing is learnt."""


class LeaseLab:
    """A device of six pages, and sessions of two pages each that wait for tools."""

    def __init__(self, host: int = 20) -> None:
        self.lab = KvLab(device=6, host=host)
        self.session_cache = SessionCache(self.lab.memory, MAKER, AdviceByName(), self.lab.clock)

    def turn(self, name: str, tool: str | None) -> None:
        """A session's turn, after which it waits for a tool, or for nobody knows what."""
        path = self.path(name)
        allocation = self.lab.memory.allocate_path(path, self.lab.memory.match(path), len(path.token_ids))
        assert allocation is not None
        self.lab.fire_all()
        self.lab.compute(path, allocation)
        self.lab.memory.insert(path, allocation.pages, SessionUse(SessionKey(name)))
        self.lab.memory.set_history(path, SessionUse(SessionKey(name)))
        self.lab.memory.release(allocation.pages)
        self.command(name, SessionVerb.HOLD, () if tool is None else (ToolWait(tool),))

    def command(self, name: str, verb: SessionVerb, waits: tuple[ToolWait, ...] = ()) -> None:
        """One verb, and all copies that it begins."""
        path = self.path(name)
        self.session_cache.run(SessionCommand(verb, SessionKey(name), DOMAIN, (), tuple(path.token_ids), waits=waits))
        self.lab.fire_all()

    def path(self, name: str) -> TokenPath:
        return TokenPath(PrefixScope(MAKER.scope(DOMAIN, ())), tuple(ord(letter) for letter in name.ljust(4)), DOMAIN)

    def is_on_device(self, name: str) -> bool:
        """Whether both pages of a session are there."""
        path = self.path(name)
        nodes = self.lab.memory.page_store.tree.walk(path.scope, path.token_ids)
        return [node.device is not None for node in nodes] == [True, True]


def test_pages_under_a_lease_outlast_those_without_one() -> None:
    """The session that waits for nothing known gives way, though it was used last."""
    lab = LeaseLab()
    lab.turn("old", "100")
    lab.turn("new", None)

    lab.turn("next", "100")
    lab.turn("last", "100")

    assert lab.is_on_device("old")
    assert not lab.is_on_device("new")


def test_a_lease_that_has_run_out_protects_nothing() -> None:
    """Once its time is over, a session's pages go before those of a session whose lease lasts."""
    lab = LeaseLab()
    lab.turn("long", "1000")
    lab.turn("soon", "10")
    lab.turn("else", "1000")

    lab.lab.clock.advance(11)
    lab.turn("last", "1000")

    assert lab.is_on_device("long")
    assert not lab.is_on_device("soon")


def test_a_session_that_is_about_to_go_on_outlasts_all_that_wait() -> None:
    """Its tools have answered and its turn is on the way: its pages stay, and a session's whose tool runs go."""
    lab = LeaseLab()
    lab.turn("back", None)
    lab.turn("wait", "1000")
    lab.turn("else", "1000")

    lab.command("back", SessionVerb.PREFETCH)
    lab.turn("last", "1000")

    assert lab.is_on_device("back")
    assert not lab.is_on_device("wait")


def test_the_end_of_a_turn_takes_back_what_its_beginning_was_given() -> None:
    """A session that goes on is protected until its turn ends, and no longer where nothing known is waited for."""
    lab = LeaseLab()
    lab.turn("wait", "1000")
    lab.turn("else", "1000")
    lab.turn("back", None)

    lab.command("back", SessionVerb.PREFETCH)
    lab.turn("next", "1000")  # at the cost of one that waits
    lab.turn("back", None)
    lab.turn("last", "1000")

    assert lab.is_on_device("else")
    assert not lab.is_on_device("back")


def test_a_suspended_session_that_the_host_has_no_room_for_goes_first() -> None:
    """It said that it will not go on soon: its lease is over from then on, wherever its pages are."""
    lab = LeaseLab(host=0)
    for name in ("else", "gone", "idle", "next"):  # the last one at the cost of the first
        lab.turn(name, "1000")
    lab.turn("idle", None)

    lab.command("gone", SessionVerb.SUSPEND)
    lab.turn("last", "1000")

    assert not lab.is_on_device("gone")
    assert lab.is_on_device("idle")
