"""Runs one turn, from the engine's first token to its stored outcome.

    generate ──► EventStream ──► store, then feed        (a heartbeat renews the lease meanwhile)
        │
        └─ answered, failed or cancelled ──► store outcome and usage ──► settle the quota ──► show the last events

Owns a running turn. A turn ends early only if it is cancelled, if it fails, or if this process stops. It does not end
if a client that reads its events disconnects. Never plans a turn.
Invariant: the turn has exactly one last event. One transaction stores this event with the turn's outcome and usage row.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from graftwork.engine.core.session_commands import SessionMemory, ToolWait
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError, InternalFailure, Unavailable
from graftwork.platform.ids import CheckpointId, TurnId, new_id
from graftwork.platform.ledger.usage import UsageOutcome
from graftwork.platform.tenancy.principals import Principal, RunningWork
from graftwork.sessions.core.events import (
    EventDraft,
    EventFeed,
    EventType,
    SessionEvent,
    output_text_delta,
    reasoning_delta,
    tool_call_arguments_delta,
    tool_call_done,
    tool_call_started,
    turn_created,
)
from graftwork.sessions.core.items import Item, answer_call, answer_message_id, message
from graftwork.sessions.core.lease import LeaseLost, Pause, SessionLease, keep_alive
from graftwork.sessions.core.session import AgentSession, Turn, TurnStatus
from graftwork.sessions.core.transcript import Checkpoint, Transcript, TurnEncoder
from graftwork.sessions.core.views import awaiting_fields, cache_body, completed_fields, lease_answer
from graftwork.sessions.generation.constraints import ConstraintPlanner
from graftwork.sessions.generation.generator import (
    Generation,
    GenerationFinished,
    Generator,
    OutputEvent,
    PromptAdmitted,
    PromptReported,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallStarted,
)
from graftwork.sessions.generation.logprobs import token_scores
from graftwork.sessions.generation.request import GenerationRequest
from graftwork.sessions.generation.usage import Accounting, RequestAccount, Usage
from graftwork.sessions.store.event_log import RETRY_AFTER_S, EventLog
from graftwork.sessions.store.turn_outcome import TurnOutcome, failure_event
from graftwork.sessions.store.turn_store import TurnStore
from graftwork.sessions.text.encoding import PromptEncoding
from graftwork.sessions.tools.tool_choice import CallForm, CallForms
from graftwork.sessions.turns.kv import History, SessionKvClient

_log = logging.getLogger("graftwork.sessions")

Answer = TypeVar("Answer")

_ATTEMPTS = 40
"""How often the end of a turn is stored or read. All attempts together take 20 s, less than the length of a lease."""


@dataclass(frozen=True, slots=True)
class ToolHint:
    """What a client says about a tool: how long the tool usually takes, and when its output is due."""

    expected_ms: float
    """The time in milliseconds that the tool usually takes."""
    deadline_ms: float | None = None
    """The time in milliseconds from the end of the turn that calls the tool until its output is due."""


ToolHints = Mapping[str, ToolHint]
"""Maps each tool's name to its hint."""

NO_HINTS: ToolHints = {}


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """What a turn needs to run: the session, the prompt and the engine request. It is made before the turn begins."""

    principal: Principal
    session: AgentSession
    """The session as it was read when the plan was made."""
    encoder: TurnEncoder
    transcript: Transcript
    new_items: tuple[Item, ...]
    new_token_ids: tuple[int, ...]
    """The token ids that the new items and the start of the answer add to the history."""
    request: GenerationRequest
    tool_hints: ToolHints = field(default_factory=dict)
    call_forms: CallForms = field(default_factory=dict)
    num_dropped: int = 0
    """How many of the oldest items the prompt leaves out, because the whole history does not fit in the context."""


