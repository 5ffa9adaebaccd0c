"""What is counted of one simulated run.

Invariant: device + host + disk + recomputed = prompt, turn by turn.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.transfer.plan import TransferKind


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one policy on one trace."""

    num_turns: int
    shares: dict[str, float]
    """Of all prompt tokens, by where they came from."""
    mean_ttft_s: float
    p95_ttft_s: float
    moved_bytes: dict[str, float]
    """By kind of transfer."""
    refusals: int
    working_set: float
    """Pages that live sessions reach, on average over turns, as a multiple of the device."""


@dataclass(slots=True)
class Tally:
    """Counts turns after the first `num_warm_up`, in which all policies only fill their tiers."""

    num_warm_up: int = 0
    num_turns: int = 0
    refusals: int = 0
    ttft_s: list[float] = field(default_factory=list)
    reached_pages: list[int] = field(default_factory=list)
    tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    recomputed: int = 0

    def count(self, ttft_s: float, tokens_by_tier: Mapping[Tier, int], prompt_tokens: int, reached_pages: int) -> None:
        """A turn has its first token."""
        self.num_turns += 1
        if self.num_turns <= self.num_warm_up:
            return
        recomputed = prompt_tokens - sum(tokens_by_tier.values())
        assert recomputed > 0, "the last token of a prompt is always computed"
        for tier, tokens in tokens_by_tier.items():
            self.tokens[tier] += tokens
        self.recomputed += recomputed
        self.ttft_s.append(ttft_s)
        self.reached_pages.append(reached_pages)

    def figures(self, moved_pages: Mapping[TransferKind, int], page_bytes: int, device_pages: int) -> Figures:
        """What all of it comes to."""
        total = max(sum(self.tokens.values()) + self.recomputed, 1)
        shares = {str(tier): tokens / total for tier, tokens in self.tokens.items()}
        ordered = sorted(self.ttft_s) or [0.0]
        return Figures(
            num_turns=self.num_turns,
            shares=shares | {"recomputed": self.recomputed / total},
            mean_ttft_s=statistics.mean(ordered),
            p95_ttft_s=ordered[int(0.95 * (len(ordered) - 1))],
            moved_bytes={str(kind): float(pages * page_bytes) for kind, pages in moved_pages.items()},
            refusals=self.refusals,
            working_set=statistics.mean(self.reached_pages or [0]) / device_pages,
        )
