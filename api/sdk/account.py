"""Defines `client.usage` and `client.quota`, which read a tenant's own usage and limits."""

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation
from graftwork.platform.answers.admin import Quota
from graftwork.platform.answers.base import Page
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


class OwnQuota(Resource[R]):
    """Reads the tenant's limits. Sends `GET /v1/quota`."""

    @operation
    def get(self) -> Steps[Quota]:
        return (yield from self._read(Quota, Call("GET", "/v1/quota")))
