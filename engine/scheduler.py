"""Who is served in the next step, and what came of the last one.

The Scheduler owns every Sequence. Its four verbs are admit, plan, absorb and cancel; it is pure Python, without torch.
There is no prefill mode and no decode mode: a sequence catches up with the tokens that are known of it.

A sequence is let in with pages for everything that is known of it, and takes one more whenever it has filled its
last. When there is none, the sequence that deserves its place least is offloaded: its pages go to the host, and it
goes on where it stopped once there is room again. Nobody is let in while somebody who runs lacks a page, so what runs
gets to its end.
"""

from collections.abc import Collection, Iterable, Mapping
from random import Random

from graftwork.engine.adapter_residency import AdapterResidency
from graftwork.engine.batch import SequenceSlice, StepPlan, StepResult
from graftwork.engine.drafting.speculator import Speculator, matching, no_drafts
from graftwork.engine.grammar.residency import GrammarResidency, NoGrammars
from graftwork.engine.growth import Growth
from graftwork.engine.intake import Intake, SchedulerLimits
from graftwork.engine.kv_memory import KvMemory
from graftwork.engine.landings import Landings
from graftwork.engine.outputs import Output, SchedulerCounters
from graftwork.engine.pace import Pace
from graftwork.engine.pages import PageId
from graftwork.engine.policy import FairShare
from graftwork.engine.request import (
    EngineRequest,
    FinishReason,
    PromptAdmitted,
    RequestFinished,
    SessionMemory,
    SessionTending,
    TokensGenerated,
)
from graftwork.engine.scope import ScopeMaker
from graftwork.engine.sequence import Sequence
from graftwork.engine.session_tending import SessionTender
from graftwork.engine.slicing import Slicer
from graftwork.engine.tier_names import Tier
from graftwork.engine.transfers import TransferDone, TransferPlan
from graftwork.platform.clock import Clock
from graftwork.platform.errors import CapacityContended, Conflict, GraftworkError, InternalFailure
from graftwork.platform.ids import RequestId

_NO_GRAMMARS = NoGrammars()
_NOT_LOADED = (
    "KV could not be copied from the host to the device while this request was computed; the engine's log says why."
)


