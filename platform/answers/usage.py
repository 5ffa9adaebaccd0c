"""Defines token counts: the usage of one answer, the sources of its prompt, and the usage of a tenant."""

from graftwork.platform.answers.base import Answer, absent


class PromptTokensDetails(Answer):
    """The sources of the prompt's tokens.

    device + host + disk = cached, and cached + recomputed = all tokens of the prompt.
    """

    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int


class CompletionTokensDetails(Answer):
    """The numbers of tokens that were drafted, that were accepted, and that a grammar forced."""

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
        """The part of the prompt that came from the cache, from 0 to 1."""
        cached = self.prompt_tokens_details.cached_tokens
        return cached / self.prompt_tokens if self.prompt_tokens else 0.0


class CacheReport(PromptTokensDetails):
    """The sources of a turn's prompt, and the reason why the cache did not hold all of it."""

    miss_reason: str | None
    """The reason: `never_cached`, `evicted_pressure`, `evicted_quota`, `lease_expired`, `adapter_changed`,
    `history_edited` or `restarted`.
    """


class UsageRow(Answer):
    """The usage of one group, such as one day.

    By adapter, requests without an adapter are the group of the base model's name. By session, `group` is null for
    requests without a session.
    """

    group: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
