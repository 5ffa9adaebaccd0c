"""Defines token counts and costs: the usage of one answer, the sources of a prompt's tokens (cached or computed), the
usage of a tenant, price lists and invoices.

An amount of money is decimal text, such as `"0.000123"`, because a JSON number is read as a float, which loses digits.
"""

from decimal import Decimal
from typing import Literal, Protocol, Self

from graftwork.platform.answers.base import Answer, absent
from graftwork.platform.prices.rates import amount_text, from_atoms


class HasCurrency(Protocol):
    """A price list."""

    @property
    def currency(self) -> str: ...


class Money(Answer):
    """An amount of money. `amount` is decimal text with up to 12 decimals, and `currency` a code such as `USD`."""

    amount: str
    currency: str

    @classmethod
    def of(cls, atoms: int, currency: str) -> Self:
        """Makes an amount from 10⁻¹² of the currency."""
        return cls(amount=amount_text(from_atoms(atoms)), currency=currency)

    @classmethod
    def of_prices(cls, atoms: int, prices: HasCurrency | None) -> Self | None:
        """Makes an amount in the currency of a price list; None without a list."""
        return None if prices is None else cls.of(atoms, prices.currency)

    @property
    def decimal(self) -> Decimal:
        """The amount as an exact number."""
        return Decimal(self.amount)


class PromptTokensDetails(Answer):
    """The number of prompt tokens by source: KV cached in device memory, host memory or on disk, or computed again.

    device + host + disk = cached, and cached + recomputed = all tokens of the prompt.
    """

    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int


class CompletionTokensDetails(Answer):
    """Counts of draft tokens, which speculative decoding proposes.

    `drafted_tokens` counts the draft tokens that the model verified. `accepted_tokens` counts those that became part of
    the answer. `forced_tokens` counts accepted draft tokens at positions where a grammar allowed no other token.
    """

    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    accepted_prediction_tokens: int | None = absent()
    """The number of tokens of the request's `prediction` that are in the answer."""
    rejected_prediction_tokens: int | None = absent()
    reasoning_tokens: int | None = absent()
    """The number of the answer's tokens that are the model's reasoning. Present only if there is any."""


class Usage(Answer):
    """The token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @property
    def cached_share(self) -> float:
        """The fraction of the prompt tokens whose KV was cached, from 0 to 1."""
        cached = self.prompt_tokens_details.cached_tokens
        return cached / self.prompt_tokens if self.prompt_tokens else 0.0


class TurnUsage(Usage):
    """The token counts of one turn, what it took of the engine's memory, and what it costs."""

    kv_byte_seconds: int
    """Bytes of KV cache that the turn held in device memory, times the seconds for which it held them."""
    adapter_bytes: int
    """Bytes of adapters that the engine loaded to the device for this turn. It is 0 if they were there."""
    engine_ms: float = 0.0
    """The turn's share of the time of the engine's steps, in milliseconds: by its tokens among those of each step."""
    cost: Money | None
    """Null if the turn has no price."""


class CacheReport(PromptTokensDetails):
    """The number of a turn's prompt tokens by source, and the reason why some of them were not in the KV cache."""

    miss_reason: str | None
    """One of `never_cached`, `evicted_pressure`, `evicted_quota`, `lease_expired`, `adapter_changed`, `history_edited`
    and `restarted`; null if there is no reason to report.
    """


class UsageTotals(Answer):
    """What several requests used together, and what they cost."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    """Cached tokens whose KV was in device memory; the next two: in host memory, and on disk."""
    host_tokens: int
    disk_tokens: int
    completion_tokens: int
    total_tokens: int
    kv_byte_seconds: int
    """Bytes of KV cache that the requests held in device memory, times the seconds for which they held them."""
    adapter_bytes: int
    """Bytes of adapters that the engine loaded to the device for these requests."""
    drafted_tokens: int
    """Draft tokens that the model verified."""
    forced_tokens: int
    """Tokens of the answers that a grammar dictated."""
    reasoning_tokens: int
    """Tokens of the answers that are the model's reasoning."""
    engine_ms: float
    """The requests' share of the time of the engine's steps, in milliseconds."""
    costs: tuple[Money, ...]
    """One amount for each currency. It is empty if no request has a price."""


class UsageRow(UsageTotals):
    """The usage and the cost of one group of requests, such as all requests of one day.

    `group` names the group. If the groups are adapters, requests without an adapter have the base model's name as their
    group. If the groups are sessions, null is all requests without a session.
    """

    group: str | None


