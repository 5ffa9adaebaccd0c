"""Plans the next step: chooses its tokens, allocates the pages for them, and describes them to the runner.

Owns the order in which requests share the token budget of a step. Never frees a page and never changes a request's
tokens. A slice is the part of a step that belongs to one request: the request's next tokens, then its draft tokens, and
how to sample the tokens after them. Invariant: a slice samples only if it contains the last token.

A step may be planned ahead: while the step before is in flight (see steps_in_flight.py).
"""

from collections.abc import Mapping

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.core.step import KvEviction, RequestSlice, SampleSpec, StepPlan
from graftwork.engine.scheduler.order.prompt_turns import in_step_order
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import WaitingOrder
from graftwork.engine.scheduler.preemption import PageGrower
from graftwork.engine.scheduler.prefill_first import PrefillFirst
from graftwork.engine.scheduler.resources import GrammarProvider
from graftwork.engine.scheduler.service_meter import FLEX_STEP_SHARE, FlexHoldback
from graftwork.engine.scheduler.speculator import Speculator
from graftwork.engine.scheduler.step_time import PromptRoom, StepTimes
from graftwork.engine.scheduler.steps_in_flight import StepsInFlight
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.engine.step_recorder import NO_RECORDER, StepRecorder
from graftwork.platform.ids import RequestId


