"""Defines a tenant's limits and the errors for requests above them, and checks the limit of tokens per month.

Owns how limits are read from JSON, and the form of the `x-ratelimit-*` headers. Counts nothing: quota keepers count.
Invariant: the tokens that a tenant has used this month, plus the reserved tokens of its running requests, never exceed
the limit.

The order of steps ensures this. A new reservation first adds its tokens to the sum of reserved tokens. Then it reads
the used tokens from the usage ledger, the table of finished requests. When a request ends, it is first written to the
ledger, and then its reservation is settled. So each request is always in the sum or in the ledger. For a moment a
request may be in both and count twice, but it is never missed.
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
"""The length in seconds of the time for which limits per minute hold. They hold in every span of 60 seconds, not only
in minutes of the clock.
"""


class Quota(answers.Quota):
    """The limits of one tenant. A limit of None means that there is no limit."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Makes the limits from the JSON body of a request.

        Raises ValidationFailed with the name of a limit that is unknown or has a wrong value.
        """
        checked: dict[str, int | None] = {}
        for name, value in values.items():
            if name not in cls.model_fields:
                raise ValidationFailed(f"There is no limit named {name!r}.", param=name, code="unknown_field")
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not _fits(value)):
                raise ValidationFailed(f"{name} must be a whole number from 0 to 2^53, or null.", param=name)
            checked[name] = value
        return cls(**checked)

    def as_mapping(self) -> dict[str, int | None]:
        """Returns a dict from the name of each limit to its value; None means no limit."""
        return self.model_dump()


@dataclass(frozen=True, slots=True)
class Standing:
    """How many requests and tokens of a tenant counted in the last minute, at the moment when one reservation was
    decided.
    """

    requests: int
    tokens: int
    empty_in_s: float
    """If no further request comes, the seconds until the last minute contains no request."""

    def headers(self, quota: Quota) -> dict[str, str]:
        """Returns the headers `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.

        Leaves out the headers for requests if requests have no limit, and the headers for tokens if tokens have no
        limit.
        """
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
    """Returns the error for a request that would exceed a limit. `limit` is the name of the limit.

    `retry_after_s` is the time in seconds after which the request fits, or None if it never fits.
    """
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
    """Returns the error for a request that would exceed the tenant's tokens per month.

    `spent_tokens` is the number of tokens that are used or reserved this month, including those of this request.
    """
    return BudgetSpent(
        f"The limit monthly_tokens = {quota.monthly_tokens} leaves too little for this request: "
        f"{spent_tokens} tokens are spent or in flight. Ask for fewer tokens or have the limit raised.",
        details={"limit": "monthly_tokens"},
    )


def go_duration(seconds: float) -> str:
    """Formats a time in seconds as Go does, rounded up to milliseconds: `120ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
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
    """Reads from the usage records how many tokens a tenant has used."""

    async def tokens_since(self, tenant_id: TenantId, start: float) -> int:
        """Returns how many prompt and completion tokens the tenant has used in requests that were recorded at `start`
        or later.

        `start` is in seconds since the Unix epoch.
        """
        ...


class Refundable(Protocol):
    """A reservation that can be cancelled with `refund`."""

    async def refund(self) -> None: ...


class MonthlyBudget:
    """Refuses requests that would exceed a tenant's limit of tokens per month (in UTC)."""

    def __init__(self, ledger: TokenLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def check(self, tenant_id: TenantId, quota: Quota, tokens_in_flight: int, reservation: Refundable) -> None:
        """Refunds the reservation and raises BudgetSpent if the tenant's tokens of this month exceed its limit.

        `tokens_in_flight` is the number of reserved tokens of the tenant's running requests. It includes this
        reservation.
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
    """Returns the start of the calendar month (in UTC) that contains the time `now`. Both are seconds since the Unix
    epoch.
    """
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
