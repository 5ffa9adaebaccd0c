"""Defines the events of a session (text, tool calls, the end of a turn), and the feed from which readers get them.

Owns the shapes of events, and the feed of each running turn. Never stores anything: the store saves an event first, and
only then is the event added to the feed.
Invariant: the events of a session are numbered from 1 without gaps. A feed holds only the newest events, in order. A
slow reader reads older events from the store, so no reader can slow down a turn or fill the memory.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from graftwork.platform.ids import CallId, SessionId, TurnId

_FEED_EVENTS = 1024


class EventType(StrEnum):
    TURN_CREATED = "turn.created"
    REASONING_DELTA = "reasoning.delta"
    OUTPUT_TEXT_DELTA = "output_text.delta"
    TOOL_CALL_STARTED = "tool_call.started"
    TOOL_CALL_ARGUMENTS_DELTA = "tool_call.arguments.delta"
    TOOL_CALL_DONE = "tool_call.done"
    TURN_AWAITING_TOOL = "turn.awaiting_tool"
    TURN_COMPLETED = "turn.completed"
    TURN_FAILED = "turn.failed"
    TURN_CANCELLED = "turn.cancelled"


TERMINAL_TYPES = frozenset(
    {EventType.TURN_AWAITING_TOOL, EventType.TURN_COMPLETED, EventType.TURN_FAILED, EventType.TURN_CANCELLED}
)
"""The types of a turn's last event. Each turn has exactly one event of these types."""

_DELTA_TYPES = frozenset({EventType.REASONING_DELTA, EventType.OUTPUT_TEXT_DELTA, EventType.TOOL_CALL_ARGUMENTS_DELTA})


@dataclass(frozen=True, slots=True)
class EventDraft:
    """An event of a turn that is not stored yet, so it has no number."""

    type: EventType
    fields: Mapping[str, Any] = field(default_factory=dict)
    answer_tokens: int | None = None
    """How many tokens of the answer the engine had generated when the event was made. Clients do not see it."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """An event of a session, with its number. The store saves events in this form, and clients get this form."""

    session_id: SessionId
    turn_id: TurnId
    seq: int
    """The number of the event. Each session counts its events from 1."""
    type: EventType
    fields: Mapping[str, Any]
    answer_tokens: int | None = field(default=None, compare=False)
    """See `EventDraft.answer_tokens`. Stored events are read without it."""

    @property
    def is_terminal(self) -> bool:
        return self.type in TERMINAL_TYPES

    def data(self) -> dict[str, Any]:
        """Returns the event's JSON body for clients."""
        head = {"type": self.type.value, "seq": self.seq, "session_id": self.session_id, "turn_id": self.turn_id}
        return {**head, **self.fields}


def turn_created(cache: Mapping[str, Any] | None) -> EventDraft:
    """Returns the draft of the first event of a turn.

    `cache` counts the prompt's tokens by cache tier; it is None if the turn ended before the engine admitted the
    prompt.
    """
    return EventDraft(EventType.TURN_CREATED, {"cache": cache})


def reasoning_delta(delta: str) -> EventDraft:
    """Returns a piece of the model's reasoning before its answer."""
    return EventDraft(EventType.REASONING_DELTA, {"delta": delta})


def output_text_delta(delta: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> EventDraft:
    """Returns a piece of the answer's text, with the log-probabilities of its tokens if the request asked for them."""
    scores = {"logprobs": list(logprobs)} if logprobs else {}
    return EventDraft(EventType.OUTPUT_TEXT_DELTA, {"delta": delta, **scores})


def tool_call_started(call_id: CallId, name: str) -> EventDraft:
    return EventDraft(EventType.TOOL_CALL_STARTED, {"call_id": call_id, "name": name})


def tool_call_arguments_delta(call_id: CallId, delta: str) -> EventDraft:
    return EventDraft(EventType.TOOL_CALL_ARGUMENTS_DELTA, {"call_id": call_id, "delta": delta})


def tool_call_done(call_id: CallId, name: str, arguments: str) -> EventDraft:
    return EventDraft(EventType.TOOL_CALL_DONE, {"call_id": call_id, "name": name, "arguments": arguments})


def number_events(
    drafts: Sequence[EventDraft], session_id: SessionId, turn_id: TurnId, last_seq: int
) -> tuple[SessionEvent, ...]:
    """Returns the drafts of a turn's events as events with numbers.

    The numbers are consecutive, and the last event gets the number `last_seq`.
    """
    first = last_seq - len(drafts) + 1
    return tuple(
        SessionEvent(session_id, turn_id, seq, draft.type, draft.fields, draft.answer_tokens)
        for seq, draft in enumerate(drafts, first)
    )


def add_draft(drafts: list[EventDraft], draft: EventDraft, num_fixed: int = 0) -> None:
    """Appends the event `draft` to the list `drafts`.

    If `draft` and the last draft of the list are pieces (deltas) of the same text or of the same tool call, joins these
    two into one delta.
    Never changes the first `num_fixed` drafts of the list.
    """
    if len(drafts) > num_fixed and _continues(drafts[-1], draft):
        delta = drafts[-1].fields["delta"] + draft.fields["delta"]
        scores = [*drafts[-1].fields.get("logprobs", ()), *draft.fields.get("logprobs", ())]
        joined = {"delta": delta, **({"logprobs": scores} if scores else {})}
        drafts[-1] = replace(draft, fields={**draft.fields, **joined})
    else:
        drafts.append(draft)


def _continues(earlier: EventDraft, later: EventDraft) -> bool:
    same_call = earlier.fields.get("call_id") == later.fields.get("call_id")
    return later.type in _DELTA_TYPES and earlier.type is later.type and same_call


class EventFeed:
    """The newest stored events of one running turn, kept in memory for readers in this process."""

    def __init__(self, last_seq: int, max_events: int = _FEED_EVENTS) -> None:
        self._events: deque[SessionEvent] = deque(maxlen=max_events)
        self.last_seq = last_seq
        """The number of the newest event that was published."""
        self._changed = asyncio.Event()
        self.is_closed = False

    def publish(self, events: Sequence[SessionEvent]) -> None:
        """Adds events that the store has saved, and wakes the readers of the feed.

        The number of the first event must be `self.last_seq` + 1.
        """
        for event in events:
            assert event.seq == self.last_seq + 1
            self._events.append(event)
            self.last_seq = event.seq
        self._wake()

    def close(self) -> None:
        """Marks the turn of this feed as ended, and wakes the readers.

        A reader gets events that the feed no longer holds from the store.
        """
        self.is_closed = True
        self._changed.set()

    def after(self, seq: int) -> tuple[SessionEvent, ...] | None:
        """Returns the events of the feed's turn whose number is above `seq`, in order.

        Returns None if the feed does not hold all of these events, because it holds only the newest ones. The reader
        then reads the events from the store.
        """
        first = self._events[0].seq if self._events else self.last_seq + 1
        if seq + 1 < first:
            return None
        return tuple(islice(self._events, max(0, seq + 1 - first), None))

    def next_change(self) -> asyncio.Event:
        """Returns an asyncio event. The next call of `publish` or `close` sets this asyncio event.

        Call this method before you read the feed. Otherwise you can miss a change.
        """
        return self._changed

    def _wake(self) -> None:
        # Tasks that wait now have the old event. Later tasks get the new one.
        self._changed.set()
        self._changed = asyncio.Event()
