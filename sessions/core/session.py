"""A session as it stands, and what may happen to it next.

                   turn                     answered without calls
        idle ───────────────► running ───────────────► idle
         ▲                     │  ▲   answered with calls
         │ failed, cancelled:  │  │  ┌──────────────► awaiting_tool
         └─ back to what the ──┘  └──┘                     │
            head says              last missing output ◄───┘
        idle, awaiting_tool ── suspend ─► suspended ── turn, tool outputs ─► as if it had not been
        any but running ── close ─► closed (read-only)
        closed, or at rest and untouched, for as long as it is kept ─► expired (for nobody to see)

Owns the rules of that picture; never stores anything.
Invariant: outside `running` and `closed`, a session awaits tools exactly if its head ends in calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.errors import Conflict
from graftwork.platform.ids import CallId, CheckpointId, SessionId, TenantId, TurnId
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.transcript import Opening, ToolDefinition
from graftwork.sessions.tools.tool_choice import shown_tool


class SessionStatus(StrEnum):
    IDLE = "idle"
    RUNNING = "running"
    AWAITING_TOOL = "awaiting_tool"
    SUSPENDED = "suspended"
    CLOSED = "closed"
    EXPIRED = "expired"
    """Its time is over; of its rows only what forks of it stand on are left."""


class SessionKind(StrEnum):
    """Through which face a session came to be; all of them are sessions."""

    SESSION = "session"
    RESPONSES = "responses"
    """A chain of responses: never listed, never counted, gone with the last response that stands on it."""
    CONVERSATION = "conversation"
    """A conversation of the Responses API: reached by its id, neither listed nor counted among the sessions."""


class TurnStatus(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    AWAITING_TOOL = "awaiting_tool"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What every turn of a session goes by, unless it overrides it; in chat.completions' forms."""

    instructions: str | None = None
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opening(self) -> Opening:
        return Opening(self.instructions, tuple(map(shown_tool, self.tools)))


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """A line of the ledger: a call at the end of a checkpoint, and its answer once there is one."""

    checkpoint_id: CheckpointId
    position: int
    """Among the checkpoint's calls, from 0."""
    call_id: CallId
    name: str
    arguments: str
    output: str | None = None
    turn_id: TurnId | None = None
    """The latest turn that took the answer."""
    deadline_at: float | None = None
    """When whoever started the turn expects the answer at the latest. A note for clients: a later one counts as well."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One reading of a session's row and of the ledger of its head."""

    session_id: SessionId
    tenant_id: TenantId
    status: SessionStatus
    model: ResolvedModel
    settings: SessionSettings
    metadata: Mapping[str, str]
    created_at: float
    updated_at: float
    retention_s: float | None = None
    """Seconds that it stays readable once closed, and open while nothing happens; None for the service's own once
    closed, and for ever while open. 0 keeps nothing once closed, and does not limit how long it is open."""
    head_id: CheckpointId | None = None
    origin_id: CheckpointId | None = None
    """The checkpoint of another session that it was forked at."""
    forked_from: SessionId | None = None
    epoch: int = 0
    """Grows whenever the head, the model or the lease changes hands, so that a plan made before is found out."""
    running_turn_id: TurnId | None = None
    lease_owner: str | None = None
    lease_expires_at: float | None = None
    cancel_requested: bool = False
    last_seq: int = 0
    last_cache: Mapping[str, Any] | None = None
    closed_at: float | None = None
    kind: SessionKind = SessionKind.SESSION
    ledger: tuple[LedgerCall, ...] = ()
    """The calls at the end of the head, in the model's order."""

    @property
    def resting_status(self) -> SessionStatus:
        """What the head says while nothing runs."""
        return SessionStatus.AWAITING_TOOL if self.ledger else SessionStatus.IDLE

    @property
    def awaited_call_ids(self) -> tuple[CallId, ...]:
        """The calls of the head that nobody has answered yet."""
        return tuple(call.call_id for call in self.ledger if call.output is None)

    @property
    def ends_at(self) -> float | None:
        """When its own retention is over; None without one, and while a turn runs, which this never interrupts."""
        if self.retention_s is None or self.status is SessionStatus.RUNNING:
            return None
        if self.closed_at is not None:
            return self.closed_at + self.retention_s
        return self.updated_at + self.retention_s if self.retention_s else None

    def is_over(self, now: float, retention_s: float) -> bool:
        """Whether its time is over, if closed sessions that do not say otherwise are kept for `retention_s`."""
        if self.status is SessionStatus.EXPIRED:
            return True
        ends_at = self.ends_at
        if self.closed_at is not None and self.retention_s is None:
            ends_at = self.closed_at + retention_s
        return ends_at is not None and ends_at <= now

    def check_open(self) -> None:
        """Raises Conflict once the session is closed."""
        if self.status is SessionStatus.CLOSED:
            raise Conflict("The session is closed: it can be read, not changed.", code="session_closed")

    def check_at_rest(self) -> None:
        """Raises Conflict while a turn runs, or once the session is closed."""
        self.check_open()
        if self.status is SessionStatus.RUNNING:
            raise Conflict(
                f"A turn of this session is running, {self.running_turn_id}: wait for its end, or cancel it.",
                code="turn_running",
                details={"turn_id": self.running_turn_id},
            )

    def check_head(self, if_head: str | None) -> None:
        """Raises Conflict unless the head is `if_head`; None asks for nothing."""
        if if_head is not None and if_head != self.head_id:
            raise Conflict(
                f"The session's head is {self.head_id or 'still empty'}, not {if_head}: read its items, then send the "
                "turn with the head of now.",
                param="if_head",
                code="head_moved",
                details={"head": self.head_id},
            )

    def check_takes_turn(self, if_head: str | None) -> None:
        """Raises Conflict unless a user's turn may start here."""
        self.check_at_rest()
        self.check_head(if_head)
        if self.ledger:
            awaited = self.awaited_call_ids or tuple(call.call_id for call in self.ledger)
            raise Conflict(
                f"The session awaits the output of {', '.join(awaited)}: send it to tool_outputs, or rewind.",
                code="awaiting_tool",
                details={"call_ids": list(awaited)},
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, running or ended."""

    turn_id: TurnId
    session_id: SessionId
    status: TurnStatus
    parent_id: CheckpointId | None
    """The head when it started."""
    first_seq: int
    """The number of its first event."""
    input: tuple[Item, ...]
    created_at: float
    checkpoint_id: CheckpointId | None = None
    output: tuple[Item, ...] = ()
    """What the model answered; empty unless the turn was committed."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    finished_at: float | None = None
    made_with: Mapping[str, Any] | None = None
    """See `provenance`; None for turns from before it was noted."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A client's answer to one call."""

    call_id: CallId
    output: str


def new_outputs(stored: Mapping[CallId, str | None], outputs: Sequence[ToolOutput]) -> tuple[ToolOutput, ...]:
    """The outputs that are not stored yet, each once; `stored` has every call that they name, None unanswered.

    Raises Conflict if one differs from what is stored, or from another of the same request.
    """
    fresh: dict[CallId, ToolOutput] = {}
    for given in outputs:
        earlier = fresh.get(given.call_id)
        output = earlier.output if earlier else stored[given.call_id]
        if output is None:
            fresh[given.call_id] = given
        elif output != given.output:
            raise Conflict(
                f"The call {given.call_id} already has another output: an answered call cannot be answered anew.",
                param="outputs",
                code="tool_output_differs",
                details={"call_id": given.call_id},
            )
    return tuple(fresh.values())
