"""Defines `client.admin`, which manages tenants, and reads usage, audit entries and replicas.

Keys are in `keys.py`, organisations, limits and webhooks in `limits.py`, people in `people.py`.

Every call sends the admin key.
"""

from collections.abc import Mapping
from typing import Any, Unpack, overload

from graftwork.api.sdk.account import Moment
from graftwork.api.sdk.data_rights import TenantExports, TenantRetentions
from graftwork.api.sdk.keys import TenantKeys
from graftwork.api.sdk.limits import Organisations, Quotas, Webhooks, tenant_path
from graftwork.api.sdk.overview import ServerOverviewQuery, follow_overview
from graftwork.api.sdk.people import People
from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.transport.runtimes import AsyncRuntime, SyncRuntime
from graftwork.api.sdk.transport.streams import AsyncStream, Stream
from graftwork.platform.answers import admin as answers
from graftwork.platform.answers.admin import AuditEntry, Replica, Tenant, TenantErasure
from graftwork.platform.answers.base import Deleted, Page
from graftwork.platform.answers.overview import Overview
from graftwork.platform.answers.timelines import Timeline, TraceSwitch
from graftwork.platform.answers.usage import Invoice, PriceList, UsageCheck, UsageRow


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Tenants(Resource[R]):
    """Creates, changes and deletes tenants. Sends requests to `/v1/admin/tenants`."""

    @operation
    def create(
        self,
        name: str,
        *,
        weight: float | None = None,
        service_tier_ceiling: str | None = None,
        organisation_id: str | None = None,
    ) -> Steps[Tenant]:
        body = {"name": name} | _given(
            weight=weight, service_tier_ceiling=service_tier_ceiling, organisation_id=organisation_id
        )
        call = Call("POST", "/v1/admin/tenants", json=body, admin=True, creates=True)
        return (yield from self._read(Tenant, call))

    @operation
    def list(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[Tenant]]:
        call = Call("GET", "/v1/admin/tenants", query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(Tenant, call))

    @operation
    def get(self, tenant_id: str) -> Steps[Tenant]:
        return (yield from self._read(Tenant, Call("GET", tenant_path(tenant_id), admin=True)))

    @operation
    def update(
        self,
        tenant_id: str,
        *,
        name: str | None = None,
        weight: float | None = None,
        service_tier_ceiling: str | None = None,
    ) -> Steps[Tenant]:
        body = _given(name=name, weight=weight, service_tier_ceiling=service_tier_ceiling)
        return (yield from self._read(Tenant, Call("PATCH", tenant_path(tenant_id), json=body, admin=True)))

    @operation
    def suspend(self, tenant_id: str) -> Steps[Tenant]:
        """Suspends a tenant. The server refuses all keys of the tenant until `resume` is called."""
        return (yield from self._read(Tenant, Call("POST", f"{tenant_path(tenant_id)}/suspend", admin=True)))

    @operation
    def resume(self, tenant_id: str) -> Steps[Tenant]:
        return (yield from self._read(Tenant, Call("POST", f"{tenant_path(tenant_id)}/resume", admin=True)))

    @operation
    def delete(self, tenant_id: str) -> Steps[Deleted]:
        """Deletes a tenant, and cancels its requests. The server then erases its data; see `erasure`."""
        return (yield from self._read(Deleted, Call("DELETE", tenant_path(tenant_id), admin=True)))

    @operation
    def erasure(self, tenant_id: str) -> Steps[TenantErasure]:
        """Reads how far the erasure of a deleted tenant is. The field `status` is `done` when nothing is left."""
        return (yield from self._read(TenantErasure, Call("GET", f"{tenant_path(tenant_id)}/erasure", admin=True)))


class Modes(Resource[R]):
    """Reads and sets the degraded modes of all gateways. Sends requests to `/v1/admin/modes`."""

    @operation
    def get(self) -> Steps[answers.Modes]:
        return (yield from self._read(answers.Modes, Call("GET", "/v1/admin/modes", admin=True)))

    @operation
    def set(
        self, *, max_output_tokens: int | None = None, suspend_drafts: bool = False, refuse_flex: bool = False
    ) -> Steps[answers.Modes]:
        """Replaces all modes. The server switches off each mode that you leave out."""
        body = {"max_output_tokens": max_output_tokens, "suspend_drafts": suspend_drafts, "refuse_flex": refuse_flex}
        return (yield from self._read(answers.Modes, Call("PUT", "/v1/admin/modes", json=body, admin=True)))


class Prices(Resource[R]):
    """Reads and sets price lists. Sends requests to `/v1/admin/prices`."""

    @operation
    def list(self, *, tenant_id: str | None = None) -> Steps[Page[PriceList]]:
        """Lists all price lists, or those of one tenant. The newest comes first."""
        return (
            yield from self._page(
                PriceList, Call("GET", "/v1/admin/prices", query={"tenant_id": tenant_id}, admin=True)
            )
        )

    @operation
    def set(
        self,
        currency: str,
        rates: Mapping[str, str],
        *,
        tenant_id: str | None = None,
        service_tier: str | None = None,
        valid_from: Moment | None = None,
    ) -> Steps[PriceList]:
        """Sets the prices of requests that begin from `valid_from` on; None means now.

        `rates` are decimal text by name, such as `{"input": "0.50", "output": "1.50"}`.
        """
        body = {"currency": currency, "rates": dict(rates)}
        body |= _given(tenant_id=tenant_id, service_tier=service_tier, valid_from=valid_from)
        call = Call("POST", "/v1/admin/prices", json=body, admin=True, creates=True)
        return (yield from self._read(PriceList, call))


