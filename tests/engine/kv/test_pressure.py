"""Which of the KV memory's promises bend under pressure, one scene each."""

from graftwork.engine.core.prefix_keys import PageKey, PrefixScope
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionCommand, SessionMemory, SessionVerb, ToolWait
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.session_index import SessionIndex
from graftwork.engine.kv.transfer.loader import TokenPath
from graftwork.platform.ids import IsolationDomain
from tests.engine.kv_lab import FakeDisk, FixedAdvice, KvLab

MAKER = CacheScopes("sha256:model", "float32/2")
ALICE, BOB = b"alice", b"bob"


class Scene:
    """A memory of few pages of two tokens, and the session_cache of its sessions."""

    def __init__(self, *, device: int, host: int, disk_pages: int = 0, context: int = 4) -> None:
        self.lab = KvLab(device=device, host=host, context=context, disk=FakeDisk(max_pages=disk_pages))
        self.session_cache = SessionCache(self.lab.memory, MAKER, FixedAdvice(), self.lab.clock)

    def path(self, domain: bytes, tokens: list[int]) -> TokenPath:
        return TokenPath(PrefixScope(MAKER.scope(IsolationDomain(domain), ())), tokens, domain)

    def turn(self, domain: bytes, tokens: list[int], session: str | None = None) -> bool:
        """A whole request whose answer is nothing; whether there was room for it."""
        memory, path = self.lab.memory, self.path(domain, tokens)
        use = None if session is None else SessionUse(SessionKey(session))
        allocation = memory.allocate_path(path, memory.match(path), len(tokens), use)
        if allocation is None:
            return False
        self.lab.fire_all()
        self.lab.compute(path, allocation)
        memory.insert(path, allocation.pages, use)
        if use is not None:
            memory.set_history(path, use)
        memory.release(allocation.pages)
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


def test_a_party_that_the_host_has_no_room_for_does_not_keep_others_from_it() -> None:
    """With the host full of the beginning of Alice's one path, the rest of which finds no room, Bob's pages behind it
    in the line are copied down."""
    scene = Scene(device=15, host=4, context=8)
    memory, long = scene.lab.memory, tokens_from(1, 8)
    scene.turn(ALICE, long, "a")
    scene.command(SessionVerb.HOLD, ALICE, "a", long)
    scene.lab.fire_all()
    scene.turn(BOB, tokens_from(2, 4), "b")

    memory.start_background_copies()
    memory.start_background_copies()

    assert [plan.domain for plan, _ in scene.lab.copies.under_way] == [BOB]


def test_an_expired_lease_is_no_better_than_none() -> None:
    """Pages whose lease has run out give way before those that were used since, though nothing has happened to them
    in between."""
    scene = Scene(device=8, host=16)
    leased, recent = tokens_from(1, 4), tokens_from(2, 4)
    scene.turn(ALICE, leased, "waits")
    scene.command(SessionVerb.HOLD, ALICE, "waits", leased, "search")
    scene.lab.fire_all()
    scene.turn(ALICE, recent, "idle")
    scene.command(SessionVerb.HOLD, ALICE, "idle", recent)
    scene.lab.fire_all()

    scene.lab.clock.advance(11)  # the lease was for ten seconds
    scene.lab.memory.start_background_copies()
    scene.turn(ALICE, tokens_from(3, 4), "newcomer")

    assert scene.device_tokens(ALICE, recent) == 8
    assert scene.device_tokens(ALICE, leased) == 0


def test_what_was_prefetched_stays_for_the_turn_it_was_fetched_for() -> None:
    """A session that is prefetched from the host is still on the device after somebody else has needed room that a
    third, used before it, could give."""
    scene = Scene(device=8, host=16)
    returning, idle = tokens_from(1, 3), tokens_from(2, 4)
    scene.turn(ALICE, returning, "returns")
    scene.command(SessionVerb.HOLD, ALICE, "returns", returning, "search")
    scene.lab.fire_all()
    scene.command(SessionVerb.SUSPEND, ALICE, "returns", returning)
    scene.lab.fire_all()
    scene.turn(ALICE, idle, "idle")
    scene.command(SessionVerb.HOLD, ALICE, "idle", idle)
    scene.lab.fire_all()

    scene.command(SessionVerb.PREFETCH, ALICE, "returns", returning)
    scene.lab.fire_all()
    scene.turn(ALICE, tokens_from(3, 3), "newcomer")

    assert scene.device_tokens(ALICE, returning) == 6


def test_a_prefetch_takes_what_room_it_can_have() -> None:
    """Where the reserve of others leaves room for a part of a path, that part is fetched; and nobody's page is given
    up for a part that is not."""
    scene = Scene(device=8, host=16)
    long = tokens_from(1, 6)
    scene.turn(ALICE, long, "long")
    scene.command(SessionVerb.SUSPEND, ALICE, "long", long)
    scene.lab.fire_all()
    bobs = tokens_from(2, 2)
    scene.turn(BOB, bobs, "bob")
    held = scene.lab.memory.allocate_pages(2, ALICE)
    assert held is not None

    scene.command(SessionVerb.PREFETCH, ALICE, "long", long)
    scene.lab.fire_all()

    assert scene.device_tokens(BOB, bobs) == 4
    assert scene.device_tokens(ALICE, long) == 8
    scene.lab.memory.release(held)
    scene.lab.check()


def test_pages_on_their_way_from_disk_are_counted_there() -> None:
    """While a fetch is under way its pages are on the disk and nowhere nearer."""
    scene = Scene(device=8, host=0, disk_pages=100)
    tokens = tokens_from(1, 3)
    path = scene.path(ALICE, tokens)
    scene.lab.disk.pages = {key: key for key in scene.lab.tags(path)}

    answer = scene.command(SessionVerb.PREFETCH, ALICE, "s", tokens)

    assert (answer.device_tokens, answer.host_tokens, answer.disk_tokens) == (0, 0, 6)
    scene.lab.fire_all()
    assert scene.device_tokens(ALICE, tokens) == 6


def test_sessions_that_never_end_a_turn_are_forgotten_in_time() -> None:
    """However many sessions are begun and left, and however often one rewrites its history, the table of sessions
    stays within its bound."""
    table = SessionIndex(max_keys=100)

    for number in range(1000):
        keys = [PageKey(b"%d-%d" % (number, page)) for page in range(5)]
        table.add_pages(ALICE, SessionKey(f"begun-{number}"), b"scope", keys)
        table.set_history(ALICE, SessionKey("rewritten"), b"scope", keys)
        table.check_integrity()

    assert len(table) <= 100
    assert table.is_in_history(PageKey(b"999-0"))
    assert len(table.remove(ALICE, SessionKey("rewritten"))) <= 100
