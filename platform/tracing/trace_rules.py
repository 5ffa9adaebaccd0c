"""Decides which requests are traced: the engine reports their steps, and the gateway times each of their tokens.

    x-graftwork-trace: 1          the client asks for it; 0 asks for none, whatever the rest says
    a switch                      the operator has switched on the tracing of the tenant or the session
    traceparent …-01              the client records the trace, and this gateway exports traces
    a share of all requests       by the setting `trace_share`

Owns no request. Never raises for a client that asks for nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random, SystemRandom

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import TenantId
from graftwork.platform.tracing.trace_ids import TraceIds

TRACE_HEADER = "x-graftwork-trace"


@dataclass(slots=True)
class Switches:
    """What the operator has switched on: ids of tenants and of sessions."""

    traced: Collection[str] = frozenset()
    """Those whose requests are traced."""
    token_logged: Collection[str] = frozenset()
    """Those whose token ids are logged."""


@dataclass(frozen=True, slots=True)
class TraceRules:
    """The rules of one gateway."""

    share: float = 0.0
    """The part of the requests, from 0 to 1, that is traced without being asked for."""
    follows_parent: bool = False
    """Whether a request is traced because its client records the trace that it belongs to."""
    switches: Switches = field(default_factory=Switches)
    chance: Random = field(default_factory=SystemRandom)

    def wants(self, ids: TraceIds, tenant_id: TenantId) -> bool:
        """Returns whether a tenant's request with these ids is traced.

        Raises InvalidRequest if its header asks for something else than 0 or 1.
        """
        if ids.asked is not None:
            if ids.asked not in ("0", "1"):
                raise InvalidRequest(
                    f"{TRACE_HEADER} is {ids.asked[:40]!r}: send 1, 0 or no such header.", param=TRACE_HEADER
                )
            return ids.asked == "1"
        if self.follows_parent and ids.parent is not None and ids.parent.is_sampled:
            return True
        return tenant_id in self.switches.traced or (self.share > 0 and self.chance.random() < self.share)

    def may_want(self, tenant_id: TenantId) -> bool:
        """Returns whether a tenant's request that asks for no trace can be traced."""
        return self.share > 0 or tenant_id in self.switches.traced
