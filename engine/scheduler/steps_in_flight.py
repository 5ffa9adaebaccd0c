"""Tracks the steps in flight: steps that were planned, and whose results are not processed yet.

    plan n          begin(n): from now on the device may compute step n
    plan n + 1      begin(n + 1): planned ahead; each request is planned as if step n had gone as expected
    result of n     land(n): the device does not use the memory of step n any more
    result of n + 1 land(n + 1)

Without overlap, a step lands before the next one is planned. With overlap (engine/step_pipeline.py), the next step is
planned while the device computes this one.

*What is known of a request that is in a step in flight?* Where its tokens will be, but not which. `RequestState` counts
a token that a step in flight samples as a token of the request, without an id: a token in flight. The next step can
compute it, because the device knows its id by then (`RequestSlice.awaits_token`). Whether the answer ends with this
token is known only if it reaches the largest length; then no further step is planned. Else the answer may still end by
a stop token, a grammar, a cancel or an error. Then the next step has computed a token too many. `land` drops it, because
the request does not have this slice in flight any more.

*What must not change while a step is in flight?* The memory that it reads and writes.

- Nobody else gets it. A request gives up pages and adapters only through `release`, which keeps them until every step
  that had begun by then has landed. Steps land in order, so no step in flight uses a page or an adapter that is free.
- Nobody moves it. Preemption and the placement of adapters wait: they call `ask_to_land`, and the next step is planned
  after all steps have landed.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.step import StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.platform.ids import RequestId


@dataclass(slots=True)
class _StepInFlight:
    """A step in flight, and what is released when it has landed."""

    plan: StepPlan
    pages: list[PageId] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)


class StepsInFlight:
    """Owns the order of the steps in flight, and the pages and adapters that are released when they land."""

    def __init__(self, release_pages: Callable[[Iterable[PageId]], None], unpin: Callable[[str], None]) -> None:
        """`release_pages` ends one hold of each page, and `unpin` one pin of an adapter."""
        self._release_pages = release_pages
        self._unpin = unpin
        self._steps: deque[_StepInFlight] = deque()
        self._is_landing_wanted = False

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._steps)

    @property
    def is_landing_wanted(self) -> bool:
        """Whether the next step should be planned only after all steps in flight have landed."""
        return self._is_landing_wanted and bool(self._steps)

    def ask_to_land(self) -> None:
        """Asks that all steps in flight land before the next step is planned."""
        self._is_landing_wanted = True

    def begin(self, plan: StepPlan, running: Mapping[RequestId, RequestState]) -> None:
        """Records that the device may compute `plan` from now on. Each request gets its slice in flight."""
        self._steps.append(_StepInFlight(plan))
        for piece in plan.slices:
            running[piece.request_id].slices_in_flight.append(piece)

    def land(self, plan: StepPlan, running: Mapping[RequestId, RequestState]) -> StepPlan:
        """Records that the device has ended `plan`, the oldest step in flight, or that it failed.

        Returns the slices whose results count: those of requests that have run since the step was planned.
        """
        step = self._steps.popleft()
        assert step.plan is plan, "steps land in the order in which they began"
        self._is_landing_wanted = self._is_landing_wanted and bool(self._steps)
        self._release_pages(step.pages)
        for digest in step.adapters:
            self._unpin(digest)
        counted = []
        for piece in plan.slices:
            state = running.get(piece.request_id)
            if state is not None and state.slices_in_flight and state.slices_in_flight[0] is piece:
                state.slices_in_flight.pop(0)
                counted.append(piece)
        return StepPlan(tuple(counted))

    def release(self, pages: Iterable[PageId], adapters: Iterable[str] = ()) -> None:
        """Ends one hold of each page and one pin of each adapter, once all steps that are in flight now have landed."""
        if self._steps:
            self._steps[-1].pages.extend(pages)
            self._steps[-1].adapters.extend(adapters)
            return
        self._release_pages(pages)
        for digest in adapters:
            self._unpin(digest)

    @property
    def kept_pages(self) -> list[PageId]:
        """The pages whose holds end when steps land, once for each hold."""
        return [page for step in self._steps for page in step.pages]

    def check_integrity(self, running: Collection[RequestState]) -> None:
        """Checks that all pages of the steps in flight are held for them, and that the slices of each request follow
        each other.
        """
        in_flight = [piece for step in self._steps for piece in step.plan.slices]
        held = {page for state in running for page in state.frames}.union(self.kept_pages)
        assert all(held.issuperset(piece.frames) for piece in in_flight), (
            "a step in flight uses a page that is not held"
        )
        for state in running:
            own = [piece for piece in in_flight if any(piece is one for one in state.slices_in_flight)]
            assert own == state.slices_in_flight, "a request waits for a step that is not in flight"
            ends = [state.num_computed, *(piece.known_end for piece in own)]
            assert [piece.start for piece in own] == ends[:-1], "the steps in flight leave a gap, or overlap"
            assert state.num_scheduled <= state.num_tokens <= state.max_total_tokens
