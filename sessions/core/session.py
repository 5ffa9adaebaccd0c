"""Defines the state of a session, and the rules for its changes.

                   turn                     answered without calls
        idle ───────────────► running ───────────────► idle
         ▲                     │  ▲   answered with calls
         │ failed, cancelled:  │  │  ┌──────────────► awaiting_tool
         └─ back to what the ──┘  └──┘                     │
            head says              last missing output ◄───┘
        idle, awaiting_tool ── suspend ─► suspended ── turn, tool outputs ─► as without the suspend
        any but running ── close ─► closed (read-only)
        closed, or unused, for longer than its time to live ─► expired (no client can read it)

Owns these rules. Never stores anything.
Invariant: a session that is neither running nor closed awaits tools exactly if its head ends in calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.platform.errors import Conflict
from graftwork.platform.ids import CallId, CheckpointId, SessionId, TenantId, TurnId, new_id
from graftwork.sessions.core.items import Item
from graftwork.sessions.core.transcript import UNENCODED, Checkpoint, Opening, ToolDefinition
from graftwork.sessions.tools.tool_choice import tool_for_prompt


class SessionStatus(StrEnum):
    IDLE = "idle"
    RUNNING = "running"
    AWAITING_TOOL = "awaiting_tool"
    SUSPENDED = "suspended"
    CLOSED = "closed"
    EXPIRED = "expired"
    """The session is past its time to live. Only the rows that it shares with its forks are left."""


class SessionKind(StrEnum):
    """The API that created a session."""

    SESSION = "session"
    RESPONSES = "responses"
    """A response chain: never listed or counted, and deleted with its last response."""
    CONVERSATION = "conversation"
    """A conversation of the Responses API: clients read it by its id. It is never listed or counted."""


class TurnStatus(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    AWAITING_TOOL = "awaiting_tool"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings of a session's turns, in chat.completions' forms. A turn may override some of them."""

    instructions: str | None = None
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opening(self) -> Opening:
        return Opening(self.instructions, tuple(map(tool_for_prompt, self.tools)))


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """A line of the ledger: a tool call at the end of a checkpoint, and its output when a client has sent it."""

    checkpoint_id: CheckpointId
    position: int
    """The index of the call within its checkpoint, from 0."""
    call_id: CallId
    name: str
    arguments: str
    output: str | None = None
    turn_id: TurnId | None = None
    """The latest turn that used the output."""
    deadline_at: float | None = None
    """The latest time at which the client expects the output, in Unix seconds. A later output is accepted too."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A session as it was read from the store: its row, and its ledger.

    The ledger lists the tool calls at the session's head, with their outputs.
    """

    session_id: SessionId
    tenant_id: TenantId
    status: SessionStatus
    model: ResolvedModel
    settings: SessionSettings
    metadata: Mapping[str, str]
    created_at: float
    updated_at: float
    retention_s: float | None = None
    """Time to live in seconds, counted from the close, or from the last use of an open session.

    None: a closed session has the service's default, and an open session has no limit. 0: a closed session ends at
    once, and an open session has no limit.
    """
    head_id: CheckpointId | None = None
    origin_id: CheckpointId | None = None
    """The checkpoint of another session where this one was forked."""
    forked_from: SessionId | None = None
    epoch: int = 0
    """Rises with each change of the head, the model or the lease, so that a turn planned earlier is refused."""
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
        """The session's status while no turn runs. It depends on the head."""
        return SessionStatus.AWAITING_TOOL if self.ledger else SessionStatus.IDLE

    @property
    def awaited_call_ids(self) -> tuple[CallId, ...]:
        """The calls of the head that have no output yet."""
        return tuple(call.call_id for call in self.ledger if call.output is None)

    @property
    def ends_at(self) -> float | None:
        """The end of the session's own time to live; None if it has none, and while a turn runs."""
        if self.retention_s is None or self.status is SessionStatus.RUNNING:
            return None
        if self.closed_at is not None:
            return self.closed_at + self.retention_s
        return self.updated_at + self.retention_s if self.retention_s else None

    def is_over(self, now: float, retention_s: float) -> bool:
        """Returns whether the session's time to live has passed. `retention_s` is the default for closed sessions."""
        if self.status is SessionStatus.EXPIRED:
            return True
        ends_at = self.ends_at
        if self.closed_at is not None and self.retention_s is None:
            ends_at = self.closed_at + retention_s
        return ends_at is not None and ends_at <= now

    def check_open(self) -> None:
        """Checks that the session is not closed. Raises Conflict if it is."""
        if self.status is SessionStatus.CLOSED:
            raise Conflict("The session is closed: it can be read, not changed.", code="session_closed")

    def check_at_rest(self) -> None:
        """Checks that no turn runs and that the session is not closed. Raises Conflict otherwise."""
        self.check_open()
        if self.status is SessionStatus.RUNNING:
            raise Conflict(
                f"A turn of this session is running, {self.running_turn_id}: wait for its end, or cancel it.",
                code="turn_running",
                details={"turn_id": self.running_turn_id},
            )

    def check_head(self, if_head: str | None) -> None:
        """Checks that the head is `if_head`; None accepts any head. Raises Conflict otherwise."""
        if if_head is not None and if_head != self.head_id:
            raise Conflict(
                f"The session's head is {self.head_id or 'still empty'}, not {if_head}: read its items, then send the "
                "turn with the head of now.",
                param="if_head",
                code="head_moved",
                details={"head": self.head_id},
            )

    def check_takes_turn(self, if_head: str | None) -> None:
        """Checks that a user's turn may start now, on the head `if_head`. Raises Conflict otherwise."""
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
    """The head when the turn started."""
    first_seq: int
    """The number of the turn's first event."""
    input: tuple[Item, ...]
    created_at: float
    checkpoint_id: CheckpointId | None = None
    output: tuple[Item, ...] = ()
    """The model's answer; empty for a turn without a checkpoint."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    finished_at: float | None = None
    made_with: Mapping[str, Any] | None = None
    """Digests of the weights, template and tokenizer, and the sampling. None for turns of older versions."""


def seed_history(session: AgentSession, items: Sequence[Item]) -> tuple[Turn, Checkpoint]:
    """Returns the first turn and checkpoint of a new session that starts with `items`.

    The next turn encodes the items.
    """
    turn_id, checkpoint_id = TurnId(new_id("turn")), CheckpointId(new_id("ckp"))
    turn = Turn(
        turn_id=turn_id,
        session_id=session.session_id,
        status=TurnStatus.COMPLETED,
        parent_id=None,
        first_seq=1,
        input=tuple(items),
        created_at=session.created_at,
        checkpoint_id=checkpoint_id,
        finished_at=session.created_at,
    )
    checkpoint = Checkpoint(
        checkpoint_id=checkpoint_id,
        session_id=session.session_id,
        parent_id=None,
        turn_id=turn_id,
        depth=1,
        num_items=len(items),
        num_answer_items=0,
        num_tokens=0,
        token_ids=(),
        closed=True,
        awaits_tools=False,
        created_at=session.created_at,
        opening=UNENCODED,
    )
    return turn, checkpoint


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of one call, as a client sent it."""

    call_id: CallId
    output: str


def new_outputs(stored: Mapping[CallId, str | None], outputs: Sequence[ToolOutput]) -> tuple[ToolOutput, ...]:
    """Returns the outputs that are not stored yet, each once. `stored` maps each call to its output or to None.

    Raises Conflict if an output differs from the stored output, or from another output for the same call.
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
