"""Runs a draft model: guesses the next tokens of several requests in one forward pass, and keeps the KV of their texts.

Owns the KV pages of the draft model. They are of its own memory, and no tier lies below: a text whose pages were taken is
computed again. A request keeps the tokens that were computed; what differs from its text when it comes again, such as
draft tokens that were not accepted, is overwritten.
A guess is sampled as the request samples, with the noise of the token's position. So the guess of a request with a
temperature is right more often than the likeliest token would be.
Invariant: each page belongs to one request or is free.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan, StepResult
from graftwork.engine.core.tiers import PageId
from graftwork.engine.runner.model_runner import ModelRunner
from graftwork.engine.speculative.draft_model import DraftContext, Guess, GuessPass
from graftwork.platform.ids import RequestId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftModelSizes:
    """What a draft model can serve."""

    num_pages: int
    page_tokens: int
    context_tokens: int
    """The longest text that the draft model reads."""
    max_rows: int
    """The most tokens of one pass."""
    vocab_size: int
    """The token ids of the served model are below this number."""
    own_vocab_size: int
    """The same for the draft model. Their tokenizers are equal; one embedding may have more unused rows."""


@dataclass(slots=True)
class _Text:
    """The text of one request, as far as the draft model has read it."""

    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    """The tokens whose KV is in `pages`."""
    pages: list[PageId] = field(default_factory=list)
    num_known: int = 0
    """How many of `token_ids` certainly are tokens of the request: more were draft tokens when they were computed."""

    def agreement(self, context: DraftContext) -> int:
        """Returns how many of the first tokens of a context are computed."""
        known, drafted = context.token_ids, context.drafted
        position, end = min(self.num_known, len(known)), min(len(self.token_ids), len(known))
        while position < end and self.token_ids[position] == known[position]:
            position += 1
        if position < len(known):
            return position
        for token in drafted[: len(self.token_ids) - len(known)]:
            if self.token_ids[position] != token:
                break
            position += 1
        return position


class DraftModelRunner:
    """A DraftModel that runs on a device. `runner` runs its passes, over `sizes.num_pages` KV pages."""

    def __init__(
        self, runner: ModelRunner, sizes: DraftModelSizes, relative_cost: float, weight_bytes: int, kv: torch.Tensor
    ) -> None:
        """`kv` is the memory of the pages, uint8."""
        self.runner = runner
        self.relative_cost = relative_cost
        self.weight_bytes = weight_bytes
        self.kv = kv
        self._sizes = sizes
        self._free = [PageId(page) for page in reversed(range(sizes.num_pages))]
        self._texts: OrderedDict[RequestId, _Text] = OrderedDict()
        """The text of each request, the one first that has waited longest for a guess."""

    def reaches(self, context: DraftContext, max_tokens: int) -> bool:
        num_tokens, sizes = context.num_tokens + max_tokens, self._sizes
        return num_tokens <= min(sizes.context_tokens, sizes.num_pages * sizes.page_tokens)

    def num_missing(self, context: DraftContext) -> int:
        text = self._texts.get(context.request_id)
        return context.num_tokens - min(0 if text is None else text.agreement(context), context.num_tokens - 1)

    def guess(self, contexts: Sequence[DraftContext]) -> GuessPass:
        pieces: list[RequestSlice] = []
        rows_left, served = self._sizes.max_rows, {context.request_id for context in contexts}
        for context in contexts:
            piece = self._piece(context, rows_left, served) if rows_left else None
            if piece is not None:
                pieces.append(piece)
                rows_left -= piece.num_tokens
        if not pieces:
            return GuessPass((None,) * len(contexts), 0)
        plan = StepPlan(tuple(pieces))
        try:
            result = self.runner.run(plan)
        except torch.OutOfMemoryError:
            self._give_up()
            return GuessPass((None,) * len(contexts), 0)
        return GuessPass(tuple(self._guess_of(context.request_id, result) for context in contexts), plan.num_tokens)

    def forget(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free.extend(text.pages)

    def check_integrity(self) -> None:
        """Checks that each page belongs to one request or is free, and that texts have room in their pages."""
        held = [page for text in self._texts.values() for page in text.pages]
        assert sorted(held + self._free) == list(range(self._sizes.num_pages)), "a page is lost, or has two owners"
        for text in self._texts.values():
            assert text.num_known <= len(text.token_ids) <= len(text.pages) * self._sizes.page_tokens

    def _give_up(self) -> None:
        """Drops all texts, because a pass had too little memory: drafts are missed, and no request fails."""
        _log.warning("draft_model_out_of_memory", extra={"texts": len(self._texts)})
        for request_id in list(self._texts):
            self.forget(request_id)
        self.runner.recover()

    def _piece(self, context: DraftContext, rows_left: int, served: set[RequestId]) -> RequestSlice | None:
        """Returns the part of a pass that belongs to one request; None if it gets no pages, or cannot be read.

        `served` are the requests of the pass: their pages are not taken.
        """
        text = self._text_of(context)
        start = min(text.agreement(context), context.num_tokens - 1)
        end = min(context.num_tokens, start + rows_left)
        token_ids = _tokens(context, start, end)
        if max(token_ids) >= self._sizes.own_vocab_size or not self._grow(text, end, served):
            return None
        text.token_ids[start:] = token_ids
        text.num_known = min(end, len(context.token_ids))
        is_whole = end == context.num_tokens
        return RequestSlice(
            request_id=context.request_id,
            token_ids=token_ids,
            start=start,
            pages=tuple(text.pages[: pages_for(end, self._sizes.page_tokens)]),
            adapters=(),
            samples=(SampleSpec(text.sampling, context.seed, end),) if is_whole else (),
        )

    def _text_of(self, context: DraftContext) -> _Text:
        text = self._texts.get(context.request_id)
        if text is None:
            text = self._texts[context.request_id] = _Text(plain_sampling(context.sampling, self._sizes.own_vocab_size))
        self._texts.move_to_end(context.request_id)
        return text

    def _grow(self, text: _Text, num_tokens: int, served: set[RequestId]) -> bool:
        """Gives a text the pages for its first tokens. Takes them from the requests that have waited longest."""
        num_lacking = pages_for(num_tokens, self._sizes.page_tokens) - len(text.pages)
        for request_id in [request_id for request_id in self._texts if request_id not in served]:
            if len(self._free) >= num_lacking:
                break
            self.forget(request_id)
        if len(self._free) < num_lacking:
            return False
        for _ in range(num_lacking):
            text.pages.append(self._free.pop())
        return True

    def _guess_of(self, request_id: RequestId, result: StepResult) -> Guess | None:
        sampled = result.token_ids.get(request_id)
        if sampled is None or sampled[0] >= self._sizes.vocab_size:
            return None
        return Guess(sampled[0], math.exp(min(result.logprobs[request_id][0].logprob, 0.0)))


def _tokens(context: DraftContext, start: int, end: int) -> tuple[int, ...]:
    num_known = len(context.token_ids)
    drafted = context.drafted[max(start - num_known, 0) : max(end - num_known, 0)]
    return (*context.token_ids[start:end], *drafted)


def plain_sampling(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Returns how guesses are sampled: as the request samples, but without penalties, whose counts only it keeps."""
    return replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias if token < vocab_size),
        prompt_logprobs=None,
        logprobs=0,
    )
