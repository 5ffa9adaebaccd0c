"""Refuses a request that the engine would refuse, before its prompt is read.

Owns what is asked, and that the refusal is counted. Never asks an engine: its client knows what the engine has said last
(engine/rpc/forecasts.py, engine/rpc/queue_rooms.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.engine.core.deadlines import Newcomer
from graftwork.engine.core.requests import AdapterUse, ServiceTier
from graftwork.platform.tenancy.principals import Principal
from graftwork.sessions.generation.generator import Generator
from graftwork.sessions.generation.usage import Accounting


@dataclass(frozen=True, slots=True)
class EarlyRefusal:
    """Decides about the requests of a gateway, whatever their prompts. Under overload most requests end here, so a refusal
    must cost little.
    """

    generator: Generator
    accounting: Accounting
    pepper: bytes

    def check(self, principal: Principal, tier: str, adapters: Sequence[AdapterUse]) -> None:
        """Raises CapacityContended, with the time to retry, if the engine would refuse a request outside sessions: its first
        token would come too late, or no more requests of its tenant may wait.
        """
        self._check(principal, Newcomer(ServiceTier(tier), principal.isolation(self.pepper), adapters))

    def check_turn(self, principal: Principal, tier: str) -> None:
        """Raises the same for a turn of a session that asks for this tier."""
        served = ServiceTier(principal.capped_tier(tier))
        self._check(principal, Newcomer(served, principal.isolation(self.pepper), in_session=True))

    def _check(self, principal: Principal, newcomer: Newcomer) -> None:
        with self.accounting.counted_refusal(principal.tenant_id):
            self.generator.refuse_early(newcomer, principal.first_token_due_at)
