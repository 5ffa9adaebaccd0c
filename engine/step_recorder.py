"""Records what the engine does for traced requests, and reports it with their outputs.

    arrived ─► considers … started ─► (outputs) … launched ─► landed … preempted ─► started … ─► (last output)
       └─ QUEUE ──────────────┘  └─ KV_LOAD ─┘  └─ PREFILL, DECODE ─┘      └─ PREEMPTED ─┘

`StepRecorder` records nothing; the parts of the engine report to it as they report to a `TraceRecorder`. A request that
is not traced costs one look into a dictionary a step. Memory of a traced request does not grow with its length: a span
is reported when it has ended, and the steps of a long answer share spans.
Never changes a request or an output. Only the engine loop's thread uses it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.events import EngineEvent, PromptAdmitted, RequestOutput, StepsTraced, TokensGenerated
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step import MaskRow, RequestSlice, StepPlan
from graftwork.engine.core.step_spans import EngineSpan, SpanName
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

_SHARE_OF_STEPS = 4
"""A span of steps has at most this part of all steps of its kind so far, so their number grows with the logarithm."""
_REPORT_AFTER_S = 1.0
"""A span of DECODE is reported so many seconds after the last report, or with the next other span: a report costs the
gateway a third of a token.
"""
_LEAST_DECODE_STEPS = 16
"""The least steps of a span of DECODE that the request's next steps continue."""


Lacks = Callable[[EngineRequest], bool]
"""Returns whether something that a request needs is not there yet: an adapter, or its grammar."""


