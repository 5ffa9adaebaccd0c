"""Names and describes the headers that the server adds to its answers, besides those of HTTP itself.

The one home of these names: the OpenAPI document describes the headers in HEADERS, and web pages of other origins may
read them (`cors.py`). Never sets a header on an answer. `platform/errors.py` and `platform/quotas/quota.py` write the
values of the headers for retries and limits.
"""

from typing import NamedTuple

REQUEST_ID = "x-request-id"
SERVER_REQUEST_ID = "x-graftwork-request-id"
TRACE_ID = "x-graftwork-trace-id"
ANTHROPIC_REQUEST_ID = "request-id"
AUTHENTICATE = "www-authenticate"
MODEL = "x-graftwork-model"
UNENFORCED = "x-graftwork-unenforced"
IGNORED = "x-graftwork-ignored"
DEGRADED = "x-graftwork-degraded"
SERVICE_TIER = "x-graftwork-service-tier"
REPLAYED = "idempotent-replayed"


class HeaderDescription(NamedTuple):
    """What a header says, and an example of its value. All values are texts."""

    meaning: str
    example: str


_RETRY = {
    "retry-after": HeaderDescription("Seconds to wait before the request is sent again.", "1"),
    "retry-after-ms": HeaderDescription("Milliseconds to wait before the request is sent again.", "250"),
    "x-should-retry": HeaderDescription("`false` where sending the same request again cannot help.", "false"),
}
_LIMITS = {
    "x-ratelimit-limit-requests": HeaderDescription("The tenant's limit of requests a minute.", "60"),
    "x-ratelimit-remaining-requests": HeaderDescription("Requests left in this minute.", "59"),
    "x-ratelimit-reset-requests": HeaderDescription("Until the whole limit is available again.", "1m0s"),
    "x-ratelimit-limit-tokens": HeaderDescription("The tenant's limit of tokens a minute.", "100000"),
    "x-ratelimit-remaining-tokens": HeaderDescription("Tokens left in this minute.", "99000"),
    "x-ratelimit-reset-tokens": HeaderDescription("Until the whole limit is available again.", "600ms"),
}
ID_HEADERS = (REQUEST_ID, SERVER_REQUEST_ID, TRACE_ID)
RETRY_HEADERS = tuple(_RETRY)
LIMIT_HEADERS = tuple(_LIMITS)

HEADERS: dict[str, HeaderDescription] = {
    REQUEST_ID: HeaderDescription(
        "The request's id: the client's own, if it has sent one, else the server's.", "req_01hzx"
    ),
    SERVER_REQUEST_ID: HeaderDescription(
        "The server's id of a request that has the client's `x-request-id`.", "req_01hzx"
    ),
    TRACE_ID: HeaderDescription(
        "The id of the request's trace: that of its `traceparent`, or a new one.", "4bf92f3577b34da6a3ce929d0e0e4736"
    ),
    ANTHROPIC_REQUEST_ID: HeaderDescription("The request's id under Anthropic's name.", "req_01hzx"),
    AUTHENTICATE: HeaderDescription("How to authenticate.", "Bearer"),
    **_RETRY,
    **_LIMITS,
    MODEL: HeaderDescription("The model, or the adapter version, that answers.", "support@3"),
    UNENFORCED: HeaderDescription(
        "Places in the request's JSON Schemas that are not enforced, separated by commas.",
        "tools[0].function.parameters#/properties/id/format",
    ),
    IGNORED: HeaderDescription(
        "Parts of the request that are hints, or that this server leaves out, separated by commas.",
        "tools[2] (web_search), thinking (adaptive)",
    ),
    DEGRADED: HeaderDescription(
        "What the operator takes away from this answer while the server has too much to do.", "max_output_tokens=256"
    ),
    SERVICE_TIER: HeaderDescription("The service tier that serves the turn. It is at most the tenant's own.", "flex"),
    REPLAYED: HeaderDescription("`true` where an earlier request's answer is repeated.", "true"),
}
"""Maps the name of each header to its description."""


def tier_header(service_tier: str | None) -> dict[str, str]:
    """Returns the header that tells which service tier serves a turn. Returns no header for None."""
    return {} if service_tier is None else {SERVICE_TIER: service_tier}


def degraded_header(output_cap: int | None) -> dict[str, str]:
    """Returns the header that tells that the operator has lowered the most tokens of an answer to `output_cap`. Returns
    no header for None.
    """
    return {} if output_cap is None else {DEGRADED: f"max_output_tokens={output_cap}"}
