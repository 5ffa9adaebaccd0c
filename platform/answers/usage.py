"""Token counts: what one answer used, where its prompt came from, and what a tenant used."""

from graftwork.platform.answers.base import Answer, absent


class PromptTokensDetails(Answer):
    """Where the prompt's tokens came from: device + host + disk = cached, and cached + recomputed = prompt."""

    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int


class CompletionTokensDetails(Answer):
    """How the completion's tokens were found."""

    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    accepted_prediction_tokens: int | None = absent()
    """Tokens of the request's `prediction` that are in the answer."""
    rejected_prediction_tokens: int | None = absent()


class Usage(Answer):
    """The tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @property
    def cached_share(self) -> float:
        """The part of the prompt that was not computed again, from 0 to 1."""
        cached = self.prompt_tokens_details.cached_tokens
        return cached / self.prompt_tokens if self.prompt_tokens else 0.0


class CacheReport(PromptTokensDetails):
    """Where a turn's prompt came from, and why the cache did not hold all of it."""

    miss_reason: str | None
    """`never_cached`, `evicted_pressure`, `evicted_quota`, `lease_expired`, `adapter_changed`, `history_edited` or
    `restarted`."""


class UsageRow(Answer):
    """What one group used. `group` is None for work outside sessions."""

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
