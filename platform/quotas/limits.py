"""Defines the limits that hold for one request: those of its organisation, its tenant, its key and its end user.

    organisation ─► tenant ─► key ─► end user        a request counts for each of them, and each may refuse it

Owns which limits each level may have, and the errors that name the level and the limit that refuse. Counts nothing.
Invariant: the limits of a request are of one organisation at most, and always include those of its tenant.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from graftwork.platform.errors import BudgetSpent, LimitExceeded, ValidationFailed
from graftwork.platform.ids import EndUserId, OrganisationId, TenantId
from graftwork.platform.prices.rates import amount_text, from_atoms
from graftwork.platform.quotas.quota import Quota, Standing, go_duration, rate_limit_headers

LIMIT_HEADER = "x-graftwork-limit"
"""The header of a refusal that names the level and the limit, such as `key.requests_per_minute`."""


class Level(StrEnum):
    """Whose limits they are, from the widest to the narrowest."""

    ORGANISATION = "organisation"
    TENANT = "tenant"
    KEY = "key"
    USER = "user"


_USER_LIMITS = frozenset(
    {
        "requests_per_minute",
        "tokens_per_minute",
        "max_concurrent_requests",
        "monthly_tokens",
        "monthly_budget",
        "soft_budget",
        "currency",
    }
)
_BEGUN_LIMITS = frozenset({"max_adapters", "max_sessions"})
"""Limits of what a key or an end user has begun and the tenant still keeps."""
_KEPT_LIMITS = frozenset(
    {
        *_BEGUN_LIMITS,
        "max_adapter_bytes",
        "max_adapter_rank",
        "max_device_kv_bytes",
        "max_host_kv_bytes",
    }
)
"""Limits of what tenants keep, which an organisation's tenants share."""
_LIMITS = {
    Level.ORGANISATION: _USER_LIMITS | _KEPT_LIMITS,
    Level.TENANT: frozenset(Quota.model_fields),
    Level.KEY: _USER_LIMITS | _BEGUN_LIMITS,
    Level.USER: _USER_LIMITS | _BEGUN_LIMITS,
}
"""By level: the limits that it may have. Bytes of adapters and KV are counted by tenant and organisation, and those of files
by tenant alone."""


def check_level(level: Level, quota: Quota) -> None:
    """Raises ValidationFailed if the level cannot have one of these limits."""
    for name, value in quota.as_mapping().items():
        if value is not None and name not in _LIMITS[level]:
            raise ValidationFailed(f"{name} is no limit of this level ({level}): set it for a tenant.", param=name)


def end_user_id(tenant_id: TenantId, user: str | None) -> EndUserId | None:
    """Returns the id of an end user that a tenant's request names; None if it names none.

    It is a digest, so that no table and no log has the name. It differs between tenants.
    """
    if not user:
        return None
    digest = hashlib.sha256(f"{tenant_id}\0{user}".encode("utf-8", "surrogatepass"))
    return EndUserId(f"usr_{digest.hexdigest()[:32]}")


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """The limits of one owner at its level."""

    level: Level
    owner_id: str
    """The id of an organisation, a tenant, a key or an end user."""
    quota: Quota


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request, the widest first. An owner without limits is left out, except for the tenant."""

    tenant_id: TenantId
    owners: tuple[OwnerLimits, ...]
    organisation_id: OrganisationId | None = None
    """The tenant's organisation, which may be without limits."""

    @classmethod
    def of_tenant(cls, tenant_id: TenantId, quota: Quota) -> Self:
        """Returns limits of a tenant alone."""
        return cls(tenant_id, (OwnerLimits(Level.TENANT, tenant_id, quota),))

    @property
    def tenant(self) -> Quota:
        """The limits of the tenant itself."""
        return next(owner.quota for owner in self.owners if owner.level is Level.TENANT)

    @property
    def organisation(self) -> Quota | None:
        """The limits of the tenant's organisation; None if there are none."""
        return next((owner.quota for owner in self.owners if owner.level is Level.ORGANISATION), None)

    @property
    def group_id(self) -> str:
        """The organisation, or the tenant if it has none. All counts of a request are kept together under this id."""
        return self.organisation_id or self.tenant_id

    def headers(self, standings: Sequence[Standing]) -> dict[str, str]:
        """Returns the `x-ratelimit-*` headers. `standings` has one entry for each owner."""
        return rate_limit_headers(zip((owner.quota for owner in self.owners), standings, strict=True))

    def exceeded(
        self, owner: OwnerLimits, limit: str, retry_after_s: float | None, standings: Sequence[Standing]
    ) -> LimitExceeded:
        """Returns the error for a request that would exceed the limit of this name of one of the owners.

        `retry_after_s` is the time in seconds after which the request fits, or None if it never fits.
        """
        if retry_after_s is None and limit == "max_concurrent_requests":
            advice = "Each answer of a request counts; ask for fewer (prompts times n) or have the limit raised."
        elif retry_after_s is None:
            advice = "This request alone is more than that; ask for fewer tokens or have the limit raised."
        else:
            advice = f"Try again in {go_duration(retry_after_s)}."
        message = f"The limit {limit} = {getattr(owner.quota, limit)} of this {owner.level} is reached. {advice}"
        error = LimitExceeded(message, retry_after_s=retry_after_s, details=_details(owner, limit))
        error.rate_limit_headers = self.headers(standings) | _header(owner, limit)
        return error


