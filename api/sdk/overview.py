"""Defines `client.overview`, which reads what a tenant does now, and the stream of overviews that operators read too.

A stream never reconnects by itself: it ends when the server stops, and raises an error when the connection breaks.
"""

import json
from typing import Any, TypedDict, Unpack, overload

from graftwork.api.sdk.transport.effects import Call, Connection, Emit, Opened, ReadStream, Steps
from graftwork.api.sdk.transport.errors import error_from_description
from graftwork.api.sdk.transport.operation import R, Resource, operation
from graftwork.api.sdk.transport.retries import RetryPolicy, open_stream
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, Runtime, SyncRuntime
from graftwork.api.sdk.transport.sse import FrameParser
from graftwork.api.sdk.transport.streams import AsyncStream, Stream, start_stream
from graftwork.platform.answers.overview import Overview


class OverviewQuery(TypedDict, total=False):
    """What an overview shows."""

    sort: str
    """The order of tenants and adapters, such as `activity`, `tokens` or `ttft`."""
    rows: int
    """The most rows of each list, 1 to 200."""
    adapters: int
    """How many rows of the list of adapters are left out at its beginning."""
    sessions: int
    find: str
    """Only rows whose name or id has this text."""


class ServerOverviewQuery(OverviewQuery, total=False):
    """What an overview of the whole server shows."""

    tenants: int
    """How many rows of the list of tenants are left out at its beginning."""
    tenant_id: str
    """Only this tenant."""


class OwnOverview(Resource[R]):
    """Reads snapshots of what the tenant does now. Sends `GET /v1/overview`."""

    @operation
    def get(self, **query: Unpack[OverviewQuery]) -> Steps[Overview]:
        return (yield from self._read(Overview, Call("GET", "/v1/overview", query=dict(query))))

    @overload
    def watch(self: "OwnOverview[SyncRuntime]", **query: Unpack[OverviewQuery]) -> Stream[Overview]: ...
    @overload
    def watch(self: "OwnOverview[AsyncRuntime]", **query: Unpack[OverviewQuery]) -> AsyncStream[Overview]: ...
    def watch(self, **query: Unpack[OverviewQuery]) -> Stream[Overview] | AsyncStream[Overview]:
        """Yields a snapshot at once, and one a second while something changes."""
        return follow_overview(self._runtime, Call("GET", "/v1/overview", query={**query, "stream": "true"}))


def follow_overview(runtime: Runtime, call: Call) -> Stream[Any] | AsyncStream[Any]:
    """Returns a stream of `Overview`.

    While it is read, raises the server's error if the key loses its access, and APIConnectionError if the connection
    breaks.
    """
    connection = Connection()
    return start_stream(runtime, _snapshots(call, connection, runtime.policy), connection)


def _snapshots(call: Call, connection: Connection, policy: RetryPolicy) -> Steps[None]:
    yield from open_stream(call, connection, policy)
    yield Opened()
    parser = FrameParser()
    while (chunk := (yield ReadStream(connection))) is not None:
        for frame in parser.feed(chunk):
            if frame.event == "error":
                body = json.loads(frame.data)
                raise error_from_description(body.get("error", body), None)
            if frame.event == "overview":
                yield Emit(Overview.read(json.loads(frame.data)))
