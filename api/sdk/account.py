"""Defines `client.usage`, `client.quota` and `client.timelines`, which read a tenant's own usage, costs, limits and
requests.
"""

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.admin import OwnerQuota
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.timelines import Timeline
from graftwork.platform.answers.usage import Invoice, PriceList, UsageRow

Moment = float | str
"""A time as Unix seconds, or as ISO 8601 text."""


class UsageLedger(Resource[R]):
    """Reads the tenant's usage. Sends `GET /v1/usage`."""

    @operation
    def list(
        self, *, start: Moment | None = None, end: Moment | None = None, group_by: str | None = None
    ) -> Steps[Page[UsageRow]]:
        """Lists usage rows from `start` to `end`. `group_by` is `day`, `adapter`, `session`, `key`, `tier`,
        `price`, `organisation`, `user`, `batch` or `model`.
        """
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


class Timelines(Resource[R]):
    """Reads what the server did when for one request. Sends `GET /v1/requests/{id}/timeline`."""

    @operation
    def get(self, request_id: str) -> Steps[Timeline]:
        """Returns the timeline of one of the tenant's latest requests. `request_id` may also be the id of a turn."""
        return (yield from self._read(Timeline, Call("GET", f"/v1/requests/{path_segment(request_id)}/timeline")))


class OwnQuota(Resource[R]):
    """Reads the tenant's limits, and what it uses of them. Sends `GET /v1/quota`."""

    @operation
    def get(self) -> Steps[OwnerQuota]:
        return (yield from self._read(OwnerQuota, Call("GET", "/v1/quota")))