def tokens_spent(owner: OwnerLimits, spent_tokens: int) -> BudgetSpent:
    """Returns the error for a request that would exceed an owner's tokens per month.

    `spent_tokens` is the number of tokens that are used or reserved this month, including those of this request.
    """
    message = (
        f"The limit monthly_tokens = {owner.quota.monthly_tokens} of this {owner.level} leaves too little for this request: "
        f"{spent_tokens} tokens are spent or in flight. Ask for fewer tokens or have the limit raised."
    )
    return _spent(owner, "monthly_tokens", message)


def budget_spent(owner: OwnerLimits, spent_atoms: int) -> BudgetSpent:
    """Returns the error for a request that would exceed an owner's budget of money.

    `spent_atoms` is what is spent or reserved this month, in 10⁻¹² of the currency, including this request.
    """
    quota = owner.quota
    message = (
        f"The limit monthly_budget = {quota.monthly_budget} {quota.currency} of this {owner.level} leaves too little for "
        f"this request: {amount_text(from_atoms(spent_atoms))} {quota.currency} are spent or in flight. Ask for fewer tokens "
        "or have the budget raised."
    )
    return _spent(owner, "monthly_budget", message)


def keeps_too_much(level: Level, limit: str, message: str, *, code: str, param: str | None = None) -> BudgetSpent:
    """Returns the error for something that a tenant, or all tenants of an organisation together, may not keep as well."""
    error = BudgetSpent(message, code=code, param=param, details={"limit": limit, "level": str(level)})
    error.rate_limit_headers = {LIMIT_HEADER: f"{level}.{limit}"}
    return error


def whose(level: Level) -> str:
    """Returns how a sentence names the limits of a level to somebody of a tenant."""
    return "Your" if level is Level.TENANT else f"Your {level}'s"


def wrong_currency(owner: OwnerLimits, currency: str) -> BudgetSpent:
    """Returns the error for a request with a price in another currency than the budget that it would be charged to."""
    message = (
        f"The monthly_budget of this {owner.level} is in {owner.quota.currency}, and this request has a price in {currency}: "
        "tell the operator to set both in one currency."
    )
    return _spent(owner, "monthly_budget", message)


def _spent(owner: OwnerLimits, limit: str, message: str) -> BudgetSpent:
    error = BudgetSpent(message, details=_details(owner, limit))
    error.rate_limit_headers = _header(owner, limit)
    return error


def _details(owner: OwnerLimits, limit: str) -> dict[str, str]:
    return {"limit": limit, "level": str(owner.level)}


def _header(owner: OwnerLimits, limit: str) -> dict[str, str]:
    return {LIMIT_HEADER: f"{owner.level}.{limit}"}