class StepPlanner:
    """Plans one step at a time, from the running requests."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: Mapping[RequestId, RequestState],
        waiting: WaitingOrder,
        steps: StepsInFlight,
        page_grower: PageGrower,
        step_builder: "StepBuilder",
        speculator: Speculator,
        step_times: StepTimes,
        flex: FlexHoldback,
    ) -> None:
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._steps = steps
        self._page_grower = page_grower
        self._step_builder = step_builder
        self._speculator = speculator
        self._step_times = step_times
        self._flex = flex
        self._prefill_first = PrefillFirst(step_times, limits.max_running)

    def must_land(self) -> bool:
        """Returns whether all steps in flight must land before the next step is planned.

        They must if memory is to be moved, or if the next step depends on the tokens in flight: it could verify drafts,
        which are chosen by the tokens before them.
        """
        if not self._steps:
            return False
        return (
            self._steps.is_landing_wanted
            or any(state.waits_for_result for state in self._running.values())
            or self._speculator.may_draft(sum(state.num_uncomputed == 1 for state in self._running.values()))
        )

    def plan(self) -> StepPlan | None:
        """Returns the next step: one token of each decoding request, then chunks of prompts. None if nothing can run.

        The step also verifies draft tokens, but only as many as the token budget still allows. If a prompt got fewer tokens
        than it lacks, only nearly certain ones: these save the time that they take, so no prompt waits for drafts.
        """
        chunks, prompts_wait = self._chunks()
        sampling = [
            state
            for state, num_tokens in chunks
            if num_tokens == state.num_uncomputed and state.generates and not (state.forgets and state.ends_prompt)
        ]
        spare_rows = self._limits.max_batch_tokens - sum(num_tokens for _, num_tokens in chunks)
        drafts = self._speculator.draft(sampling, spare_rows, only_certain=prompts_wait)
        slices = [
            self._step_builder.slice(
                state, num_tokens, self._page_grower.fit_draft(state, drafts.get(state.request_id, ()))
            )
            for state, num_tokens in chunks
        ]
        if not slices:
            self._step_times.rest()
            return None
        plan = StepPlan(tuple(slices))
        self._speculator.step_begins(plan)
        is_typical = not any(
            state.overlapped_loads or piece.reads_prompt for (state, _), piece in zip(chunks, slices, strict=True)
        )
        self._step_times.begin(plan, is_typical=is_typical)
        return plan

    def step_ended(self) -> float:
        """Records that the oldest step in flight has ended or failed. Learns its duration, and returns it in seconds."""
        self._speculator.step_ended()
        return self._step_times.end()

    def _chunks(self) -> tuple[list[tuple[RequestState, int]], bool]:
        """Returns how many tokens of each request the next step computes, without drafts, and whether a prompt got fewer than
        it lacks. All of the tokens have pages.

        Prompts get what the token budget leaves, and beside decoding requests only what their inter-token time allows.
        """
        budget = self._limits.max_batch_tokens
        chunks: list[tuple[RequestState, int]] = []
        planned: set[RequestId] = set()
        prompts_wait = False
        running = self._prefill_first.choose(self._running.values())
        rows = sum(state.num_uncomputed == 1 for state in running)
        room, flex_room, most_of_prompts = self._room_for_prompts(rows) if rows < len(running) else (None, None, budget)
        for state in in_step_order(running, self._waiting, self._limits.max_running, most_of_prompts):
            if budget == 0:
                prompts_wait = True
                break
            num_uncomputed = state.num_uncomputed
            num_tokens = min(num_uncomputed, budget)
            if num_uncomputed > 1 and not state.pending_loads:
                if flex_room is not None and state.request.tier is ServiceTier.FLEX:
                    num_tokens = flex_room.take(state.num_attended, num_tokens)
                if room is not None and num_tokens:
                    num_tokens = room.take(state.num_attended, num_tokens)
            if state.forgets and state.eviction is not None:
                num_tokens = state.eviction.chunk(state.num_scheduled, num_tokens, budget)
            prompts_wait |= num_tokens < num_uncomputed
            if num_tokens == 0 or state.request_id not in self._running:
                continue
            if self._page_grower.grow(state, num_tokens, planned):
                chunks.append((state, num_tokens))
                planned.add(state.request_id)
                budget -= num_tokens
        return chunks, prompts_wait

    def _room_for_prompts(self, rows: int) -> tuple[PromptRoom | None, PromptRoom | None, int]:
        """Returns the room for prompts beside `rows` decoding rows, that for prompts of flex requests (None: no limit), and
        the most prompt tokens of the step.
        """
        flex_room = self._step_times.room_for_share(rows, FLEX_STEP_SHARE) if self._flex.is_active else None
        return self._step_times.room(rows), flex_room, self._step_times.prompt_tokens_beside(rows)


class StepBuilder:
    """Makes the slice of a request: the part of a step that belongs to this request."""

    def __init__(self, page_tokens: int, grammars: GrammarProvider, recorder: StepRecorder = NO_RECORDER) -> None:
        self._page_tokens = page_tokens
        self._grammars = grammars
        self._recorder = recorder

    def slice(self, state: RequestState, num_tokens: int, drafted: tuple[int, ...]) -> RequestSlice:
        """Returns the slice of a request, which is the request's part of a step.

        It contains the next `num_tokens` tokens, then the draft tokens `drafted`. The request must have pages for all.
        """
        start, known_end = state.num_scheduled, state.num_scheduled + num_tokens
        is_last = known_end == state.num_tokens
        num_pages = pages_for(known_end + len(drafted), self._page_tokens)
        return RequestSlice(
            request_id=state.request_id,
            token_ids=(*state.token_ids[start:known_end], *drafted),
            start=start,
            pages=tuple(state.pages[: num_pages - state.num_given_up]),
            adapters=state.request.adapters,
            samples=self._sample_specs(state, drafted) if is_last and state.generates else (),
            scores=state.scores(known_end),
            pool=None if state.pool is None else state.pool.spec(known_end),
            awaits_token=start == len(state.token_ids),
            rolling_window=state.rolling_window,
            place=state.place,
            num_given_up=state.num_given_up,
            is_compacted=state.forgets and state.is_compacted,
            eviction=_eviction_of(state, known_end) if state.forgets else None,
            windows=None if state.windows is None else state.windows.tables(num_pages),
        )

    def _sample_specs(self, state: RequestState, drafted: tuple[int, ...]) -> tuple[SampleSpec, ...]:
        """Returns how to sample the token after the last known token, and the token after each draft token."""
        return tuple(self._sample_spec(state, drafted[:count]) for count in range(len(drafted) + 1))

    def _sample_spec(self, state: RequestState, drafted: tuple[int, ...]) -> SampleSpec:
        banned = state.banned_token_ids(len(drafted))
        mask = self._grammars.row(state.request_id, banned, drafted, state.num_tokens_in_flight)
        return SampleSpec(
            params=state.request.sampling,
            seed=state.seed,
            position=state.num_tokens + len(drafted),
            banned_token_ids=banned,
            history=state.updated_history(),
            draft_token_ids=drafted,
            mask=self._recorder.mask_of(state.request, mask),
        )


def _eviction_of(state: RequestState, known_end: int) -> KvEviction | None:
    """Returns what a step keeps of a request's prompt, if it ends in the step."""
    if state.eviction is None or state.num_given_up or known_end != state.num_prompt:
        return None
    return KvEviction(state.eviction.num_kept, tuple(state.targets))
