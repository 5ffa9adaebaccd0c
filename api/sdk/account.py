"""Defines `client.usage`, `client.quota` and `client.overview`, which read a tenant's own usage, limits and activity."""

from typing import TypedDict, Unpack

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.admin import Quota
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.overview import Overview
from graftwork.platform.answers.timelines import Timeline
from graftwork.platform.answers.usage import UsageRow

Moment = float | str
"""A time as Unix seconds, or as ISO 8601 text."""


class UsageLedger(Resource[R]):
    """Reads the tenant's usage. Sends `GET /v1/usage`."""

    @operation
    def list(
        self, *, start: Moment | None = None, end: Moment | None = None, group_by: str | None = None
    ) -> Steps[Page[UsageRow]]:
        """Lists usage rows from `start` to `end`. `group_by` is `day`, `adapter`, `session` or `key`."""
        query = {"from": start, "to": end, "group_by": group_by}
        return (yield from self._page(UsageRow, Call("GET", "/v1/usage", query=query)))


class Timelines(Resource[R]):
    """Reads what the server did when for one request. Sends `GET /v1/requests/{id}/timeline`."""

    @operation
    def get(self, request_id: str) -> Steps[Timeline]:
        """Returns the timeline of one of the tenant's latest requests. `request_id` may also be the id of a turn."""
        return (yield from self._read(Timeline, Call("GET", f"/v1/requests/{path_segment(request_id)}/timeline")))


class OwnQuota(Resource[R]):
    """Reads the tenant's limits. Sends `GET /v1/quota`."""

    @operation
    def get(self) -> Steps[Quota]:
        return (yield from self._read(Quota, Call("GET", "/v1/quota")))


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


class OwnOverview(Resource[R]):
    """Reads a snapshot of what the tenant does now. Sends `GET /v1/overview`."""

    @operation
    def get(self, **query: Unpack[OverviewQuery]) -> Steps[Overview]:
        return (yield from self._read(Overview, Call("GET", "/v1/overview", query=dict(query))))
