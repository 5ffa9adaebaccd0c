"""Defines `client.sessions`, which creates, finds and lists sessions."""

from typing import Any, TypedDict, Unpack

from graftwork.api.sdk.session import Session
from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.sessions import SessionState


class SessionParameters(TypedDict, total=False):
    """The parameters of a new session. `tools` and `sampling` have the same form as in chat completions."""

    instructions: str
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any]
    sampling: dict[str, Any]
    metadata: dict[str, Any]
    retention: dict[str, Any]
    """How long the server keeps the session, in seconds, as in `{"ttl_s": 86400}`.

    The time starts at the last change of an open session, and at the close of a closed session.
    """
    user: str
    """An id of the end user for whom the session is made, in whose limit of sessions it counts."""


class Sessions(Resource[R]):
    """Creates, finds and lists sessions. Sends requests to `/v1/sessions`."""

    @operation
    def create(self, *, model: str, **parameters: Unpack[SessionParameters]) -> Steps[Session[R]]:
        """Creates a session. The session keeps the adapter version to which `model` points now."""
        call = Call("POST", "/v1/sessions", json={"model": model, **parameters}, creates=True)
        return Session(self._runtime, (yield from self._read(SessionState, call)))

    @operation
    def get(self, session_id: str) -> Steps[Session[R]]:
        """Gets an existing session."""
        state = yield from self._read(SessionState, Call("GET", f"/v1/sessions/{path_segment(session_id)}"))
        return Session(self._runtime, state)

    @operation
    def list(
        self, *, limit: int | None = None, after: str | None = None, order: str | None = None
    ) -> Steps[Page[SessionState]]:
        query = {"limit": limit, "after": after, "order": order}
        return (yield from self._page(SessionState, Call("GET", "/v1/sessions", query=query)))
