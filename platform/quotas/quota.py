"""Defines a tenant's limits and the errors that refuse requests above them, and checks the monthly token budget.

Owns how limits are read, and the form of the `x-ratelimit-*` headers. Counts nothing: quota keepers count.
Invariant: the tokens that the ledger says are spent, plus the tokens of running requests, never pass the budget.

The order of steps ensures this. A reservation first adds its tokens to the tokens of running requests and gets their
sum. Then it reads the ledger. A request is written to the ledger before its reservation is settled. So every other
request is in the sum, or in the ledger, or comes later and counts this one. For a moment a request may be counted
twice, but no request is missed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, Self

from pydantic import ConfigDict

from graftwork.platform.answers import admin as answers
from graftwork.platform.clock import Clock
from graftwork.platform.errors import BudgetSpent, LimitExceeded, ValidationFailed
from graftwork.platform.ids import TenantId

WINDOW_S = 60.0
"""The length in seconds of the span for which per-minute limits hold. They hold in every such span, not only in
calendar minutes.
"""


class Quota(answers.Quota):
    """The limits of a tenant. A missing limit is no limit."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Makes a quota from a request's body. Raises ValidationFailed with the name of a wrong or unknown limit."""
        checked: dict[str, int | None] = {}
        for name, value in values.items():
            if name not in cls.model_fields:
                raise ValidationFailed(f"There is no limit named {name!r}.", param=name, code="unknown_field")
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not _fits(value)):
                raise ValidationFailed(f"{name} must be a whole number from 0 to 2^53, or null.", param=name)
            checked[name] = value
        return cls(**checked)

    def as_mapping(self) -> dict[str, int | None]:
        """Returns every limit by its name."""
        return self.model_dump()


@dataclass(frozen=True, slots=True)
class Standing:
    """The use of one tenant's limits in the last minute, at the time when a reservation was decided."""

    requests: int
    tokens: int
    empty_in_s: float
    """The seconds until no request of the last minute counts any more, if no further request comes."""

    def headers(self, quota: Quota) -> dict[str, str]:
        """Returns the headers `x-ratelimit-{limit,remaining,reset}-{requests,tokens}` for the limits that exist."""
        headers: dict[str, str] = {}
        used_by_kind = {
            "requests": (quota.requests_per_minute, self.requests),
            "tokens": (quota.tokens_per_minute, self.tokens),
        }
        for kind, (limit, used) in used_by_kind.items():
            if limit is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(limit - used, 0))
                headers[f"x-ratelimit-reset-{kind}"] = go_duration(self.empty_in_s if used else 0.0)
        return headers


def limit_exceeded(quota: Quota, limit: str, retry_after_s: float | None, standing: Standing) -> LimitExceeded:
    """Returns the error that refuses a request over `limit`. `retry_after_s` is None if the request can never fit."""
    if retry_after_s is None and limit == "max_concurrent_requests":
        advice = "Each answer of a request counts; ask for fewer (prompts times n) or have the limit raised."
    elif retry_after_s is None:
        advice = "This request alone is more than that; ask for fewer tokens or have the limit raised."
    else:
        advice = f"Try again in {go_duration(retry_after_s)}."
    message = f"The limit {limit} = {getattr(quota, limit)} is reached. {advice}"
    error = LimitExceeded(message, retry_after_s=retry_after_s, details={"limit": limit})
    error.rate_limit_headers = standing.headers(quota)
    return error


def budget_spent(quota: Quota, spent_tokens: int) -> BudgetSpent:
    """Returns the error for a tenant whose tokens of this month are all spent or reserved."""
    return BudgetSpent(
        f"The limit monthly_tokens = {quota.monthly_tokens} leaves too little for this request: "
        f"{spent_tokens} tokens are spent or in flight. Ask for fewer tokens or have the limit raised.",
        details={"limit": "monthly_tokens"},
    )


def go_duration(seconds: float) -> str:
    """Formats seconds as Go does, rounded up to milliseconds: `120ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    milliseconds = math.ceil(round(seconds * 1000, 6))
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _fits(value: int) -> bool:
    return 0 <= value <= answers.MAX_LIMIT


class TokenLedger(Protocol):
    """Reads how many tokens a tenant has spent."""

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Returns the prompt and completion tokens of the requests that were recorded at `start` or later."""
        ...


class Refundable(Protocol):
    """A reservation that can be undone."""

    async def refund(self) -> None: ...


class MonthlyBudget:
    """Refuses reservations that exceed a tenant's tokens of the month."""

    def __init__(self, ledger: TokenLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def check(self, tenant_id: TenantId, quota: Quota, tokens_in_flight: int, reservation: Refundable) -> None:
        """Checks a reservation whose tokens are already in `tokens_in_flight`.

        Raises BudgetSpent after refunding it.
        """
        if quota.monthly_tokens is None:
            return
        kept = False
        try:
            spent_tokens = await self._ledger.tokens_since(tenant_id, month_start(self._clock.now()))
            kept = spent_tokens + tokens_in_flight <= quota.monthly_tokens
        finally:  # also when the ledger cannot be read or the caller is cancelled
            if not kept:
                await reservation.refund()
        if not kept:
            raise budget_spent(quota, spent_tokens + tokens_in_flight)


def month_start(now: float) -> float:
    """Returns the time when the calendar month of `now` began in UTC, in seconds since the Unix epoch."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
