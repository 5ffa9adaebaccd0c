"""Measures what running requests take of the engine, and holds back requests of the flex tier.

    ServiceMeter   charges each request for tokens, rejected drafts, and the pages that it holds, and shares out the time
    FlexHoldback   keeps places and pages free for higher tiers, and steps short, while requests of higher tiers come

Owns the times up to which requests were charged, and adds the KV that they held and their shares of steps to their
states, for the reports that bills are made of. Never admits, orders or ends a request.
Invariant: a held page is charged from its request's start to its end, each second once.
"""

from collections.abc import Collection, Mapping

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.core.step import StepPlan
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import ServiceUse, WaitingOrder
from graftwork.platform.clock import Clock
from graftwork.platform.ids import RequestId

CHARGE_EVERY_S = 0.25
"""Pages are charged at most so often, in seconds, and at the end of a request."""
FLEX_SHARE = 0.75
"""The fraction of places and of device pages that flex requests may take while higher tiers are active."""
FLEX_STEP_SHARE = 0.4
"""The time that prompts of flex requests may add to a step while higher tiers are active, as a fraction of the time of
its decoding rows. A request of a higher tier waits for the step that runs when it comes.
"""
ACTIVE_FOR_S = 60.0
"""A higher tier is active for so many seconds after its last request started."""


class ServiceMeter:
    """Charges requests for what they take of the engine."""

    def __init__(self, clock: Clock, order: WaitingOrder, flex: "FlexHoldback", page_bytes: int) -> None:
        self._clock = clock
        self._page_bytes = page_bytes
        self._order = order
        self._flex = flex
        self._charged_until: dict[RequestId, float] = {}
        self._next_at = 0.0

    def start(self, state: RequestState) -> None:
        """Records that a request holds its place and its pages from now on."""
        self._flex.record_start(state)
        self._charged_until[state.request_id] = self._clock.monotonic()

    def charge_step(self, state: RequestState, num_drafts: int, num_tokens: int) -> None:
        """Charges a request for a step that verified `num_drafts` draft tokens and gave it `num_tokens` tokens."""
        rejected = max(num_drafts - max(num_tokens - 1, 0), 0)
        self._order.charge(state, ServiceUse(output_tokens=num_tokens, rejected_drafts=rejected))

    def charge_time(self, plan: StepPlan, seconds: float, running: Mapping[RequestId, RequestState]) -> None:
        """Shares out the duration of a step among the requests that it computed, by their tokens. The share of a request
        that has ended since the step was planned is nobody's.
        """
        each_s = seconds / max(plan.num_tokens, 1)
        for piece in plan.slices:
            state = running.get(piece.request_id)
            if state is not None:
                state.engine_s += each_s * piece.num_tokens

    def charge_pages(self, running: Collection[RequestState]) -> None:
        """Charges the running requests for their pages, if the last time is long enough ago."""
        now = self._clock.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + CHARGE_EVERY_S
        for state in running:
            self._charge_pages(state, now)

    def end(self, state: RequestState) -> None:
        """Charges a request for its pages until now. The request must still have them."""
        self._flex.record_end(state)
        self._charge_pages(state, self._clock.monotonic())
        del self._charged_until[state.request_id]

    def _charge_pages(self, state: RequestState, now: float) -> None:
        page_seconds = len(state.frames) * (now - self._charged_until[state.request_id])
        self._charged_until[state.request_id] = now
        if page_seconds:
            state.kv_byte_seconds += page_seconds * self._page_bytes
            self._order.charge(state, ServiceUse(page_seconds=page_seconds))


class FlexHoldback:
    """Holds back flex requests above a fraction of the places and pages, while requests of higher tiers come.

    Flex requests alone may take everything. A flex request is never held back by requests of other tiers, only by
    running flex requests, so it starts when one of these ends.
    """

    def __init__(self, clock: Clock, max_running: int, max_pages: int) -> None:
        self._clock = clock
        self._places = max(1, int(max_running * FLEX_SHARE))
        self._pages = max(1, int(max_pages * FLEX_SHARE))
        self._active_until = 0.0
        self._running: dict[RequestId, RequestState] = {}

    def record_start(self, state: RequestState) -> None:
        """Records that a request has started."""
        if state.request.tier is ServiceTier.FLEX:
            self._running[state.request_id] = state
        else:
            self._active_until = self._clock.monotonic() + ACTIVE_FOR_S

    def record_end(self, state: RequestState) -> None:
        """Records that a running request has given up its place."""
        self._running.pop(state.request_id, None)

    @property
    def is_active(self) -> bool:
        """Whether requests of higher tiers come, so that flex requests are held back."""
        return self._clock.monotonic() < self._active_until

    def holds(self, state: RequestState) -> bool:
        """Returns whether a waiting request must not start now."""
        if state.request.tier is not ServiceTier.FLEX or not self.is_active:
            return False
        flex = self._running.values()
        return bool(flex) and (len(flex) >= self._places or sum(len(one.frames) for one in flex) >= self._pages)
