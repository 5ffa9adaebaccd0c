"""Computes steps by CUDA graphs: one launch for the whole forward pass.

A graph is captured at start for each key (graph_keys.py). Its kernels read the numbers of the step from a block of
memory that never moves (StepInputs), and their grids cover the largest step of the key. So a step is one copy, at most
one launch for awaited tokens, and the graph. A graph of mixed steps gathers the sampled rows before the head. Adapters come and go without a new graph, because the kernels find them
through tables of addresses. Unused rows write their KV to a scrap page.

Invariant: a graph holds no number of a step. Two steps of one key use the same addresses and grids.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.triton_attention import StepCapacity
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import MOST_ROLLING_TOKENS
from graftwork.engine.core.step import StepPlan
from graftwork.engine.kernels.step_inputs import HostMemory, Passenger, StepInputs, WordLayout, Words
from graftwork.engine.kernels.take_tokens import take_tokens_launch
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.lora.triton.backend import StepOwners
from graftwork.engine.lora.triton.fused_lora import CutStep
from graftwork.engine.runner.forward import SampledTokens
from graftwork.engine.runner.graph_keys import EagerReason, GraphKey, GraphKeys
from graftwork.engine.runner.input_batch import BatchRows
from graftwork.engine.runner.packed_forward import PackedParts, batch_over, row_words, window_names

_PASSENGER_WORDS = 2**18
"""The most words that may travel along with a step in the block of the graphs; more are sent alone."""


class CapturedGraph(Protocol):
    """Work of a device that was captured once and is repeated by one launch."""

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Captures the work that a function launches."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Runs `work` once, so that all it needs is compiled, and captures it while it runs once more."""
        ...


class CudaGraphs:
    """Captures CUDA graphs. All of them share one pool of memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        # The outer `stream` restores the stream of the caller; torch's `graph` does not if it cannot end the capture.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        return graph


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest step of the graphs."""

    keys: GraphKeys
    context_tokens: int
    page_tokens: int
    num_groups: int = 1
    """The number of layer groups: each has a page table for each request."""
    window_pages: int = 0
    """The most pages of a request in each layer group after the first."""

    def requests(self, key: GraphKey) -> int:
        """Returns the most requests of a step, which is also the most decoding and sampled rows."""
        return min(key.num_rows, self.keys.row_counts[-1])

    def attention(self, key: GraphKey) -> StepCapacity:
        most = self.requests(key)
        pages_of_one = pages_for(self.context_tokens, self.page_tokens) + (self.num_groups - 1) * self.window_pages
        return StepCapacity(
            num_queries=most,
            num_keys=self.context_tokens,
            num_pages=most * pages_of_one,
            num_chunk_rows=key.num_rows if key.is_mixed else 0,
            num_chunks=most,
            has_rolling=key.has_rolling,
        )

    def lora_words(self, key: GraphKey) -> int:
        """Returns the words of the tiles of LoRA."""
        return 0 if key.lora is None else key.lora.capacity(key.num_rows, self.requests(key)).num_words


@dataclass(frozen=True, slots=True)
class _Pass:
    """The forward pass of one key, and where its numbers are."""

    graph: CapturedGraph
    work: Callable[[], None]
    """What was captured. It keeps the memory alive whose addresses the graph holds."""
    sizes: dict[str, int]
    """The words of each array whose size does not depend on the step. Page numbers and passengers follow them."""


