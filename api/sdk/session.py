"""One session: start turns, run the tools that the model calls, fork and rewind.

`Session` remembers the last state that the server answered, and the last event that it saw. It asks the server for
everything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

from graftwork.api.sdk.session_feed import SessionFeed
from graftwork.api.sdk.transport.effects import Call, Connection, RunTools, Steps
from graftwork.api.sdk.transport.errors import ToolLoopError, TurnFailedError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, SyncRuntime
from graftwork.api.sdk.transport.streams import AsyncStream, Stream, start_stream
from graftwork.api.sdk.transport.tools import TOOL_TIMEOUT_S, ToolOutput, Tools, ToolTimeout
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.session_events import SessionEvent, TurnAwaitingTool, TurnCompleted
from graftwork.platform.answers.sessions import (
    GivenOutputs,
    Item,
    PendingCall,
    PinnedModel,
    SessionCache,
    SessionState,
    Turn,
)
from graftwork.platform.answers.usage import Usage

Input = str | Sequence[Mapping[str, Any]]
MAX_TURNS = 16
"""Of one `run`."""
_CUT_OFF = frozenset({"turn_interrupted", "shutting_down"})
"""Codes of turns that a stop of the server interrupted. They can be started again."""


class TurnParameters(TypedDict, total=False):
    """The options of one turn. They do not change the session."""

    if_head: str
    """Raise ConflictError unless the session's head is this checkpoint."""
    tool_hints: dict[str, dict[str, Any]]
    """`{name: {"expected_ms": 800}}`: how long the session's cache should be kept warm for."""
    tool_choice: str | dict[str, Any]
    response_format: dict[str, Any]
    sampling: dict[str, Any]
    cancel_on_disconnect: bool
    """Cancel the turn when this connection breaks. By default it continues."""


@dataclass(frozen=True, slots=True)
class Run:
    """The turns of one `run`. The last turn has the answer. A `resume` without open calls has no turns."""

    turns: tuple[Turn, ...]

    @property
    def turn(self) -> Turn:
        return self.turns[-1]

    @property
    def text(self) -> str:
        return self.turn.text if self.turns else ""

    @property
    def usages(self) -> tuple[Usage, ...]:
        return tuple(turn.usage for turn in self.turns if turn.usage is not None)


