"""Tests of the scheduler with copies that end late, in any order, or fail."""

from collections import Counter
from random import Random

from graftwork.engine.core.events import PromptAdmitted, RequestFinished, RequestOutput, TokensGenerated
from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, page_key
from graftwork.engine.core.requests import EngineRequest, ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.session_commands import SessionCommand, SessionVerb, ToolWait
from graftwork.engine.core.step import RequestSlice, StepResult
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.ids import IsolationDomain, RequestId
from tests.engine.scheduler.scheduler_driver import ManualAdapterProvider
from tests.engine.tagged_kv_cache import FakeDisk, FixedLeases, TaggedKvCache

PAGE, CONTEXT = 2, 16
SCOPES = CacheScopes("sha256:model", "float32")
OWNERS = (b"x", b"y")
TIERS = (ServiceTier.DEFAULT, ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY)
Tokens = tuple[int, ...]


def next_token(known: Tokens) -> int:
    """The model's next token: one of two, which depends on all these tokens."""
    return 10 + (sum(token * (place + 3) for place, token in enumerate(known)) // 7) % 2


class RandomSchedulerRun:
    """Random requests over a device where each page records the tokens that were computed in it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        host, disk_pages = ((6, 100), (6, 0), (0, 100), (30, 8))[seed % 4]
        self.cache = TaggedKvCache(
            device=CONTEXT // PAGE + seed % 3 * 3,
            host=host,
            page_tokens=PAGE,
            context=CONTEXT // PAGE,
            disk=FakeDisk(max_pages=disk_pages),
        )
        self.session_cache = SessionCache(self.cache.kv_cache, SCOPES, FixedLeases(), self.cache.clock)
        limits = SchedulerLimits(PAGE, 7, 5, 100, CONTEXT, 100, frozenset({1}))
        self.scheduler = Scheduler(
            limits,
            self.cache.kv_cache,
            self.session_cache,
            ManualAdapterProvider(),
            SCOPES,
            clock=self.cache.clock,
        )
        self.requests: dict[RequestId, EngineRequest] = {}
        self.known: dict[RequestId, Tokens] = {}
        self.begun: dict[PageId, Tokens] = {}
        """By partly filled page: all tokens up to the last one computed in it."""
        self.histories: dict[tuple[bytes, str], Tokens] = {}
        self.finished: set[RequestId] = set()
        self.cancelled: set[RequestId] = set()
        self.seen: Counter[str] = Counter()

    # ---- actions ----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit the next turn of a session, or a request without a session."""
        owner, number = self.random.choice(OWNERS), len(self.requests)
        session = f"s{self.random.randrange(4)}" if self.random.random() < 0.7 else None
        history = self.histories.get((owner, session or ""), ())
        prompt = (*history, *(self.random.randrange(10, 12) for _ in range(self.random.randint(1, 5))))
        prompt = prompt if len(prompt) < CONTEXT else prompt[: self.random.randint(1, 5)]
        request = EngineRequest(
            RequestId(str(number)),
            prompt,
            SamplingParams(max_tokens=self.random.randint(1, 6)),
            IsolationDomain(owner),
            tier=self.random.choice(TIERS),
            session=None if session is None else SessionUse(SessionKey(session), len(history)),
        )
        self.requests[request.request_id], self.known[request.request_id] = request, prompt
        self.scheduler.submit(request)

    def cancel(self) -> None:
        alive = sorted(self.requests.keys() - self.finished - self.cancelled)
        if alive:
            request_id = self.random.choice(alive)
            self.scheduler.cancel(request_id)
            self.cancelled.add(request_id)

    def step(self) -> None:
        """Admit, plan, compute, absorb."""
        self.record(self.scheduler.admit())
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is not None:
            chosen = {piece.request_id: (self.compute(piece),) for piece in plan.slices}
            self.record(self.scheduler.absorb(self.scheduler.land(plan), StepResult(chosen)))

    def finish_copy(self) -> None:
        """End a random copy; one in four fails halfway."""
        if self.cache.copies.under_way:
            index = self.random.randrange(len(self.cache.copies.under_way))
            done = self.cache.copies.fire(index, self.random.randrange(2) if self.random.random() < 0.25 else None)
            self.seen[done.plan.kind] += done.num_good
            self.seen["cut short"] += done.num_good < len(done.plan.moves)
            self.record(self.scheduler.finish_transfer(done))

    def command(self) -> None:
        if self.histories:
            owner, session = self.random.choice(sorted(self.histories))
            verb = self.random.choice(list(SessionVerb))
            tokens = self.histories[owner, session]
            waits = (ToolWait("search"),) if verb is SessionVerb.HOLD else ()
            self.scheduler.session_cache.run(
                SessionCommand(verb, SessionKey(session), IsolationDomain(owner), (), tokens, waits=waits)
            )
            if verb is SessionVerb.CLOSE:
                del self.histories[owner, session]

    def wait(self) -> None:
        self.cache.clock.advance(self.random.random() * 8)

    # ---- invariants --------------------------------------------------------------------------------------------

    def compute(self, piece: RequestSlice) -> int:
        """The forward pass. Asserts that the KV before the slice is there, and that no other request holds the written pages."""
        request, known = self.requests[piece.request_id], self.known[piece.request_id]
        pool, on_device = self.cache.kv_cache.page_store.device, self.cache.copies.tags[Tier.DEVICE]
        end = piece.start + len(piece.token_ids)
        assert piece.token_ids == known[piece.start : end]
        tags = self.tags(request, known[:end])
        for page, tag in zip(piece.pages[: piece.start // PAGE], tags, strict=False):
            assert on_device.get(page) == tag, "it computes on KV that is not its own"
        for index in range(piece.start // PAGE, -(-end // PAGE)):
            page = piece.pages[index]
            if index * PAGE < piece.start:
                assert self.begun[page] == known[: piece.start], "a page that was begun holds something else"
            assert pool.holders(page) == 1, "a page that is shared is written"
            assert not pool.is_in_flight(page), "a page is written while it is copied"
            self.begun.pop(page, None)
            if (index + 1) * PAGE <= end:
                on_device[page] = tags[index]
            else:
                on_device[page], self.begun[page] = None, known[:end]
        return next_token(known[:end])

    def tags(self, request: EngineRequest, tokens: Tokens) -> list[PageKey]:
        """The keys of the whole pages of some tokens."""
        scope, keys = PrefixScope(SCOPES.scope(request.domain, ())), list[PageKey]()
        for index in range(len(tokens) // PAGE):
            page = tokens[index * PAGE : (index + 1) * PAGE]
            keys.append(page_key(scope, index, keys[-1] if keys else None, page))
        return keys

    def record(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            request, event = self.requests[name], output.event
            assert name not in self.cancelled | self.finished, "somebody who is gone is told something"
            if isinstance(event, PromptAdmitted):
                assert event.cache.prompt_tokens == len(request.prompt_token_ids)
                self.seen["from host"] += event.cache.host_tokens
                self.seen["from disk"] += event.cache.disk_tokens
            elif isinstance(event, TokensGenerated):
                for token in event.token_ids:
                    assert token == next_token(self.known[name])
                    self.known[name] += (token,)
            else:
                assert isinstance(event, RequestFinished), event
                self.end(request)

    def end(self, request: EngineRequest) -> None:
        known, most = self.known[request.request_id], len(request.prompt_token_ids) + request.sampling.max_tokens
        assert len(known) == min(most, CONTEXT)
        self.finished.add(request.request_id)
        if request.session is not None:
            self.histories[request.domain, request.session.session] = known

    def drain(self) -> None:
        """End all requests and close all sessions. Asserts that only pages used outside sessions are left."""
        for _ in range(3000):
            if self.finished | self.cancelled == self.requests.keys():
                break
            self.step()
            self.finish_copy()
        assert self.finished | self.cancelled == self.requests.keys(), "nobody gets anywhere"
        while self.cache.copies.under_way:
            self.finish_copy()
        pool = self.cache.kv_cache.page_store.device
        assert pool.free_pages + pool.idle_pages == pool.num_pages
        self.scheduler.check_integrity()


def finished_run(seed: int) -> RandomSchedulerRun:
    """Returns a run after 1,500 random actions, in which all requests have ended."""
    run = RandomSchedulerRun(seed)
    acts = [run.step] * 8 + [run.finish_copy] * 5 + [run.submit] * 2 + [run.command] * 2 + [run.cancel, run.wait]
    for _ in range(1500):
        run.random.choice(acts)()
    run.drain()
    return run


def test_no_request_computes_on_kv_that_is_missing_or_of_another() -> None:
    """On small devices, with or without a host and a disk, every request that is not cancelled gives the model's tokens.
    Each kind of copy, failure and preemption happens in at least one of the eight runs."""
    runs = [finished_run(seed) for seed in range(8)]

    seen = sum((run.seen for run in runs), Counter[str]())
    assert all(run.finished for run in runs)
    assert sum(run.scheduler.counters.preemptions for run in runs) > 0
    assert {*TransferKind, "cut short", "from host", "from disk"} <= seen.keys()
