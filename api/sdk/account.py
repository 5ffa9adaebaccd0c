"""Defines `client.usage`, `client.quota` and `client.overview`, which read a tenant's own usage, costs, limits and
activity.
"""

from typing import TypedDict, Unpack

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation
from graftwork.platform.answers.admin import Quota
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.overview import Overview
from graftwork.platform.answers.usage import Invoice, PriceList, UsageRow

Moment = float | str
"""A time as Unix seconds, or as ISO 8601 text."""


class UsageLedger(Resource[R]):
    """Reads the tenant's usage. Sends `GET /v1/usage`."""

    @operation
    def list(
        self, *, start: Moment | None = None, end: Moment | None = None, group_by: str | None = None
    ) -> Steps[Page[UsageRow]]:
        """Lists usage rows from `start` to `end`. `group_by` is `day`, `adapter`, `session`, `key`, `tier` or `price`."""
        query = {"from": start, "to": end, "group_by": group_by}
        return (yield from self._page(UsageRow, Call("GET", "/v1/usage", query=query)))

    @operation
    def invoice(self, month: str) -> Steps[Invoice]:
        """Reads the tenant's invoice of a month in UTC, such as `2026-11`."""
        return (yield from self._read(Invoice, Call("GET", "/v1/usage/invoice", query={"month": month})))

    @operation
    def prices(self) -> Steps[Page[PriceList]]:
        """Lists the prices of requests that the tenant sends now."""
        return (yield from self._page(PriceList, Call("GET", "/v1/prices")))


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
