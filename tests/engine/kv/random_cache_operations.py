"""Random operations on a KV cache, with a check of every invariant after each of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from graftwork.engine.core.requests import KvGroupKey, KvLimits, SessionKey, SessionUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.index.page_windows import PageWindows, frames_for
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from graftwork.engine.kv.transfer.plan import TransferPlan, domain_digest
from graftwork.platform.ids import IsolationDomain
from tests.engine.kv.expected_requests import (
    ExpectedSession,
    RunningRequest,
    check_limits,
    check_prompt_leases,
    check_windows,
    needed_keys,
    seen_pages,
)
from tests.engine.kv.random_adapter_operations import DOMAINS, AdapterOperations
from tests.engine.tagged_kv_cache import FakeDisk, FixedLeases, TaggedKvCache, request_for

SIZE, DEVICE, HOST, CONTEXT = 2, 20, 9, 5
RESERVE_SHARE, LORA_FLOOR_SHARE = 0.2, 0.15
SCOPES = CacheScopes("sha256:model", "float32/2")
GROUP = KvGroupKey(b"g")


def public_tokens(tokens: Sequence[int]) -> int:
    """Returns how many tokens are public: the first page if it is all zeros."""
    return SIZE if not any(tokens[:SIZE]) else 0


class RandomCacheOperations(AdapterOperations):
    """Sessions that take turns, fork, rewind, wait and close, while copies end in any order, some fail, and adapters
    come and go.

    Every operation gets two numbers and some tokens to choose by. It does nothing if it is impossible just now.
    """

    def __init__(
        self, *, disk_pages: int, host: int, windows: PageWindows | None = None, rolling: RollingWindow | None = None
    ) -> None:
        """`windows` tells what windowed layer groups keep, if the model has some. `rolling` is the rolling window of all
        requests, which should be no narrower.
        """
        self.host, self.windows, self.rolling = host, windows, rolling
        self.advice = FixedLeases()
        self.agents: list[ExpectedSession] = []
        self.numbers = 0
        self.seen: Counter[str] = Counter()
        self.begin(FakeDisk(max_pages=disk_pages))

    def begin(self, disk: FakeDisk) -> None:
        """Starts a new process over a disk."""
        context = frames_for(CONTEXT * SIZE, SIZE, self.windows)
        self.cache = TaggedKvCache(
            device=DEVICE
            + 5 * (context - CONTEXT) // 4,  # a fifth of it is reserved, and adapters get as much as before
            host=self.host,
            context=context,
            windows=self.windows,
            step_tokens=CONTEXT * SIZE,
            disk=disk,
            reserve_share=RESERVE_SHARE,
            lora_floor_share=LORA_FLOOR_SHARE,
        )
        self.cache.adapters.frame_allocator.on_pages_moved = self.rename
        self.session_cache = SessionCache(self.cache.kv_cache, SCOPES, self.advice, self.cache.clock)
        self.running: list[RunningRequest] = []
        self.pinned: list[str] = []

    def operate(self, name: str, first: int, second: int, tokens: Sequence[int]) -> None:
        """Runs one operation and checks every invariant."""
        adapters, floor = self.cache.adapters, self.cache.kv_cache.page_store.sizes.lora_floor_pages
        before = adapters.num_frames
        getattr(self, name)(first, second, tokens)
        if name not in ("place_adapters", "prune", "restart"):
            assert adapters.num_frames >= min(before, floor), "KV has pushed adapters below their floor"
            self.seen["adapters were evicted"] += adapters.num_frames < before
        self.cache.check(sum(len(one.frames) for one in self.running))
        self.check_running()
        assert set(self.pinned) <= set(self.cache.adapters.digests), "an adapter in use is gone"

    # ---- sessions ---------------------------------------------------------------------------------------------

    def open(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if len(self.agents) < 8:
            self.numbers += 1
            self.agents.append(ExpectedSession(f"s{self.numbers}", DOMAINS[first % 3]))

    def turn(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and len(self.running) < 4:
            history = (*agent.tokens, *tokens)
            self.start(agent, self.path(agent.domain, history if len(history) <= CONTEXT * SIZE else tokens))

    def request_without_session(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if len(self.running) < 4:
            self.start(None, self.path(DOMAINS[first % 3], (*tokens, *tokens)[: CONTEXT * SIZE]))

    def start(self, agent: ExpectedSession | None, path: TokenPath) -> None:
        kv_cache = self.cache.kv_cache
        match = kv_cache.match(path)
        self.check_match(path, len(match))
        sure = kv_cache.page_store.reserve_pages(Tier.DEVICE)
        before = self.used_by_domain()
        session = None if agent is None else SessionUse(SessionKey(agent.name))
        allocation = kv_cache.allocate_path(path, match, len(path.token_ids), session)
        for domain, used in before.items():
            now = kv_cache.page_store.used_pages(Tier.DEVICE, domain)
            sure = min(sure, kv_cache.page_store.reserve_pages(Tier.DEVICE))  # it grows when a domain is gone
            assert domain == path.domain or now == used or now >= sure, "a domain was pushed below its reserve"
        if allocation is None:
            self.seen["no room"] += 1
            return
        self.seen.update(allocation.tiers)
        self.seen["waits"] += bool(allocation.loads)
        assert len(allocation.pages) + allocation.num_given_up == -(-len(path.token_ids) // SIZE)
        assert len(allocation.tiers) == len(match)
        if agent is not None:
            self.session_cache.begin_turn(path.domain, SessionUse(SessionKey(agent.name)))
        self.running.append(RunningRequest(agent, path, allocation))

    def finish(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Ends a turn. One in four is not kept, two in four wait for a tool."""
        if (one := self.ready(first)) is None:
            return
        self.running.remove(one)
        kv_cache, agent = self.cache.kv_cache, one.agent
        self.compute_once(one)
        use = None if agent is None else SessionUse(SessionKey(agent.name), len(agent.tokens))
        if first % 2:
            self.slide(one)
        nodes = self.insert(one, use)
        kv_cache.prompt_leases.lease(request_for(one.path, use, ttl_s=(None, 3.0, 6.0, 60.0)[second % 4]), nodes)
        if agent is not None and use is not None and second % 4:
            kv_cache.set_history(one.path, use)
            agent.past.append(agent.tokens)
            agent.tokens = tuple(one.path.token_ids)
        kv_cache.release(one.frames)
        kv_cache.enforce_limits(one.path.domain)
        self.seen["kept prompts"] += check_prompt_leases(self.cache)
        if agent is not None and second % 4:
            self.run_command(agent, SessionVerb.HOLD, (ToolWait("search"),) if second % 2 else ())

    def compute(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Computes what is missing of a request, which goes on running."""
        if (one := self.ready(first)) is not None:
            self.compute_once(one)
            if second % 2:
                use = None if one.agent is None else SessionUse(SessionKey(one.agent.name))
                self.insert(one, use)
                self.slide(one)

    def insert(self, one: RunningRequest, use: SessionUse | None) -> list[Node]:
        held = one.allocation
        return self.cache.kv_cache.insert(one.path, held.pages, use, held.windows, held.num_given_up)

    def compute_once(self, one: RunningRequest) -> None:
        """Computes what is missing of a request, unless that was done before."""
        if not one.is_computed:
            self.cache.compute(one.path, one.allocation)
            one.is_computed = True

    def slide(self, one: RunningRequest) -> None:
        """Gives up the pages that no later query of a computed request sees."""
        rolling = self.cache.kv_cache.page_store.sizes.rolling_pages(self.rolling)
        if rolling is not None:
            held, end = one.allocation, len(one.path.token_ids)
            first = rolling.sink_pages
            dropped = held.pages[first : max(rolling.first_page(end) - held.num_given_up, first)]
            kept = [*held.pages[:first], *held.pages[first + len(dropped) :]]
            one.allocation = replace(held, pages=kept, num_given_up=held.num_given_up + len(dropped))
            self.cache.kv_cache.release(dropped)
            self.seen["pages that rolled by"] += bool(dropped)
        if self.windows is not None and one.allocation.windows is not None:
            first = self.windows.first_page(len(one.path.token_ids))
            dropped = one.allocation.windows.drop_before(first)
            self.cache.kv_cache.release(dropped)
            self.seen["windows that moved on"] += bool(dropped)

    def cancel(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if self.running:
            one = self.running.pop(first % len(self.running))
            self.cache.kv_cache.release(one.frames)

    def offload(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (one := self.ready(first)) is not None:
            self.running.remove(one)
            self.compute_once(one)
            use = None if one.agent is None else SessionUse(SessionKey(one.agent.name))
            self.slide(one)
            held = one.allocation
            self.cache.kv_cache.offload(one.path, held.pages, use, held.windows, held.num_given_up)

    def command(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None:
            self.run_command(agent, (SessionVerb.PREFETCH, SessionVerb.SUSPEND, SessionVerb.READ)[second % 3])

    def fork(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and len(self.agents) < 8:
            self.numbers += 1
            self.agents.append(ExpectedSession(f"s{self.numbers}", agent.domain, agent.tokens, list(agent.past)))

    def rewind(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None and agent.past:
            agent.tokens = agent.past.pop(second % len(agent.past))

    def close(self, first: int, second: int, tokens: Sequence[int]) -> None:
        if (agent := self.idle(first)) is not None:
            self.agents.remove(agent)
            self.run_command(agent, SessionVerb.CLOSE)

    def forget_domain(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Forgets a domain's KV. Its sessions may come back."""
        if second < 2:
            domain, kv_cache = DOMAINS[first % 3], self.cache.kv_cache
            kv_cache.forget_domain(domain)
            self.seen["forgotten domains"] += 1
            assert all(kv_cache.page_store.used_pages(tier, domain) == 0 for tier in (Tier.DEVICE, Tier.HOST))
            assert all(self.cache.disk.domains[key] != domain_digest(domain) for key in self.cache.disk.pages)

    def limit(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Limits a domain alone or, one time in four, together with the others that were limited so."""
        is_shared = sum(tokens) == 2
        device, host = (None if number > 6 else number * (300 if is_shared else 100) for number in (first, second))
        domain = DOMAINS[len(tokens) % 3]
        limits = KvLimits(None, None, GROUP, device, host) if is_shared else KvLimits(device, host)
        self.cache.kv_cache.set_limits(domain, limits)
        self.seen["limits of groups"] += check_limits(self.cache, domain)

    def wait(self, first: int, second: int, tokens: Sequence[int]) -> None:
        self.cache.clock.advance(1 + first)

    # ---- copies -----------------------------------------------------------------------------------------------

    def end_copy(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Ends one of the running copies. One in four fails part of the way."""
        if not self.cache.copies.under_way:
            return
        index = first % len(self.cache.copies.under_way)
        done = self.cache.copies.fire(index, second if second < 2 else None)
        self.seen[done.plan.kind] += done.num_good
        self.seen[f"{done.plan.kind} cut short"] += done.num_good < len(done.plan.moves)
        failed_from = self.cache.kv_cache.finish_transfer(done)
        for one in self.running:
            if done.plan in one.allocation.loads:
                one.allocation = self.without(one, done.plan, failed_from)

    def without(self, one: RunningRequest, plan: TransferPlan, failed_from: int | None) -> PageAllocation:
        """Returns a request's allocation after one of its loads has ended. Pages that failed are replaced."""
        pages, tiers, windows = one.allocation.pages, one.allocation.tiers, one.allocation.windows
        num_given_up = one.allocation.num_given_up
        if failed_from is not None and (self.windows is not None or self.rolling is not None):
            self.cache.kv_cache.release(one.frames)
            num_groups = 0 if self.windows is None else self.windows.num_groups
            num_pages = -(-len(one.path.token_ids) // SIZE)
            fresh = self.cache.kv_cache.allocate_pages(num_pages * (1 + num_groups), one.path.domain) or []
            pages, tiers, num_given_up = fresh[:num_pages], (), 0
            if windows is not None:
                windows = WindowPages()
                windows.extend(fresh[num_pages:], num_groups)
        elif failed_from is not None:
            self.cache.kv_cache.release(pages[failed_from:])
            fresh = self.cache.kv_cache.allocate_pages(len(pages) - failed_from, one.path.domain) or []
            pages, tiers = pages[:failed_from] + fresh, tiers[:failed_from]
        return PageAllocation(pages, tiers, one.allocation.loads - {plan}, windows, num_given_up)

    def tick(self, first: int, second: int, tokens: Sequence[int]) -> None:
        self.cache.kv_cache.start_background_copies()

    def restart(self, first: int, second: int, tokens: Sequence[int]) -> None:
        """Kills the process. Only what is on disk survives."""
        if self.cache.disk.max_pages and first < 2:
            self.begin(self.cache.disk)
            self.seen["restarts"] += 1

    def rename(self, moves: Mapping[PageId, PageId]) -> None:
        """Updates page numbers as the scheduler does."""
        for one in self.running:
            one.allocation.pages[:] = [moves.get(page, page) for page in one.allocation.pages]
            if one.allocation.windows is not None:
                one.allocation.windows.rename(moves)

    # ---- checks -----------------------------------------------------------------------------------------------

    def check_running(self) -> None:
        """Checks that a request's pages still contain what it found or wrote, wherever they are."""
        on_device = self.cache.copies.tags[Tier.DEVICE]
        for one in self.running:
            num_written = len(one.path.token_ids) // SIZE if one.is_computed else len(one.allocation.tiers)
            if not one.allocation.loads:
                places = self.cache.places(one.path, one.allocation)
                assert all(on_device[page] == tag for index, page, tag in places if index < num_written), (
                    "a sequence's page holds something else"
                )
                self.check_rolling(num_written, [index for index, _, _ in places])
                check_windows(self.cache, one, num_written)

    def check_rolling(self, num_written: int, held: list[int]) -> None:
        """Checks that a request with a rolling window has all pages that the next query sees."""
        if self.rolling is not None:
            assert set(held) >= seen_pages(num_written * SIZE, SIZE, self.rolling), "a page that is seen is gone"

    def check_match(self, path: TokenPath, matched: int) -> None:
        """Checks that a match is the longest prefix of which all pages exist on some tier, with the windowed pages whose
        keys the token after it sees.
        """
        page_store = self.cache.kv_cache.page_store
        anywhere = {node.key for tier in (Tier.DEVICE, Tier.HOST) for node in page_store.tree.nodes_on(tier)}
        anywhere |= self.cache.disk.pages.keys()
        tags = self.cache.tags(path)
        expected = max(
            length
            for length in range(len(tags) + 1)
            if anywhere.issuperset(needed_keys(tags[:length], self.windows, self.rolling, SIZE))
        )
        assert matched == expected
        self.seen["prefixes that cannot be continued"] += matched < sum(tag in anywhere for tag in tags)

    def end(self) -> None:
        """Closes everything and checks that no session's page is left and that all other pages can be evicted."""
        kv_cache = self.cache.kv_cache
        for one in self.running:
            kv_cache.release(one.frames)
        self.running = []
        self.cache.fire_all()
        for agent in list(self.agents):
            self.run_command(agent, SessionVerb.CLOSE)
        self.cache.fire_all()
        for digest in self.pinned:
            self.cache.adapters.unpin(digest)
        for digest in self.cache.adapters.digests:
            self.cache.adapters.evict(digest)
        self.cache.check()
        for tier in (Tier.DEVICE, Tier.HOST):
            pool = kv_cache.page_store.pool(tier)
            assert all(node.owner.outlives_sessions for node in kv_cache.page_store.tree.nodes_on(tier)), (
                "a closed session's page is left"
            )
            assert pool.free_pages + pool.idle_pages == pool.num_pages
            assert pool.idle_pages == kv_cache.page_store.tree.num_copies(tier)

    # ---- helpers ----------------------------------------------------------------------------------------------

    def path(self, domain: bytes, tokens: Sequence[int]) -> TokenPath:
        own, public = SCOPES.scope(IsolationDomain(domain), ()), public_tokens(tokens) // SIZE
        scope = SCOPES.of_prompt(own, (), public, self.rolling)
        return TokenPath(scope, tuple(tokens), domain)

    def idle(self, index: int) -> ExpectedSession | None:
        busy = {one.agent for one in self.running}
        agents = [agent for agent in self.agents if agent not in busy]
        return agents[index % len(agents)] if agents else None

    def ready(self, index: int) -> RunningRequest | None:
        ready = [
            one
            for one in self.running
            if not one.allocation.loads
            and len(one.allocation.pages) + one.allocation.num_given_up == -(-len(one.path.token_ids) // SIZE)
        ]
        return ready[index % len(ready)] if ready else None

    def run_command(self, agent: ExpectedSession, verb: SessionVerb, waits: tuple[ToolWait, ...] = ()) -> None:
        answer = self.session_cache.run(
            SessionCommand(
                verb,
                SessionKey(agent.name),
                IsolationDomain(agent.domain),
                (),
                agent.tokens,
                public_tokens(agent.tokens),
                waits,
                window=self.rolling,
            )
        )
        parts = answer.device_tokens + answer.host_tokens + answer.disk_tokens + answer.missing_tokens
        assert parts == len(agent.tokens)