class Rates(Answer):
    """Prices as decimal text: per million tokens, per GB-hour of KV cache, and per GB of adapters. A GB is 10⁹ bytes."""

    input: str
    """Per million prompt tokens that are computed."""
    output: str
    """Per million generated tokens."""
    input_device: str
    """Per million prompt tokens whose KV was cached in device memory; the next two: in host memory, and on disk."""
    input_host: str
    input_disk: str
    kv_gb_hour: str
    """Per GB of KV cache that a request holds in device memory for an hour."""
    adapter_gb: str
    """Per GB of adapters that are loaded to the device."""


class PriceList(Answer):
    """The prices of requests that begin at `valid_from` or later, until a newer list of the same tenant and tier begins.

    A list without a tenant is for all tenants that have none of their own, and a list without a service tier for all
    tiers that have none of their own.
    """

    id: str
    object: Literal["price_list"] = "price_list"
    tenant_id: str | None
    service_tier: str | None
    currency: str
    rates: Rates
    valid_from: float
    """In unix seconds."""
    created_at: float
    in_force: bool
    """Whether requests that begin now may have this list: it has begun, and no newer one has replaced it."""


class InvoiceLine(Answer):
    """What was used at one rate of one price list, and the amount of money for it."""

    price_list: str
    item: str
    """The name of the rate, such as `input_host`."""
    quantity: int
    unit: Literal["token", "byte-second", "byte"]
    rate: str
    """The price per million tokens, per GB-hour, or per GB."""
    amount: str
    currency: str


class Invoice(Answer):
    """What a tenant owes for one month in UTC. The totals are the sums of the lines, which are the sums of the requests'
    costs. Nothing is rounded but the parts of each request's cost, to 12 decimals.
    """

    object: Literal["invoice"] = "invoice"
    tenant_id: str
    month: str
    start: float
    """The month is the time from `start` up to `end`, in unix seconds."""
    end: float
    is_final: bool
    """Whether the month is over."""
    lines: tuple[InvoiceLine, ...]
    totals: tuple[Money, ...]
    requests: int
    unpriced: UsageTotals
    """The requests that had no price. They are in no line."""


class ComparedUsage(Answer):
    """All requests of a check with one verdict, with the sums of the ledger's and of the engines' figures by field.

    `agrees`: billed and unbilled figures are what the engines reported. `again`: several engines worked on one answer, and
    at most what they reported is billed. `interrupted`: the gateway died, and at most what was reported is billed.
    `nothing`: no engine began. `dropped`: a line of a batch that is done again. `own`: the server
    asked an engine whether it is ready. `pending`: the request may still run.
    `more`, `less`, `unreported` and `unbilled` are differences.
    """

    verdict: Literal[
        "agrees",
        "again",
        "interrupted",
        "nothing",
        "dropped",
        "own",
        "pending",
        "more",
        "less",
        "unreported",
        "unbilled",
    ]
    is_difference: bool
    requests: int
    billed: dict[str, int]
    """By field: `prompt_tokens`, `cached_tokens`, `host_tokens`, `disk_tokens`, `completion_tokens`, `kv_byte_seconds`,
    `adapter_bytes` and `engine_us`.
    """
    unbilled: dict[str, int]
    """What the ledger knows and does not bill, such as tokens after a stop string."""
    reported: dict[str, int]
    examples: tuple[str, ...]
    """Up to ten request ids, of a difference."""


class SumDifference(Answer):
    """A field whose sums differ from the requests."""

    field: str
    sums: int
    requests: int


class EngineTotals(Answer):
    """What an engine has counted since its start."""

    replica_id: str
    prompt_tokens: int
    generated_tokens: int


class OpenJournal(Answer):
    """What the asked gateway's journal has beside the ledger. Such requests are in no other figure of a check."""

    open: int
    """The requests that have an entry: those that run, and those that wait."""
    waiting: int
    """The requests that have ended, and that the database has not stored yet."""


class UsageCheck(Answer):
    """Whether the usage ledger agrees with what engines have reported, and with its own sums."""

    object: Literal["usage.check"] = "usage.check"
    start: float
    """The requests from `start` up to `end`, in unix seconds. It begins with the oldest report that is kept."""
    end: float
    differences: int
    """0 if all agrees."""
    compared: tuple[ComparedUsage, ...]
    sums: tuple[SumDifference, ...]
    engines: tuple[EngineTotals, ...]
    journal: OpenJournal | None = None
    """None from a server that does not tell it."""
