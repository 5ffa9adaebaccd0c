"""Decides which requests run in the next step, and processes the result of the last step.

Owns every RequestState, from submit to the last token. Never imports torch, and never waits.
There is no prefill mode and no decode mode: each step computes tokens that are known but have no KV yet.

A request is admitted with pages for all its known tokens. It gets another page when its last page is full. If no page
is free, the lowest-priority request is preempted: its KV is offloaded to the host, and it continues later from there.
Invariant: nothing is admitted while a running request lacks a page, so running requests finish.

    admit → plan → land → absorb                        a step without overlap
    admit → plan n + 1 → land n → absorb n → …          planned ahead, see steps_in_flight.py
"""

from collections.abc import Collection, Iterable, Mapping

from graftwork.engine.core.events import (
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    RequestOutput,
    TokensGenerated,
)
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.stats import EngineCounters
from graftwork.engine.core.step import RequestSlice, StepPlan, StepResult
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.cache_scope import CacheScopes
from graftwork.engine.kv.manager import KvCacheManager
from graftwork.engine.kv.session_cache import SessionCache
from graftwork.engine.kv.transfer.plan import TransferDone, TransferPlan
from graftwork.engine.scheduler.candidates import Candidates
from graftwork.engine.scheduler.first_token import DeadlineAdmission, Received
from graftwork.engine.scheduler.order.batch_shares import BatchShares
from graftwork.engine.scheduler.order.fair_share import VirtualTokenCounter
from graftwork.engine.scheduler.order.pending_loads import PendingLoads
from graftwork.engine.scheduler.order.prompt_turns import RunningPrompts
from graftwork.engine.scheduler.order.request_state import RequestState
from graftwork.engine.scheduler.order.waiting_order import RequestTables, ServiceUse, WaitingOrder
from graftwork.engine.scheduler.planner import StepBuilder, StepPlanner
from graftwork.engine.scheduler.preemption import PageGrower
from graftwork.engine.scheduler.queue_bounds import QueueBounds, displaced_error
from graftwork.engine.scheduler.resources import AdapterProvider, GrammarProvider, NoGrammars
from graftwork.engine.scheduler.service_meter import FlexHoldback, ServiceMeter
from graftwork.engine.scheduler.speculator import Speculator, accepted_prefix, no_drafts
from graftwork.engine.scheduler.step_time import StepTimes
from graftwork.engine.scheduler.steps_in_flight import StepsInFlight
from graftwork.engine.scheduler.validation import RequestValidator, SchedulerLimits
from graftwork.engine.step_recorder import NO_RECORDER, StepRecorder
from graftwork.platform.clock import Clock
from graftwork.platform.errors import Conflict, GraftworkError
from graftwork.platform.ids import RequestId

_NO_GRAMMARS = NoGrammars()


