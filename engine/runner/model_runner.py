"""Runs steps on the device, and measures how long prefills take.

Owns the decoder and the running measurement. Reads the adapter pool. For each step it builds input tensors, runs the
forward pass and samples tokens. Keeps no state of a request between steps: the scheduler does that.

The measurement never waits for the device. It reads the clock around each step, and uses the times of steps that sample
tokens: for these tokens the host has waited anyway. A time is recorded only if the steps did nothing but this prefill:
no decoding, no draft tokens, no log probabilities of the prompt, no waiting for a copy of KV pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, StepPlan, StepResult
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.kv.index.cost_model import CostTracker
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.lora.torch_backend import Segment
from graftwork.engine.runner.attention import PagedAttention
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.input_batch import AdapterRun, BatchBuilder, BatchTensors
from graftwork.engine.runner.prompt_scorer import PromptScorer
from graftwork.engine.sampling.sampler import StepLogprobs, choose_tokens
from graftwork.platform.clock import Clock
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId

_FEWEST_TOKENS = 32
"""The fewest tokens of a prefill that is measured. A shorter prefill tells little about the cost of tokens, because
most of its time is the fixed cost.
"""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The prefill that is measured now: tokens [start, end) of a prompt, and the seconds that their steps took."""

    piece: RequestSlice
    """The slice of the prompt that the last step computed."""
    start: int
    seconds: float


class PrefillMeter:
    """Measures the seconds that prefills take. The engine loop calls it before and after each step.

    If the prefill of a prompt takes several steps, their times are added up.
    """

    def __init__(self, costs: CostTracker, clock: Clock) -> None:
        self._costs = costs
        self._clock = clock
        self._previous: StepPlan | None = None
        self._prefill: _Prefill | None = None
        self._began_at = 0.0

    def step_begins(self) -> None:
        """Records the time at which a step begins. Must be called right before the step runs."""
        self._began_at = self._clock.monotonic()

    def step_ended(self, plan: StepPlan, *, waited: bool) -> None:
        """Adds the time of the step that has just ended to the measured prefill.

        Must be called as soon as the result of the step is known. `waited` says whether the step waited for KV pages
        that were being copied to the device. Such a step is not measured.
        """
        seconds = self._clock.monotonic() - self._began_at
        previous, self._previous = self._previous, plan
        begun, self._prefill = self._prefill, None
        piece = plan.slices[0]
        if len(plan.slices) > 1 or waited or piece.num_drafts or piece.scores is not None or seconds <= 0:
            return
        if begun is not None and begun.piece.request_id == piece.request_id and begun.piece.end == piece.start:
            prefill = _Prefill(piece, begun.start, begun.seconds + seconds)
        elif previous is None or _samples(previous):
            prefill = _Prefill(piece, piece.start, seconds)
        else:
            return  # the device may still have worked on the previous step when this one began
        if not piece.samples:
            self._prefill = prefill
        elif piece.end - prefill.start >= _FEWEST_TOKENS:
            self._costs.observe_prefill(piece.end - prefill.start, prefill.start, prefill.seconds)


def _samples(plan: StepPlan) -> bool:
    """Returns whether a step samples tokens. The host waits for the device only to read sampled tokens."""
    return any(piece.samples for piece in plan.slices)


class ModelRunner:
    """Runs the steps of one model on one device."""

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        builder: BatchBuilder,
        pool: LoraPool,
        lora: LoraBackend,
        masks: MaskFiller,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._builder = builder
        self._pool = pool
        self._lora = lora
        self._masks = masks
        self._scorer = PromptScorer(decoder, lora, builder.rules, self._mix)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Runs the forward pass of one step, and samples the tokens that the plan asks for."""
        batch = self.batch(plan)
        specs = [spec for piece in batch.slices for spec in piece.samples]
        filling = self._masks.begin(specs)
        hidden, logits = self._forward(batch)
        logprobs = StepLogprobs(logits, specs)
        ends = self._masks.apply(filling, logits)
        tokens = choose_tokens(logits, specs)
        return _by_request(batch, tokens, logprobs.of(tokens), ends, self._scorer.score(batch.slices, hidden))

    def batch(self, plan: StepPlan) -> BatchTensors:
        """Builds the input tensors of one step on the device."""
        return self._builder.build(plan)

    def logits(self, batch: BatchTensors) -> torch.Tensor:
        """Computes the forward pass. Returns the logits of the sampled rows: [num_sampled, vocab] fp32.

        A row is one token of the step. A sampled row is one whose next token the step samples.
        """
        return self._forward(batch)[1]

    def _forward(self, batch: BatchTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states of all rows, [num_tokens, hidden], and the logits as `logits` does."""
        segments = [self._segment(run) for run in batch.adapter_runs]
        lora = self._lora.step(segments, len(batch.token_ids))
        hidden = self._decoder.hidden(batch, self._attention, lora)
        logits = self._decoder.logits(hidden.index_select(0, batch.sampled_rows), lora)
        return hidden, logits[: batch.num_sampled].float()

    def _segment(self, run: AdapterRun) -> Segment:
        mix = self._mix(run.adapters)
        return Segment(run.start_row, run.end_row, mix, run.first_sample, run.last_sample, run.decoding)

    def _mix(self, uses: Sequence[AdapterUse]) -> AdapterMix:
        return AdapterMix(tuple((self._pool.get(use.digest), use.weight) for use in uses))


def _by_request(
    batch: BatchTensors,
    tokens: list[int],
    logprobs: Sequence[TokenLogprobs | None],
    ends: Mapping[int, GraftworkError | None],
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]],
) -> StepResult:
    """Returns the results of all sampled rows, grouped by request, and the log probabilities of prompts."""
    chosen: dict[RequestId, tuple[int, ...]] = {}
    scored: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    ended: dict[RequestId, dict[int, GraftworkError | None]] = {}
    start = 0
    for piece in batch.slices:
        end = start + len(piece.samples)
        if piece.samples:
            chosen[piece.request_id] = tuple(tokens[start:end])
        if own := tuple(one for one in logprobs[start:end] if one is not None):
            scored[piece.request_id] = own
        if rows := {row - start: ends[row] for row in range(start, end) if row in ends}:
            ended[piece.request_id] = rows
        start = end
    return StepResult(chosen, scored, ended, prompt_logprobs)
