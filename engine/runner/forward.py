"""Defines the forward pass of a step: from the rows of a plan to logits. An engine chooses one kind at its start.

ForwardPass is the interface. PlainForward copies the step's tensors to the device one by one, and works with every
backend on every device. PackedForward (packed_forward.py) sends all of them by one copy, for CUDA.

Owns nothing between two steps. Never samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from graftwork.engine.attention.backend import AttentionBackend
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.experts.backend import ExpertBackend
from graftwork.engine.kernels.step_inputs import Passenger
from graftwork.engine.lora.backend import LoraBackend, StepLora
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.pool import ResidentAdapters
from graftwork.engine.lora.segments import Segment
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.input_batch import BatchBuilder, BatchRows, BatchTensors
from graftwork.platform.ids import RequestId


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step has sampled. The device may still be computing them."""

    token_ids: torch.Tensor  # [num_sampled] int32 or int64, on the device
    row_by_id: Mapping[RequestId, int]
    """Where the first token of each request is in `token_ids`."""

    def sources(self, slices: Sequence[RequestSlice]) -> dict[int, int]:
        """Returns, for each row of a step that awaits its token, where this token is in `token_ids`."""
        starts = accumulate((piece.num_tokens for piece in slices), initial=0)
        return {
            start: self.row_by_id[piece.request_id]
            for piece, start in zip(slices, starts, strict=False)
            if piece.awaits_token
        }


@dataclass(slots=True)
class StepPaths:
    """How steps were computed since the engine's start, and which kernels are missing. Fields are those of EngineStats."""

    graph_steps: int = 0
    graph_prompt_steps: int = 0
    eager_chunk_steps: int = 0
    eager_score_steps: int = 0
    eager_window_steps: int = 0
    eager_adapter_steps: int = 0
    eager_row_steps: int = 0
    eager_steps: int = 0
    expert_kernel_rows: int = 0
    expert_torch_rows: int = 0
    fallback_rows: int = 0
    fallback_attention: int = 0
    fallback_experts: int = 0
    fallback_lora: int = 0
    fallback_weights: int = 0
    fallback_sampler: int = 0
    fallback_graphs: int = 0

    def count(self, path: str) -> None:
        """Counts one step under a field."""
        setattr(self, path, getattr(self, path) + 1)

    def count_experts(self, experts: type[ExpertBackend] | None, rows: BatchRows) -> None:
        """Counts the tokens of a step by what computes their experts; None if the model has none."""
        if experts is None:
            return
        num_tokens = sum(piece.num_tokens for piece in rows.slices)
        if experts.uses_kernels:
            self.expert_kernel_rows += num_tokens
        else:
            self.expert_torch_rows += num_tokens


class ForwardPass(Protocol):
    """Computes the forward pass of steps."""

    paths: StepPaths

    def arrange(self, plan: StepPlan) -> BatchRows:
        """Arranges the rows of a step, on the host."""
        ...

    def compute(
        self, rows: BatchRows, tokens: SampledTokens | None = None, passenger: Passenger | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Starts the forward pass of a step.

        Rows that await their token take it from `tokens`, those that the step before has sampled. The `passenger` may
        be sent along with the step's own numbers.

        Returns the hidden states of all rows, [num_rows, hidden], and the logits of the sampled rows in the model's
        dtype, [num_sampled, vocab]. Both are valid until the next step is computed. The hidden states may be None if no
        slice reads its prompt.
        """
        ...


class SegmentFinder:
    """Finds the adapters of a step's rows among those on the device."""

    def __init__(self, pool: ResidentAdapters) -> None:
        self._pool = pool

    def segments(self, rows: BatchRows) -> list[Segment]:
        """Returns the ranges of rows that use one adapter or one mixture."""
        return [
            Segment(run.start_row, run.end_row, self.mix(run.adapters), run.first_sample, run.last_sample, run.decoding)
            for run in rows.adapter_runs
        ]

    def mix(self, uses: Sequence[AdapterUse]) -> AdapterMix:
        """Returns the resident adapters that a request uses."""
        return AdapterMix(tuple((self._pool.get(use.digest), use.weight) for use in uses))


class PlainForward:
    """Computes the forward pass with any backend, on any device. Several copies a step carry its tensors."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        builder: BatchBuilder,
        lora: LoraBackend,
        adapters: SegmentFinder,
        spread: Callable[[torch.Tensor], None] = lambda token_ids: None,
    ) -> None:
        """`spread` gives all ranks of an engine the tokens of rank 0, [num_rows] on the device, if a step awaits some."""
        self._decoder = decoder
        self._attention = attention
        self._builder = builder
        self._lora = lora
        self._adapters = adapters
        self._spread = spread
        self.paths = StepPaths()

    def arrange(self, plan: StepPlan) -> BatchRows:
        return self._builder.arrange(plan)

    def compute(
        self, rows: BatchRows, tokens: SampledTokens | None = None, passenger: Passenger | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.paths.eager_steps += 1
        self.paths.count_experts(self._decoder.experts, rows)
        batch = self._builder.tensors(rows)
        if tokens is not None:
            sources = tokens.sources(rows.slices)
            found = tokens.token_ids[list(sources.values())]
            batch.token_ids[list(sources)] = found.to(batch.token_ids.dtype)
            self._spread(batch.token_ids)
        hidden, lora = self._hidden(rows, batch)
        logits = self._decoder.logits(hidden.index_select(0, batch.sampled_rows), lora)
        return hidden, logits[: rows.num_sampled]

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Computes a step on a rank above 0: its part of each layer, and no logits. Awaited tokens come from rank 0."""
        rows = self.arrange(plan)
        batch = self._builder.tensors(rows)
        if plan.awaits_tokens:
            self._spread(batch.token_ids)
        self._hidden(rows, batch)

    def _hidden(self, rows: BatchRows, batch: BatchTensors) -> tuple[torch.Tensor, StepLora]:
        lora = self._lora.step(self._adapters.segments(rows), len(rows.token_ids))
        return self._decoder.hidden(batch, self._attention.plan(batch.attention), lora), lora
