"""Computes the forward pass on CUDA with Triton kernels: all numbers of a step travel to the device by one copy.

The parts of the engine prepare their numbers with numpy: the rows, the tiles of attention, the tiles of LoRA, and the
sampler's parameters as a passenger. The host never waits for the device. Adapters that the kernels cannot apply (changes
of the vocabulary, adapters without a slot) are applied by torch, which makes copies of its own.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.triton_attention import TritonAttention
from graftwork.engine.core.step import StepPlan
from graftwork.engine.kernels.step_inputs import HostMemory, Passenger, StepInputs, WordLayout, Words
from graftwork.engine.kernels.take_tokens import take_tokens_launch
from graftwork.engine.lora.triton.backend import StepOwners, TritonLora
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.forward import SampledTokens, SegmentFinder, StepPaths
from graftwork.engine.runner.graph_keys import EagerReason, GraphKey
from graftwork.engine.runner.input_batch import BatchBuilder, BatchRows, BatchTensors

_FIRST_WORDS = 2**16
"""The block begins with 256 KB and grows with the largest step."""


class Graphs(Protocol):
    """Computes some steps by CUDA graphs. See step_graphs.py."""

    def key_for(self, rows: BatchRows, owners: StepOwners) -> GraphKey | EagerReason: ...

    def compute(
        self,
        key: GraphKey,
        rows: BatchRows,
        owners: StepOwners,
        tokens: SampledTokens | None,
        passenger: Passenger | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedParts:
    """The decoder, and the parts of an engine whose numbers travel together."""

    decoder: Decoder
    attention: TritonAttention
    builder: BatchBuilder
    lora: TritonLora


class PackedForward:
    """Computes the forward pass of steps whose numbers travel together."""

    def __init__(self, parts: PackedParts, adapters: SegmentFinder, host: HostMemory) -> None:
        self.parts = parts
        self._adapters = adapters
        self._inputs = StepInputs(_FIRST_WORDS, parts.builder.device, host)
        self.graphs: Graphs | None = None
        """Computes the steps that it has a graph for. None computes every step here."""
        self.paths = StepPaths()

    def arrange(self, plan: StepPlan) -> BatchRows:
        return self.parts.builder.arrange(plan)

    def compute(
        self, rows: BatchRows, tokens: SampledTokens | None = None, passenger: Passenger | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        self.paths.count_experts(self.parts.decoder.experts, rows)
        owners = self.parts.lora.owners_of(self._adapters.segments(rows), len(rows.token_ids), in_tiles=rows.is_mixed)
        key = EagerReason.OFF if self.graphs is None else self.graphs.key_for(rows, owners)
        if self.graphs is not None and isinstance(key, GraphKey):
            self.paths.count("graph_prompt_steps" if key.is_mixed else "graph_steps")
            return None, self.graphs.compute(key, rows, owners, tokens, passenger)
        self.paths.count(str(key))
        cut = self.parts.lora.cut(owners)
        queries = self.parts.attention.cut(AttentionBatch(rows.placed, torch.tensor(rows.positions)))
        arrays = row_words(rows, tokens) | {"lora": cut.segments.words} | queries.arrays
        if passenger is not None:
            arrays["passenger"] = passenger.words
        layout = WordLayout.of(arrays)
        self._inputs.reserve(layout.num_words)
        self._inputs.send(layout, arrays)
        on_device = self._inputs.views(layout)
        if passenger is not None:
            passenger.board(on_device["passenger"])
        batch = batch_over(rows, on_device)
        if tokens is not None:
            take_tokens_launch(batch.token_ids, on_device["sources"], tokens.token_ids).run()
        lora = self.parts.lora.begin(owners, cut, on_device["lora"])
        hidden = self.parts.decoder.hidden(batch, self.parts.attention.over(on_device, queries.num_slots), lora)
        are_all = rows.sampled_rows == list(range(len(hidden)))
        sampled = hidden if are_all else hidden.index_select(0, batch.sampled_rows)
        return hidden, self.parts.decoder.logits(sampled, lora)[: rows.num_sampled]


def row_words(rows: BatchRows, tokens: SampledTokens | None) -> dict[str, Words]:
    """Returns the numbers of a step's rows, by name. The source of a row is where its awaited token is; -1 for none."""
    sources = np.full(len(rows.token_ids), -1, np.int32)
    if tokens is not None:
        for row, source in tokens.sources(rows.slices).items():
            sources[row] = source
    names = ("token_ids", "positions", "row_pages", "row_offsets", "begun_pages", "sampled_rows")
    words = {name: np.array(getattr(rows, name), np.int32) for name in names} | {"sources": sources}
    windowed = zip(window_names(len(rows.window_row_pages)), rows.window_row_pages, strict=True)
    return words | {name: np.array(pages, np.int32) for name, pages in windowed}


def window_names(num_groups: int) -> list[str]:
    """Returns the names of the arrays with the pages of the rows, for the layer groups after the first."""
    return [f"row_pages {group}" for group in range(num_groups)]


def batch_over(rows: BatchRows, on_device: dict[str, torch.Tensor]) -> BatchTensors:
    """Returns the input tensors of a step, which are int32 views of its block on the device."""
    return BatchTensors(
        slices=rows.slices,
        token_ids=on_device["token_ids"],
        positions=on_device["positions"],
        row_pages=on_device["row_pages"],
        row_offsets=on_device["row_offsets"],
        begun_pages=on_device["begun_pages"],
        window_row_pages=tuple(on_device[name] for name in window_names(len(rows.window_row_pages))),
        window_begun_pages=(),
        sampled_rows=on_device["sampled_rows"],
        num_sampled=rows.num_sampled,
        attention=AttentionBatch(rows.placed, on_device["positions"]),
        adapter_runs=rows.adapter_runs,
        last_position=max(rows.positions) if rows.has_rolling else 0,
    )
