"""The orders of waiting requests that are compared, each with the bound that its authors prove.

Owns no order: they are the engine's own. The bound is on the difference of the service of any two tenants over any time
in which both are backlogged, in input tokens, divided by the weight (see meter.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.simulation.engine import VOCABULARY as TOKEN_IDS
from benchmarks.simulation.engine import AdaptersAlwaysReady, MakeOrder
from benchmarks.simulation.meter import INPUT_PRICE, OUTPUT_PRICE

from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.scheduler.order.fair_share import DeficitPrefixOrder, VirtualTokenCounter
from graftwork.engine.scheduler.order.locality import DeviceLocality
from graftwork.engine.scheduler.order.request_rank import DeficitSettings
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import FirstComeFirstServed, WaitingOrder
from graftwork.platform.clock import Clock


@dataclass(frozen=True, slots=True)
class Policy:
    """One order, and what it promises."""

    name: str
    order: MakeOrder
    is_fair: bool = True
    """Whether a bound is promised at all."""
    quantum: float = 0.0
    """What a deficit order adds to the bound of VTC, in input tokens."""

    def bound(self, longest_input: int, kv_tokens: int, least_weight: float = 1.0) -> float | None:
        """Returns the largest difference of service that is promised; None if none is.

        `longest_input` is the longest prompt, and `kv_tokens` the tokens whose KV the device holds.
        Source: theorem 4.4 of VTC (arXiv 2401.00588), and of DLPM (arXiv 2501.14312) the same with the quantum added.
        """
        if not self.is_fair:
            return None
        most = max(INPUT_PRICE * longest_input, OUTPUT_PRICE * kv_tokens)
        return 2 * (most + self.quantum) / least_weight


def deficit_order(quantum: float, *, programs_first: bool = True) -> MakeOrder:
    """Returns what makes a deficit longest prefix match over the device's prefix tree. `quantum` is in input tokens."""

    def make(clock: Clock, kv_cache: KvCacheManager) -> WaitingOrder:
        locality = DeviceLocality(kv_cache.page_store.tree, AdaptersAlwaysReady().is_ready)
        return DeficitPrefixOrder(clock, locality, settings=DeficitSettings(quantum, programs_first=programs_first))

    return make


class ByBeginning(FirstComeFirstServed):
    """Serves all requests with one first token, one after the other, then those with the next: an oracle of locality.

    In a scene whose prompts have common beginnings, no order finds more of them cached. It is not fair.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def candidates(self) -> Iterator[RequestState]:
        def order(state: RequestState) -> tuple[int, float]:
            return (state.token_ids[0] - self._last) % TOKEN_IDS, state.arrived_at

        return iter(sorted(self, key=order))

    def start(self, state: RequestState) -> None:
        self._last = state.token_ids[0]
        self.remove(state)


QUANTUM = 4 * 2048.0
"""As the engine's default: the prompt tokens of four steps."""
WIDE_QUANTUM = 32 * 2048.0
FCFS = Policy("fcfs", lambda clock, kv_cache: FirstComeFirstServed(), is_fair=False)
VTC = Policy("vtc", lambda clock, kv_cache: VirtualTokenCounter(clock))
BY_BEGINNING = Policy("by-beginning", lambda clock, kv_cache: ByBeginning(), is_fair=False)
DLPM = Policy("dlpm", deficit_order(QUANTUM), quantum=QUANTUM)
DLPM_WIDE = Policy("dlpm-wide", deficit_order(WIDE_QUANTUM), quantum=WIDE_QUANTUM)
DLPM_ANY_PROGRAM = Policy("dlpm-any-program", deficit_order(QUANTUM, programs_first=False), quantum=QUANTUM)
"""Without the rule that turns of running agent programs go before new programs."""
POLICIES = {policy.name: policy for policy in (FCFS, VTC, DLPM, DLPM_WIDE, DLPM_ANY_PROGRAM, BY_BEGINNING)}
