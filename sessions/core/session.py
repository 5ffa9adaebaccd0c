"""Defines the state of a session, and the rules for its changes. Never stores anything.

    status                    what happens                                new status
    idle                      a user's turn starts                        running
    awaiting_tool             the last missing tool output arrives        running
    running                   the model answers without tool calls        idle
    running                   the model answers with tool calls           awaiting_tool
    running                   the turn fails or is cancelled              as before the turn (idle or awaiting_tool)
    idle, awaiting_tool       a client suspends the session               suspended
    suspended                 a turn starts, or a tool output arrives     as from idle or awaiting_tool
    all except running        a client closes the session                 closed (read-only)
    all except running        the time to live has passed                 expired (no client can read it)

Invariant: no session is idle while a tool call at the end of its latest checkpoint has no output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from graftwork.adapters.format.specs import Caller, ResolvedModel
from graftwork.platform.errors import SERVER_FAULT_TYPES, Conflict
from graftwork.platform.ids import CallId, CheckpointId, EndUserId, KeyId, SessionId, TenantId, TurnId, new_id
from graftwork.platform.tenancy.principals import TenantScope
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
    """The session's time to live has passed. Its rows are deleted, except for the rows that it shares with its forks.
"""


class SessionKind(StrEnum):
    """The kind of a session. It says which API created the session: sessions, responses or conversations."""

    SESSION = "session"
    RESPONSES = "responses"
    """An internal session of the Responses API: a chain of responses outside a conversation.

    The session is deleted with its last response. Clients do not see it in lists, and it does not count towards the
    limit of open sessions.
    """
    CONVERSATION = "conversation"
    """A conversation of the Responses API. Clients can read it by its id.

    Clients do not see such a session in lists, and it does not count towards the limit of open sessions.
    """


_ID_PREFIXES = {SessionKind.SESSION: "ses", SessionKind.RESPONSES: "chain", SessionKind.CONVERSATION: "conv"}


def new_session_id(kind: SessionKind) -> SessionId:
    """Returns a new session id. Its prefix shows the kind: `ses` (session), `chain` (responses) or `conv`."""
    return SessionId(new_id(_ID_PREFIXES[kind]))


class TurnStatus(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    AWAITING_TOOL = "awaiting_tool"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ModelResolver(Protocol):
    """The interface of the adapter registry: it finds adapter versions by name. It has only what sessions use."""

    async def resolve(
        self, scope: TenantScope, model: str, base_name: str, caller: Caller, *, pinned: ResolvedModel | None = None
    ) -> ResolvedModel:
        """Finds the adapter version to which `model` refers now for this caller. `pinned` is what the caller used last.

        Raises NotFound if no model or adapter has this name.
        """


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings for the turns of a session, in the shapes of OpenAI's chat completions.

    A single turn may use other values for some of these settings.
    """

    instructions: str | None = None
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    num_logprobs: int | None = None
    """How many likely tokens to report beside each token of an answer, from 0; None reports no log-probabilities."""

    truncates_history: bool = False
    """Whether a prompt that does not fit in the context leaves out the oldest items, instead of an error."""
    service_tier: str = "default"
    """The service tier that the client asks for, of `SERVICE_TIERS`. A tenant with a lower ceiling is served there."""

    @property
    def opening(self) -> Opening:
        return Opening(self.instructions, tuple(map(tool_for_prompt, self.tools)))


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """A tool call at the end of a checkpoint, with its output if a client has sent one.

    All such calls of a session's latest checkpoint together are called the ledger of the session.
    """

    checkpoint_id: CheckpointId
    position: int
    """The index of the call among the calls of its checkpoint, from 0."""
    call_id: CallId
    name: str
    arguments: str
    output: str | None = None
    turn_id: TurnId | None = None
    """The latest turn whose prompt contains the output; None if no turn has used it."""
    deadline_at: float | None = None
    """The time until which the client expects to send the output, in Unix seconds. A later output is accepted too."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A session as it was read from the store: its database row, and its ledger.

    The ledger lists the tool calls at the session's head (its latest checkpoint), with their outputs.
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
    """The session's own time to live in seconds.

    While the session is open, this time counts from the last use. After the close, it counts from the close.
    If None, the default of the service applies to the closed session. If 0, the session is over when it is closed. If
    None or 0, an open session has no limit.
    """
    head_id: CheckpointId | None = None
    origin_id: CheckpointId | None = None
    """The checkpoint of another session from which this session was forked; None if this session is not a fork."""
    forked_from: SessionId | None = None
    epoch: int = 0
    """A counter that rises with each change of the head, the model or the lease.

    A turn that was planned with an older epoch is refused.
    """
    running_turn_id: TurnId | None = None
    lease_owner: str | None = None
    lease_expires_at: float | None = None
    cancel_requested: bool = False
    last_seq: int = 0
    last_cache: Mapping[str, Any] | None = None
    closed_at: float | None = None
    kind: SessionKind = SessionKind.SESSION
    key_id: KeyId | None = None
    """The API key in whose limit of sessions it counts: the one that began it, or the first of those that rotations have
    replaced by that one. None for a session of an older version.
    """
    end_user_id: EndUserId | None = None
    """The end user for whom the session was begun; None if the request named none."""
    ledger: tuple[LedgerCall, ...] = ()
    """The tool calls at the end of the latest checkpoint (the head), in the order in which the model made them."""

    @property
    def resting_status(self) -> SessionStatus:
        """The session's status while no turn runs.

        It is awaiting_tool if the latest checkpoint ends with tool calls, and idle otherwise.
        """
        return SessionStatus.AWAITING_TOOL if self.ledger else SessionStatus.IDLE

    @property
    def charged_id(self) -> SessionId | None:
        """The session in the usage rows of its turns. The turn of a response is charged without a session."""
        return None if self.kind is SessionKind.RESPONSES else self.session_id

    @property
    def awaited_call_ids(self) -> tuple[CallId, ...]:
        """The ids of the tool calls at the end of the session's latest checkpoint that have no output yet."""
        return tuple(call.call_id for call in self.ledger if call.output is None)

    @property
    def ends_at(self) -> float | None:
        """The time, in Unix seconds, at which the session's `retention_s` is over.

        It is None while a turn runs. It is also None if `retention_s` is None, or if it is 0 and the session is open.
        """
        if self.retention_s is None or self.status is SessionStatus.RUNNING:
            return None
        if self.closed_at is not None:
            return self.closed_at + self.retention_s
        return self.updated_at + self.retention_s if self.retention_s else None

    def is_over(self, now: float, retention_s: float) -> bool:
        """Returns whether the session's time to live has passed at the time `now`, in Unix seconds.

        `retention_s` is the default time to live in seconds. It applies to a closed session that has no time to live of
        its own.
        """
        if self.status is SessionStatus.EXPIRED:
            return True
        ends_at = self.ends_at
        if self.closed_at is not None and self.retention_s is None:
            ends_at = self.closed_at + retention_s
        return ends_at is not None and ends_at <= now

    def check_open(self) -> None:
        """Raises Conflict if the session is closed."""
        if self.status is SessionStatus.CLOSED:
            raise Conflict("The session is closed: it can be read, not changed.", code="session_closed")

    def check_at_rest(self) -> None:
        """Raises Conflict if a turn of the session runs, or if the session is closed."""
        self.check_open()
        if self.status is SessionStatus.RUNNING:
            raise Conflict(
                f"A turn of this session is running, {self.running_turn_id}: wait for its end, or cancel it.",
                code="turn_running",
                details={"turn_id": self.running_turn_id},
            )

    def check_head(self, if_head: str | None) -> None:
        """Raises Conflict if the id of the session's latest checkpoint (its head) is not `if_head`.

        If `if_head` is None, every checkpoint is accepted.
        """
        if if_head is not None and if_head != self.head_id:
            raise Conflict(
                f"The session's head is {self.head_id or 'still empty'}, not {if_head}: read its items, then send the "
                "turn with the head of now.",
                param="if_head",
                code="head_moved",
                details={"head": self.head_id},
            )

    def check_takes_turn(self, if_head: str | None) -> None:
        """Raises Conflict if a user's turn cannot start now.

        A turn cannot start if another turn runs, if the session is closed, or if the session awaits tool outputs. It
        cannot start either if the id of the session's latest checkpoint is not `if_head`. If `if_head` is None, every
        checkpoint is accepted.
        """
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
    """One turn of a session: the input of the client, and the answer of the model. The turn may still run."""

    turn_id: TurnId
    session_id: SessionId
    status: TurnStatus
    parent_id: CheckpointId | None
    """The session's head (its latest checkpoint) when the turn started; None for the first turn."""
    first_seq: int
    """The number of the turn's first event."""
    input: tuple[Item, ...]
    created_at: float
    checkpoint_id: CheckpointId | None = None
    output: tuple[Item, ...] = ()
    """The items of the model's answer; empty for a turn without a checkpoint."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cache: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    finished_at: float | None = None
    made_with: Mapping[str, Any] | None = None
    """The sampling, the digests of the weights, the chat template and the tokenizer that made the answer, and its tier.

    It is None for turns that an older version of the server stored.
    """
    key_id: KeyId | None = None
    """The API key that started the turn; None for turns that an older version stored, and for given history."""

    @property
    def service_tier(self) -> str | None:
        """The service tier that serves the turn; None for turns that an older version of the server stored."""
        return None if self.made_with is None else self.made_with.get("service_tier")

    @property
    def end_user_id(self) -> EndUserId | None:
        """The end user for whom the turn was started, for the usage row if the turn's process dies."""
        return None if self.made_with is None else self.made_with.get("end_user")

    @property
    def batch_id(self) -> str | None:
        """The batch whose line the turn answers; None for others."""
        return None if self.made_with is None else self.made_with.get("batch")

    @property
    def failed_by_server(self) -> bool:
        """Whether the turn failed through the server's fault, so that the same turn may succeed if it is sent again."""
        return self.error is not None and self.error["type"] in SERVER_FAULT_TYPES


