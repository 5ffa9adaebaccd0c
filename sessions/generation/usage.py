"""Accounts for the tokens of a request: the quota reservation, the usage row and the metrics.

Owns the order of the steps: reserve quota, record the usage, settle the reservation.
Never generates anything.
Invariant: the usage row is written before the reservation is settled. So at any time, the tokens of a request are in
the reservation, in the usage row, or in both.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.platform.activity.meter import ActivityMeter
from graftwork.platform.answers.usage import Money
from graftwork.platform.clock import Clock, SystemClock
from graftwork.platform.errors import CapacityContended, GraftworkError, LimitExceeded
from graftwork.platform.ids import OrganisationId, RequestId, SessionId, TenantId
from graftwork.platform.ledger.backlog import UsageBacklog
from graftwork.platform.ledger.journal import JournalEntry
from graftwork.platform.ledger.usage import UsageEvent, UsageOutcome
from graftwork.platform.prices.price_list import PriceBook, PriceList
from graftwork.platform.quotas.budget import ReservedCost
from graftwork.platform.quotas.in_flight import HeldPlaces, InFlightBound
from graftwork.platform.quotas.limits import Limits
from graftwork.platform.quotas.quotas import QuotaKeeper, Reservation
from graftwork.platform.telemetry import Telemetry
from graftwork.platform.tenancy.principals import Principal
from graftwork.platform.tracing.request_trace import Stage
from graftwork.sessions.core.views import turn_usage_body, usage_body
from graftwork.sessions.text.encoding import Prompt, PromptEncoding


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What one request took of the engine's memory and time."""

    kv_byte_seconds: int = 0
    """Bytes of KV that it held on the device, times the seconds for which it held them."""
    adapter_bytes: int = 0
    """Bytes of adapters that were loaded to the device for it."""
    engine_us: int = 0
    """Its share of the time of the engine's steps, in microseconds."""

    def __add__(self, other: "EngineUse") -> "EngineUse":
        return EngineUse(
            self.kv_byte_seconds + other.kv_byte_seconds,
            self.adapter_bytes + other.adapter_bytes,
            self.engine_us + other.engine_us,
        )


@dataclass(frozen=True, slots=True)
class UnbilledTokens:
    """Tokens that the engine has reported for a request, and that nobody pays."""

    prompt: int = 0
    """The prompt of further answers to the same prompt."""
    completion: int = 0
    """Generated tokens after a stop string."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one request: its prompt by cache tier, its answer, and its draft tokens; and what it took of the engine.

    The cached tokens of the prompt are those from the device, the host and the disk. All other prompt tokens were
    computed again.
    """

    cache: CacheReport
    completion_tokens: int
    drafts: DraftReport
    engine: EngineUse = EngineUse()
    reasoning_tokens: int = 0
    """Those of the answer's tokens that are the model's reasoning, known at the end of the answer."""
    unbilled: UnbilledTokens = UnbilledTokens()

    @property
    def prompt_tokens(self) -> int:
        return self.cache.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.cache.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.cache.prompt_tokens + self.completion_tokens

    @property
    def prompt_tokens_by_tier(self) -> dict[str, int]:
        """How many prompt tokens had their KV on each cache tier, and how many were recomputed.

        The keys are the labels that the metrics use.
        """
        return {
            "device": self.cache.device_tokens,
            "host": self.cache.host_tokens,
            "disk": self.cache.disk_tokens,
            "recomputed": self.cache.recomputed_tokens,
        }

    def as_body(self) -> dict[str, Any]:
        """Returns the token counts of this request as the JSON object `usage` of an API answer."""
        return usage_body(self.cache, self.completion_tokens, self.drafts, self.reasoning_tokens)

    def turn_body(self, cost: Money | None) -> dict[str, Any]:
        """Returns the same object for a turn, with what it took of the engine, and its cost."""
        return turn_usage_body(self.as_body(), astuple(self.engine), cost)