class StepGraphs:
    """Owns the graphs of an engine, and the memory that they read from and write to."""

    def __init__(
        self,
        parts: PackedParts,
        gates: LayerGates,
        host: HostMemory,
        limits: GraphLimits,
    ) -> None:
        """Captures nothing yet; see `capture`. `gates` are those of the loads that a step reads."""
        decoder = self._decoder = parts.decoder
        self._attention, self._builder, self._lora = parts.attention, parts.builder, parts.lora
        self._gates = gates
        self._limits = limits
        self._passes: dict[GraphKey, _Pass] = {}
        head = decoder.weights.embedding
        most = limits.keys.row_counts[-1]
        self._logits = torch.empty(most, len(head), dtype=head.dtype, device=self._builder.device)
        num_words = max(WordLayout(self._sizes(key)).num_words for key in limits.keys)
        num_pages = max(limits.attention(key).num_pages for key in limits.keys)
        self._inputs = StepInputs(num_words + num_pages + _PASSENGER_WORDS, self._builder.device, host)

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder, keys: Iterable[GraphKey] | None = None) -> None:
        """Captures the graphs of some keys; of all keys by default. Must be called when no page is in use."""
        for key in self._limits.keys if keys is None else keys:
            self._passes[key] = self._capture(key, recorder)

    @property
    def keys(self) -> GraphKeys:
        """The keys of all graphs."""
        return self._limits.keys

    def work_of(self, key: GraphKey) -> Callable[[], None]:
        """Returns what the graph of a key has captured. Calling it launches the same kernels one by one."""
        return self._passes[key].work

    def key_for(self, rows: BatchRows, owners: StepOwners) -> GraphKey | EagerReason:
        """Returns the key of the graph that computes a step, or why no graph can.

        Adapters that torch applies are not in a graph.
        """
        if any(piece.reads_prompt for piece in rows.slices):
            return EagerReason.SCORES
        if rows.has_rolling and not self._limits.keys.serves_rolling:
            return EagerReason.WINDOWS
        if not owners.is_for_kernels_alone:
            return EagerReason.ADAPTERS
        key = self._limits.keys.find(
            len(rows.token_ids), self._lora.needs_of(owners), is_mixed=rows.is_mixed, has_rolling=rows.has_rolling
        )
        if key is None or key not in self._passes or not self._has_room(key, rows):
            return EagerReason.CHUNKS if rows.is_mixed else EagerReason.ROWS
        return key

    def compute(
        self,
        key: GraphKey,
        rows: BatchRows,
        owners: StepOwners,
        tokens: SampledTokens | None,
        passenger: Passenger | None,
    ) -> torch.Tensor:
        """Launches the graph of a step. Returns the logits of the sampled rows, [num_sampled, vocab], which are valid
        until the next step is computed.

        The device first waits for the whole of the loads that the step reads. An eager step waits layer by layer, but
        takes longer by more than most loads do. Raises LoadFailed if one of them has failed.
        """
        found = self._passes[key]
        arrays = self._arrays(key, rows, self._cut(key, owners), tokens)
        sizes = found.sizes | {"page_ids": len(arrays["page_ids"])}
        travels = passenger is not None and len(passenger.words) <= _PASSENGER_WORDS
        if passenger is not None and travels:
            arrays["passenger"] = passenger.words
            sizes["passenger"] = len(passenger.words)
        layout = WordLayout(sizes)
        self._inputs.send(layout, arrays)
        if passenger is not None and travels:
            passenger.board(self._inputs.view(layout, "passenger"))
        if tokens is not None:
            token_ids, sources = (self._inputs.view(layout, name) for name in ("token_ids", "sources"))
            take_tokens_launch(token_ids, sources, tokens.token_ids).run()
        self._gates.wait_for_all()
        found.graph.replay()
        return self._logits[: rows.num_sampled]

    def _capture(self, key: GraphKey, recorder: GraphRecorder) -> _Pass:
        """Captures the graph of one key, over a step without requests."""
        rows = self._builder.padded(self._builder.arrange(StepPlan(())), key.num_rows)
        owners = StepOwners([None] * key.num_rows, (), ())
        cut = self._cut(key, owners)
        sizes = self._sizes(key)
        capacity = self._limits.attention(key)
        layout = WordLayout(sizes | {"page_ids": capacity.num_pages})
        self._inputs.send(layout, self._arrays(key, rows, cut, None))
        on_device = self._inputs.views(layout)
        nothing = on_device["token_ids"][:0]
        sampled = on_device.get("sampled_rows")
        batch = batch_over(rows, {"sampled_rows": nothing} | on_device | {"begun_pages": nothing})
        if key.has_rolling:  # texts may be longer than the context
            batch = replace(batch, last_position=MOST_ROLLING_TOKENS)
        attention = self._attention.over(on_device, self._attention.sizes_for(capacity)[1])

        def work() -> None:
            lora = self._lora.begin(owners, cut, on_device["lora"])
            hidden = self._decoder.hidden(batch, attention, lora)
            chosen = hidden if sampled is None else hidden.index_select(0, sampled)
            self._logits[: len(chosen)].copy_(self._decoder.logits(chosen, lora))

        return _Pass(recorder.capture(work), work, sizes)

    def _arrays(self, key: GraphKey, rows: BatchRows, cut: CutStep, tokens: SampledTokens | None) -> dict[str, Words]:
        padded = self._builder.padded(rows, key.num_rows)
        batch = AttentionBatch(rows.placed, torch.tensor(padded.positions))
        words = row_words(padded, tokens) | {"lora": cut.segments.words}
        if key.is_mixed:
            sampled = np.zeros(self._limits.requests(key), np.int32)  # what is not filled gathers the first row
            sampled[: rows.num_sampled] = words["sampled_rows"][: rows.num_sampled]
            words["sampled_rows"] = sampled
        queries = self._attention.cut(batch, pads_by_tiles=key.is_mixed, has_rolling=key.has_rolling)
        return words | queries.arrays

    def _cut(self, key: GraphKey, owners: StepOwners) -> CutStep:
        if key.lora is None:
            return self._lora.cut(owners)
        capacity = key.lora.capacity(key.num_rows, self._limits.requests(key))
        return self._lora.cut(owners, capacity, key.lora.bounds)

    def _has_room(self, key: GraphKey, rows: BatchRows) -> bool:
        """Returns whether the arrays of a graph hold a step's requests, decoding rows and sampled rows."""
        return max(len(rows.slices), rows.num_decoding, rows.num_sampled) <= self._limits.requests(key)

    def _sizes(self, key: GraphKey) -> dict[str, int]:
        """Returns the words of each array whose size does not depend on the step."""
        names = ["token_ids", "positions", "row_pages", "row_offsets", "sources"]
        names += window_names(self._limits.num_groups - 1)
        sizes = dict.fromkeys(names, key.num_rows)
        if key.is_mixed:
            sizes["sampled_rows"] = self._limits.requests(key)
        sizes["lora"] = self._limits.lora_words(key)
        sizes |= self._attention.sizes_for(self._limits.attention(key))[0]
        del sizes["page_ids"]
        return sizes
