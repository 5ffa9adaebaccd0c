"""Refuses requests that would exceed the tokens or the money of a month.

Owns the order of the checks. Counts nothing: keepers count what is in flight, and the ledger what is spent.
Invariant: what an owner has spent this month, plus what its running requests have reserved, never exceeds its limits.

The order of steps ensures this. A new reservation first adds to what is reserved. Then it reads what is spent from the
ledger, the record of finished requests. When a request ends, it is first written to the ledger, and then its
reservation is settled. So each request is always in the sum or in the ledger. For a moment a request may be in both and
count twice, but it is never missed. A request reserves the highest cost that its tokens can have; the cost of KV that it
will hold and of adapters that it will load is unknown then, and counts once it is in the ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graftwork.platform.clock import Clock
from graftwork.platform.errors import BudgetSpent
from graftwork.platform.prices.rates import Cost, Quantities, Rates
from graftwork.platform.quotas.limits import Limits, OwnerLimits, budget_spent, tokens_spent, wrong_currency
from graftwork.platform.quotas.quota import budget_atoms, month_of

_NANO_ATOMS = 1_000
"""Atoms in 10⁻⁹ of a currency. Reserved costs are kept in these units, so that sums of them have at most 64 bits."""


@dataclass(frozen=True, slots=True)
class ReservedCost:
    """The highest cost that a request's tokens can have."""

    nanos: int
    """In 10⁻⁹ of the currency, rounded up."""
    currency: str

    @classmethod
    def of(cls, rates: Rates, currency: str, prompt_tokens: int, output_tokens: int) -> "ReservedCost":
        """Returns the highest cost at these rates, wherever the prompt is cached."""
        prompts = (
            Quantities(uncached_tokens=prompt_tokens),
            Quantities(device_tokens=prompt_tokens),
            Quantities(host_tokens=prompt_tokens),
            Quantities(disk_tokens=prompt_tokens),
        )
        output = Quantities(output_tokens=output_tokens)
        highest = max((rates.cost(prompt + output) for prompt in prompts), key=_atoms)
        return cls(-(-highest.atoms // _NANO_ATOMS), currency)


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the running requests of one owner have reserved, at the moment when one of them was added."""

    tokens: int
    nanos: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What an owner has used in a month."""

    tokens: int = 0
    atoms: Mapping[str, int] = field(default_factory=dict)
    """The cost by currency, in 10⁻¹² of the currency."""


class SpendLedger(Protocol):
    """Reads from the usage records what owners of limits have used."""

    async def spent(self, owner_ids: Sequence[str], month: str) -> Mapping[str, Spent]:
        """Returns what each of these owners has used in a month such as `2026-11`. Leaves out owners without use."""
        ...


class Refundable(Protocol):
    """A reservation that can be cancelled with `refund`."""

    async def refund(self) -> None: ...


class MonthlyBudget:
    """Refuses requests that would exceed an owner's tokens or money of the calendar month (in UTC)."""

    def __init__(self, ledger: SpendLedger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def check(
        self, limits: Limits, cost: ReservedCost | None, reserved: Sequence[Reserved], reservation: Refundable
    ) -> None:
        """Refunds the reservation and raises BudgetSpent if it exceeds what one of the owners may use this month.

        `reserved` has one entry for each owner, which includes this reservation. `cost` is None for a request without a
        price.
        """
        asked = [(owner, sums) for owner, sums in zip(limits.owners, reserved, strict=True) if owner.quota.has_month]
        if not asked:
            return
        refusal: BudgetSpent | None = None
        is_kept = False
        try:
            spent = await self._ledger.spent([owner.owner_id for owner, _ in asked], month_of(self._clock.now()))
            found = (_refusal(owner, sums, spent.get(owner.owner_id, Spent()), cost) for owner, sums in asked)
            refusal = next((error for error in found if error is not None), None)
            is_kept = refusal is None
        finally:  # also when the ledger cannot be read or the caller is cancelled
            if not is_kept:
                await reservation.refund()
        if refusal is not None:
            raise refusal


def _refusal(owner: OwnerLimits, reserved: Reserved, spent: Spent, cost: ReservedCost | None) -> BudgetSpent | None:
    quota = owner.quota
    if quota.monthly_tokens is not None and spent.tokens + reserved.tokens > quota.monthly_tokens:
        return tokens_spent(owner, spent.tokens + reserved.tokens)
    if quota.monthly_budget is None or quota.currency is None or cost is None:
        return None
    if cost.currency != quota.currency:
        return wrong_currency(owner, cost.currency)
    atoms = spent.atoms.get(quota.currency, 0) + reserved.nanos * _NANO_ATOMS
    return budget_spent(owner, atoms) if atoms > budget_atoms(quota.monthly_budget) else None


def _atoms(cost: Cost) -> int:
    return cost.atoms
