"""The usage object of every answer, as plain figures that add up."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from graftwork.engine.core.events import CacheReport, DraftReport
from graftwork.sessions.core.views import draft_body
from graftwork.sessions.generation.usage import TallyingEngine

_NOTHING = CacheReport()


@dataclass(frozen=True, slots=True)
class UsageFigures:
    """device + host + disk = cached, cached + recomputed = prompt."""

    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    completion_tokens: int
    drafts: DraftReport = field(default_factory=DraftReport)

    @classmethod
    def of(cls, tallies: Iterable[TallyingEngine], choices_per_prompt: int) -> "UsageFigures":
        """Of all sequences of one request; a prompt that several choices share counts once."""
        ordered = list(tallies)
        caches = [tally.cache or _NOTHING for tally in ordered[::choices_per_prompt]]
        return cls(
            device_tokens=sum(cache.device_tokens for cache in caches),
            host_tokens=sum(cache.host_tokens for cache in caches),
            disk_tokens=sum(cache.disk_tokens for cache in caches),
            recomputed_tokens=sum(cache.recomputed_tokens for cache in caches),
            completion_tokens=sum(tally.completion_tokens for tally in ordered),
            drafts=DraftReport.sum_of(tally.drafts for tally in ordered),
        )

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.recomputed_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "device_tokens": self.device_tokens,
                "host_tokens": self.host_tokens,
                "disk_tokens": self.disk_tokens,
                "recomputed_tokens": self.recomputed_tokens,
            },
            "completion_tokens_details": draft_body(self.drafts),
        }
