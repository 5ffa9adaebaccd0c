"""One step's work and its result. No torch: the scheduler plans it, the runner carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.tiers import PageId
from graftwork.engine.core.token_counts import TokenHistory
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


class MaskRow(Protocol):
    """The tokens that a grammar allows at one place; filled while the forward pass runs."""

    def fill(self, words: NDArray[np.int32]) -> GraftworkError | None:
        """Set the bits of the tokens that may come, the lowest first; all are clear where the answer is complete.

        Returns why the request cannot go on, if it cannot.
        """
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose one token: everything that one sampled row needs besides its logits."""

    params: SamplingParams
    seed: int
    """The request's own, or the one drawn for it."""
    position: int
    """Of the token to choose, from 0 at the start of the prompt; noise is keyed by (seed, choice, position)."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that may not be chosen here (the stop tokens, before `min_tokens`)."""
    history: TokenHistory | None = None
    """What the penalties count, up to the last known token; None where nothing is penalised. Read within the step only."""
    draft_token_ids: tuple[int, ...] = ()
    """Tokens before this one that are only guessed; penalties count them too."""
    mask: MaskRow | None = None
    """What the request's grammar allows here; None allows everything."""


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """A run of one sequence's tokens [start, start + len(token_ids)) that this step computes.

    The last `num_drafts` of them are guesses that the step verifies; those before are known.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    """Position of the first of them; everything before it has its KV in `pages`."""
    pages: tuple[PageId, ...]
    """In order; the first ceil((start + len) / page_tokens) of the sequence."""
    adapters: tuple[AdapterUse, ...]
    """By ascending digest; empty for the base model."""
    samples: tuple[SampleSpec, ...]
    """For the last len(samples) rows, which are the last known one and the drafts; empty while the prompt is not
    yet computed to its end."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        return max(len(self.samples) - 1, 0)

    @property
    def known_end(self) -> int:
        """Where the drafts begin."""
        return self.end - self.num_drafts

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All slices of one forward pass, at most one for each sequence."""

    slices: tuple[RequestSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def num_adapters(self) -> int:
        """Distinct adapters, the bare base not counted."""
        return len({use.digest for piece in self.slices for use in piece.adapters})


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was chosen after each sampled row of every slice that has some."""

    token_ids: Mapping[RequestId, tuple[int, ...]]
    logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By request, one for each chosen token; only of requests that asked for them."""
    ends: Mapping[RequestId, Mapping[int, GraftworkError | None]] = field(default_factory=dict)
    """By request and sampled row: where a grammar left no token to choose. None where the answer was complete, else
    why it cannot go on."""
