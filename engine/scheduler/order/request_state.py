"""Holds the state of each request while the engine serves it.

Owns a request's tokens, the number of tokens that have been computed, the list of pages that hold their KV, and the
loads into these pages. Never allocates or releases a page, which the scheduler does, and never starts a load, which
the KV cache does at admission. Invariant: the pages of a request have room for at least `num_computed` tokens.

The tokens that an earlier run of the request has generated, on another engine, are tokens of its answer from the start.
So a request with such tokens is in the state of a request that was preempted after them.

While a step in flight computes a request, `num_computed` and `token_ids` are as they were before the step.
`num_scheduled` and `num_tokens` are as they will be after it (see steps_in_flight.py); the next step is planned from
these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graftwork.engine.core.events import (
    CacheReport,
    FinishReason,
    MissReason,
    PromptAdmitted,
    PromptEmbedded,
    PromptScored,
    RequestFinished,
    RequestOutput,
)
from graftwork.engine.core.pooling import PromptPool
from graftwork.engine.core.prefix_keys import PageKey, PrefixScope, TokenHistory
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.step import RequestSlice, ScoreSpec, StepResult
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.kv_budget import PromptEviction
from graftwork.engine.kv.index.window_pages import WindowPages
from graftwork.engine.kv.transfer.loader import PageAllocation, TokenPath
from graftwork.engine.kv.transfer.plan import TransferPlan
from graftwork.engine.speculative.request_drafts import RequestDrafts
from graftwork.platform.ids import IsolationDomain, RequestId


@dataclass(frozen=True, slots=True)
class FirstTokenEstimate:
    """How long a request is expected to wait, and how long its own prompt then takes, in seconds."""

    wait_s: float
    own_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.own_s


@dataclass(slots=True, eq=False)
class RequestState:
    """What the scheduler knows about one request. Only the scheduler changes it."""

    request: EngineRequest
    scope: PrefixScope
    seed: int
    arrived_at: float
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    """The most tokens of prompt and answer together: what the request allows, but at most the context length of the
    engine.
    """
    token_ids: list[int] = field(default_factory=list)
    """The prompt, then the answer so far."""
    known_keys: list[PageKey] = field(default_factory=list)
    """The keys of the first pages of `token_ids`, as far as a lookup has needed them."""
    pages: list[PageId] = field(default_factory=list)
    windows: WindowPages | None = None
    """The pages of windowed layer groups, which may end before `pages`; None if the model has one group."""
    num_given_up: int = 0
    """The pages that are in `pages` no more: with a rolling window those after the sinks, with a budget any of the prompt."""
    eviction: PromptEviction | None = None
    """What the request gives up of its prompt; None if that is nothing."""
    targets: list[PageId] = field(default_factory=list)
    """The pages for what is kept of the prompt, while the step is in flight that fills them."""
    num_computed: int = 0
    """The number of tokens whose KV is in `pages`, or will be there once `pending_loads` have ended."""
    pending_loads: set[TransferPlan] = field(default_factory=set)
    """Loads into `pages` that must end, or become readable layer by layer, before a step can compute this request."""
    overlapped_loads: set[TransferPlan] = field(default_factory=set)
    """Loads into `pages` that still run while steps compute this request. Each layer waits for its own KV."""
    tiers: tuple[Tier, ...] = ()
    """The tiers on which the KV of the first pages was found, one tier for each page."""
    miss_reason: MissReason | None = None
    priority: int = 0
    """The priority at admission; 0 is the highest. See WaitingOrder.priority."""
    expected: FirstTokenEstimate | None = None
    """When the first token was expected at the arrival of a request with a deadline; None without one."""
    uncached_tokens: int | None = None
    """How many prompt tokens had to be computed when that was last asked, while the request waited for its first run; None
    if nobody has asked.
    """
    place: int = 0
    """The number of the request's place in the batch while it runs."""
    started_at_step: int = 0
    """How many steps had ended when the request got its present place in the batch."""
    is_admitted: bool = False
    """Whether the request's admission has been reported. This stays true when the request is preempted."""
    drafts: RequestDrafts | None = None
    """The request's drafters and their counts; None until the request first runs."""
    num_scored: int = 0
    """The number of prompt tokens whose log probabilities have been reported, for a request that asks for them."""
    pool: PromptPool | None = None
    """The embedding of the prompt, as far as it is computed; None for a request that asks for none."""
    history: TokenHistory | None = None
    """Token counts for penalties; None without penalties. The last tokens may be missing: call `updated_history`."""
    kv_byte_seconds: float = 0.0
    """Bytes of pages that the request held, times seconds, which no event has reported yet."""
    engine_s: float = 0.0
    """The request's share of the time of steps, in seconds, which no event has reported yet."""
    slices_in_flight: list[RequestSlice] = field(default_factory=list)
    """The slices of this request in the steps in flight, the oldest first. StepsInFlight changes them.

    The result of a step counts only while its slice is here.
    """

    request_id: RequestId = field(init=False)
    domain: IsolationDomain = field(init=False)
    """The domain (usually one tenant) that the request's pages and computed tokens are charged to."""
    num_prompt: int = field(init=False)
    rolling_window: RollingWindow | None = field(init=False)
    forgets: bool = field(init=False)
    """Whether the request has a rolling window, or gives up a part of its prompt."""

    def __post_init__(self) -> None:
        """Keeps what steps ask often of a request, which never changes."""
        self.request_id, self.domain = self.request.request_id, self.request.domain
        self.num_prompt = len(self.request.prompt_token_ids)
        self.rolling_window = self.request.sampling.rolling_window
        self.forgets = self.rolling_window is not None or self.eviction is not None

    @property
    def frames(self) -> list[PageId]:
        """The pages of all layer groups that the request holds."""
        if self.windows is None and not self.targets:
            return self.pages
        return [*self.pages, *self.targets, *([] if self.windows is None else self.windows.all_frames)]

    @property
    def is_compacted(self) -> bool:
        """Whether `pages` have what was kept of the prompt, one token after another, and then the tokens after it."""
        return self.eviction is not None and self.num_given_up > 0

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt is to be evicted, and is not yet."""
        return self.eviction is not None and not self.num_given_up

    @property
    def due_at(self) -> float | None:
        """The time at which the first token must be there, on the scheduler's clock; None without a deadline, or if an
        earlier run has generated it.
        """
        if self.request.deadline_s is None or self.request.emitted_token_ids:
            return None
        return self.arrived_at + self.request.deadline_s

    @property
    def has_run(self) -> bool:
        """Whether the request has had a place in a batch: of this engine, or of the one with the earlier run."""
        return self.is_admitted or bool(self.request.emitted_token_ids)

    @property
    def num_submitted(self) -> int:
        """The number of tokens that were known when the request arrived: those of the prompt and of an earlier run."""
        return self.num_prompt + len(self.request.emitted_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens_in_flight(self) -> int:
        """The number of tokens that steps in flight sample for the request. Their ids are not known yet.

        A slice with draft tokens counts as one token: the step may give more.
        """
        return sum(bool(piece.samples) for piece in self.slices_in_flight)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer, with those in flight."""
        return len(self.token_ids) + (self.num_tokens_in_flight if self.slices_in_flight else 0)

    @property
    def num_scheduled(self) -> int:
        """The number of tokens whose KV is computed, or is being computed by steps in flight."""
        return self.slices_in_flight[-1].known_end if self.slices_in_flight else self.num_computed

    @property
    def num_attended(self) -> int:
        """The number of tokens before the next one to schedule that it attends to."""
        scheduled = self.num_scheduled
        return scheduled if self.rolling_window is None else self.rolling_window.seen_of(scheduled)

    @property
    def generates(self) -> bool:
        """Whether the request may generate a further token, after those in flight. False if it only asks to compute its
        prompt.
        """
        return self.num_tokens < self.max_total_tokens

    @property
    def num_uncomputed(self) -> int:
        """The number of tokens that the next step can compute: 1 while decoding, usually more while prefilling.

        It is 0 if steps in flight compute all of them, or if the answer ends with the token in flight, which needs no
        KV.
        """
        if not self.slices_in_flight:
            return len(self.token_ids) - self.num_computed
        if self.num_tokens_in_flight and not self.generates:
            return 0
        return self.num_tokens - self.num_scheduled

    @property
    def waits_for_result(self) -> bool:
        """Whether the request's next slice depends on more than the length of its result: on how many draft tokens are
        accepted, or on what the step tells about the prompt.
        """
        return any(piece.num_drafts or piece.reads_prompt for piece in self.slices_in_flight)

    @property
    def num_reusable(self) -> int:
        """The number of known tokens whose KV may come from the cache.

        The last token is always computed, because its logits are needed. So are tokens that predict a token of the
        prompt whose log probability has not been reported, and tokens whose hidden states an embedding lacks.
        """
        if self.pool is not None:
            return self.pool.num_reusable
        if self._lacks_scores:
            return self.num_scored
        return len(self.token_ids) - 1 if self.eviction is None else self.eviction.num_reusable

    @property
    def _lacks_scores(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    def scores(self, end: int) -> ScoreSpec | None:
        """Returns which log probabilities the next step reports, if it computes the tokens up to position `end`."""
        num_top = self.request.sampling.prompt_logprobs
        last = min(end, self.num_prompt - 1)
        if num_top is None or not self._lacks_scores or last <= self.num_scored:
            return None
        return ScoreSpec(self.num_scored, tuple(self.token_ids[self.num_scored + 1 : last + 1]), num_top)

    def read_prompt(self, piece: RequestSlice, result: StepResult) -> list[RequestOutput]:
        """Takes what a step has told about the prompt beside tokens. Returns the outputs that report it."""
        outputs: list[RequestOutput] = []
        if logprobs := result.prompt_logprobs.get(self.request_id):
            self.num_scored += len(logprobs)
            outputs.append(RequestOutput(self.request_id, PromptScored(logprobs)))
        if self.pool is not None and piece.pool is not None:
            self.pool.take(result.pooled[self.request_id], piece.pool.end)
            if self.pool.is_complete:
                outputs.append(RequestOutput(self.request_id, PromptEmbedded(self.pool.values())))
        return outputs

    def path(self, num_tokens: int) -> TokenPath:
        """Returns the first `num_tokens` tokens of the request as a TokenPath, for a lookup in the prefix cache."""
        return TokenPath(self.scope, self.token_ids[:num_tokens], self.domain, self.known_keys)

    @property
    def computed_path(self) -> TokenPath:
        """The tokens whose KV is computed exactly, as a TokenPath."""
        return self.path(min(self.num_computed, self.num_prompt) if self.is_compacted else self.num_computed)

    def rename_pages(self, moves: Mapping[PageId, PageId]) -> None:
        """Updates the numbers of the request's pages after pages were moved. `moves` maps old to new numbers."""
        self.pages = [moves.get(page, page) for page in self.pages]
        self.targets = [moves.get(page, page) for page in self.targets]
        if self.windows is not None:
            self.windows.rename(moves)

    def hold(self, allocation: PageAllocation, page_tokens: int, miss_reason: MissReason | None) -> None:
        """Records the pages that were allocated to a request that starts, and the loads that fill them."""
        self.pages, self.tiers, self.windows = list(allocation.pages), allocation.tiers, allocation.windows
        self.num_given_up = allocation.num_given_up
        self.pending_loads = set(allocation.loads)
        self.num_computed = len(self.tiers) * page_tokens
        self.miss_reason = miss_reason

    def give_up(self, sink_pages: int, first: int) -> list[PageId]:
        """Gives up the pages between those of the sinks and page `first` of the text. Returns them; the caller must release
        them.
        """
        end = max(first - self.num_given_up, sink_pages)
        lost = self.pages[sink_pages:end]
        del self.pages[sink_pages:end]
        self.num_given_up += len(lost)
        return lost

    def compact(self) -> list[PageId]:
        """Goes on with what was kept of the prompt. Returns the pages of the whole prompt; the caller must release them."""
        assert self.eviction is not None
        lost, self.pages, self.targets = self.pages, self.targets, []
        self.num_given_up = self.eviction.num_given_up
        return lost

    def drop_pages(self) -> None:
        """Forgets all pages, which were released or offloaded."""
        self.pages, self.windows, self.targets, self.num_given_up = [], None, [], 0

    def truncate_pages(self, num_pages: int, page_tokens: int) -> list[PageId]:
        """Keeps the first `num_pages` pages of the request, because a load could not read the pages after them. Keeps
        none with a rolling window or with windowed layer groups, whose pages before are not there.

        Returns the removed pages. The caller must release them.
        """
        lost = self.pages[num_pages:]
        if self.windows is not None or self.rolling_window is not None:
            num_pages, lost, self.num_given_up = 0, self.frames, 0
            self.windows = None if self.windows is None else WindowPages()
        self.pages, self.tiers = self.pages[:num_pages], self.tiers[:num_pages]
        self.num_computed = min(self.num_computed, num_pages * page_tokens)
        return lost

    def cache_report(self, page_tokens: int) -> CacheReport:
        """Returns how many prompt tokens had cached KV on each tier, and why the other prompt tokens were not cached."""
        found = dict.fromkeys(Tier, 0)
        for index, tier in enumerate(self.tiers):
            found[tier] += min(page_tokens, max(self.num_prompt - index * page_tokens, 0))
        return CacheReport(
            device_tokens=found[Tier.DEVICE],
            host_tokens=found[Tier.HOST],
            disk_tokens=found[Tier.DISK],
            recomputed_tokens=self.num_prompt - sum(found.values()),
            miss_reason=self.miss_reason,
        )

    def append_tokens(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Appends generated tokens to the request. Stops after the first token that ends the answer.

        Returns the appended tokens.
        """
        before = len(self.token_ids)
        for token_id in token_ids:
            self.token_ids.append(token_id)
            if self.finish_reason() is not None:
                break
        return tuple(self.token_ids[before:])

    def max_draft_tokens(self) -> int:
        """Returns the most draft tokens that the next step may verify for the request without exceeding its maximum
        length.

        A step always generates one more token than the draft tokens that it accepts.
        """
        return max(self.max_total_tokens - len(self.token_ids) - 1, 0)

    def banned_token_ids(self, num_drafted: int = 0) -> tuple[int, ...]:
        """Returns the tokens that must not be sampled next, because the answer has not reached its minimum length.

        These are the tokens that would end the answer. `num_drafted` draft tokens count as part of the answer, and so do
        tokens in flight.
        """
        if self.num_tokens - self.num_prompt + num_drafted >= self.request.sampling.min_tokens:
            return ()
        return tuple(sorted(self.stop_token_ids))

    def updated_history(self) -> TokenHistory | None:
        """Returns the token counts for penalties, including all tokens generated so far; None if the request has no
        penalties.
        """
        if self.history is not None:
            self.history.extend(self.token_ids[self.num_prompt + self.history.num_generated_tokens :])
        return self.history

    def take_use(self) -> tuple[int, int]:
        """Returns the KV that the request held, in byte-seconds, and its share of steps, in microseconds, as far as no
        event has reported them. The caller reports them.
        """
        kv_byte_seconds, engine_us = int(self.kv_byte_seconds), int(self.engine_s * 1e6)
        self.kv_byte_seconds -= kv_byte_seconds
        self.engine_s -= engine_us / 1e6
        return kv_byte_seconds, engine_us

    def outputs_if_over(self, page_tokens: int) -> list[RequestOutput]:
        """Returns all outputs of a request whose answer has ended with its earlier run; [] if the answer goes on.

        None of its KV was looked up, so its whole prompt counts as recomputed.
        """
        reason = self.finish_reason() if self.request.emitted_token_ids else None
        if reason is None:
            return []
        admitted, finished = PromptAdmitted(self.cache_report(page_tokens)), RequestFinished(reason, self.num_generated)
        return [RequestOutput(self.request_id, admitted), RequestOutput(self.request_id, finished)]

    def finish_reason(self) -> FinishReason | None:
        """Returns why the request's last token ends the answer; None if the answer continues."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
