"""Keeps the traces of the latest requests of this gateway, in memory, and finds them by their ids.

Owns how many are kept: at most MAX_KEPT, and at most MAX_KEPT_OF_TENANT of one tenant, so that a busy tenant does not push
out the requests of a quiet one. The oldest go first. Nothing is kept beyond the end of the process.
Invariant: a tenant finds only its own requests.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from graftwork.platform.clock import Clock
from graftwork.platform.ids import KeyId, SessionId, TenantId
from graftwork.platform.tracing.request_trace import RequestTrace
from graftwork.platform.tracing.trace_ids import read_trace_ids
from graftwork.platform.tracing.trace_rules import TraceRules

MAX_KEPT = 4096
MAX_KEPT_OF_TENANT = 256


class TraceBook:
    """The traces of the requests that this gateway serves or has served lately."""

    def __init__(
        self,
        clock: Clock,
        gateway_id: str = "",
        *,
        rules: TraceRules | None = None,
        most: int = MAX_KEPT,
        of_tenant: int = MAX_KEPT_OF_TENANT,
    ) -> None:
        """`gateway_id` names this gateway in answers. Without `rules`, requests are traced if they ask for it."""
        self.clock = clock
        self.rules = rules or TraceRules()
        self.gateway_id = gateway_id
        self._most = most
        self._most_of_tenant = of_tenant
        self._by_id: OrderedDict[str, RequestTrace] = OrderedDict()
        """The kept traces by the server's ids, the oldest first."""
        self._by_alias: dict[tuple[str, str], RequestTrace] = {}
        """The same by tenant and the other ids of the request: the client's, and that of its turn."""
        self._ids_of: dict[TenantId, deque[str]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, request_id: str, scope: Mapping[str, Any]) -> RequestTrace:
        """Returns the trace of a request that comes now. `scope` is that of ASGI."""
        trace = RequestTrace(read_trace_ids(request_id, scope["headers"]), scope["method"], scope["path"], self.clock)
        trace.keeper = self
        return trace

    def authenticated(self, trace: RequestTrace, tenant_id: TenantId, key_id: KeyId) -> None:
        """Notes whose request it is, and decides whether it is traced.

        Raises InvalidRequest if `x-graftwork-trace` is neither 0 nor 1.
        """
        trace.tenant_id, trace.key_id = tenant_id, key_id
        trace.is_traced = self.rules.wants(trace.ids, tenant_id)

    def traces_session(self, session_id: SessionId | None) -> bool:
        return session_id is not None and self.rules.switches.traces(session_id)

    def keep(self, trace: RequestTrace) -> None:
        """Keeps the trace of a request whose tenant is known. A second call does nothing."""
        tenant_id, request_id = trace.tenant_id, trace.ids.request_id
        if tenant_id is None or request_id in self._by_id:
            return
        self._by_id[request_id] = trace
        own = self._ids_of.setdefault(tenant_id, deque())
        own.append(request_id)
        if trace.ids.client_request_id is not None:
            self._by_alias[tenant_id, trace.ids.client_request_id] = trace
        if len(own) > self._most_of_tenant:
            self._drop(own[0])
        if len(self._by_id) > self._most:
            self._drop(next(iter(self._by_id)))

    def name_work(self, trace: RequestTrace, work_id: str) -> None:
        """Lets a kept request be found by the id of its work as well, if that is another one."""
        if trace.tenant_id is not None and trace.ids.request_id in self._by_id and work_id != trace.ids.request_id:
            trace.work_id = work_id
            self._by_alias[trace.tenant_id, work_id] = trace

    def find(self, request_id: str, tenant_id: TenantId | None = None) -> RequestTrace | None:
        """Returns the trace of the request with this id: the server's, or of a tenant also the client's or the turn's.

        With `tenant_id`, only a request of that tenant. None if there is none.
        """
        found = self._by_id.get(request_id)
        if tenant_id is None:
            return found or next((one for (_, alias), one in self._by_alias.items() if alias == request_id), None)
        if found is None:
            found = self._by_alias.get((tenant_id, request_id))
        return found if found is not None and found.tenant_id == tenant_id else None

    def forget(self, tenant_id: TenantId) -> None:
        """Drops all traces of a deleted tenant."""
        for request_id in list(self._ids_of.get(tenant_id, ())):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        trace = self._by_id.pop(request_id)
        assert trace.tenant_id is not None
        own = self._ids_of[trace.tenant_id]
        own.remove(request_id)
        if not own:
            del self._ids_of[trace.tenant_id]
        for alias in (trace.ids.client_request_id, trace.work_id):
            if alias is not None and self._by_alias.get((trace.tenant_id, alias)) is trace:
                del self._by_alias[trace.tenant_id, alias]
