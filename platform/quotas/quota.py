"""Defines the limits of one owner, such as a tenant, and how they are read from JSON.

Owns the exact amounts of budgets, and the form of the `x-ratelimit-*` headers. Counts nothing: quota keepers count.
Never knows how owners belong together: `limits.py` does.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Self

from pydantic import ConfigDict

from graftwork.platform.answers import admin as answers
from graftwork.platform.errors import ValidationFailed
from graftwork.platform.prices.rates import amount_text, to_atoms

WINDOW_S = 60.0
"""The length in seconds of the time for which limits per minute hold. They hold in every span of 60 seconds, not only
in minutes of the clock.
"""
BUDGETS = ("monthly_budget", "soft_budget")
"""The limits of a month that are amounts of money, in the currency that the limits name."""
_BUDGET = re.compile(answers.BUDGET_PATTERN)
_CURRENCY = re.compile(r"[A-Z]{3}")


class Quota(answers.Quota):
    """The limits of one owner. A limit of None means that there is no limit."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Self:
        """Makes the limits from the JSON body of a request.

        Raises ValidationFailed with the name of a limit that is unknown or has a wrong value.
        """
        checked: dict[str, int | str | None] = {}
        for name, value in values.items():
            if name == "used":  # a client may send back what it has read
                continue
            if name not in cls.model_fields:
                raise ValidationFailed(f"There is no limit named {name!r}.", param=name, code="unknown_field")
            checked[name] = None if value is None else _checked(name, value)
        for name in BUDGETS:
            if checked.get(name) is not None and checked.get("currency") is None:
                raise ValidationFailed(f"{name} needs a currency, such as USD.", param="currency")
        return cls.model_validate(checked)

    def as_mapping(self) -> dict[str, int | str | None]:
        """Returns a dict from the name of each limit to its value; None means no limit."""
        return self.model_dump()

    @property
    def has_month(self) -> bool:
        """Whether requests are refused by what was used this month."""
        return self.monthly_tokens is not None or self.monthly_budget is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no limit at all."""
        return all(value is None for value in self.as_mapping().values())


def budget_atoms(amount: str) -> int:
    """Returns an amount of money as a whole number of 10⁻¹² of its currency."""
    return to_atoms(Decimal(amount))


@dataclass(frozen=True, slots=True)
class Standing:
    """How many requests and tokens of an owner counted in the last minute, at the moment when one reservation was
    decided.
    """

    requests: int
    tokens: int
    empty_in_s: float
    """If no further request comes, the seconds until the last minute contains no request."""


def rate_limit_headers(standings: Iterable[tuple[Quota, Standing]]) -> dict[str, str]:
    """Returns the headers `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.

    Of several owners, the headers of each kind are those of the owner with least left. Leaves out the headers of a kind
    that no owner limits.
    """
    least: dict[str, tuple[int, int, float]] = {}
    for quota, standing in standings:
        for kind, limit, used in (
            ("requests", quota.requests_per_minute, standing.requests),
            ("tokens", quota.tokens_per_minute, standing.tokens),
        ):
            if limit is not None:
                found = (max(limit - used, 0), limit, standing.empty_in_s if used else 0.0)
                least[kind] = min(least.get(kind, found), found)
    headers: dict[str, str] = {}
    for kind, (left, limit, empty_in_s) in least.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(left)
        headers[f"x-ratelimit-reset-{kind}"] = go_duration(empty_in_s)
    return headers


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


def month_of(at: float) -> str:
    """Returns the calendar month (in UTC) of a time in Unix seconds, as `2026-11`."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m}"


def _checked(name: str, value: object) -> int | str:
    if name in BUDGETS:
        if not isinstance(value, str) or not _BUDGET.fullmatch(value):
            raise ValidationFailed(
                f'{name} must be decimal text with at most 10 digits before the point and 6 behind it, such as "100.00", '
                "or null.",
                param=name,
            )
        return amount_text(Decimal(value))
    if name == "currency":
        if not isinstance(value, str) or not _CURRENCY.fullmatch(value):
            raise ValidationFailed("currency must be a code of three capital letters, such as USD.", param=name)
        return value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= answers.MAX_LIMIT:
        raise ValidationFailed(f"{name} must be a whole number from 0 to 2^53, or null.", param=name)
    return value
