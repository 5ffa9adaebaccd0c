"""A request while it is served: its tokens, how far its KV has caught up with them, and the pages it holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from graftwork.engine.core.events import CacheReport, FinishReason, MissReason
from graftwork.engine.core.prefix_keys import PrefixScope
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.core.token_counts import TokenHistory
from graftwork.engine.kv.index.radix_tree import Domain
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from graftwork.engine.kv.transfer.plan import TransferPlan
from graftwork.engine.speculative.sequence_drafts import SequenceDrafts
from graftwork.platform.ids import RequestId


def history_for(request: EngineRequest) -> TokenHistory | None:
    """What its penalties count, if it has any; a presence and a frequency penalty leave the prompt alone."""
    if not request.sampling.counts_tokens:
        return None
    return TokenHistory(request.prompt_token_ids if request.sampling.repetition_penalty != 1 else ())


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the Scheduler; nobody else changes it."""

    request: EngineRequest
    scope: PrefixScope
    seed: int
    arrived_at: float
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    """Prompt and completion together: what was asked, cut to the context."""
    token_ids: list[int] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in `pages`, once `arrivals` have landed."""
    arrivals: set[TransferPlan] = field(default_factory=set)
    """Copies into `pages` that it waits for."""
    reading: set[TransferPlan] = field(default_factory=set)
    """Copies into `pages` that it has been planned with before they ended."""
    tiers: tuple[Tier, ...] = ()
    """Where the KV of its first pages was found."""
    miss_reason: MissReason | None = None
    rank: int = 0
    """The class that it was let in with; see FairShare.rank."""
    is_admitted: bool = False
    """Whether its client has been told; it stays so when it is offloaded and goes on."""
    drafts: SequenceDrafts | None = None
    """What it guesses; None until it runs."""
    history: TokenHistory | None = None
    """What penalties count; None where there are none. May be behind: see `counted_history`."""

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_behind(self) -> int:
        """Known tokens that are not computed yet: 1 while decoding, more while catching up."""
        return len(self.token_ids) - self.num_computed

    @property
    def domain(self) -> Domain:
        """Whom its pages are charged to."""
        return self.request.isolation

    def path(self, num_tokens: int) -> TokenPath:
        """Its first tokens, and where their pages may be shared."""
        return TokenPath(self.scope, self.token_ids[:num_tokens], self.domain)

    def settle(self, allocation: PageAllocation, page_tokens: int, miss_reason: MissReason | None) -> None:
        """Move in: from now on it holds these pages."""
        self.pages, self.tiers = list(allocation.pages), allocation.tiers
        self.arrivals = set(allocation.loads)
        self.num_computed = len(self.tiers) * page_tokens
        self.miss_reason = miss_reason

    def give_back(self, num_pages: int, page_tokens: int) -> list[PageId]:
        """Keep the first pages only: the KV of the others could not be read. Returns what must be released."""
        lost = self.pages[num_pages:]
        self.pages, self.tiers = self.pages[:num_pages], self.tiers[:num_pages]
        self.num_computed = min(self.num_computed, num_pages * page_tokens)
        return lost

    def cache_report(self, page_tokens: int) -> CacheReport:
        """Where the prompt's tokens came from."""
        found = {tier: self.tiers.count(tier) * page_tokens for tier in Tier}
        return CacheReport(
            device_tokens=found[Tier.DEVICE],
            host_tokens=found[Tier.HOST],
            disk_tokens=found[Tier.DISK],
            recomputed_tokens=self.num_prompt - sum(found.values()),
            miss_reason=self.miss_reason,
        )

    def take(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Append tokens up to the one that ends it, and return them; what was chosen behind that one never was."""
        before = len(self.token_ids)
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if self.finish_reason() is not None:
                break
        return tuple(self.token_ids[before:])

    def max_draft_tokens(self) -> int:
        """How many may be guessed now: each may come true, and the step adds one more of its own."""
        return max(self.max_total_tokens - len(self.token_ids) - 1, 0)

    def banned_token_ids(self, num_drafted: int = 0) -> tuple[int, ...]:
        """What may not be sampled next, once so many drafted tokens have come true."""
        if self.num_generated + num_drafted >= self.request.sampling.min_tokens:
            return ()
        return tuple(sorted(self.stop_token_ids))

    def counted_history(self) -> TokenHistory | None:
        """The history with every token that is known by now."""
        if self.history is not None:
            self.history.extend(self.token_ids[self.num_prompt + self.history.num_generated_tokens :])
        return self.history

    def finish_reason(self) -> FinishReason | None:
        """Whether the last token ended it, and why."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