class Scheduler:
    """Schedules requests by continuous batching, with chunked prefill under a token budget."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KvCacheManager,
        session_cache: SessionCache,
        adapters: AdapterProvider,
        scopes: CacheScopes,
        *,
        clock: Clock,
        grammars: GrammarProvider = _NO_GRAMMARS,
        speculator: Speculator | None = None,
        order: WaitingOrder | None = None,
        recorder: StepRecorder = NO_RECORDER,
    ) -> None:
        """Without `speculator`, each request generates one token in a step. Without `order`, domains take turns."""
        self._limits, self._recorder = limits, recorder
        self._kv_cache, self.session_cache = kv_cache, session_cache
        self._adapters, self._grammars = adapters, grammars
        self._validator = RequestValidator(limits, scopes, clock)
        self._waiting = VirtualTokenCounter(clock) if order is None else order
        self._flex = FlexHoldback(clock, limits.max_running, kv_cache.page_store.sizes.device_pages)
        self._meter = ServiceMeter(clock, self._waiting, self._flex, kv_cache.page_store.sizes.page_bytes)
        self.queue_bounds = QueueBounds(limits.queue, self._waiting)
        self._candidates = Candidates(self._waiting, adapters, grammars, recorder)
        self.requests = RequestTables(self._waiting)
        self._running, self._by_id = self.requests.running, self.requests.by_id
        self.free_places = list(range(limits.max_running))
        self._steps = StepsInFlight(kv_cache.release, adapters.unpin)
        self._page_grower = PageGrower(kv_cache, self._running, limits, self._preempt_if_landed)
        self.pending_loads = PendingLoads(kv_cache, self._running, limits.page_tokens)
        self.step_times = StepTimes(clock, limits.target_itl_s, limits.page_tokens, limits.max_batch_tokens)
        self.deadlines = DeadlineAdmission(limits, self.requests, kv_cache, self.step_times, clock)
        self.speculator, self.counters = speculator or no_drafts(clock), EngineCounters()
        builder = StepBuilder(limits.page_tokens, grammars, recorder)
        parts = (self._steps, self._page_grower, builder, self.speculator, self.step_times, self._flex)
        self._planner = StepPlanner(limits, self._running, self._waiting, *parts)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_ids(self) -> Collection[RequestId]:
        """The ids of the running requests. A running request has pages and is in the batch."""
        return self._running.keys()

    # ---- submit and cancel ------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, received: Received | None = None) -> list[RequestOutput]:
        """Queues a request, of which `received` says what the thread has found that received it.

        If it cannot be served or may not wait, raises a GraftworkError and changes nothing. Returns the errors of waiting
        requests of other domains that made room for it, or its own outputs if an earlier run has ended its answer.
        """
        if request.request_id in self._by_id:
            raise Conflict(f"Request {request.request_id} is being served already: give each request its own id.")
        self._validator.check(request)
        state = self._validator.new_state(request, None if received is None else received.at)
        if ended := state.outputs_if_over(self._limits.page_tokens):
            return ended
        self.deadlines.check(state, received)
        free_places, retry_after_s = self._limits.max_running - len(self._running), self.deadlines.retry_after_s()
        displaced = self.queue_bounds.displaced_by(state, free_places, retry_after_s)
        outputs = self.fail([one.request_id for one in displaced], displaced_error(retry_after_s))
        if request.session is not None:
            self.session_cache.begin_turn(request.domain, request.session)
        self._kv_cache.unlock_files(request.domain, request.kv_key)
        self._kv_cache.set_limits(request.domain, request.kv_limits)
        self._by_id[request.request_id] = state
        self._waiting.enqueue(state)
        return outputs

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request without a result, and frees its pages and adapters. Does nothing if it has ended already."""
        state = self._by_id.pop(request_id, None)
        if state is None:
            return
        if request_id in self._running:
            self._steps.release(state.frames)
            self._remove_running(state)
        else:
            self._waiting.remove(state)

    def fail_waiting_for(self, digest: str, error: GraftworkError) -> list[RequestOutput]:
        """Ends, with `error`, every waiting request that needs the adapter `digest`, which could not be loaded."""
        return self.fail([one.request_id for one in self._waiting if digest in one.request.adapter_digests], error)

    def fail(self, request_ids: Iterable[RequestId], error: GraftworkError) -> list[RequestOutput]:
        """Ends requests with `error`. Returns one output with it for each id, even of a request that has ended already."""
        outputs = [RequestOutput(request_id, error) for request_id in request_ids]
        for output in outputs:
            self.cancel(output.request_id)
        return outputs

    # ---- admit ------------------------------------------------------------------------------------------------

    def admit(self) -> list[RequestOutput]:
        """Admits waiting requests, best first (see candidates.py), until pages or places in the batch run out.

        Skips a request whose prompt would only wait in the batch, or that lacks only a place: one behind it may take a place
        by its share. Stops at a request that lacks pages, so that small requests cannot starve a large one.
        """
        outputs = self.fail(self.deadlines.expired(), self.deadlines.deadline_passed())
        waiting, running = list(self._waiting.domains()), self._running.values()
        if self._candidates.want(waiting, may_place=not self._steps):
            self._steps.ask_to_land()
        if not len(self._waiting):
            return outputs
        settled_since = self.counters.steps - max(self._limits.min_run_steps, 1)  # who starts here runs a step
        shares = BatchShares(self._limits.max_running, running, waiting, settled_since, self._waiting.service)
        prompts = RunningPrompts(running, self._waiting, self.step_times.prompt_tokens_beside)
        chosen = self._candidates.choose(waiting, shares, self._limits.max_running - len(running), prompts)
        outputs += [
            output for state, error in self._candidates.refused for output in self.fail([state.request_id], error)
        ]
        return outputs + self._admit(chosen, shares, prompts)

    def _admit(
        self, chosen: Iterable[RequestState], shares: BatchShares, prompts: RunningPrompts
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for state in chosen:
            if self._flex.holds(state) or prompts.hold(state, shares):
                continue
            while not (self._has_place() and self._page_grower.allocate(state)):
                if not self._preempt_for(state, shares):
                    if self._has_place() or self._page_grower.starved:
                        return outputs
                    break
            else:
                outputs += self._start(state, shares)
                prompts.started(state)
        return outputs

    def _has_place(self) -> bool:
        return len(self._running) < self._limits.max_running and not self._page_grower.starved

    def _preempt_for(self, state: RequestState, shares: BatchShares) -> bool:
        """Preempts a running request for a waiting one, as BatchShares says.

        Returns False if there is none, or if the request lacks pages and copies will free some soon.
        """
        if len(self._running) < self._limits.max_running and self._kv_cache.page_store.device.in_flight_pages:
            return False
        if not self._waiting.shares_places:
            return False
        victims = shares.victims_for(state, self._waiting.priority(state))
        victim = self._page_grower.first_victim(victims, shares)
        if victim is None or not self._preempt_if_landed(victim):
            return False
        shares.preempted(victim)
        return True

    def _start(self, state: RequestState, shares: BatchShares) -> list[RequestOutput]:
        state.priority, state.started_at_step = self._waiting.priority(state), self.counters.steps
        self._waiting.start(state)
        for digest in state.request.adapter_digests:
            self._adapters.pin(digest)
        self._running[state.request_id] = state
        state.place = self.free_places.pop()
        self._meter.start(state)
        error = self._grammars.open(state.request, state.stop_token_ids, state.token_ids[state.num_prompt :])
        if error is not None:
            return self.fail([state.request_id], error)
        shares.started(state)
        self._recorder.started(state.request_id, loads=bool(state.pending_loads))
        self.deadlines.record_start(state)
        return [] if state.pending_loads else self._report_admitted(state)

    def _report_admitted(self, state: RequestState) -> list[RequestOutput]:
        """Reports the admission of a request once its cached pages are all readable. Reports it only once."""
        if state.is_admitted:
            return []
        state.is_admitted = True
        report = state.cache_report(self._limits.page_tokens)
        self._waiting.charge(state, ServiceUse(input_tokens=report.recomputed_tokens))
        self.counters.count_prompt(report)
        loaded = sum(map(self._adapters.take_loaded_bytes, state.request.adapter_digests))
        return [RequestOutput(state.request_id, PromptAdmitted(report, loaded))]

    def renumber_pages(self, moves: Mapping[PageId, PageId]) -> None:
        """Updates the page numbers of running requests after pages were moved. `moves` maps old to new numbers."""
        assert not self._steps, "pages move while a step in flight uses them"
        for state in self._running.values():
            state.rename_pages(moves)

    def overlap_load(self, plan: TransferPlan) -> list[RequestOutput]:
        """Starts the requests that waited for the load `plan`, because its pages can now be read layer by layer."""
        return [output for state in self.pending_loads.overlap(plan) for output in self._report_admitted(state)]

    def finish_transfer(self, done: TransferDone) -> list[RequestOutput]:
        """Processes the end of a transfer: starts requests that waited for it, fails those computed with pages it lost."""
        outcome = self.pending_loads.finish(done)
        outputs = self.fail(outcome.failed, outcome.error)
        return outputs + [output for state in outcome.ready for output in self._report_admitted(state)]

    # ---- plan -------------------------------------------------------------------------------------------------

    def must_land(self) -> bool:
        """Returns whether all steps in flight must land before `admit` and `plan` are called."""
        return self._planner.must_land()

    def plan(self) -> StepPlan | None:
        """Returns the next step, which is in flight until `land` is called; None if nothing can run."""
        self._kv_cache.start_background_copies()
        plan = self._planner.plan()
        if plan is not None:
            self._steps.begin(plan, self._running)
        return plan

    def _preempt_if_landed(self, state: RequestState) -> bool:
        """Offloads the computed pages of a running request to the host, and queues the request again. If a step is in
        flight, asks that it lands instead, and returns False.
        """
        if self._steps:
            self._steps.ask_to_land()
            return False
        self._page_grower.offload(state)
        self._remove_running(state)
        state.num_computed = 0
        self._waiting.enqueue(state)
        self._recorder.preempted(state.request_id)
        self.counters.preemptions += 1
        return True

    # ---- absorb -----------------------------------------------------------------------------------------------

    def land(self, plan: StepPlan) -> StepPlan:
        """Records that the oldest step in flight has ended or failed. Releases what was kept for it.

        Returns the part of the plan that is still of use: of requests that have run since the step was planned.
        """
        seconds = self._planner.step_ended()
        self.counters.step_seconds += seconds
        self.deadlines.step_ended(plan, seconds)
        self._meter.charge_time(plan, seconds, self._running)
        return self._steps.land(plan, self._running)

    def absorb(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Appends the tokens that a step has generated to their requests, and finishes the requests that are complete.

        `plan` is what `land` has returned. Returns the outputs to send to the clients.
        """
        outputs: list[RequestOutput] = []
        for piece in plan.slices:
            state = self._running[piece.request_id]
            state.num_computed = end = piece.known_end
            submitted = state.num_submitted
            if piece.start < submitted <= end or (end < submitted and self._page_grower.gives_up_branches(state)):
                self._cache_pages(state)
            if piece.reads_prompt:
                outputs += state.read_prompt(piece, result)
            if piece.samples:
                outputs.extend(self._append(state, piece, result))
            elif not state.generates and state.num_computed == len(state.token_ids):
                outputs.append(self._finish(state, FinishReason.LENGTH))
            if (state.forgets or state.windows is not None) and self._page_grower.has_unseen(state):
                self._steps.release(self._page_grower.drop_unseen(state))
        self._meter.charge_pages(self._running.values())
        self.counters.count_step(plan.num_adapters)
        return outputs

    def _append(self, state: RequestState, piece: RequestSlice, result: StepResult) -> list[RequestOutput]:
        """Appends the accepted tokens of one request. All but the last were drafted, so their KV is computed already."""
        ends = result.ends.get(piece.request_id, {})
        accepted = accepted_prefix(piece.draft_token_ids, result.token_ids[piece.request_id])
        ended_at = next((row for row in range(len(accepted)) if row in ends), None)
        token_ids = state.append_tokens(accepted[:ended_at])
        state.updated_history()
        for token_id in token_ids:
            error = self._grammars.accept(state.request_id, token_id)
            if error is not None:
                return self.fail([state.request_id], error)
        outputs: list[RequestOutput] = []
        if token_ids:
            state.num_computed = len(state.token_ids) - 1
            self.counters.generated_tokens += len(token_ids)
            logprobs = result.logprobs.get(piece.request_id, ())[: len(token_ids)]
            outputs.append(RequestOutput(state.request_id, TokensGenerated(token_ids, logprobs, *state.take_use())))
        self._meter.charge_step(state, piece.num_drafts, len(token_ids))
        self.speculator.learn(state, piece.num_drafts, len(token_ids))
        reason = state.finish_reason() if token_ids else None
        if reason is None and ended_at is not None:
            return outputs + self._end(state, ends[ended_at])
        return outputs if reason is None else [*outputs, self._finish(state, reason)]

    def _end(self, state: RequestState, error: GraftworkError | None) -> list[RequestOutput]:
        """Ends a request whose grammar allows no further token: its answer is complete, or it has failed."""
        return [self._finish(state, FinishReason.STOP)] if error is None else self.fail([state.request_id], error)

    def _cache_pages(self, state: RequestState) -> None:
        self._steps.release(self._page_grower.cache(state))

    def _finish(self, state: RequestState, reason: FinishReason) -> RequestOutput:
        self._cache_pages(state)
        if state.request.session is not None:
            self._kv_cache.set_history(state.computed_path, state.request.session)
        report = self.speculator.finish(state)
        del self._by_id[state.request_id]
        self._steps.release(state.frames)
        self._remove_running(state)
        self._kv_cache.enforce_limits(state.domain)
        self.deadlines.record_finished()
        finished = RequestFinished(reason, state.num_generated, report, *state.take_use())
        return RequestOutput(state.request_id, finished)

    def _remove_running(self, state: RequestState) -> None:
        """Takes a request out of the batch. The request's pages must have been released or offloaded before."""
        self._meter.end(state)
        del self._running[state.request_id]
        self.free_places.append(state.place)
        self._page_grower.starved.discard(state.request_id)
        state.drop_pages()
        state.slices_in_flight.clear()
        state.overlapped_loads.clear()
        self._grammars.close(state.request_id)
        self.speculator.leave_batch(state.request_id)
        self._steps.release((), state.request.adapter_digests)

    def check_integrity(self) -> None:
        """Checks that only the prefix tree, requests and steps in flight hold each device page."""
        self._kv_cache.check_integrity()
        self._steps.check_integrity(self._running.values())
        device, tree = self._kv_cache.page_store.device, self._kv_cache.page_store.tree
        held = sum(len(state.frames) for state in self._running.values()) + len(self._steps.kept_pages)
        expected = held + tree.num_copies(Tier.DEVICE)
        assert expected == device.num_holders, f"{expected} holds expected, {device.num_holders} counted"
        self.requests.check_integrity()
        places = [*self.free_places, *(state.place for state in self._running.values())]
        assert sorted(places) == list(range(len(places))), "a place in the batch is taken twice or lost"
        self._page_grower.check_integrity()
