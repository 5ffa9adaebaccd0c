"""Defines `Session`, which starts the turns of one session, runs the tools that the model calls, and forks the session.

Keeps the last state of the session that the server sent, and the number of the last event that the client read.
Never stores the history: a `Session` asks the server for it.
"""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

from graftwork.api.sdk.runs import GoingOn, Rounds, Run, TurnParameters
from graftwork.api.sdk.session_feed import SessionFeed
from graftwork.api.sdk.transport.effects import Call, Connection, RunTools, Steps, deadline_header
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

Input = str | Sequence[Mapping[str, Any]]
MAX_TURNS = 16
"""How many turns one call of `Session.run` may have, unless the caller passes another number."""
_CUT_OFF = frozenset({"turn_interrupted", "shutting_down"})
"""Error codes of turns that ended because the server stopped. The client can start such a turn again."""


EventStream = Stream[SessionEvent] | AsyncStream[SessionEvent]
TurnAnswer = Turn | Coroutine[Any, Any, Turn] | EventStream


class Session(Resource[R]):
    """One session on the server. `client.sessions` creates it. Sends requests to `/v1/sessions/{id}`."""

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
        """The id of the session's latest checkpoint, which is the state of the history after the last turn.

        It is None if the session has no turns. The next turn continues from this checkpoint.
        """
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
    def turn(self, input: Input, *, stream: bool = False, **options: Unpack[TurnParameters]) -> TurnAnswer:
        """Starts a turn with a text or a list of items, and returns the finished turn.

        With `stream=True`, returns a stream of the turn's events.
        """
        call = self._turn_call(input, stream, options)
        return self._stream(call) if stream else self._runtime.run(self._turn(call))

    @overload
    def tool_outputs(
        self: "Session[SyncRuntime]",
        outputs: Sequence[ToolOutput],
        *,
        stream: Literal[True],
        **options: Unpack[GoingOn],
    ) -> Stream[SessionEvent]: ...
    @overload
    def tool_outputs(
        self: "Session[SyncRuntime]",
        outputs: Sequence[ToolOutput],
        *,
        stream: Literal[False] = False,
        **options: Unpack[GoingOn],
    ) -> Turn: ...
    @overload
    def tool_outputs(
        self: "Session[AsyncRuntime]",
        outputs: Sequence[ToolOutput],
        *,
        stream: Literal[True],
        **options: Unpack[GoingOn],
    ) -> AsyncStream[SessionEvent]: ...
    @overload
    async def tool_outputs(
        self: "Session[AsyncRuntime]",
        outputs: Sequence[ToolOutput],
        *,
        stream: Literal[False] = False,
        **options: Unpack[GoingOn],
    ) -> Turn: ...
    def tool_outputs(
        self, outputs: Sequence[ToolOutput], *, stream: bool = False, **options: Unpack[GoingOn]
    ) -> TurnAnswer:
        """Sends outputs for the tool calls of the last turn.

        When every call has an output, the server starts the next turn, with these options. With `stream=True`, returns a
        stream of the next turn's events.
        """
        call = self._tool_outputs_call(outputs, stream, options)
        return self._stream(call) if stream else self._runtime.run(self._turn(call))

    @overload
    def events(self: "Session[SyncRuntime]", *, after: int = 0) -> Stream[SessionEvent]: ...
    @overload
    def events(self: "Session[AsyncRuntime]", *, after: int = 0) -> AsyncStream[SessionEvent]: ...
    def events(self, *, after: int = 0) -> EventStream:
        """Returns a stream of the session's events with numbers above `after`.

        First come the stored events, and then the events of the running turn.
        """
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
        """Starts a turn, and runs the tools that the model calls, until the model answers without a tool call.

        `tools` maps names to plain or async functions, which get the arguments as keywords. The calls of one turn run
        at the same time, each for at most `tool_timeout` seconds. If a call fails, takes too long or has an unknown
        name, the model gets the error as the call's output.
        Raises ToolLoopError after `max_turns` turns, and TurnFailedError if a turn fails or is cancelled.
        """
        rounds = Rounds(tools, tool_timeout, max_turns, _going_on(options))
        turns = [(yield from self._kept_turn(self._turn_call(input, False, options)))]
        return (yield from self._run(turns, rounds))

    @operation
    def resume(
        self,
        *,
        tools: Tools,
        tool_timeout: ToolTimeout = TOOL_TIMEOUT_S,
        max_turns: int = MAX_TURNS,
        **options: Unpack[GoingOn],
    ) -> Steps[Run]:
        """Continues a session whose last turn called tools, for example after this program crashed.

        Runs the tool calls that have no output yet, and then continues like `run`.
        If every call has an output, but the turn after them was refused or failed, sends the stored outputs again.
        If the last turn called no tools, returns a `Run` without turns.
        """
        given = yield from self._given_outputs()
        if given.tool_calls:
            outputs = yield RunTools(given.tool_calls, tools, tool_timeout)
        elif given.outputs:
            outputs = [ToolOutput(stored.call_id, stored.output) for stored in given.outputs]
        else:
            return Run(())
        turns = [(yield from self._kept_turn(self._tool_outputs_call(outputs, False, options)))]
        return (yield from self._run(turns, Rounds(tools, tool_timeout, max_turns, options)))

    @operation
    def open_calls(self) -> Steps[tuple[PendingCall, ...]]:
        """Asks the server for the session's tool calls that still need outputs, and returns them."""
        return (yield from self._given_outputs()).tool_calls

    @operation
    def given_outputs(self) -> Steps[GivenOutputs]:
        """Asks the server for the outputs that it has stored for the session's last tool calls.

        The result also has the tool calls that still need outputs.
        """
        return (yield from self._given_outputs())

    @operation
    def fork(self, *, at: str | None = None, count: int = 1) -> "Steps[list[Session[R]]]":
        """Creates `count` sessions that share this session's history up to the checkpoint `at`.

        By default `at` is the latest checkpoint.
        """
        body: dict[str, Any] = {"count": count} | ({"at": at} if at is not None else {})
        answer = yield from self._json(self._post("/fork", body, creates=True))
        return [Session(self._runtime, SessionState.read(state)) for state in answer["data"]]

    @operation
    def rewind(self, to: str) -> Steps[SessionState]:
        """Moves the session back to the checkpoint `to`. The next turn continues from that checkpoint."""
        return (yield from self._update(self._post("/rewind", {"to": to})))

    @operation
    def cancel(self) -> Steps[SessionState]:
        """Cancels the running turn. Does nothing if no turn runs."""
        return (yield from self._update(self._post("/cancel", {})))

    @operation
    def change(self, *, model: str | None = None, metadata: Mapping[str, str] | None = None) -> Steps[SessionState]:
        """Moves the session to another adapter version, replaces the session's metadata, or both.

        A new adapter version drops the session's cached KV.
        """
        given = {"model": model, "metadata": metadata}
        body = {name: value for name, value in given.items() if value is not None}
        return (yield from self._update(Call("PATCH", self._path, json=body)))

    @operation
    def suspend(self) -> Steps[SessionState]:
        """Suspends the session, so that its cached KV leaves the device.

        The next turn or tool output resumes the session.
        """
        return (yield from self._update(self._post("/suspend", {})))

    @operation
    def prefetch(self) -> Steps[Mapping[str, Any]]:
        """Loads the session's cached KV to the device. Call this method shortly before the next turn."""
        return (yield from self._json(self._post("/prefetch", {})))

    @operation
    def refresh(self) -> Steps[SessionState]:
        """Reads the session's current state from the server."""
        return (yield from self._refresh())

    @operation
    def close(self) -> Steps[SessionState]:
        """Closes the session. You can still read it until its retention ends."""
        return (yield from self._update(Call("DELETE", self._path)))

    @operation
    def items(
        self, *, limit: int | None = None, after: str | None = None, order: str | None = None
    ) -> Steps[Page[Item]]:
        """Lists the items of the session's history, up to its latest checkpoint."""
        query = {"limit": limit, "after": after, "order": order}
        return (yield from self._page(Item, Call("GET", f"{self._path}/items", query=query)))

    @operation
    def cache(self) -> Steps[SessionCache]:
        """Returns how many tokens of the session's history are in each cache tier.

        The tiers are device memory, host memory and disk.
        """
        return (yield from self._read(SessionCache, Call("GET", f"{self._path}/cache")))

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{path_segment(self.id)}"

    def _post(self, action: str, body: Mapping[str, Any], *, creates: bool = False) -> Call:
        return Call("POST", self._path + action, json=body, creates=creates)

    def _turn_call(self, input: Input, stream: bool, options: TurnParameters) -> Call:
        said = input if isinstance(input, str) else list(input)
        headers = deadline_header(options.pop("deadline_ms", None))
        call = self._post("/turns", {"input": said, "stream": stream, **options}, creates=True)
        return replace(call, headers=headers)

    def _tool_outputs_call(self, outputs: Sequence[ToolOutput], stream: bool, options: GoingOn) -> Call:
        body: dict[str, Any] = {"outputs": [output.body() for output in outputs], "stream": stream}
        return self._post("/tool_outputs", body | options)

    def _turn(self, call: Call) -> Steps[Turn]:
        turn = yield from self._read(Turn, call)
        self._last_seq = None  # the client did not see the turn's events
        if turn.status in ("completed", "awaiting_tool"):  # other ends do not change the session
            status = "idle" if turn.status == "completed" else turn.status
            self.state = self._state_with(status, turn.checkpoint_id)
        return turn

    def _kept_turn(self, call: Call) -> Steps[Turn]:
        """Starts a turn. If the server stopped during the turn, starts the turn again."""
        for _ in range(self._runtime.policy.max_retries):
            turn = yield from self._turn(call)
            if turn.error is None or turn.error.get("code") not in _CUT_OFF:
                return turn
        return (yield from self._turn(call))

    def _run(self, turns: list[Turn], rounds: "Rounds") -> Steps[Run]:
        while turns[-1].status == "awaiting_tool":
            if len(turns) >= rounds.max_turns:
                raise ToolLoopError(
                    f"The model still called tools in turn {rounds.max_turns}, the last allowed.", turns
                )
            outputs = yield RunTools(turns[-1].tool_calls, rounds.tools, rounds.tool_timeout)
            turns.append((yield from self._kept_turn(self._tool_outputs_call(outputs, False, rounds.options))))
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
        """Updates `state` from the call's answer. Keeps the old value of each field that the answer lacks."""
        answer = yield from self._json(call)
        self.state = SessionState.read({**self.state.raw, "head": self.head, **answer})
        return self.state

    def _stream(self, call: Call) -> EventStream:
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
        """Returns a copy of the state with this status. `head` replaces the head, unless it is None."""
        return self.state.model_copy(update={"status": status, "head": head or self.head})


def _going_on(options: TurnParameters) -> GoingOn:
    """Returns the options of a turn that hold for the turns after its tool calls too."""
    kept: GoingOn = {}
    if "service_tier" in options:
        kept["service_tier"] = options["service_tier"]
    if "user" in options:
        kept["user"] = options["user"]
    return kept