@dataclass(frozen=True, slots=True)
class Charge:
    """The parts of a usage row that are known before the answer: request, principal, model and session."""

    request_id: RequestId
    principal: Principal
    model: ResolvedModel
    session_id: SessionId | None = None
    """The session that is charged; None for a request outside sessions."""
    service_tier: str = "default"
    batch_id: str | None = None
    """The batch that the request belongs to; None for none."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request is expected to use, before it runs."""

    tokens: int
    """The tokens that its limits per minute and per month reserve."""
    answers: int = 1
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    """The most tokens of its answers. With the prompt, they give the highest cost, which its budgets reserve."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Reserves quota for the requests of a gateway, and opens a RequestAccount for each of them."""

    limits_of: Callable[[Principal], Awaitable[Limits]]
    quotas: QuotaKeeper
    backlog: UsageBacklog
    telemetry: Telemetry
    clock: Clock
    in_flight: InFlightBound
    activity: ActivityMeter = field(default_factory=lambda: ActivityMeter(SystemClock()))
    """Counts what tenants do, with the requests that are refused here."""
    book: PriceBook = field(default_factory=PriceBook)
    """The price lists. A request has the list that is in force when its account is opened."""

    def take_places(self, principal: Principal, answers: int = 1) -> HeldPlaces:
        """Takes a place for each answer of a request, the one that the request already has among them. Call it before
        any other work for the request.

        Raises CapacityContended if the engine has no room for so many answers of the tenant, and InvalidRequest if it
        never has.
        """
        with self.counted_refusal(principal.tenant_id):
            principal.trace.keep()
            if principal.place is None or principal.place.is_resized:
                return self.in_flight.take(principal.tenant_id, answers)
            principal.place.resize(answers)
            return principal.place

    def take_first_place(self, tenant_id: TenantId) -> HeldPlaces:
        """Takes one place for a request of which only the tenant is known. Raises CapacityContended if there is none."""
        with self.counted_refusal(tenant_id):
            return self.in_flight.take(tenant_id, 1)

    @contextmanager
    def counted_refusal(self, tenant_id: TenantId) -> Iterator[None]:
        """Counts a CapacityContended that the block raises as a refusal of the tenant's request."""
        try:
            yield
        except CapacityContended as error:
            self._count_refusal(tenant_id, error)
            raise

    def _count_refusal(self, tenant_id: TenantId, error: GraftworkError) -> None:
        self.telemetry.count_request(tenant_id, "refused")
        self.activity.refuse(tenant_id, error.code)

    async def open(self, charge: Charge, limits: Limits, expected: Expected) -> "RequestAccount":
        """Reserves the expected tokens, the highest cost and a place for each answer in the limits of the request's owners.
        Returns the account of the request.

        Raises LimitExceeded if one of the limits has too little left. Raises Unavailable while usage rows cannot be
        stored, so that no work starts that nobody can charge.
        """
        self.backlog.check()
        tenant_id = charge.principal.tenant_id
        prices = self.book.in_force(tenant_id, charge.service_tier, self.clock.now())
        cost = None
        if prices is not None:
            tokens = (expected.prompt_tokens, expected.max_output_tokens)
            cost = ReservedCost.of(prices.rates, prices.currency, *tokens)
        try:
            reservation = await self.quotas.reserve(limits, expected.tokens, expected.answers, cost)
        except LimitExceeded as error:
            self._count_refusal(tenant_id, error)
            raise
        charge.principal.trace.mark(Stage.QUOTA)
        charge.principal.trace.describe(
            charge.model.requested, charge.model.adapter_label, charge.session_id, charge.request_id
        )
        return RequestAccount(self, charge, reservation, prices, limits.organisation_id)

    async def encode(self, principal: Principal, encoding: PromptEncoding, prompt: Prompt) -> tuple[int, ...]:
        """Encodes a prompt. While a long prompt is encoded, it counts as one concurrent request of the tenant.

        A long prompt that is refused counts in the tenant's requests. A long prompt that is encoded does not, because
        `open` counts the whole request. Raises the errors of `PromptEncoding.encode`, and for a long prompt those of `open`.
        """
        principal.trace.mark(Stage.PREPARE)
        token_ids = await self._encode(principal, encoding, prompt)
        principal.trace.mark(Stage.ENCODE)
        return token_ids

    async def _encode(self, principal: Principal, encoding: PromptEncoding, prompt: Prompt) -> tuple[int, ...]:
        tenant_id = principal.tenant_id
        if not encoding.is_long(prompt):
            return await encoding.encode(tenant_id, prompt)
        self.backlog.check()
        reservation = await self._reserve_request(principal)
        try:
            token_ids = await encoding.encode(tenant_id, prompt)
        except BaseException:
            await reservation.settle(0)
            raise
        await reservation.refund()
        return token_ids

    @asynccontextmanager
    async def counted(self, principal: Principal) -> AsyncGenerator[None]:
        """Counts a request that generates nothing in the tenant's requests, and as concurrent while it runs.

        Raises LimitExceeded.
        """
        reservation = await self._reserve_request(principal)
        try:
            yield
        finally:
            await reservation.settle(0)

    async def _reserve_request(self, principal: Principal) -> Reservation:
        try:
            return await self.quotas.reserve(await self.limits_of(principal), 0)
        except LimitExceeded as error:
            self._count_refusal(principal.tenant_id, error)
            raise


