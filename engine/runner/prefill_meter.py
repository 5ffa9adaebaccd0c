"""Reports to the cost model how long prefills take while the engine serves.

Owns the measurement of the prefill that runs now. Never waits for the device: it reads the clock around steps that
end with sampled tokens, which the engine has on the host by then.
A prefill is reported only if it had its steps to itself. A step that also decodes, verifies drafts or waits for a
copy says nothing about the cost of prefilling.
"""

from dataclasses import dataclass

from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.platform.clock import Clock

_FEWEST_TOKENS = 32
"""A shorter prefill costs hardly more than its fixed part, so it tells little about the cost of tokens."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The steps of one prompt so far: tokens [start, end) of it, and the time that they took."""

    piece: RequestSlice
    """The slice of its last step."""
    start: int
    seconds: float


class PrefillMeter:
    """Told of each step by the engine loop; adds up the steps of a chunked prefill."""

    def __init__(self, costs: CostTracker, clock: Clock) -> None:
        self._costs = costs
        self._clock = clock
        self._previous: StepPlan | None = None
        self._prefill: _Prefill | None = None
        self._began_at = 0.0

    def step_begins(self) -> None:
        """Call right before a step runs."""
        self._began_at = self._clock.monotonic()

    def step_ended(self, plan: StepPlan, *, waited: bool) -> None:
        """Call once its result is there. `waited`: the step waited for pages on their way to the device."""
        seconds = self._clock.monotonic() - self._began_at
        previous, self._previous = self._previous, plan
        begun, self._prefill = self._prefill, None
        piece = plan.slices[0]
        if len(plan.slices) > 1 or waited or piece.num_drafts or seconds <= 0:
            return
        if begun is not None and begun.piece.request_id == piece.request_id and begun.piece.end == piece.start:
            prefill = _Prefill(piece, begun.start, begun.seconds + seconds)
        elif previous is None or _samples(previous):
            prefill = _Prefill(piece, piece.start, seconds)
        else:
            return  # the device may still have worked on the previous step when this one began
        if not piece.samples:
            self._prefill = prefill
        elif piece.end - prefill.start >= _FEWEST_TOKENS:
            self._costs.observe_prefill(piece.end - prefill.start, prefill.start, prefill.seconds)


def _samples(plan: StepPlan) -> bool:
    """Whether the host has waited for the step's result: it reads sampled tokens, and nothing else."""
    return any(piece.samples for piece in plan.slices)