class Traces(Resource[R]):
    """Switches the tracing of tenants and sessions on and off. Sends requests to `/v1/admin/traces`."""

    @operation
    def list(self) -> Steps[Page[TraceSwitch]]:
        return (yield from self._page(TraceSwitch, Call("GET", "/v1/admin/traces", admin=True)))

    @operation
    def on(self, target: str, *, token_ids: bool = False) -> Steps[TraceSwitch]:
        """Traces all requests of a tenant or a session, by its id. With `token_ids`, also logs those."""
        call = Call("PUT", f"/v1/admin/traces/{path_segment(target)}", json={"token_ids": token_ids}, admin=True)
        return (yield from self._read(TraceSwitch, call))

    @operation
    def off(self, target: str) -> Steps[Deleted]:
        path = f"/v1/admin/traces/{path_segment(target)}"
        return (yield from self._read(Deleted, Call("DELETE", path, admin=True)))


class Admin(Resource[R]):
    """Groups the methods for operators, such as `client.admin.tenants.create`. Every call sends the admin key."""

    @property
    def tenants(self) -> Tenants[R]:
        return Tenants(self._runtime)

    @property
    def keys(self) -> TenantKeys[R]:
        return TenantKeys(self._runtime)

    @property
    def quotas(self) -> Quotas[R]:
        return Quotas(self._runtime)

    @property
    def organisations(self) -> Organisations[R]:
        return Organisations(self._runtime)

    @property
    def people(self) -> People[R]:
        return People(self._runtime)

    @property
    def webhooks(self) -> Webhooks[R]:
        return Webhooks(self._runtime)

    @property
    def exports(self) -> TenantExports[R]:
        return TenantExports(self._runtime)

    @property
    def retention(self) -> TenantRetentions[R]:
        return TenantRetentions(self._runtime)

    @property
    def modes(self) -> Modes[R]:
        return Modes(self._runtime)

    @property
    def prices(self) -> Prices[R]:
        return Prices(self._runtime)

    @property
    def traces(self) -> Traces[R]:
        return Traces(self._runtime)

    @operation
    def usage(
        self,
        *,
        tenant_id: str | None = None,
        start: Moment | None = None,
        end: Moment | None = None,
        group_by: str | None = None,
    ) -> Steps[Page[UsageRow]]:
        query = {"tenant_id": tenant_id, "from": start, "to": end, "group_by": group_by}
        return (yield from self._page(UsageRow, Call("GET", "/v1/admin/usage", query=query, admin=True)))

    @operation
    def check_usage(
        self, *, start: Moment | None = None, end: Moment | None = None, settled_s: float | None = None
    ) -> Steps[UsageCheck]:
        """Compares the usage ledger with what engines have reported, and with its own sums."""
        query = {"from": start, "to": end, "settled_s": settled_s}
        return (yield from self._read(UsageCheck, Call("GET", "/v1/admin/usage/check", query=query, admin=True)))

    @operation
    def invoice(self, tenant_id: str, month: str) -> Steps[Invoice]:
        """Reads a tenant's invoice of a month in UTC, such as `2026-11`."""
        query = {"tenant_id": tenant_id, "month": month}
        return (yield from self._read(Invoice, Call("GET", "/v1/admin/usage/invoice", query=query, admin=True)))

    @operation
    def audit(self, *, limit: int | None = None, after: str | None = None) -> Steps[Page[AuditEntry]]:
        """Lists the audit entries: who changed what, and when. The newest entry comes first."""
        call = Call("GET", "/v1/admin/audit", query={"limit": limit, "after": after}, admin=True)
        return (yield from self._page(AuditEntry, call))

    @operation
    def overview(self, **query: Unpack[ServerOverviewQuery]) -> Steps[Overview]:
        """Reads a snapshot of the server: engines, tenants, adapters and live sessions, with their figures."""
        return (yield from self._read(Overview, Call("GET", "/v1/admin/overview", query=dict(query), admin=True)))

    @overload
    def watch_overview(self: "Admin[SyncRuntime]", **query: Unpack[ServerOverviewQuery]) -> Stream[Overview]: ...
    @overload
    def watch_overview(self: "Admin[AsyncRuntime]", **query: Unpack[ServerOverviewQuery]) -> AsyncStream[Overview]: ...
    def watch_overview(self, **query: Unpack[ServerOverviewQuery]) -> Stream[Overview] | AsyncStream[Overview]:
        """Yields a snapshot of the server at once, and one a second while something changes."""
        call = Call("GET", "/v1/admin/overview", query={**query, "stream": "true"}, admin=True)
        return follow_overview(self._runtime, call)

    @operation
    def timeline(self, request_id: str) -> Steps[Timeline]:
        """Returns what the server did when for one request of any tenant, by the server's id of it or that of a turn."""
        path = f"/v1/admin/requests/{path_segment(request_id)}/timeline"
        return (yield from self._read(Timeline, Call("GET", path, admin=True)))

    @operation
    def replicas(self) -> Steps[Page[Replica]]:
        """Lists the engines (replicas) with figures of their load, such as the number of waiting requests."""
        return (yield from self._page(Replica, Call("GET", "/v1/admin/replicas", admin=True)))

    @operation
    def drain_replica(self, replica_id: str) -> Steps[Replica]:
        """Begins to drain an engine: it gets no new requests, and its running ones end there or go on elsewhere."""
        path = f"/v1/admin/replicas/{path_segment(replica_id)}/drain"
        return (yield from self._read(Replica, Call("POST", path, admin=True)))
