"""Carries out a step: builds its tensors, runs the forward pass, and chooses tokens.

Owns the decoder; reads the adapter pool. Never keeps anything of a step: requests live in the scheduler.
"""

from collections.abc import Mapping, Sequence

import torch

from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.lora.torch_backend import Segment
from graftwork.engine.runner.attention import PagedAttention
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.input_batch import AdapterRun, BatchBuilder, BatchTensors
from graftwork.engine.sampling.logprobs import StepLogprobs
from graftwork.engine.sampling.sampler import choose_tokens
from graftwork.platform.errors import GraftworkError
from graftwork.platform.ids import RequestId


class ModelRunner:
    """The runner of one model on one device."""

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

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one forward pass, and choose a token for each sampled row."""
        batch = self.batch(plan)
        specs = [spec for piece in batch.slices for spec in piece.samples]
        filling = self._masks.begin(specs)
        logits = self.logits(batch)
        logprobs = StepLogprobs(logits, specs)
        ends = self._masks.apply(filling, logits)
        tokens = choose_tokens(logits, specs)
        return _by_request(batch, tokens, logprobs.of(tokens), ends)

    def batch(self, plan: StepPlan) -> BatchTensors:
        """Build the tensors of a step, on the device."""
        return self._builder.build(plan)

    def logits(self, batch: BatchTensors) -> torch.Tensor:
        """The logits of the sampled rows.  # [num_sampled, vocab] in fp32"""
        segments = [self._segment(run) for run in batch.adapter_runs]
        lora = self._lora.step(segments, len(batch.token_ids))
        return self._decoder.logits(batch, self._attention, lora)

    def _segment(self, run: AdapterRun) -> Segment:
        mix = AdapterMix(tuple((self._pool.get(use.digest), use.weight) for use in run.adapters))
        return Segment(run.start_row, run.end_row, mix, run.first_sample, run.last_sample, run.decoding)


def _by_request(
    batch: BatchTensors,
    tokens: list[int],
    logprobs: Sequence[TokenLogprobs | None],
    ends: Mapping[int, GraftworkError | None],
) -> StepResult:
    """Sort the results of all sampled rows by request."""
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
    return StepResult(chosen, scored, ended)
