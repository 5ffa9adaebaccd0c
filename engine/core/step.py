"""Defines the plan of one step (one forward pass), its result, and the runner that executes it.

    launch(plan) → Flight      the forward pass has begun
    Flight.sample()            the choice of tokens has begun; all tokens before them are known
    Flight.result()            the step has ended, and its tokens are on the host

The scheduler makes the plan, and the runner executes it. Never imports torch. Invariants: a plan has at most one slice
(part) of each request. Steps are sampled, and end, in the order in which they were launched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.pooling import Float64, PoolSpec
from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.tiers import PageId
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


class MaskRow(Protocol):
    """The tokens that a grammar allows at one position of an answer. They are computed only when `fill` is called."""

    def fill(self, words: NDArray[np.int32]) -> GraftworkError | None:
        """Sets the bits of the allowed tokens in the bitmask `words`. Token 0 has the lowest bit of the first word.

        A word has the bits of 32 tokens. If the answer is complete, sets no bit. If the request must fail, returns the
        error with which it ends; else returns None.
        """
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What the sampler needs to choose one token, besides the logits."""

    params: SamplingParams
    seed: int
    """The request's seed, or a random one if the request has none."""
    position: int
    """The position of the chosen token; the prompt starts at 0. Noise depends on (seed, choice, position)."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that must not be chosen: the stop tokens, until the answer has `min_tokens` tokens."""
    history: TokenHistory | None = None
    """Token counts for penalties, up to the token before `position`; None without penalties.

    Valid from the time when all tokens before `position` are known to the end of the step.
    """
    draft_token_ids: tuple[int, ...] = ()
    """Draft tokens right before this position; penalties count them too."""
    mask: MaskRow | None = None
    """The tokens that the grammar allows; None allows all."""

    @property
    def needs_tokens(self) -> bool:
        """Whether all tokens before `position` must be known, because penalties or a grammar depend on them."""
        return self.history is not None or self.mask is not None


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """The tokens of a prompt whose log probabilities a step reports. They are adjacent."""

    start: int
    """The position right before the first of these tokens: the step computes it, and it predicts this token."""
    token_ids: tuple[int, ...]
    """The tokens at the positions [start + 1, start + 1 + len(token_ids))."""
    num_top: int
    """How many likely tokens to report beside each of them."""


@dataclass(frozen=True, slots=True)
class KvEviction:
    """What a step keeps of a prompt that ends in it (see kv_budget.py)."""

    num_kept: int
    """The tokens that each KV head keeps."""
    targets: tuple[PageId, ...]
    """The pages that their KV is copied to."""


