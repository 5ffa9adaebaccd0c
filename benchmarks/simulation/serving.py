"""A device that serves a bounded number of turns: waits, loads, prefills one at a time, and decodes side by side.

Uses the KV cache as the scheduler does: match, allocate, insert when the prompt is computed and again at the end, set
the history, release. A turn has pages for its prompt and its whole answer before it starts.
Invariant: turns start in the order in which they came, and whatever fits an empty device is served in the end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulation.hardware import ScaledHardware
from benchmarks.simulation.reserve_watch import ReserveWatch
from benchmarks.simulation.tally import Tally
from benchmarks.simulation.timeline import Timeline

from graftwork.engine.core.requests import SessionUse
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan

RETRY_S = 2.0
"""After which a turn that was refused comes back."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session: a prompt, and the answer that it will have."""

    whole: TokenPath
    """Prompt and answer."""
    num_prompt: int
    use: SessionUse
    on_end: Callable[[], None]
    arrived_at: float
    pages: list[PageId] = field(default_factory=list)
    tiers: tuple[Tier, ...] = ()
    arrivals: set[TransferPlan] = field(default_factory=set)

    def path(self, num_tokens: int) -> TokenPath:
        """Of its first tokens."""
        return TokenPath(self.whole.scope, self.whole.token_ids[:num_tokens], self.whole.domain)


class Server:
    """Turns that wait and turns that run."""

    def __init__(
        self,
        kv_cache: KvCacheManager,
        session_cache: SessionCache,
        hardware: ScaledHardware,
        timeline: Timeline,
        watch: ReserveWatch,
    ) -> None:
        self._kv_cache = kv_cache
        self._session_cache = session_cache
        self._hardware = hardware
        self._timeline = timeline
        self.tally = Tally()
        self._watch = watch
        self._waiting: deque[Turn] = deque()
        self._running: set[Turn] = set()
        self._prefill_free_at = 0.0

    @property
    def num_held_pages(self) -> int:
        """Device pages that running turns hold."""
        return sum(len(turn.pages) for turn in self._running)

    def submit(self, turn: Turn) -> None:
        """Queue a turn; where the queue is full, it is refused and comes back."""
        if len(self._waiting) >= self._hardware.most_waiting:
            self.tally.refusals += 1
            self._timeline.after(RETRY_S, lambda: self.submit(turn))
            return
        self._session_cache.begin_turn(turn.whole.domain, turn.use)
        self._waiting.append(turn)
        self.go_on()

    def absorb(self, done: TransferDone) -> None:
        """A copy has ended: turns that waited for it go on, and where it failed they begin again."""
        failed_from = self._kv_cache.finish_transfer(done)
        for turn in [one for one in self._running if done.plan in one.arrivals]:
            turn.arrivals.discard(done.plan)
            if failed_from is not None:
                self._start_over(turn)
            elif not turn.arrivals:
                self._prefill(turn)
        self.go_on()

    def go_on(self) -> None:
        """Start as many turns as there is room for."""
        while self._waiting and len(self._running) < self._hardware.most_running and self._settle(self._waiting[0]):
            turn = self._waiting.popleft()
            self._running.add(turn)
            if not turn.arrivals:
                self._prefill(turn)
        device = self._kv_cache.page_store.device
        assert self._running or not self._waiting or device.in_flight_pages, "a turn fits the device and cannot start"
        self._kv_cache.start_background_copies()

    def _settle(self, turn: Turn) -> bool:
        kv_cache, path = self._kv_cache, turn.path(turn.num_prompt - 1)  # the last token's logits are needed
        match = kv_cache.match(path)
        if not kv_cache.has_room(match, len(turn.whole.token_ids), 0):
            return False
        with self._watch.others_than(path.domain):
            allocation = kv_cache.allocate_path(path, match, len(turn.whole.token_ids), turn.use)
        if allocation is not None:
            self._take(turn, allocation)
        return allocation is not None

    def _take(self, turn: Turn, allocation: PageAllocation) -> None:
        turn.pages, turn.tiers, turn.arrivals = allocation.pages, allocation.tiers, set(allocation.loads)

    def _start_over(self, turn: Turn) -> None:
        """Some of its pages could not be read: the turn goes back to the head of the queue."""
        self._kv_cache.release(turn.pages)
        turn.pages, turn.arrivals = [], set()
        self._running.discard(turn)
        self._waiting.appendleft(turn)

    def _prefill(self, turn: Turn) -> None:
        """Compute what was not cached, behind what is being computed already."""
        cached = len(turn.tiers) * self._kv_cache.page_tokens
        seconds = self._hardware.costs.prefill.seconds(turn.num_prompt - cached, cached)
        self._prefill_free_at = max(self._prefill_free_at, self._timeline.now) + seconds
        self._timeline.after(self._prefill_free_at - self._timeline.now, lambda: self._answer(turn))

    def _answer(self, turn: Turn) -> None:
        """The first token is there; the rest follows at the speed of decoding."""
        size = self._kv_cache.page_tokens
        by_tier = {tier: turn.tiers.count(tier) * size for tier in Tier}
        ttft_s = self._timeline.now - turn.arrived_at
        self.tally.count(ttft_s, by_tier, turn.num_prompt, self._kv_cache.sessions.num_history_pages)
        self._enter(turn, turn.num_prompt)
        seconds = (len(turn.whole.token_ids) - turn.num_prompt) * self._hardware.decode_token_s
        self._timeline.after(seconds, lambda: self._end(turn))

    def _end(self, turn: Turn) -> None:
        num_computed = len(turn.whole.token_ids) - 1
        self._enter(turn, num_computed)
        self._kv_cache.set_history(turn.path(num_computed), turn.use)
        self._kv_cache.release(turn.pages)
        self._kv_cache.enforce_limits(turn.whole.domain)
        self._running.discard(turn)
        turn.on_end()
        self.go_on()

    def _enter(self, turn: Turn, num_computed: int) -> None:
        nodes = self._kv_cache.insert(turn.path(num_computed), turn.pages, turn.use)
        turn.pages, replaced = self._kv_cache.deduplicate(nodes, turn.pages)
        self._kv_cache.release(replaced)