def given_history(
    session: AgentSession, items: Sequence[Item], parent: Checkpoint | None, now: float
) -> tuple[Turn, Checkpoint]:
    """Returns a turn and its checkpoint that add `items` of a client to a session's history, without an answer.

    `parent` is the session's latest checkpoint; None is an empty history. `now` is in Unix seconds. The checkpoint has
    no token ids: the session's next turn encodes the whole history. It awaits the outputs of the session's ledger.
    """
    turn_id, checkpoint_id = TurnId(new_id("turn")), CheckpointId(new_id("ckp"))
    turn = Turn(
        turn_id=turn_id,
        session_id=session.session_id,
        status=TurnStatus.COMPLETED,
        parent_id=None if parent is None else parent.checkpoint_id,
        first_seq=session.last_seq + 1,
        input=tuple(items),
        created_at=now,
        checkpoint_id=checkpoint_id,
        finished_at=now,
    )
    checkpoint = Checkpoint(
        checkpoint_id=checkpoint_id,
        session_id=session.session_id,
        parent_id=None if parent is None else parent.checkpoint_id,
        turn_id=turn_id,
        depth=1 + (0 if parent is None else parent.depth),
        num_items=len(items) + (0 if parent is None else parent.num_items),
        num_answer_items=0,
        num_tokens=0,
        token_ids=(),
        closed=True,
        awaits_tools=bool(session.ledger),
        created_at=now,
        opening=UNENCODED,
    )
    return turn, checkpoint


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of one tool call, as a client sent it."""

    call_id: CallId
    output: str


def new_outputs(stored: Mapping[CallId, str | None], outputs: Sequence[ToolOutput]) -> tuple[ToolOutput, ...]:
    """Returns those of the outputs that are not stored yet, at most one for each tool call.

    `stored` maps the id of each call to its stored output, or to None if the call has no output yet.
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
