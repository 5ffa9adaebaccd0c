"""Defines token counts: the usage of one answer, the sources of a prompt's tokens (cached or computed), and the usage
of a tenant.
"""

from graftwork.platform.answers.base import Answer, absent


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


class CacheReport(PromptTokensDetails):
    """The number of a turn's prompt tokens by source, and the reason why some of them were not in the KV cache."""

    miss_reason: str | None
    """One of `never_cached`, `evicted_pressure`, `evicted_quota`, `lease_expired`, `adapter_changed`, `history_edited`
    and `restarted`; null if there is no reason to report.
    """


class UsageRow(Answer):
    """The token counts of one group of requests, such as all requests of one day.

    `group` names the group. If the groups are adapters, requests without an adapter have the base model's name as their
    group. If the groups are sessions, null is all requests without a session.
    """

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
