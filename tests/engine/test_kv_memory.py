"""The KV memory under everything at once: its promises hold after every operation, in any order of events."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from graftwork.engine.arrivals import Path, Residence
from graftwork.engine.device_adapters import Placing
from graftwork.engine.pages import PageId
from graftwork.engine.request import KvLimits, SessionKey, SessionTending, SessionUse, SessionVerb, ToolWait
from graftwork.engine.scope import ScopeMaker
from graftwork.engine.session_tending import SessionTender
from graftwork.engine.tier_names import Tier
from graftwork.engine.transfers import TransferKind, TransferPlan, file_owner
from graftwork.platform.ids import IsolationDomain
from tests.engine.kv_lab import FakeDisk, FixedAdvice, KvLab, adapter_of
from tests.hypothesis_profiles import examples

SIZE, DEVICE, HOST, CONTEXT = 2, 20, 9, 5
RESERVE_SHARE, LORA_FLOOR_SHARE = 0.2, 0.15
MAKER = ScopeMaker("sha256:model", "float32/2")
OWNERS = (b"x", b"y", b"z")
OPERATIONS = [
    *["open", "stranger", "cancel", "offload", "fork", "rewind", "close", "limit", "wait", "tick", "restart", "expel"],
    *["turn"] * 5,
    *["finish"] * 6,
    *["land"] * 5,
    *["look_after"] * 2,
    *["graft"] * 5,
    *["pin", "unpin", "prune", "prune", "compute"],
]
"""By weight."""
number = st.integers(0, 7)
new_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=2 * SIZE)


def public_tokens(tokens: Sequence[int]) -> int:
    """The operator has declared one beginning public: a page of zeros."""
    return SIZE if not any(tokens[:SIZE]) else 0


@dataclass(eq=False)
class Agent:
    """A session as it must be."""

    name: str
    owner: bytes
    tokens: tuple[int, ...] = ()
    past: list[tuple[int, ...]] = field(default_factory=list)


@dataclass(eq=False)
class Running:
    """A sequence that holds pages."""

    agent: Agent | None
    path: Path
    residence: Residence
    is_computed: bool = False


class World:
    """Agents that take turns, fork, rewind, wait and leave, while copies land in any order and some fail, and adapters
    come, are used and go.

    Every operation takes two numbers to choose by, and some tokens; what cannot be done just now does nothing.
    """

    def __init__(self, *, disk_pages: int, host: int) -> None:
        self.host = host
        self.advice = FixedAdvice()
        self.agents: list[Agent] = []
        self.numbers = 0
        self.seen: Counter[str] = Counter()
        self.begin(FakeDisk(max_pages=disk_pages))

    def begin(self, disk: FakeDisk) -> None:
        """A fresh process over a disk."""
        self.lab = KvLab(
            device=DEVICE,
            host=self.host,
            context=CONTEXT,
            disk=disk,
            reserve_share=RESERVE_SHARE,
            lora_floor_share=LORA_FLOOR_SHARE,
        )
        self.lab.adapters.room.on_pages_moved = self.rename
        self.tender = SessionTender(self.lab.memory, MAKER, self.advice, self.lab.clock)
        self.running: list[Running] = []
        self.pinned: list[str] = []

    def operate(self, name: str, first: int, second: int, tokens: Sequence[int]) -> None:
        """One operation, and every invariant after it."""
        adapters, floor = self.lab.adapters, self.lab.memory.residency.sizes.lora_floor_pages
        before = adapters.num_frames
        getattr(self, name)(first, second, tokens)
        if name not in ("graft", "prune", "restart"):
            assert adapters.num_frames >= min(before, floor), "KV has pushed adapters below their floor"
            self.seen["adapters gave way"] += adapters.num_frames < before
        self.lab.check(sum(len(one.residence.pages) for one in self.running))
        self.check_running()
        assert set(self.pinned) <= set(self.lab.adapters.digests), "an adapter in use is gone"

    # ---- sessions ---------------------------------------------------------------------------------------------

    def open(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if len(self.agents) < 8:
            self.numbers += 1
            self.agents.append(Agent(f"s{self.numbers}", OWNERS[first % 3]))

    def turn(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and len(self.running) < 4:
            history = (*agent.tokens, *tokens)
            self.start(agent, self.path(agent.owner, history if len(history) <= CONTEXT * SIZE else tokens))

    def stranger(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if len(self.running) < 4:
            self.start(None, self.path(OWNERS[first % 3], (*tokens, *tokens)[: CONTEXT * SIZE]))

    def start(self, agent: Agent | None, path: Path) -> None:
        memory = self.lab.memory
        match = memory.match(path)
        self.check_match(path, len(match))
        sure = memory.residency.reserve_pages(Tier.DEVICE)
        before = self.used_by_owner()
        session = None if agent is None else SessionUse(SessionKey(agent.name))
        residence = memory.settle(path, match, len(path.token_ids), session)
        for owner, used in before.items():
            now = memory.residency.used_pages(Tier.DEVICE, owner)
            sure = min(sure, memory.residency.reserve_pages(Tier.DEVICE))  # it grows when a party is gone
            assert owner == path.owner or now == used or now >= sure, "a party was pushed below its reserve"
        if residence is None:
            self.seen["no room"] += 1
            return
        self.seen.update(residence.tiers)
        self.seen["waits"] += bool(residence.arrivals)
        assert len(residence.pages) == -(-len(path.token_ids) // SIZE)
        assert len(residence.tiers) == len(match)
        if agent is not None:
            self.tender.goes_on(path.owner, SessionUse(SessionKey(agent.name)))
        self.running.append(Running(agent, path, residence))

    def finish(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A turn ends; one in four is not kept, two in four wait for a tool."""
        if (one := self.ready(first)) is None:
            return
        self.running.remove(one)
        memory, agent = self.lab.memory, one.agent
        self.lab.compute(one.path, one.residence)
        use = None if agent is None else SessionUse(SessionKey(agent.name), len(agent.tokens))
        memory.enter(one.path, one.residence.pages, use)
        if agent is not None and use is not None and second % 4:
            memory.follow(one.path, use)
            agent.past.append(agent.tokens)
            agent.tokens = tuple(one.path.token_ids)
        memory.release(one.residence.pages)
        memory.enforce_limits(one.path.owner)
        if agent is not None and second % 4:
            self.tend(agent, SessionVerb.HOLD, (ToolWait("search"),) if second % 2 else ())

    def compute(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A step computes what is missing of a sequence, which goes on running."""
        if (one := self.ready(first)) is not None:
            self.lab.compute(one.path, one.residence)
            one.is_computed = True

    def cancel(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if self.running:
            one = self.running.pop(first % len(self.running))
            self.lab.memory.release(one.residence.pages)

    def offload(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (one := self.ready(first)) is not None:
            self.running.remove(one)
            self.lab.compute(one.path, one.residence)
            use = None if one.agent is None else SessionUse(SessionKey(one.agent.name))
            self.lab.memory.offload(one.path, one.residence.pages, use)

    def look_after(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None:
            self.tend(agent, (SessionVerb.PREFETCH, SessionVerb.SUSPEND, SessionVerb.READ)[second % 3])

    def fork(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and len(self.agents) < 8:
            self.numbers += 1
            self.agents.append(Agent(f"s{self.numbers}", agent.owner, agent.tokens, list(agent.past)))

    def rewind(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and agent.past:
            agent.tokens = agent.past.pop(second % len(agent.past))

    def close(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None:
            self.agents.remove(agent)
            self.tend(agent, SessionVerb.CLOSE)

    def expel(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A party's KV is given up; its sessions may come back."""
        if second < 2:
            owner, memory = OWNERS[first % 3], self.lab.memory
            memory.forget_owner(owner)
            self.seen["expelled"] += 1
            assert all(memory.residency.used_pages(tier, owner) == 0 for tier in (Tier.DEVICE, Tier.HOST))
            assert all(self.lab.disk.owners[key] != file_owner(owner) for key in self.lab.disk.pages)

    def limit(self, first: int, second: int, tokens: Sequence[int]) -> None:
        device, host = (None if number > 6 else number * 100 for number in (first, second))
        self.lab.memory.set_limits(OWNERS[len(tokens) % 3], KvLimits(device, host))

    def wait(self, first: int, second: int, tokens: Sequence[int]) -> None:
        self.lab.clock.advance(1 + first)

    # ---- copies -----------------------------------------------------------------------------------------------

    def land(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A copy ends: any of those under way; one in four is cut short."""
        if not self.lab.copies.under_way:
            return
        index = first % len(self.lab.copies.under_way)
        done = self.lab.copies.fire(index, second if second < 2 else None)
        self.seen[done.plan.kind] += done.num_good
        self.seen[f"{done.plan.kind} cut short"] += done.num_good < len(done.plan.moves)
        failed_from = self.lab.memory.absorb(done)
        for one in self.running:
            if done.plan in one.residence.arrivals:
                one.residence = self.without(one, done.plan, failed_from)

    def without(self, one: Running, plan: TransferPlan, failed_from: int | None) -> Residence:
        """A residence after one of its arrivals, with fresh pages for what could not be read."""
        pages, tiers = one.residence.pages, one.residence.tiers
        if failed_from is not None:
            self.lab.memory.release(pages[failed_from:])
            fresh = self.lab.memory.take(len(pages) - failed_from, one.path.owner) or []
            pages, tiers = pages[:failed_from] + fresh, tiers[:failed_from]
        return Residence(pages, tiers, one.residence.arrivals - {plan})

    def tick(self, first: int, second: int, tokens: Sequence[int]) -> None:
        self.lab.memory.tick()

    def restart(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """The process is killed: only what is on disk is left, and nothing that was under way counts."""
        if self.lab.disk.max_pages and first < 2:
            self.begin(self.lab.disk)
            self.seen["restarts"] += 1

    # ---- adapters ---------------------------------------------------------------------------------------------

    def graft(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A request needs one adapter, or two at once; when nothing is in use, there is always room for them."""
        adapters, pool = self.lab.adapters, self.lab.memory.residency.device
        group = {f"adapter-{number}": adapter_of(number) for number in {first, second if second % 2 else first}}
        adapters.wanted = set(group)
        away = [adapter for digest, adapter in group.items() if digest not in adapters]
        room, memory = adapters.room, self.lab.memory
        cached = memory.residency.tree.num_copies(Tier.DEVICE)
        before = room.num_relocated_pages, room.num_moved_runs, len(adapters.digests)
        is_used = pool.active_pages > 0
        sure, kept = memory.residency.reserve_pages(Tier.DEVICE), self.used_by_owner()
        placing = adapters.place(away, group.keys())
        for owner, now in self.used_by_owner().items():
            sure = min(sure, memory.residency.reserve_pages(Tier.DEVICE))
            assert not is_used or now == kept[owner] or now >= sure, "an adapter pushed a party below its reserve"
        is_quiet = not self.running and not self.pinned and not pool.in_flight_pages
        assert placing is Placing.DONE or not is_quiet, "adapters wait though nothing is in use"
        assert all((adapter.digest in adapters) == (placing is Placing.DONE) for adapter in away)
        self.seen[placing.name] += bool(away)
        self.seen["KV gave way"] += memory.residency.tree.num_copies(Tier.DEVICE) < cached
        self.seen["relocations"] += room.num_relocated_pages > before[0]
        self.seen["compactions"] += room.num_moved_runs > before[1]

    def used_by_owner(self) -> dict[bytes, int]:
        return {owner: self.lab.memory.residency.used_pages(Tier.DEVICE, owner) for owner in OWNERS}

    def pin(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """A request begins with an adapter that is here."""
        digests = self.lab.adapters.digests
        if digests and len(self.pinned) < 3:
            self.pinned.append(digests[first % len(digests)])
            self.lab.adapters.pin(self.pinned[-1])

    def unpin(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if self.pinned:
            self.lab.adapters.unpin(self.pinned.pop(first % len(self.pinned)))

    def prune(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """An adapter is deleted; and nobody in the queue waits for any."""
        self.lab.adapters.wanted = ()
        idle = [digest for digest in self.lab.adapters.digests if digest not in self.pinned]
        if idle:
            self.lab.adapters.evict(idle[first % len(idle)])

    def rename(self, moves: Mapping[PageId, PageId]) -> None:
        """What the scheduler does when pages have moved."""
        for one in self.running:
            one.residence.pages[:] = [moves.get(page, page) for page in one.residence.pages]

    # ---- what must hold ---------------------------------------------------------------------------------------

    def check_running(self) -> None:
        """Whatever a sequence found or wrote in its pages is there, wherever they are by now."""
        on_device = self.lab.copies.tags[Tier.DEVICE]
        for one in self.running:
            num_written = len(one.path.token_ids) // SIZE if one.is_computed else len(one.residence.tiers)
            if not one.residence.arrivals:
                pages = zip(one.residence.pages[:num_written], self.lab.tags(one.path), strict=False)
                assert all(on_device[page] == tag for page, tag in pages), "a sequence's page holds something else"

    def check_match(self, path: Path, matched: int) -> None:
        """A match is the longest run of prefixes that is in a dictionary of all that is anywhere."""
        residency = self.lab.memory.residency
        anywhere = {node.key for tier in (Tier.DEVICE, Tier.HOST) for node in residency.tree.nodes_on(tier)}
        anywhere |= self.lab.disk.pages.keys()
        expected = 0
        for tag in self.lab.tags(path):
            if tag not in anywhere:
                break
            expected += 1
        assert matched == expected

    def end(self) -> None:
        """Everybody leaves: what no stranger has used is gone from every tier, and all the rest can go."""
        memory = self.lab.memory
        for one in self.running:
            memory.release(one.residence.pages)
        self.running = []
        self.lab.fire_all()
        for agent in list(self.agents):
            self.tend(agent, SessionVerb.CLOSE)
        self.lab.fire_all()
        for digest in self.pinned:
            self.lab.adapters.unpin(digest)
        for digest in self.lab.adapters.digests:
            self.lab.adapters.evict(digest)
        self.lab.check()
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = memory.residency.pool(tier)
            assert all(node.is_loose for node in memory.residency.tree.nodes_on(tier)), (
                "a closed session's page is left"
            )
            assert pool.free_pages + pool.idle_pages == pool.num_pages
            assert pool.idle_pages == memory.residency.tree.num_copies(tier)

    # ---- helpers ----------------------------------------------------------------------------------------------

    def path(self, owner: bytes, tokens: Sequence[int]) -> Path:
        scope = MAKER.within(MAKER.scope(IsolationDomain(owner), ()), (), public_tokens(tokens) // SIZE)
        return Path(scope, tuple(tokens), owner)

    def idle(self, index: int) -> Agent | None:
        busy = {one.agent for one in self.running}
        agents = [agent for agent in self.agents if agent not in busy]
        return agents[index % len(agents)] if agents else None

    def ready(self, index: int) -> Running | None:
        ready = [
            one
            for one in self.running
            if not one.residence.arrivals and len(one.residence.pages) == -(-len(one.path.token_ids) // SIZE)
        ]
        return ready[index % len(ready)] if ready else None

    def tend(self, agent: Agent, verb: SessionVerb, waits: tuple[ToolWait, ...] = ()) -> None:
        answer = self.tender.tend(
            SessionTending(
                verb,
                SessionKey(agent.name),
                IsolationDomain(agent.owner),
                (),
                agent.tokens,
                public_tokens(agent.tokens),
                waits,
            )
        )
        parts = answer.device_tokens + answer.host_tokens + answer.disk_tokens + answer.missing_tokens
        assert parts == len(agent.tokens)


class MemoryMachine(RuleBasedStateMachine):
    """Hypothesis looks for the shortest way to break a promise."""

    @initialize(disk_pages=st.sampled_from([0, 6, 200]), host=st.sampled_from([0, HOST]))
    def begin(self, disk_pages: int, host: int) -> None:
        self.world = World(disk_pages=disk_pages, host=host)

    @rule(name=st.sampled_from(OPERATIONS), first=number, second=number, tokens=new_tokens)
    def operate(self, name: str, first: int, second: int, tokens: list[int]) -> None:
        self.world.operate(name, first, second, tokens)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=examples(60), stateful_step_count=60)


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_operations_break_no_promise(seed: int) -> None:
    """Four worlds of 4,000 operations each, in which every kind of copy, loss, move and wait has happened."""
    random = Random(seed)
    world = World(disk_pages=(200, 12)[seed % 2], host=HOST)

    for _ in range(4000):
        tokens = [random.randrange(2) for _ in range(random.randint(1, 2 * SIZE))]
        world.operate(random.choice(OPERATIONS), random.randrange(8), random.randrange(8), tokens)
    world.end()

    cut_short = {f"{kind} cut short" for kind in TransferKind}
    told = {"adapters gave way", "KV gave way", "relocations", "compactions", *(placing.name for placing in Placing)}
    assert {*Tier, *TransferKind, *cut_short, "waits", "restarts", "expelled", "no room", *told} <= set(+world.seen)