class StepRecorder:
    """Is told what the engine does, and records nothing."""

    def arrived(self, request: EngineRequest, arrived_at: float | None) -> None:
        """A request was queued. `arrived_at` is the time at which it came, on the engine's clock; None means now."""

    def considers(self, waiting: EngineRequest, *, is_ready: bool) -> None:
        """The scheduler looks at a waiting request. If `is_ready`, it lacks no adapter and no grammar."""

    def started(self, request_id: RequestId, *, loads: bool) -> None:
        """A waiting request has got a place in the batch and its pages. `loads`: KV is being copied into them."""

    def preempted(self, request_id: RequestId) -> None:
        """A running request has lost its place."""

    def mask_of(self, request: EngineRequest, mask: MaskRow | None) -> MaskRow | None:
        """Returns the mask with which the request's next token is sampled, or the same with its time measured."""
        return mask

    def drafted(self, request_id: RequestId, seconds: float) -> None:
        """The drafts of a traced request for its next step were looked up, which took so long."""

    def launched(self, plan: StepPlan) -> None:
        """A step was launched."""

    def landed(self, plan: StepPlan) -> None:
        """The oldest step in flight has ended or failed. Call it before the step's outputs go to `attach`."""

    def attach(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Returns the outputs that go to the gateways, with what there is to report of traced requests."""
        return outputs

    def forget(self, request_id: RequestId) -> None:
        """A request was cancelled: nobody reads its outputs."""


NO_RECORDER = StepRecorder()


@dataclass(slots=True)
class _TimedMask:
    """A mask that knows how long it took to fill."""

    mask: MaskRow
    now: Callable[[], float]
    seconds: float = 0.0

    def fill(self, words: NDArray[np.int32]) -> GraftworkError | None:
        began_at = self.now()
        try:
            return self.mask.fill(words)
        finally:
            self.seconds += self.now() - began_at


@dataclass(slots=True)
class _Steps:
    """The steps of one span that has not ended."""

    name: SpanName
    start_s: float
    steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    requests: int = 0
    batch_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    masks: int = 0
    mask_s: float = 0.0
    draft_s: float = 0.0

    def add(self, piece: RequestSlice, plan: StepPlan, seconds: float) -> None:
        self.steps += 1
        self.busy_s += seconds
        self.requests += len(plan.slices)
        self.batch_tokens += plan.num_tokens
        self.drafted += piece.num_drafts
        masks = [sample.mask for sample in piece.samples if sample.mask is not None]
        self.masks += len(masks)
        self.mask_s += sum(mask.seconds for mask in masks if isinstance(mask, _TimedMask))
        if self.name is SpanName.PREFILL:
            self.tokens += piece.num_known

    def ended(self, end_s: float) -> EngineSpan:
        return EngineSpan(
            name=self.name,
            start_s=self.start_s,
            duration_s=end_s - self.start_s,
            steps=self.steps,
            busy_s=self.busy_s,
            tokens=self.tokens,
            batch_requests=self.requests / self.steps,
            batch_tokens=self.batch_tokens / self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            masks=self.masks,
            mask_s=self.mask_s,
            draft_s=self.draft_s,
        )


@dataclass(slots=True)
class _Traced:
    """What is known of one traced request. Times are seconds since its arrival."""

    arrived_at: float
    num_prompt: int
    wait: SpanName | None = SpanName.QUEUE
    """The wait that goes on; None while steps compute the request."""
    tiled_s: float = 0.0
    """Where the spans that follow each other end so far."""
    lacks: SpanName | None = None
    """What the waiting request lacks besides a place, since `lacks_from_s`."""
    lacks_from_s: float = 0.0
    open: _Steps | None = None
    last_step_s: float = 0.0
    """When the last step of `open` ended."""
    draft_s: float = 0.0
    """Spent on drafts of the step that is planned."""
    num_steps: dict[SpanName, int] = field(default_factory=dict)
    spans: list[EngineSpan] = field(default_factory=list)
    """Ended, and not reported."""
    reported_s: float = float("-inf")
    """When the last report was made."""

    def end_wait(self, now_s: float, next_wait: SpanName | None) -> None:
        """Ends the wait that goes on. A wait of no length leaves no span, except QUEUE."""
        if self.wait is not None and (now_s > self.tiled_s or self.wait is SpanName.QUEUE):
            self.spans.append(EngineSpan(self.wait, self.tiled_s, now_s - self.tiled_s))
            self.tiled_s = now_s
        self.wait = next_wait

    def end_lack(self, now_s: float) -> None:
        if self.lacks is not None:
            self.spans.append(EngineSpan(self.lacks, self.lacks_from_s, now_s - self.lacks_from_s))
            self.lacks = None

    def end_steps(self) -> None:
        if self.open is not None:
            self.spans.append(self.open.ended(self.last_step_s))
            self.tiled_s, self.open = self.last_step_s, None

    def add_step(self, piece: RequestSlice, plan: StepPlan, seconds: float, now_s: float) -> None:
        name = SpanName.PREFILL if piece.start < self.num_prompt or piece.num_known > 1 else SpanName.DECODE
        if self.open is not None and (self.open.name is not name or self.open.steps >= self._most_steps(name)):
            self.end_steps()
        if self.open is None:
            self.end_wait(max(now_s - seconds, self.tiled_s), None)
            self.open = _Steps(name, self.tiled_s)
        self.open.add(piece, plan, seconds)
        self.open.draft_s += self.draft_s
        self.draft_s = 0.0
        self.num_steps[name] = self.num_steps.get(name, 0) + 1
        self.last_step_s = now_s

    def _most_steps(self, name: SpanName) -> int:
        least = _LEAST_DECODE_STEPS if name is SpanName.DECODE else 1
        return max(self.num_steps[name] // _SHARE_OF_STEPS, least)

    def note(self, event: EngineEvent | GraftworkError, now_s: float, *, is_last: bool) -> None:
        """Records an output of the request."""
        if isinstance(event, TokensGenerated) and self.open is not None:
            self.open.accepted += len(event.token_ids) - 1
            if self.open.name is SpanName.DECODE:
                self.open.tokens += len(event.token_ids)
            if self.open.name is SpanName.PREFILL or self.open.steps >= self._most_steps(SpanName.DECODE):
                self.end_steps()
        elif isinstance(event, PromptAdmitted):
            self.end_wait(now_s, None)
        if is_last:
            self.end_lack(now_s)
            self.end_steps()
            self.end_wait(now_s, None)

    def report(self, now_s: float, *, is_last: bool) -> StepsTraced | None:
        """Returns the spans that have ended, if there are any and a report is due."""
        is_due = is_last or now_s - self.reported_s >= _REPORT_AFTER_S
        if not self.spans or not (is_due or any(span.name is not SpanName.DECODE for span in self.spans)):
            return None
        self.reported_s = now_s
        spans, self.spans = tuple(self.spans), []
        return StepsTraced(int(self.arrived_at * 1e6), now_s, spans)


class TraceRecorder(StepRecorder):
    """Records the traced requests of an engine."""

    def __init__(self, clock: Clock, lacks_adapter: Lacks, lacks_grammar: Lacks) -> None:
        self._now = clock.monotonic
        self._lackable = ((SpanName.ADAPTER_LOAD, lacks_adapter), (SpanName.GRAMMAR_COMPILE, lacks_grammar))
        self._traced: dict[RequestId, _Traced] = {}
        self._launched_at: deque[float] = deque()
        self._last_landed_at = float("-inf")

    def arrived(self, request: EngineRequest, arrived_at: float | None) -> None:
        if request.traced:
            began_at = self._now() if arrived_at is None else arrived_at
            self._traced[request.request_id] = _Traced(began_at, len(request.prompt_token_ids))

    def considers(self, waiting: EngineRequest, *, is_ready: bool) -> None:
        if not self._traced or (traced := self._traced.get(waiting.request_id)) is None:
            return
        lacks = None if is_ready else self._lack_of(waiting)
        if lacks is not traced.lacks:
            now_s = self._now() - traced.arrived_at
            traced.end_lack(now_s)
            traced.lacks, traced.lacks_from_s = lacks, now_s

    def _lack_of(self, request: EngineRequest) -> SpanName | None:
        return next((name for name, lacks in self._lackable if lacks(request)), None)

    def started(self, request_id: RequestId, *, loads: bool) -> None:
        if (traced := self._traced.get(request_id)) is not None:
            now_s = self._now() - traced.arrived_at
            traced.end_lack(now_s)
            traced.end_wait(now_s, SpanName.KV_LOAD if loads else None)

    def preempted(self, request_id: RequestId) -> None:
        if (traced := self._traced.get(request_id)) is not None:
            traced.end_steps()
            traced.wait = SpanName.PREEMPTED

    def mask_of(self, request: EngineRequest, mask: MaskRow | None) -> MaskRow | None:
        return _TimedMask(mask, self._now) if mask is not None and request.traced else mask

    def drafted(self, request_id: RequestId, seconds: float) -> None:
        if (traced := self._traced.get(request_id)) is not None:
            traced.draft_s += seconds

    def launched(self, plan: StepPlan) -> None:
        self._launched_at.append(self._now())

    def landed(self, plan: StepPlan) -> None:
        """The device works on a step from its launch, or from the end of the step before if that is later."""
        launched_at, now = self._launched_at.popleft(), self._now()
        seconds = now - max(launched_at, self._last_landed_at)
        self._last_landed_at = now
        if not self._traced:
            return
        for piece in plan.slices:
            if (traced := self._traced.get(piece.request_id)) is not None:
                traced.add_step(piece, plan, seconds, now - traced.arrived_at)

    def attach(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        if not self._traced:
            return outputs
        now, attached = self._now(), list[RequestOutput]()
        for output in outputs:
            traced = self._traced.get(output.request_id)
            if traced is None:
                attached.append(output)
                continue
            now_s = now - traced.arrived_at
            traced.note(output.event, now_s, is_last=output.is_last)
            found = traced.report(now_s, is_last=output.is_last)
            report = [] if found is None else [RequestOutput(output.request_id, found)]
            attached += [*report, output] if output.is_last else [output, *report]
            if output.is_last:
                del self._traced[output.request_id]
        return attached

    def forget(self, request_id: RequestId) -> None:
        self._traced.pop(request_id, None)