class Session(Resource[R]):
    """`/v1/sessions/{id}`. Made by `client.sessions`."""

    def __init__(self, runtime: R, state: SessionState) -> None:
        super().__init__(runtime)
        self.state = state
        self._last_seq: int | None = state.last_seq

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.state.status} model={self.model.name!r} head={self.head}>"

    @property
    def id(self) -> str:
        return self.state.id

    @property
    def status(self) -> str:
        return self.state.status

    @property
    def model(self) -> PinnedModel:
        return self.state.model

    @property
    def head(self) -> str | None:
        """The checkpoint that the next turn continues."""
        return self.state.head

    @overload
    def turn(
        self: "Session[SyncRuntime]", input: Input, *, stream: Literal[True], **options: Unpack[TurnParameters]
    ) -> Stream[SessionEvent]: ...
    @overload
    def turn(
        self: "Session[SyncRuntime]", input: Input, *, stream: Literal[False] = False, **options: Unpack[TurnParameters]
    ) -> Turn: ...
    @overload
    def turn(
        self: "Session[AsyncRuntime]", input: Input, *, stream: Literal[True], **options: Unpack[TurnParameters]
    ) -> AsyncStream[SessionEvent]: ...
    @overload
    async def turn(
        self: "Session[AsyncRuntime]",
        input: Input,
        *,
        stream: Literal[False] = False,
        **options: Unpack[TurnParameters],
    ) -> Turn: ...
    def turn(self, input: Input, *, stream: bool = False, **options: Unpack[TurnParameters]) -> Any:
        """Start a turn with a text or a list of items. With `stream=True`, iterate over its typed events."""
        call = self._turn_call(input, stream, options)
        return self._stream(call) if stream else self._runtime.run(self._turn(call))

    @overload
    def tool_outputs(
        self: "Session[SyncRuntime]", outputs: Sequence[ToolOutput], *, stream: Literal[True]
    ) -> Stream[SessionEvent]: ...
    @overload
    def tool_outputs(
        self: "Session[SyncRuntime]", outputs: Sequence[ToolOutput], *, stream: Literal[False] = False
    ) -> Turn: ...
    @overload
    def tool_outputs(
        self: "Session[AsyncRuntime]", outputs: Sequence[ToolOutput], *, stream: Literal[True]
    ) -> AsyncStream[SessionEvent]: ...
    @overload
    async def tool_outputs(
        self: "Session[AsyncRuntime]", outputs: Sequence[ToolOutput], *, stream: Literal[False] = False
    ) -> Turn: ...
    def tool_outputs(self, outputs: Sequence[ToolOutput], *, stream: bool = False) -> Any:
        """Send outputs of the last turn's calls. The last missing output starts the next turn."""
        call = self._tool_outputs_call(outputs, stream)
        return self._stream(call) if stream else self._runtime.run(self._turn(call))

    @overload
    def events(self: "Session[SyncRuntime]", *, after: int = 0) -> Stream[SessionEvent]: ...
    @overload
    def events(self: "Session[AsyncRuntime]", *, after: int = 0) -> AsyncStream[SessionEvent]: ...
    def events(self, *, after: int = 0) -> Any:
        """Iterate over the stored events after `after`, then over the running turn's events until it ends."""
        connection = Connection()
        feed = self._feed(connection, after, ends_with_turn=False)
        return start_stream(self._runtime, feed.read(feed.replay_call(after)), connection)

    @operation
    def run(
        self,
        input: Input,
        *,
        tools: Tools,
        tool_timeout: ToolTimeout = TOOL_TIMEOUT_S,
        max_turns: int = MAX_TURNS,
        **options: Unpack[TurnParameters],
    ) -> Steps[Run]:
        """Start a turn, and run the tools that the model calls until there is an answer.

        `tools` maps names to functions, plain or async, which get the arguments as keywords. The calls of one turn run
        at the same time, each for `tool_timeout` seconds at most. The model is told about failures, timeouts and
        unknown names. A turn that a restart of the server interrupted is started again.
        Raises ToolLoopError after `max_turns` turns, and TurnFailedError if a turn fails.
        """
        turns = [(yield from self._kept_turn(self._turn_call(input, False, options)))]
        return (yield from self._run(turns, tools, tool_timeout, max_turns))

    @operation
    def resume(
        self, *, tools: Tools, tool_timeout: ToolTimeout = TOOL_TIMEOUT_S, max_turns: int = MAX_TURNS
    ) -> Steps[Run]:
        """Continue a session whose tool calls have no outputs, for example after a crash of this program.

        Runs the open calls, then continues like `run`. If all outputs are stored but their turn was refused or failed,
        they are sent again. Without open calls and stored outputs, the run has no turns.
        """
        given = yield from self._given_outputs()
        if given.tool_calls:
            outputs = yield RunTools(given.tool_calls, tools, tool_timeout)
        elif given.outputs:
            outputs = [ToolOutput(stored.call_id, stored.output) for stored in given.outputs]
        else:
            return Run(())
        turns = [(yield from self._kept_turn(self._tool_outputs_call(outputs, False)))]
        return (yield from self._run(turns, tools, tool_timeout, max_turns))

    @operation
    def open_calls(self) -> Steps[tuple[PendingCall, ...]]:
        """Ask the server for the calls that wait for outputs."""
        return (yield from self._given_outputs()).tool_calls

    @operation
    def given_outputs(self) -> Steps[GivenOutputs]:
        """Ask the server for the outputs that it has, and for the calls that still wait."""
        return (yield from self._given_outputs())

    @operation
    def fork(self, *, at: str | None = None, count: int = 1) -> "Steps[list[Session[R]]]":
        """Create sessions that share this history up to the checkpoint `at`, by default the head."""
        body: dict[str, Any] = {"count": count} | ({"at": at} if at is not None else {})
        answer = yield from self._json(self._post("/fork", body, creates=True))
        return [Session(self._runtime, SessionState.read(state)) for state in answer["data"]]

    @operation
    def rewind(self, to: str) -> Steps[SessionState]:
        """Move the head back to a checkpoint. The next turn continues from there."""
        return (yield from self._update(self._post("/rewind", {"to": to})))

    @operation
    def cancel(self) -> Steps[SessionState]:
        """Cancel the running turn."""
        return (yield from self._update(self._post("/cancel", {})))

    @operation
    def change(self, *, model: str | None = None, metadata: Mapping[str, str] | None = None) -> Steps[SessionState]:
        """Move to another adapter version, which gives up the cache, or replace the metadata."""
        given = {"model": model, "metadata": metadata}
        body = {name: value for name, value in given.items() if value is not None}
        return (yield from self._update(Call("PATCH", self._path, json=body)))

    @operation
    def suspend(self) -> Steps[SessionState]:
        """Suspend the session, so that its cache can be freed. The next turn or tool output resumes it."""
        return (yield from self._update(self._post("/suspend", {})))

    @operation
    def prefetch(self) -> Steps[Mapping[str, Any]]:
        """Load the session's cache to the device, because the next turn is near."""
        return (yield from self._json(self._post("/prefetch", {})))

    @operation
    def refresh(self) -> Steps[SessionState]:
        """Ask the server for the session's current state."""
        return (yield from self._refresh())

    @operation
    def close(self) -> Steps[SessionState]:
        """Close the session. It stays readable until its retention ends."""
        return (yield from self._update(Call("DELETE", self._path)))

    @operation
    def items(
        self, *, limit: int | None = None, after: str | None = None, order: str | None = None
    ) -> Steps[Page[Item]]:
        """List the items of the history, up to the head."""
        query = {"limit": limit, "after": after, "order": order}
        return (yield from self._page(Item, Call("GET", f"{self._path}/items", query=query)))

    @operation
    def cache(self) -> Steps[SessionCache]:
        """Ask where the session's history is cached."""
        return (yield from self._read(SessionCache, Call("GET", f"{self._path}/cache")))

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{path_segment(self.id)}"

    def _post(self, action: str, body: Mapping[str, Any], *, creates: bool = False) -> Call:
        return Call("POST", self._path + action, json=body, creates=creates)

    def _turn_call(self, input: Input, stream: bool, options: TurnParameters) -> Call:
        said = input if isinstance(input, str) else list(input)
        return self._post("/turns", {"input": said, "stream": stream, **options}, creates=True)

    def _tool_outputs_call(self, outputs: Sequence[ToolOutput], stream: bool) -> Call:
        return self._post("/tool_outputs", {"outputs": [output.body() for output in outputs], "stream": stream})

    def _turn(self, call: Call) -> Steps[Turn]:
        turn = yield from self._read(Turn, call)
        self._last_seq = None  # its events went by unseen
        if turn.status in ("completed", "awaiting_tool"):  # every other end leaves the session as it was
            status = "idle" if turn.status == "completed" else turn.status
            self.state = self._state_with(status, turn.checkpoint_id)
        return turn

    def _kept_turn(self, call: Call) -> Steps[Turn]:
        """Start a turn, and start it again if a restart of the server interrupted it."""
        for _ in range(self._runtime.policy.max_retries):
            turn = yield from self._turn(call)
            if turn.error is None or turn.error.get("code") not in _CUT_OFF:
                return turn
        return (yield from self._turn(call))

    def _run(self, turns: list[Turn], tools: Tools, timeout: ToolTimeout, max_turns: int) -> Steps[Run]:
        while turns[-1].status == "awaiting_tool":
            if len(turns) >= max_turns:
                raise ToolLoopError(f"The model still called tools in turn {max_turns}, the last allowed.", turns)
            outputs = yield RunTools(turns[-1].tool_calls, tools, timeout)
            turns.append((yield from self._kept_turn(self._tool_outputs_call(outputs, False))))
        if turns[-1].status != "completed":
            reason = "no reason was given" if turns[-1].error is None else turns[-1].error.get("message")
            raise TurnFailedError(f"The turn ended as {turns[-1].status}: {reason}", turns[-1])
        return Run(tuple(turns))

    def _given_outputs(self) -> Steps[GivenOutputs]:
        given = yield from self._read(GivenOutputs, Call("GET", f"{self._path}/tool_outputs"))
        self.state = self._state_with(given.status, None)
        return given

    def _refresh(self) -> Steps[SessionState]:
        return (yield from self._update(Call("GET", self._path)))

    def _update(self, call: Call) -> Steps[SessionState]:
        """Read an answer into `state`. Fields that the answer lacks stay as they were."""
        answer = yield from self._json(call)
        self.state = SessionState.read({**self.state.raw, "head": self.head, **answer})
        return self.state

    def _stream(self, call: Call) -> Any:
        connection = Connection()
        feed = self._feed(connection, self._last_seq, ends_with_turn=True)
        return start_stream(self._runtime, feed.read(call), connection)

    def _feed(self, connection: Connection, last_seq: int | None, *, ends_with_turn: bool) -> SessionFeed:
        path = f"{self._path}/events"
        return SessionFeed(path, self._runtime.policy, connection, last_seq, ends_with_turn, self._observe)

    def _observe(self, event: SessionEvent) -> None:
        self._last_seq = max(event.seq, self._last_seq or 0)
        if isinstance(event, TurnCompleted | TurnAwaitingTool):
            status = "idle" if isinstance(event, TurnCompleted) else "awaiting_tool"
            self.state = self._state_with(status, event.checkpoint_id)

    def _state_with(self, status: str, head: str | None) -> SessionState:
        """The last known state with another status, and with a new head unless that is None."""
        return self.state.model_copy(update={"status": status, "head": head or self.head})
