"""Inference jobs of one generation each, for tests that read their events."""

import asyncio
from dataclasses import dataclass, field

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.api.inference.job import InferenceJob
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.clock import ManualClock
from graftwork.platform.database import Database
from graftwork.platform.ids import IsolationDomain, KeyId, RequestId, TenantId
from graftwork.platform.keys.scopes import ALL_SCOPES
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.meter import UsageMeter
from graftwork.platform.quotas.in_flight import InFlightBound
from graftwork.platform.quotas.quotas import LocalQuotaKeeper
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tenancy.tenancy import Tenancy
from graftwork.sessions.generation.request import GenerationRequest
from graftwork.sessions.generation.usage import Accounting, Charge, RequestAccount
from tests.api.fake_engine import FakeEngine
from tests.platform.throwaway_journal import throwaway_backlog
from tests.sessions.scripted_engine import generator_on

TENANT = TenantId("ten_1")
REQUEST = RequestId("req_1")


@dataclass
class SlowReservation:
    """Implements Reservation: settling waits for `may_settle`."""

    settled: list[int] = field(default_factory=list)
    num_refunds: int = 0
    settling: asyncio.Event = field(default_factory=asyncio.Event)
    may_settle: asyncio.Event = field(default_factory=asyncio.Event)

    def rate_limit_headers(self) -> dict[str, str]:
        return {}

    async def settle(self, actual_tokens: int) -> None:
        self.settling.set()
        await self.may_settle.wait()
        self.settled.append(actual_tokens)

    async def refund(self) -> None:
        self.num_refunds += 1
        await self.settle(0)


def make_job(
    engine: FakeEngine,
    database: Database,
    reservation: SlowReservation | None = None,
    request_id: RequestId = REQUEST,
    backlog: UsageBacklog | None = None,
) -> InferenceJob:
    """A job that is not started yet. Without a slow `reservation` it settles at once."""
    if reservation is None:
        reservation = SlowReservation()
        reservation.may_settle.set()
    clock = ManualClock()
    ledger = UsageMeter(database)
    backlog = backlog or throwaway_backlog(ledger)
    tenancy, quotas = Tenancy(database, b"pepper", clock), LocalQuotaKeeper(clock, ledger)
    in_flight = InFlightBound(clock, None, None)
    accounting = Accounting(tenancy.limits.of_active, quotas, backlog, Telemetry(), clock, in_flight)
    request = GenerationRequest(
        request_id=RequestId(f"{request_id}.0"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=100),
        resolved=ResolvedModel("tiny", None),
        isolation=IsolationDomain(bytes(32)),
    )
    principal = Principal(TENANT, "acme", KeyId("key_1"), 1.0, "default", ALL_SCOPES)
    account = RequestAccount(accounting, Charge(request_id, principal, request.resolved), reservation, None, None)
    return InferenceJob(request_id, [generator_on(engine).start(request)], 1, account, {})