@dataclass(frozen=True, slots=True)
class WindowTables:
    """The page tables of one request in the layer groups that keep only a window."""

    first: int
    """The number of the request's pages before these."""
    tables: tuple[tuple[PageId, ...], ...]
    """The pages of each windowed group from page `first` of the request on, in order."""


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """The tokens of one request that a step computes: those at positions [start, start + num_tokens).

    The last `num_drafts` of these tokens are drafts, which the step verifies. The tokens before them are known: they
    belong to the prompt or to the answer.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """Position of the first token. The KV of all tokens before it is in `pages`."""
    pages: tuple[PageId, ...]
    """The first ceil((start + num_tokens) / page_tokens) pages of the request, in order, without those given up."""
    adapters: tuple[AdapterUse, ...]
    """The adapters of the request, sorted by digest; empty for the base model."""
    samples: tuple[SampleSpec, ...]
    """How to sample the last known token's successor, and the successor of each draft token.

    Empty if the slice ends before the last known token, or if the request generates nothing.
    """
    scores: ScoreSpec | None = None
    """The tokens of the prompt to report log probabilities of; None for none."""
    pool: PoolSpec | None = None
    """The hidden states that the step adds to the prompt's embedding; None for none."""
    awaits_token: bool = False
    """Whether this slice computes the token that the step launched right before samples for this request.

    The plan is made before that token is known. It is the only token of the slice, and `token_ids` is empty.
    """
    rolling_window: RollingWindow | None = None
    """Which tokens the tokens of this slice attend to; None for all before each."""
    place: int = 0
    """The request's place in the batch: a number that no other running request has, from 0 on."""
    num_given_up: int = 0
    """The pages that a request with a rolling window, after those of the sinks, or with a budget has given up. They are not in
    `pages`.
    """
    is_compacted: bool = False
    """Whether `pages` have what was kept of the prompt, one token after another, and then the tokens after it."""
    eviction: KvEviction | None = None
    """What is kept of the prompt, if it ends in this step and the request has a budget."""
    windows: WindowTables | None = None
    """The pages of the layer groups that keep only a window; None if the model has one group.

    A trial step of a model with windowed groups has none either: all groups then use `pages`, and its results mean
    nothing.
    """

    num_tokens: int = field(init=False, repr=False, compare=False)
    num_drafts: int = field(init=False, repr=False, compare=False)
    num_known: int = field(init=False, repr=False, compare=False)
    """The number of known tokens of this slice. The other tokens are drafts."""
    end: int = field(init=False, repr=False, compare=False)
    """The position after the last token of this slice. Positions are counted from the start of the prompt."""
    known_end: int = field(init=False, repr=False, compare=False)
    """The position after the last known token of this slice. Known tokens are those that are not drafts."""

    def __post_init__(self) -> None:
        """Counts once what a step asks some thirty times of each slice."""
        num_tokens = len(self.token_ids) + self.awaits_token
        num_drafts = len(self.samples) - 1 if self.samples else 0
        put = object.__setattr__
        put(self, "num_tokens", num_tokens)
        put(self, "num_drafts", num_drafts)
        put(self, "num_known", num_tokens - num_drafts)
        put(self, "end", self.start + num_tokens)
        put(self, "known_end", self.start + num_tokens - num_drafts)

    def table(self, group: int) -> tuple[int, tuple[PageId, ...]]:
        """Returns the page table of a layer group, and the number of pages of the request that come before it. A page of the
        first group stands so many places earlier than in the text, unless it is one of the sinks.
        """
        if group == 0 or self.windows is None:
            return self.num_given_up, self.pages
        return self.windows.first, self.windows.tables[group - 1]

    @property
    def frames(self) -> list[PageId]:
        """The pages of all layer groups that the step may read or write."""
        windowed = () if self.windows is None else self.windows.tables
        return [*self.pages, *(page for table in windowed for page in table)]

    @property
    def num_before(self) -> int:
        """The number of tokens before `start` that the first token attends to."""
        return self.start if self.rolling_window is None else self.rolling_window.seen_of(self.start)

    @property
    def reads_prompt(self) -> bool:
        """Whether the step must do something with the prompt, besides sampling, before the next step can be planned: return
        something about its hidden states, or evict its KV.
        """
        return self.scores is not None or self.pool is not None or self.eviction is not None

    def in_places(self, page_tokens: int) -> "RequestSlice":
        """Returns the slice as attention sees it: positions are places in `pages`. They differ if some are given up and the
        others have moved up.
        """
        if not self.is_compacted:
            return self
        start = self.start - self.num_given_up * page_tokens
        return replace(self, start=start, num_given_up=0, is_compacted=False)

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes: one slice (part) of each request that runs in this step."""

    slices: tuple[RequestSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def awaits_tokens(self) -> bool:
        """Whether the plan was made before the tokens of the step before it were known."""
        return any(piece.awaits_token for piece in self.slices)

    @property
    def can_prepare_sampling(self) -> bool:
        """Whether nothing that sampling needs, besides the logits, depends on tokens that are not known yet."""
        return not self.awaits_tokens or not any(spec.needs_tokens for piece in self.slices for spec in piece.samples)

    @property
    def num_adapters(self) -> int:
        """The number of distinct adapters that the requests of this plan use. The base model does not count."""
        return len({use.digest for piece in self.slices for use in piece.adapters})


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that one step has chosen for its requests."""

    token_ids: Mapping[RequestId, tuple[int, ...]]
    """The chosen tokens of each request: one for each of its `RequestSlice.samples`, in order."""
    logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """The log probabilities of each chosen token, by request. Only for requests that asked for log probabilities."""
    ends: Mapping[RequestId, Mapping[int, GraftworkError | None]] = field(default_factory=dict)
    """The samples for which the grammar allows no token, by request and by index in `RequestSlice.samples`.

    The value is None if the answer is complete, else the error that ends the request.
    """
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """The log probabilities of the tokens in `RequestSlice.scores`, by request."""
    pooled: Mapping[RequestId, Float64] = field(default_factory=dict)
    """The sum of the hidden states up to the end of `RequestSlice.pool`, by request: [hidden]."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What must be computed of one prompt or of several, as far as its duration depends on it."""

    tokens: int = 0
    attended: float = 0.0
    """Pairs of a token and a position that it attends to."""

    @classmethod
    def of(cls, start: int, tokens: int, window: RollingWindow | None = None) -> "PromptWork":
        """Returns the work of `tokens` tokens from position `start` on, which attend to all before them or to a window."""
        mean = start + tokens / 2
        return cls(tokens, tokens * (mean if window is None else min(mean, window.sinks + window.window)))

    def plus(self, other: "PromptWork") -> "PromptWork":
        return PromptWork(self.tokens + other.tokens, self.attended + other.attended)

    __add__ = plus


class Flight(Protocol):
    """A step that was launched: a device computes it, or has computed it already."""

    def sample(self) -> None:
        """Starts to choose the tokens that the plan asks for. Must be called once.

        All tokens before the chosen ones must be known: the result of the step before must have been processed, so that
        grammars and penalties include its tokens.
        """
        ...

    def result(self) -> StepResult:
        """Waits until the device has ended the step, and returns its tokens. Must be called once, after `sample`."""
        ...


class Runner(Protocol):
    """Runs steps on one device. ModelRunner implements it."""

    def launch(self, plan: StepPlan) -> Flight:
        """Starts the forward pass of one step. If the device can work by itself, returns before the step has ended.

        A plan that awaits tokens takes them from the step that was launched before. That step must have been sampled.
        """
        ...

    def recover(self) -> None:
        """Waits until the device is idle, and frees memory that is not in use. Must be called after a failed step.

        Raises the device's error if the device can compute nothing any more.
        """
        ...
