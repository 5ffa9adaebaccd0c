"""Runs a draft head: reads the served model's hidden states of each step, and guesses the next tokens of requests.

Owns the head's layer and the texts of requests. It is a DraftModel: a ModelDrafter decides when it guesses. A guess is
sampled as the request samples, with the noise of the token's position.
What the served model has not computed on this engine since the request came, such as a cached prefix, the head does not
read. Its guesses are then those after the rest of the text.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.draft_head.head_layer import HeadLayer, few_sizes
from graftwork.engine.draft_head.head_texts import HeadText, HeadTexts
from graftwork.engine.runner.draft_model import plain_sampling
from graftwork.engine.runner.hidden_taps import HiddenTaps
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.sampling.sampler import Sampler
from graftwork.engine.speculative.draft_model import DraftContext, Guess, GuessPass
from graftwork.platform.ids import RequestId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """What a draft head can serve."""

    num_pages: int
    page_tokens: int
    context_tokens: int
    """The longest text that it reads."""
    max_rows: int
    """The most pairs of one pass."""
    vocab_size: int


@dataclass(slots=True)
class _Reading:
    """A context whose pairs a pass computes."""

    context: DraftContext
    text: HeadText
    next_pair: int
    num_pairs: int
    output: torch.Tensor | None = None  # [1, hidden], of the last pair

    def piece(self, rows_left: int, page_tokens: int) -> RequestSlice:
        """Returns the pairs that can be computed at once: all that begin with the served model's features, else one."""
        num_features = len(self.context.token_ids) - 1 - self.text.first
        end = max(min(num_features, self.num_pairs), self.next_pair + 1)
        end = min(end, self.next_pair + rows_left)
        return RequestSlice(
            request_id=self.context.request_id,
            token_ids=self.text.second_tokens(self.context, self.next_pair, end),
            start=self.next_pair,
            pages=tuple(self.text.pages[: -(-end // page_tokens)]),
            adapters=(),
            samples=(),
        )

    def note(self, piece: RequestSlice) -> None:
        """Notes that the pairs of `piece` are computed."""
        text = self.text
        text.paired[piece.start :] = piece.token_ids
        text.num_true = min(len(text.paired), len(self.context.token_ids) - 1 - text.first)
        self.next_pair = piece.end

    @property
    def is_complete(self) -> bool:
        return self.next_pair == self.num_pairs


class DraftHead:
    """A DraftModel that guesses from the hidden states of the served model."""

    def __init__(
        self,
        layer: HeadLayer,
        builder: BatchBuilder,
        sampler: Sampler,
        sizes: HeadSizes,
        relative_cost: float,
        weight_bytes: int,
        kv: torch.Tensor,
        taps: HiddenTaps,
    ) -> None:
        """`kv` is the memory of the pages, uint8. `taps` keep the hidden states that the head reads."""
        self.relative_cost = relative_cost
        self.weight_bytes = weight_bytes
        self.kv = kv
        self.taps = taps
        self._layer = layer
        self._builder = builder
        self._sampler = sampler
        self._sizes = sizes
        self._texts = HeadTexts(sizes.num_pages, sizes.page_tokens)

    # ---- the served model's steps -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins to read the served model's steps. Trial steps at the engine's start come before."""
        self.taps.reader = self.read_step

    def read_step(self, slices: Sequence[RequestSlice], states: torch.Tensor) -> None:
        """Keeps the features of a step's tokens. states: [num_tokens, 3 * target_hidden], in the order of the slices."""
        try:
            self._texts.read(slices)
            rows, pages, offsets = self._places(slices)
            if rows:
                self._layer.keep(states if len(rows) == len(states) else states[rows], pages, offsets)
        except torch.OutOfMemoryError:
            self._give_up()

    def _places(self, slices: Sequence[RequestSlice]) -> tuple[list[int], list[int], list[int]]:
        """Returns the rows of a step whose features are kept, with the page and the offset of each."""
        rows: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        first_row, page_tokens = 0, self._sizes.page_tokens
        for piece in slices:
            text = self._texts.get(piece.request_id)
            assert text is not None
            kept = range(max(text.first, piece.start), piece.end if text.pages else piece.start)
            rows += [first_row + position - piece.start for position in kept]
            own = [position - text.first for position in kept]
            places += [place % page_tokens for place in own]
            pages += [text.pages[place // page_tokens] for place in own]
            first_row += piece.num_tokens
        return rows, pages, places

    def _give_up(self) -> None:
        """Drops all texts, because there was too little memory: drafts are missed, and no request fails."""
        _log.warning("draft_head_out_of_memory", extra={"kv_bytes": self.kv.nbytes})
        self._texts.clear()

    @property
    def num_texts(self) -> int:
        """The number of requests of which it keeps something."""
        return self._texts.num_texts

    def first_read(self, request_id: RequestId) -> int:
        """Returns the position of the first token of a request that the head has read."""
        text = self._texts.get(request_id)
        return 0 if text is None else text.first

    # ---- DraftModel -------------------------------------------------------------------------------------------

    def reaches(self, context: DraftContext, max_tokens: int) -> bool:
        text, sizes = self._texts.get(context.request_id), self._sizes
        if text is None or not text.follows(context):
            return False
        num_tokens = context.num_tokens + max_tokens
        return num_tokens <= sizes.context_tokens and num_tokens - text.first <= sizes.num_pages * sizes.page_tokens

    def num_missing(self, context: DraftContext) -> int:
        text = self._texts.get(context.request_id)
        if text is None or not text.follows(context):
            return context.num_tokens
        return max(text.num_pairs(context) - text.num_paired(context), 1)

    @torch.inference_mode()
    def guess(self, contexts: Sequence[DraftContext]) -> GuessPass:
        served = {context.request_id for context in contexts}
        readings = [reading for context in contexts if (reading := self._begin(context, served)) is not None]
        try:
            num_rows = self._compute(readings)
            guesses = self._sample([reading for reading in readings if reading.is_complete])
        except torch.OutOfMemoryError:
            self._give_up()
            return GuessPass((None,) * len(contexts), 0)
        return GuessPass(tuple(guesses.get(context.request_id) for context in contexts), num_rows)

    def forget(self, request_id: RequestId) -> None:
        self._texts.forget(request_id)

    def check_integrity(self) -> None:
        self._texts.check_integrity()

    # ---- one pass ---------------------------------------------------------------------------------------------

    def _begin(self, context: DraftContext, served: set[RequestId]) -> _Reading | None:
        """Returns what to compute for one context; None if the head cannot guess there, or has no pages for it."""
        text = self._texts.get(context.request_id)
        if text is None or not text.follows(context):
            return None
        num_pairs = text.num_pairs(context)
        if not self._texts.grow(text, num_pairs + 1, served):
            return None
        return _Reading(context, text, min(text.num_paired(context), num_pairs - 1), num_pairs)

    def _compute(self, readings: list[_Reading]) -> int:
        """Computes the pairs of all readings, at most `max_rows`. Returns how many."""
        num_rows, page_tokens = 0, self._sizes.page_tokens
        readings = [reading for reading in readings if reading.text.pages]  # others have taken none of them
        while True:
            pieces: dict[RequestId, RequestSlice] = {}
            for reading in readings:
                rows_left = self._sizes.max_rows - num_rows
                if rows_left and not reading.is_complete:
                    piece = pieces[reading.context.request_id] = reading.piece(rows_left, page_tokens)
                    num_rows += piece.num_tokens
            if not pieces:
                return num_rows
            self._step([reading for reading in readings if reading.context.request_id in pieces], pieces)

    def _step(self, readings: list[_Reading], pieces: dict[RequestId, RequestSlice]) -> None:
        """Computes some pairs of each reading, and keeps the output of the last one as the features behind it."""
        rows = self._builder.arrange(StepPlan(tuple(pieces.values())))
        rows = self._builder.padded(rows, few_sizes(len(rows.token_ids)))
        outputs = self._layer.pairs(rows)  # [num_rows, hidden]
        last_rows = {one.piece.request_id: one.start_row + one.piece.num_tokens - 1 for one in rows.placed}
        page_tokens = self._sizes.page_tokens
        kept: list[tuple[int, int, int]] = []
        for reading in readings:
            piece = pieces[reading.context.request_id]
            reading.note(piece)
            row = last_rows[piece.request_id]
            reading.output = outputs[row : row + 1]
            if piece.end >= len(reading.context.token_ids) - 1 - reading.text.first:
                kept.append((row, reading.text.pages[piece.end // page_tokens], piece.end % page_tokens))
        if kept:
            own, pages, offsets = map(list, zip(*kept, strict=True))
            self._layer.put_features(outputs[own], pages, offsets)

    def _sample(self, readings: list[_Reading]) -> dict[RequestId, Guess]:
        """Samples a guess behind each context, all of whose pairs are computed."""
        if not readings:
            return {}
        specs = [_spec(reading.context, self._sizes.vocab_size) for reading in readings]
        outputs = torch.cat([reading.output for reading in readings if reading.output is not None])
        sampled = self._sampler.begin(specs).sample(self._layer.logits(outputs)).result()
        guesses: dict[RequestId, Guess] = {}
        for reading, token, scored in zip(readings, sampled.token_ids, sampled.logprobs, strict=True):
            assert scored is not None, "every guess asks for its log probability"
            guesses[reading.context.request_id] = Guess(token, math.exp(min(scored.logprob, 0.0)))
        return guesses


def _spec(context: DraftContext, vocab_size: int) -> SampleSpec:
    sampling: SamplingParams = plain_sampling(context.sampling, vocab_size)
    return SampleSpec(sampling, context.seed, context.num_tokens)