@dataclass(frozen=True, slots=True)
class TurnDependencies:
    """The objects that all turns of a process share, such as the store and the generator."""

    generator: Generator
    accounting: Accounting
    store: TurnStore
    log: EventLog
    kv: SessionKvClient
    encoder: TurnEncoder | None
    """Names the chat template and the tokenizer by digests. It is None for a model without a chat template."""
    encoding: PromptEncoding
    """Encodes the prompts of turns."""
    clock: Clock
    pepper: bytes
    heartbeat_s: float
    """Seconds between two renewals of a lease."""
    planner: ConstraintPlanner = field(default_factory=ConstraintPlanner)
    """Plans the outputs of turns. It must use the same tool call format as the generator."""
    pause: Pause = asyncio.sleep
    """The function that waits between two attempts to store an outcome."""
    work: RunningWork = field(default_factory=RunningWork)
    """What runs in this process, to be ended when its tenant or key loses its access."""


class TurnRunner:
    """Runs one turn whose row is already stored. Call `run` once, in its own task.

    Other tasks may call the other methods.
    """

    def __init__(
        self,
        plan: TurnPlan,
        lease: SessionLease,
        turn: Turn,
        account: RequestAccount,
        dependencies: TurnDependencies,
    ) -> None:
        self.plan = plan
        self.turn = turn
        self.account = account
        self.feed = EventFeed(turn.first_seq - 1)
        self.is_admitted = False
        """Whether the engine has admitted the prompt."""
        self.failure: GraftworkError | None = None
        """The error with which the turn failed; None if it has not failed."""
        self._lease = lease
        self._dependencies = dependencies
        self._events = dependencies.log.open(lease, self.feed, self.cancel)
        self._stop_wanted = asyncio.Event()
        self._shutting_down = False
        self._settled = asyncio.Event()

    def cancel(self) -> None:
        """Makes `run` end the turn as cancelled. Does nothing if the turn has ended.

        Does not wait for the end of the turn.
        """
        self._stop_wanted.set()

    def shut_down(self) -> None:
        """Makes `run` end the turn as failed, because this process stops. Does not wait for the end of the turn."""
        self._shutting_down = True
        self._stop_wanted.set()

    async def admitted(self) -> None:
        """Waits until the engine has admitted the prompt of the turn, or the turn has ended.

        Raises the engine's error if the engine refuses the prompt.
        """
        await self._settled.wait()
        if not self.is_admitted and self.failure is not None:
            raise self.failure

    async def run(self, generation: Generation) -> None:
        """Generates the answer of the turn, and stores the answer and the outcome of the turn.

        If the outcome cannot be stored, the turn costs nothing. The next search for interrupted turns then marks the
        turn as failed.
        """
        last_events: tuple[SessionEvent, ...] = ()
        billed = UsageOutcome.SERVER_ERROR
        try:
            outcome = await self._outcome(generation)
            last_events = await self._store(generation, outcome)
            billed = self._usage_outcome(outcome)
        except LeaseLost:
            billed = UsageOutcome.INTERRUPTED
            _log.warning("the lease of %s was lost: another process has ended it", self.turn.turn_id)
        except asyncio.CancelledError:
            billed = UsageOutcome.INTERRUPTED
            raise
        finally:
            try:
                await self.account.close(generation.usage, billed)
            finally:
                self.feed.publish(last_events)
                self._settled.set()
                self.feed.close()

    async def _outcome(self, generation: Generation) -> TurnOutcome:
        """Generates until the turn ends.

        Returns the outcome with the events that are not stored yet. Raises LeaseLost.
        """
        generating = asyncio.create_task(self._generate(generation))
        storing = asyncio.create_task(self._events.failure())
        beating = asyncio.create_task(keep_alive(self._lease, self._dependencies.store, self._dependencies.heartbeat_s))
        stopping = asyncio.create_task(self._stop_wanted.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (generating, storing, beating, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._events.close()
        finally:
            await _cancel(tasks)
        error = _told(self._events.error) or _error_of(beating) or _error_of(generating)
        if isinstance(error, LeaseLost):
            raise error
        if error is None and not generating.cancelled():
            answer = generating.result()
            outcome = self._answered(answer, generation, await self._hold(answer))
        else:
            outcome = self._broken_off(error, generation)
        after_seq = self._events.last_seq if self._events.error is None else None
        return replace(outcome, drafts=[*self._events.rest(), *outcome.drafts], after_seq=after_seq)

    async def _generate(self, generation: Generation) -> GenerationFinished:
        async with aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, GenerationFinished):
                    return event
                if isinstance(event, PromptReported):
                    continue  # a session's events have no log-probabilities
                if isinstance(event, PromptAdmitted):
                    self.is_admitted = True
                    self._settled.set()
                await self._events.put(replace(_draft(event), answer_tokens=generation.completion_tokens))
        raise InternalFailure("The answer broke off without saying why; send the turn again.")

    async def _hold(self, answer: GenerationFinished) -> SessionMemory | None:
        """Asks the engine to keep the KV for as long as the tools usually take."""
        plan, hints = self.plan, self.plan.tool_hints
        history = History(plan.session, (*plan.request.prompt_token_ids, *answer.token_ids))
        names = dict.fromkeys(call.name for call in answer.tool_calls)
        return await self._dependencies.kv.hold(history, [ToolWait(name, _expected_ms(hints, name)) for name in names])

    def _answered(
        self, answer: GenerationFinished, generation: Generation, memory: SessionMemory | None
    ) -> TurnOutcome:
        answer_items = _answer_items(answer, self.turn.turn_id, self.plan.call_forms)
        checkpoint = self._checkpoint(answer, answer_items)
        tokens, reasoned = generation.completion_tokens, generation.reasoning_tokens
        used = Usage(answer.cache, tokens, generation.drafts, generation.engine_use, reasoned)
        usage = used.turn_body(self.account.cost(used))
        if checkpoint.awaits_tools:
            status, type_ = TurnStatus.AWAITING_TOOL, EventType.TURN_AWAITING_TOOL
            call_ids: list[str] = [call.call_id for call in answer.tool_calls]
            fields = awaiting_fields(
                checkpoint.checkpoint_id, usage, call_ids, lease_answer(memory, self._dependencies.clock.now())
            )
        else:
            status, type_ = TurnStatus.COMPLETED, EventType.TURN_COMPLETED
            fields = completed_fields(checkpoint.checkpoint_id, usage, answer.reason)
        return TurnOutcome(
            status=status,
            drafts=[EventDraft(type_, fields)],
            checkpoint=checkpoint,
            items=(*self.plan.new_items, *answer_items),
            finish_reason=answer.reason,
            usage=usage,
            cache=cache_body(answer.cache),
            deadlines=self._deadlines(checkpoint.created_at),
        )

    def _deadlines(self, now: float) -> dict[str, float]:
        hints = self.plan.tool_hints.items()
        return {name: now + hint.deadline_ms / 1000.0 for name, hint in hints if hint.deadline_ms is not None}

    def _broken_off(self, error: GraftworkError | None, generation: Generation) -> TurnOutcome:
        """Returns the outcome of a turn that failed with `error`.

        If `error` is None, the turn was cancelled, or failed because this process stops.
        """
        if error is None and self._shutting_down:
            error = Unavailable(
                "The server is shutting down: send the turn, or the tool outputs, again.",
                code="shutting_down",
                retry_after_s=1.0,
            )
        self.failure = error
        terminal = EventDraft(EventType.TURN_CANCELLED) if error is None else failure_event(error)
        usage = None if error is not None and error.is_server_fault else generation.usage
        return TurnOutcome(
            status=TurnStatus.CANCELLED if error is None else TurnStatus.FAILED,
            drafts=[terminal],
            usage=None if usage is None else usage.turn_body(self.account.cost(usage)),
            cache=None if usage is None else cache_body(usage.cache),
            error=None if error is None else error.body()["error"],
        )

    def _checkpoint(self, answer: GenerationFinished, answer_items: Sequence[Item]) -> Checkpoint:
        parent = self.plan.transcript.head
        token_ids = (*self.plan.new_token_ids, *answer.token_ids)
        return Checkpoint(
            checkpoint_id=CheckpointId(new_id("ckp")),
            session_id=self.turn.session_id,
            parent_id=None if parent is None else parent.checkpoint_id,
            turn_id=self.turn.turn_id,
            depth=1 + (0 if parent is None else parent.depth),
            num_items=len(self.plan.new_items) + len(answer_items) + (0 if parent is None else parent.num_items),
            num_answer_items=len(answer_items),
            num_tokens=len(self.plan.transcript.token_ids) + len(token_ids),
            token_ids=token_ids,
            closed=self.plan.encoder.ends_turn(answer.token_ids),
            awaits_tools=answer.reason == "tool_calls",
            created_at=self._dependencies.clock.now(),
            opening=self.plan.transcript.opening,
        )

    async def until_available(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Calls `ask` until the database answers, for about twenty seconds. Then raises Unavailable."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(Unavailable):
                return await ask()
            await self._dependencies.pause(RETRY_AFTER_S)
        return await ask()

    async def _store(self, generation: Generation, outcome: TurnOutcome) -> tuple[SessionEvent, ...]:
        """Stores how the turn ended, with its usage row. Returns the events for the feed.

        If the database does not answer, tries several times, then raises Unavailable. Can also raise LeaseLost.
        """
        usage, told = generation.usage, self._usage_outcome(outcome)
        row = self.account.row(usage, told)
        claim = self.plan.principal.turn_claim
        events = await self.until_available(lambda: self._dependencies.store.end(self._lease, outcome, row, claim))
        self.account.count(usage, told)
        return events if self._events.error is None else ()

    def _usage_outcome(self, outcome: TurnOutcome) -> UsageOutcome:
        if self.failure is not None:
            return UsageOutcome.of_error(self.failure)
        return UsageOutcome.CANCELLED if outcome.status is TurnStatus.CANCELLED else UsageOutcome.COMPLETED


def _draft(event: PromptAdmitted | OutputEvent) -> EventDraft:
    if isinstance(event, PromptAdmitted):
        return turn_created(cache_body(event.cache))
    if isinstance(event, ReasoningDelta):
        return reasoning_delta(event.text)
    if isinstance(event, TextDelta):
        return output_text_delta(event.text, [token_scores(score) for score in event.logprobs])
    if isinstance(event, ToolCallStarted):
        return tool_call_started(event.call_id, event.name)
    if isinstance(event, ToolCallArgumentsDelta):
        return tool_call_arguments_delta(event.call_id, event.delta)
    return tool_call_done(event.call_id, event.name, event.arguments)


def _expected_ms(hints: ToolHints, name: str) -> float | None:
    return hints[name].expected_ms if name in hints else None


def _answer_items(answer: GenerationFinished, turn_id: TurnId, forms: CallForms) -> tuple[Item, ...]:
    """Returns the items of an answer: its text, then its calls. An answer with only calls has no text item."""
    was_cut = answer.reason == "length"
    says, calls = list[Item](), list[Item]()
    if answer.text or not answer.tool_calls:
        says = [message("assistant", answer.text, incomplete=was_cut, item_id=answer_message_id(turn_id))]
    for call in answer.tool_calls:
        form = forms.get(call.name) or CallForm(call.name)
        calls.append(answer_call(call.call_id, form, call.arguments, incomplete=was_cut and not call.complete))
    return (*says, *calls)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _error_of(task: asyncio.Task[Any]) -> GraftworkError | None:
    """Returns the error with which a task ended early."""
    return None if task.cancelled() else _told(task.exception())


def _told(error: BaseException | None) -> GraftworkError | None:
    """Returns the error that the client gets. An unexpected exception is logged and becomes an internal error."""
    if error is None or isinstance(error, GraftworkError):
        return error
    _log.error("a turn failed", exc_info=error)
    return InternalFailure("The turn failed on our side; the log has it. Send it again.")