class RequestAccount:
    """Records the usage of one request, and charges the tenant's quota for it.

    Call `close` once at the end of the request. If the caller stores the usage row itself (see `row`), call `settle`
    instead.
    In all methods, `usage` is None if the engine admitted no prompt. If `outcome` is not billed, because the server was
    at fault, the usage row has no tokens and the quota is refunded. The metrics count the tokens in any case.
    """

    def __init__(
        self,
        accounting: Accounting,
        charge: Charge,
        reservation: Reservation,
        prices: PriceList | None,
        organisation_id: OrganisationId | None,
    ) -> None:
        self.reservation = reservation
        self._accounting = accounting
        self._charge = charge
        self._prices = prices
        self._organisation_id = organisation_id
        self._is_recorded = False
        self._entry: JournalEntry | None = None

    def journal(self) -> JournalEntry:
        """Returns the request's entry in the usage journal. What the caller adds to it is billed if the process dies.

        A turn needs no entry, because its stored events say what was delivered. Raises Unavailable if the journal cannot
        be written.
        """
        if self._entry is None:
            nothing = Usage(CacheReport(), 0, DraftReport())
            self._entry = self._accounting.backlog.journal.begin(self._event(nothing, UsageOutcome.INTERRUPTED))
        return self._entry

    def row(self, usage: Usage | None, outcome: UsageOutcome) -> UsageEvent | None:
        """Returns the usage row of the request. Returns None if `usage` is None.

        This method is for a caller that stores the row in its own transaction. The caller then calls `count`.
        """
        is_dropped = self._charge.batch_id is not None and not self._is_billed(outcome)
        return None if usage is None or is_dropped else self._event(usage, outcome)

    def cost(self, usage: Usage) -> Money | None:
        """Returns what the request costs if it is billed with this usage; None if it has no price."""
        return Money.of_prices(self._event(usage, UsageOutcome.COMPLETED).cost.atoms, self._prices)

    def _event(self, usage: Usage, outcome: UsageOutcome) -> UsageEvent:
        charge, unbilled = self._charge, usage.unbilled
        if not self._is_billed(outcome):
            unbilled = UnbilledTokens(
                unbilled.prompt + usage.prompt_tokens, unbilled.completion + usage.completion_tokens
            )
            usage = Usage(CacheReport(), 0, DraftReport())
        event = UsageEvent(
            request_id=charge.request_id,
            tenant_id=charge.principal.tenant_id,
            key_id=charge.principal.key_id,
            model=charge.model.requested,
            adapter=charge.model.adapter_label,
            session_id=charge.session_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            at=self._accounting.clock.now(),
            outcome=outcome,
            host_tokens=usage.cache.host_tokens,
            disk_tokens=usage.cache.disk_tokens,
            kv_byte_seconds=usage.engine.kv_byte_seconds,
            adapter_bytes=usage.engine.adapter_bytes,
            engine_us=usage.engine.engine_us,
            drafted_tokens=usage.drafts.drafted_tokens,
            forced_tokens=usage.drafts.forced_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            service_tier=charge.service_tier,
            organisation_id=self._organisation_id,
            end_user_id=charge.principal.end_user_id,
            batch_id=charge.batch_id,
            unbilled_prompt_tokens=unbilled.prompt,
            unbilled_completion_tokens=unbilled.completion,
            first_key_id=charge.principal.first_key_id,
        )
        return event.priced(self._prices)

    def _is_billed(self, outcome: UsageOutcome) -> bool:
        """Returns whether the outcome costs something. A batch's request that breaks off does not: it is done again, or is
        not wanted any more.
        """
        breaks_off = outcome in (UsageOutcome.CANCELLED, UsageOutcome.INTERRUPTED)
        return outcome.is_billed and not (breaks_off and self._charge.batch_id is not None)

    def count(self, usage: Usage | None, outcome: UsageOutcome) -> None:
        """Adds the usage of the request to the metrics. Call this method after the usage row is stored."""
        self._is_recorded = True
        if usage is not None:
            telemetry, tenant_id = self._accounting.telemetry, self._charge.principal.tenant_id
            telemetry.count_tokens(tenant_id, usage.prompt_tokens_by_tier, usage.completion_tokens)
            telemetry.count_request(tenant_id, outcome)

    def record(self, usage: Usage | None, outcome: UsageOutcome) -> None:
        """Lets the usage row of the request be stored soon, and then adds the usage to the metrics.

        A second call for the same request changes nothing.
        """
        row = self.row(usage, outcome)
        entry, self._entry = self._entry, None
        if row is not None and not self._is_recorded:
            self._accounting.backlog.record(row, lambda: self.count(usage, outcome), entry)
        elif entry is not None:
            entry.end()

    async def close(self, usage: Usage | None, outcome: UsageOutcome) -> None:
        """Records the usage, unless it is recorded already. Then settles the quota reservation.

        Does not record an interrupted request: the process that takes the request over does. Nor a request of a batch:
        whoever stores its answer does.
        """
        try:
            if outcome is UsageOutcome.INTERRUPTED or self._charge.batch_id is not None:
                if not self._is_recorded:
                    self.count(usage, outcome)
            else:
                self.record(usage, outcome)
        finally:
            await self.settle(usage, outcome)

    async def settle(self, usage: Usage | None, outcome: UsageOutcome) -> None:
        """Ends the quota reservation of the request: charges the tokens that were used instead of the reserved ones.

        If `usage` is None or the outcome is not billed, gives back all that was reserved.
        """
        self._charge.principal.trace.settle(outcome)
        if usage is None:
            self._accounting.telemetry.count_request(self._charge.principal.tenant_id, outcome)
        if usage is None or not self._is_billed(outcome):
            await self.reservation.refund()
        else:
            await self.reservation.settle(usage.total_tokens)
