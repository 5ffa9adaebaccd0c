"""Defines the JSON answers of `GET /v1/admin/overview` and `GET /v1/overview`: one snapshot of what a server does.

All rates are those of the last 10 to 15 seconds. Percentiles, refusals and shares are those of the last `window_s`
seconds. What is said of tenants, adapters and sessions is what this gateway has seen since its start; what is said of
engines is what the engines themselves report, so it covers all gateways.
"""

from typing import Literal

from pydantic import ConfigDict

from graftwork.platform.answers.base import Answer, absent


class TierPages(Answer):
    """The KV pages of one cache tier of an engine. Null means that the tier has no such figure."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    used: int | None
    """Pages that hold KV, of running requests or cached."""
    free: int | None


class PagesByTier(Answer):
    """The KV pages of an engine by cache tier."""

    device: TierPages
    host: TierPages
    disk: TierPages


class EngineOverview(Answer):
    """One engine. Figures that it has not reported yet are null."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    status: str
    """The state of the engine: `ready`, `draining` or `absent`."""
    reason: str | None = absent()
    """Why an absent engine gets no requests."""
    epoch: int | None
    address: str
    version: str | None
    running: int | None = None
    waiting: int | None = None
    queued_tokens: int | None = None
    """Prompt tokens, of all requests that wait or run, that must still be computed."""
    pages: PagesByTier | None = None
    prompt_tokens_per_s: float | None = None
    """Prompt tokens of admitted requests a second, cached ones included."""
    generated_tokens_per_s: float | None = None
    step_ms: float | None = None
    """The mean milliseconds of a step since the snapshot before; the last known one if there was no step."""
    adapters_resident: int | None = None
    """Adapters on the device."""
    stale_s: float | None = absent()
    """How many seconds ago the engine reported these figures, if it does not answer now."""


class Percentiles(Answer):
    """Latencies in milliseconds. Null without a measurement in the window."""

    p50: float | None
    p99: float | None


class TenantOverview(Answer):
    """One tenant."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    name: str | None
    """Null for a tenant that is being deleted."""
    status: str | None
    running: int
    waiting: int
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    ttft_ms: Percentiles
    """From arrival to the first token."""
    inter_token_p99_ms: float | None
    refusals: dict[str, int]
    """Requests that were refused or failed before the engine admitted them, by the code of their error."""
    failures: dict[str, int]
    """Requests that failed after the engine admitted them, by the code of their error."""
    weight: float | None
    """The tenant's weight when tenants compete for the engine."""
    fair_share: float | None = None
    """The tenant's weight, divided by the weights of all tenants with activity in the window. Null for a tenant's key."""
    service_share: float | None = None
    """The part of all computed tokens, recomputed prompt tokens and generated ones, that was this tenant's. Null for a
    tenant's key.
    """
    service_tiers: dict[str, int]
    """Requests by service tier."""
    prompt_tokens_by_tier: dict[str, int]
    """Prompt tokens by the cache tier that had their KV: `device`, `host`, `disk` or `recomputed`."""
    slo_burn: float | None
    """How fast the tenant's requests spend the error budget of the server's objectives: 1 spends it exactly. Null without
    objectives.
    """
    active_at: float | None
    """The unix time of the latest event; null if there was none since the gateway's start."""


class AdapterOverview(Answer):
    """One adapter version."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    tenant_id: str
    name: str
    version: int | None
    """Null for a mixture."""
    residency: Literal["device", "host", "none"]
    """The fastest memory in which an engine has the adapter. With `none` it is read from its files when it is needed."""
    device: tuple[str, ...]
    """The ids of the engines that have the adapter on their device; empty for a tenant's key."""
    host: tuple[str, ...]
    """The ids of the engines that have the adapter in host memory; empty for a tenant's key."""
    size_bytes: int | None
    running: int
    """Requests with this adapter that run now: rows of the engines' batches."""
    waiting: int
    requests_per_s: float
    ttft_ms: Percentiles
    active_at: float | None


class SessionOverview(Answer):
    """One session that had a turn on this gateway."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    tenant_id: str
    model: str | None
    """The adapter version, such as `name@3`; null for the base model."""
    status: Literal["running", "waiting", "idle"]
    tokens: int
    """Tokens of the latest prompt and of what was generated after it."""
    prompt_tokens_by_tier: dict[str, int]
    """The tokens of the latest prompt by the cache tier that had their KV."""
    miss_reason: str | None
    """Why the latest prompt had to be computed where the cache might have had it."""
    turns: int
    """Turns that this gateway has run."""
    active_at: float


class OverviewTotals(Answer):
    """The sums over all tenants, and how many rows each list has without paging."""

    tenants: int
    adapters: int
    sessions: int
    running: int
    waiting: int
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    refused_per_s: float


class Overview(Answer):
    """A snapshot of a server. A tenant's key gets its own rows, and no engines."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["overview"] = "overview"
    sequence: int
    """Rises by one with each snapshot of this gateway. Gateways and starts have sequences of their own."""
    at: float
    """The unix time of the snapshot."""
    window_s: int
    version: str
    model: str
    """The name of the base model."""
    sort: str
    totals: OverviewTotals
    engines: tuple[EngineOverview, ...]
    tenants: tuple[TenantOverview, ...]
    adapters: tuple[AdapterOverview, ...]
    sessions: tuple[SessionOverview, ...]


class OverviewEvent(Overview):
    """A snapshot as an event of a stream, with the name `overview`."""
