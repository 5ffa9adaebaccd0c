"""Computes what a request costs: rates times what it used.

Owns the rates, the rounding rule, and the form of an amount of money in JSON. Every figure is a Decimal; a float would
lose digits. Never knows a tenant or a request.

The rounding rule: each part of the cost of one request is rounded to 10⁻¹² of the currency, half to even. All other
amounts, such as those of a session, a day or an invoice, are sums of these, and are not rounded. Rates have at most six
decimals, so the parts for tokens are exact without rounding.
Invariant: the amount of a request is the sum of its parts, and a sum of requests does not depend on how they are grouped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, localcontext

from graftwork.platform.errors import ValidationFailed

ATOM_DIGITS = 12
"""Amounts are whole numbers of 10⁻¹² of the currency, which are called atoms."""
MAX_RATE_DECIMALS = 6
MAX_RATE = Decimal(1_000_000)
MAX_ATOMS = 2**63 - 1
"""The largest amount of one request that the ledger can hold: 9.2 million of the currency."""
_EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)
_ATOM = Decimal(1).scaleb(-ATOM_DIGITS)
_MILLION = Decimal(10**6)
_GB = Decimal(10**9)
_GB_HOUR_BYTE_SECONDS = Decimal(10**9 * 3600)


@dataclass(frozen=True, slots=True)
class Quantities:
    """What one request used, or several together, as far as it can have a price."""

    uncached_tokens: int = 0
    """Prompt tokens whose KV was computed."""
    device_tokens: int = 0
    """Prompt tokens whose KV was cached in device memory; the next two: in host memory, and on disk."""
    host_tokens: int = 0
    disk_tokens: int = 0
    output_tokens: int = 0
    kv_byte_seconds: int = 0
    """Bytes of KV that the request held on the device, times the seconds for which it held them."""
    adapter_bytes: int = 0
    """Bytes of adapters that were loaded to the device for the request."""

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def __add__(self, other: "Quantities") -> "Quantities":
        return Quantities(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices in one currency: per million tokens, per GB-hour of KV, and per GB of adapters. A GB has 10⁹ bytes."""

    input: Decimal
    """Per million prompt tokens that are computed."""
    output: Decimal
    """Per million tokens of answers."""
    input_device: Decimal
    """Per million prompt tokens that are cached on the device."""
    input_host: Decimal
    input_disk: Decimal
    kv_gb_hour: Decimal = Decimal(0)
    adapter_gb: Decimal = Decimal(0)

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "Rates":
        """Makes rates from decimal text by name. Cached input costs as much as other input unless it has its own rate.

        Raises ValidationFailed for a rate that is missing, unknown, negative, above MAX_RATE, or has more than six
        decimals.
        """
        names = [one.name for one in fields(cls)]
        for name in given:
            if name not in names:
                raise ValidationFailed(f"There is no rate {name!r}. The rates are {', '.join(names)}.", param="rates")
        for name in ("input", "output"):
            if name not in given:
                raise ValidationFailed(f'The rate {name!r} is missing: give one, such as "0.50".', param="rates")
        found = {name: _rate(name, text) for name, text in given.items()}
        for name in ("input_device", "input_host", "input_disk"):
            found.setdefault(name, found["input"])
        return cls(**found)

    def texts(self) -> dict[str, str]:
        """Returns the rates as decimal text, by name."""
        return {one.name: amount_text(getattr(self, one.name)) for one in fields(self)}

    def parts(self, used: Quantities) -> dict[str, Decimal]:
        """Returns the parts of the cost of one request, by the name of the rate. Each is rounded by the rounding rule."""
        with localcontext(_EXACT):
            exact = {
                "input": used.uncached_tokens * self.input / _MILLION,
                "input_device": used.device_tokens * self.input_device / _MILLION,
                "input_host": used.host_tokens * self.input_host / _MILLION,
                "input_disk": used.disk_tokens * self.input_disk / _MILLION,
                "output": used.output_tokens * self.output / _MILLION,
                "kv_gb_hour": used.kv_byte_seconds * self.kv_gb_hour / _GB_HOUR_BYTE_SECONDS,
                "adapter_gb": used.adapter_bytes * self.adapter_gb / _GB,
            }
            return {name: part.quantize(_ATOM) for name, part in exact.items()}

    def cost(self, used: Quantities) -> "Cost":
        """Returns the cost of one request. Raises OverflowError above MAX_ATOMS, which no request reaches."""
        parts = self.parts(used)
        atoms = to_atoms(sum_of(parts.values()))
        if atoms > MAX_ATOMS:
            raise OverflowError(f"A request that used {used} costs more than the ledger can hold.")
        return Cost(atoms, to_atoms(parts["kv_gb_hour"]))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one request costs, in atoms: 10⁻¹² of the currency."""

    atoms: int = 0
    kv_atoms: int = 0
    """The part of `atoms` for KV that was held. It is the part that cannot be computed from a sum of requests, because
    it is rounded for each of them.
    """

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.atoms + other.atoms, self.kv_atoms + other.kv_atoms)


NO_USE = Quantities()
NO_COST = Cost()


def sum_of(amounts: Iterable[Decimal]) -> Decimal:
    """Adds up amounts without rounding."""
    with localcontext(_EXACT):
        return sum(amounts, Decimal(0))


def to_atoms(amount: Decimal) -> int:
    """Converts an amount that the rounding rule has made to a whole number of atoms."""
    return int(amount.scaleb(ATOM_DIGITS, _EXACT))


def from_atoms(atoms: int) -> Decimal:
    """Converts a whole number of atoms to an amount."""
    return Decimal(atoms).scaleb(-ATOM_DIGITS, _EXACT)


def amount_text(amount: Decimal) -> str:
    """Returns an amount or a rate as text: digits without an exponent, and without zeros at the end."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _rate(name: str, text: str) -> Decimal:
    try:
        rate = Decimal(text)
        if not rate.is_finite():
            raise InvalidOperation
    except InvalidOperation:
        raise ValidationFailed(f'{name}: {text!r} is not a decimal number, such as "0.50".', param="rates") from None
    if not 0 <= rate <= MAX_RATE:
        raise ValidationFailed(f"{name} must be from 0 to {MAX_RATE}.", param="rates")
    if rate != rate.quantize(Decimal(1).scaleb(-MAX_RATE_DECIMALS), context=_EXACT):
        raise ValidationFailed(f"{name} may have at most {MAX_RATE_DECIMALS} decimals.", param="rates")
    return abs(rate)