class Scheduler:
    """Continuous batching with chunked prefill under a token budget."""

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: KvMemory,
        tender: SessionTender,
        adapters: AdapterResidency,
        scopes: ScopeMaker,
        *,
        clock: Clock,
        seeds: Random,
        grammars: GrammarResidency = _NO_GRAMMARS,
        speculator: Speculator | None = None,
    ) -> None:
        """Without a speculator, a sequence makes one token a step."""
        self._limits = limits
        self._memory = memory
        self._tender = tender
        self._adapters = adapters
        self._grammars = grammars
        self._intake = Intake(limits, scopes, clock, seeds)
        self._slicer = Slicer(limits.page_tokens, grammars)
        self._waiting = FairShare(clock)
        self._running: dict[RequestId, Sequence] = {}
        self._by_id: dict[RequestId, Sequence] = {}
        self._growth = Growth(memory, self._running, limits.page_tokens, self._preempt)
        self.landings = Landings(memory, self._running, limits.page_tokens)
        self._pace = Pace(clock)
        self.speculator = speculator or no_drafts(clock)
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_ids(self) -> Collection[RequestId]:
        """The requests that have pages and a place in the batch."""
        return self._running.keys()

    def running_adapters(self) -> set[str]:
        return _adapters_of(self._running.values())

    def waiting_adapters(self) -> set[str]:
        return _adapters_of(self._waiting)

    # ---- submit and cancel ------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises a typed error, and changes nothing, if it cannot be served."""
        if request.request_id in self._by_id:
            raise Conflict(f"Request {request.request_id} is being served already: give each request its own id.")
        self._intake.check(request)
        free_places = self._limits.max_running - len(self._running)
        if len(self._waiting) >= self._limits.max_waiting + free_places:
            raise CapacityContended(
                f"The queue is full: {self._limits.max_waiting} requests are waiting. Try again later.",
                retry_after_s=self._pace.seconds_until_room(),
            )
        sequence = self._intake.sequence(request)
        if request.session is not None:
            self._tender.goes_on(request.isolation, request.session)
        self._memory.set_limits(request.isolation, request.kv_limits)
        self._by_id[request.request_id] = sequence
        self._waiting.enqueue(sequence)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and free what it held. One that has ended already is not an error: messages cross."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if request_id in self._running:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)

    def fail_waiting_for(self, digest: str, error: GraftworkError) -> list[Output]:
        """End every queued request that needs an adapter that could not be loaded."""
        failed = [one.request_id for one in self._waiting if digest in one.request.adapter_digests]
        return self.fail(failed, error)

    def fail(self, request_ids: Iterable[RequestId], error: GraftworkError) -> list[Output]:
        """End requests with an error; their KV is not kept.

        One that the step which failed had ended already is told the same: nobody has heard of its end.
        """
        outputs = [Output(request_id, error) for request_id in request_ids]
        for output in outputs:
            self.cancel(output.request_id)
        return outputs

    # ---- admit ------------------------------------------------------------------------------------------------

    def admit(self) -> list[Output]:
        """Let waiting sequences in, in the order of the policy, while everything that each needs is there.

        A sequence whose adapter is still being loaded, or whose grammar compiled, is passed over; one that lacks
        pages holds back the rest, so that a large request is not starved by small ones.
        """
        outputs: list[Output] = []
        candidates = list(self._waiting.candidates()) if len(self._waiting) else []
        self._adapters.want([digests for one in candidates if (digests := one.request.adapter_digests)])
        self._grammars.want([one.request for one in candidates if one.request.grammar is not None])
        for sequence in candidates:
            refusal = self._adapters.refusal(sequence.request.adapters) or self._grammars.refusal(sequence.request)
            if refusal is not None:
                outputs += self.fail([sequence.request_id], refusal)
                continue
            if not all(self._adapters.is_ready(digest) for digest in sequence.request.adapter_digests):
                continue
            if not self._grammars.is_ready(sequence.request):
                continue
            while not (self._has_place() and self._settle(sequence)):
                if not self._make_way(sequence):
                    return outputs
            outputs += self._start(sequence)
        return outputs

    def _has_place(self) -> bool:
        """Whether the batch has room, and nobody who runs waits for a page."""
        return len(self._running) < self._limits.max_running and not self._growth.starved

    def _settle(self, sequence: Sequence) -> bool:
        """Find pages for all known tokens, and leave everyone who runs a page to grow into; False if there is no
        room for that."""
        path = sequence.path(len(sequence.token_ids) - 1)  # the last token is always computed: its logits are needed
        match = self._memory.match(path)
        if self._running and not self._memory.has_room(match, len(sequence.token_ids), len(self._running)):
            return False
        session = sequence.request.session
        reason = self._memory.miss_reason(path, match, session)
        residence = self._memory.settle(path, match, len(sequence.token_ids), session)
        if residence is None:
            return False
        sequence.settle(residence, self._limits.page_tokens, reason)
        return True

    def _make_way(self, sequence: Sequence) -> bool:
        """Offload somebody of a lower class for a request that finds no place; False if there is nobody, or room is
        being made already."""
        victim = self._growth.worst()
        if victim is None or self._memory.residency.device.in_flight_pages:
            return False
        if victim.rank <= self._waiting.rank(sequence):
            return False
        self._preempt(victim)
        return True

    def _start(self, sequence: Sequence) -> list[Output]:
        sequence.rank = self._waiting.rank(sequence)
        self._waiting.remove(sequence)
        for digest in sequence.request.adapter_digests:
            self._adapters.pin(digest)
        generated = sequence.token_ids[sequence.num_prompt :]
        self._grammars.open(sequence.request, sequence.stop_token_ids, generated)
        self._running[sequence.request_id] = sequence
        return [] if sequence.arrivals else self._arrived(sequence)

    def _arrived(self, sequence: Sequence) -> list[Output]:
        """All that was cached of a sequence is on the device: tell its client, unless it only goes on."""
        if sequence.is_admitted:
            return []
        sequence.is_admitted = True
        report = sequence.cache_report(self._limits.page_tokens)
        self._waiting.charge_input(sequence, report.recomputed_tokens)
        self.counters.prompt_tokens += report.prompt_tokens
        self.counters.cached_tokens += report.cached_tokens
        self.counters.host_tokens += report.host_tokens
        self.counters.disk_tokens += report.disk_tokens
        return [Output(sequence.request_id, PromptAdmitted(report))]

    def rename_pages(self, moves: Mapping[PageId, PageId]) -> None:
        """Pages stand elsewhere on the device by now: whoever runs lists them by their new numbers."""
        for sequence in self._running.values():
            sequence.pages = [moves.get(page, page) for page in sequence.pages]

    def tend(self, tending: SessionTending) -> SessionMemory:
        """Look after a session's KV between its turns."""
        return self._tender.tend(tending)

    def absorb_readable(self, plan: TransferPlan) -> list[Output]:
        """Pages may be planned with before they have been copied: whoever waited for them goes on."""
        return [output for sequence in self.landings.readable(plan) for output in self._arrived(sequence)]

    def absorb_transfer(self, done: TransferDone) -> list[Output]:
        """Pages have been copied: whoever waited for them goes on, without those that could not be read."""
        landing = self.landings.landed(done)
        outputs = self.fail(landing.ruined, InternalFailure(_NOT_LOADED))
        return outputs + [output for sequence in landing.arrived for output in self._arrived(sequence)]

    # ---- plan -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step: every sequence that is one token behind, then chunks of those that are further behind.

        Drafts take what is left of the budget, so that nobody's prompt waits for another's guesses.
        """
        self._memory.tick()
        turns = self._turns()
        making = [sequence for sequence, num_tokens in turns if num_tokens == sequence.num_behind]
        spare_rows = self._limits.max_batch_tokens - sum(num_tokens for _, num_tokens in turns)
        drafts = self.speculator.draft(making, spare_rows)
        slices = [
            self._slicer.slice(
                sequence, num_tokens, self._growth.fitting(sequence, drafts.get(sequence.request_id, ()))
            )
            for sequence, num_tokens in turns
        ]
        if not slices:
            return None
        plan = StepPlan(tuple(slices))
        self.speculator.step_begins(plan)
        return plan

    def _turns(self) -> list[tuple[Sequence, int]]:
        """Who computes how many known tokens in the next step; all of them have the pages for that."""
        budget = self._limits.max_batch_tokens
        turns: list[tuple[Sequence, int]] = []
        planned: set[RequestId] = set()
        for sequence in sorted(self._running.values(), key=_turn):
            if budget == 0:
                break
            num_tokens = min(sequence.num_behind, budget)
            if sequence.request_id in self._running and self._growth.grow(sequence, num_tokens, planned):
                turns.append((sequence, num_tokens))
                planned.add(sequence.request_id)
                budget -= num_tokens
        return turns

    def _preempt(self, sequence: Sequence) -> None:
        """Offload a running sequence: its computed pages go to the host, and it back into the queue."""
        path = sequence.path(sequence.num_computed)
        self._memory.offload(path, sequence.pages, sequence.request.session)
        self._leave(sequence)
        sequence.num_computed = 0
        self._waiting.enqueue(sequence)
        self.counters.preemptions += 1

    # ---- absorb -----------------------------------------------------------------------------------------------

    def absorb(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's tokens in, and end the sequences that are complete."""
        self.speculator.step_ended()
        outputs: list[Output] = []
        for piece in plan.slices:
            sequence = self._running[piece.request_id]
            sequence.num_computed = piece.known_end
            if piece.start < sequence.num_prompt <= piece.known_end:
                self._enter(sequence)
            if piece.samples:
                outputs.extend(self._append(sequence, piece, result))
        self.counters.steps += 1
        self.counters.max_adapters_in_a_step = max(self.counters.max_adapters_in_a_step, plan.num_adapters)
        return outputs

    def _append(self, sequence: Sequence, piece: SequenceSlice, result: StepResult) -> list[Output]:
        """Add the choices that stand. All but the last were drafted and have their KV; of it nothing is computed."""
        ends = result.ends.get(piece.request_id, {})
        stand = matching(piece.draft_token_ids, result.token_ids[piece.request_id])
        ended_at = next((row for row in range(len(stand)) if row in ends), None)
        token_ids = sequence.take(stand[:ended_at])
        for token_id in token_ids:
            error = self._grammars.accept(sequence.request_id, token_id)
            if error is not None:
                return self.fail([sequence.request_id], error)
        outputs: list[Output] = []
        if token_ids:
            sequence.num_computed = len(sequence.token_ids) - 1
            self.counters.generated_tokens += len(token_ids)
            self._waiting.charge_output(sequence, len(token_ids))
            logprobs = result.logprobs.get(piece.request_id, ())[: len(token_ids)]
            outputs.append(Output(sequence.request_id, TokensGenerated(token_ids, logprobs)))
        self.speculator.learn(sequence, piece.num_drafts, len(token_ids))
        reason = sequence.finish_reason() if token_ids else None
        if reason is None and ended_at is not None:
            return outputs + self._end(sequence, ends[ended_at])
        return outputs if reason is None else [*outputs, self._finish(sequence, reason)]

    def _end(self, sequence: Sequence, error: GraftworkError | None) -> list[Output]:
        """A grammar left no token to choose: the answer was complete, or the request has failed."""
        return [self._finish(sequence, FinishReason.STOP)] if error is None else self.fail([sequence.request_id], error)

    def _enter(self, sequence: Sequence) -> None:
        """Let others find what is computed of a sequence, which goes on with the pages that all share."""
        path = sequence.path(sequence.num_computed)
        nodes = self._memory.enter(path, sequence.pages, sequence.request.session)
        sequence.pages = self._memory.share(nodes, sequence.pages)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Output:
        self._enter(sequence)
        if sequence.request.session is not None:
            self._memory.follow(sequence.path(sequence.num_computed), sequence.request.session)
        report = self.speculator.ended(sequence)
        del self._by_id[sequence.request_id]
        self._release(sequence)
        self._memory.enforce_limits(sequence.owner)
        self._pace.finished_one()
        return Output(sequence.request_id, RequestFinished(reason, sequence.num_generated, report))

    def _release(self, sequence: Sequence) -> None:
        self._memory.release(sequence.pages)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give up a place in the batch; the pages are somebody else's business by now."""
        del self._running[sequence.request_id]
        self._growth.starved.discard(sequence.request_id)
        sequence.pages = []
        sequence.reading.clear()
        self._grammars.close(sequence.request_id)
        for digest in sequence.request.adapter_digests:
            self._adapters.unpin(digest)

    def check_integrity(self) -> None:
        """Every page is held by the tree, by the sequences that list it, and by nobody else."""
        self._memory.check_integrity()
        device, tree = self._memory.residency.device, self._memory.residency.tree
        held = sum(len(sequence.pages) for sequence in self._running.values())
        in_tree = tree.num_copies(Tier.DEVICE)
        assert held + in_tree == device.num_holders, f"{held} + {in_tree} holds expected, {device.num_holders} counted"
        assert len(self._by_id) == len(self._running) + len(self._waiting)
        assert self._growth.starved <= self._running.keys()


def _turn(sequence: Sequence) -> tuple[bool, int, float]:
    """The order of a step: those that decode first, then by class and arrival."""
    return sequence.num_behind > 1, sequence.rank, sequence.arrived_at


def _adapters_of(sequences: Iterable[Sequence]) -> set[str]:
    return {digest for sequence in sequences for digest in sequence.request.adapter_digests}
