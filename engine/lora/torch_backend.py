"""Applies the adapters of one step in plain torch. Each row (token of the step) may have another adapter.

The rows are sorted by adapter. All rows with the same adapter, or with the same mixture (several adapters with
weights), are adjacent. They are one segment [start, end). Segments are made once in a step and serve all layers. Rows
of the base model are in no segment.

A long segment is multiplied alone, by the matrices of its adapter. Short segments are multiplied together, by a copy of
the matrices of all their adapters (a pack, see packs.py). A row gets the same bits in both ways, so its output does not
depend on the other rows.

On a CPU this file serves prefill chunks. It also serves decoding rows if the compiled kernel does not work
(cpu_backend.py). On CUDA it serves what the Triton kernels do not serve, and the kernels are compared with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.experts.routes import HostRows
from graftwork.engine.lora.expert_deltas import RoutedLora, RoutedTorch, RowOwners
from graftwork.engine.lora.packs import AdapterMix, Pack, PackCache, copied_early
from graftwork.engine.lora.resident_adapter import EmbeddingDelta, ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.model.batch_invariance import BLOCK_ROWS, BatchInvariance, multiply
from graftwork.engine.model.projections import HEAD, HEAD_LAYER


@dataclass(slots=True)
class LoraRows:
    """How many rows (tokens of steps) had an adapter since the engine's start, by what applied it.

    A row counts once in `kernels` or `torch`, for all linear layers of the decoder together.
    """

    kernels: int = 0
    torch: int = 0
    vocabulary: int = 0
    """Rows whose adapter also changes the embedding or the output head. Torch applies that on every device."""

    def count(self, segment: Segment, *, by_torch: int) -> None:
        """Counts the rows of a segment. Torch applies the adapters of `by_torch` of them, and kernels the others."""
        self.torch += by_torch
        self.kernels += segment.num_rows - by_torch
        self.vocabulary += segment.num_rows if segment.mix.changes_vocabulary else 0


LONG_SEGMENT_ROWS = 16
"""The least number of rows in a segment that is multiplied alone. For so many rows, a separate product costs less than
a pack (factors of several adapters, padded with zeros).
"""


class LoraProduct(Protocol):
    """Computes the LoRA deltas of some tokens of the step, and adds them to the outputs."""

    def add_to(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds LoRA deltas to y, in place, but only to the rows that belong to this product.

        `group` names the linear layers to change: layers with the same input `x`, such as q, k and v.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        ...


ProductPlanner = Callable[[Sequence[Segment], int], Sequence[LoraProduct]]
"""Makes the products of a step from its segments and the number of rows of the batch."""


@dataclass(frozen=True, slots=True)
class SegmentProduct:
    """Multiplies many tokens that use the same adapter by the adapter's own matrices, without copying the matrices."""

    start: int
    num_rows: int
    adapter: ResidentAdapter
    rules: BatchInvariance

    def add_to(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        delta = self.adapter.deltas.get((layer, group))
        if delta is None or not delta.slices:
            return
        own_x = x.narrow(0, self.start, self.num_rows)
        v = multiply(own_x, delta.A.t(), self.rules.rows_at_once(x.shape[1]))  # [rows, sum of ranks]
        if delta.scales is not None:
            v.mul_(delta.scales)
        out = y.narrow(0, self.start, self.num_rows)
        for part in delta.slices:
            own_v = v.narrow(1, part.rank_start, part.rank_end - part.rank_start)
            out.narrow(1, part.out_start, part.out_end - part.out_start).addmm_(own_v, part.B)


class PackedProduct:
    """Multiplies tokens of several adapters by one pack. A pack holds copies of the matrices of all these adapters.

    The tokens are multiplied in blocks of `block_rows`. Tokens without an adapter get no delta.
    """

    def __init__(self, start: int, block_rows: int, segments_by_block: Sequence[Sequence[Segment]], pack: Pack) -> None:
        self._start = start
        self._block_rows = block_rows
        self._segments = segments_by_block
        self._pack = pack
        self._foreign: dict[int, torch.Tensor] = {}

    def add_to(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        packed = self._pack.group(layer, group)
        if packed is None:
            return
        packed.read_ahead()
        blocks, rows = len(self._segments), len(self._segments) * self._block_rows
        x_blocks = x.narrow(0, self._start, rows).view(blocks, self._block_rows, x.shape[1])
        v = torch.bmm(x_blocks, packed.A_transposed)  # [blocks, rows, ranks]
        if packed.scales is not None:
            v.mul_(packed.scales)
        v.masked_fill_(self._foreign_ranks(packed.owners), 0)
        out = y.narrow(0, self._start, rows).view(blocks, self._block_rows, y.shape[1])
        for part in packed.parts:
            own_v = v.narrow(2, part.rank_start, part.rank_end - part.rank_start)
            out.narrow(2, part.out_start, part.out_end - part.out_start).baddbmm_(own_v, part.B)

    def _foreign_ranks(self, owners: torch.Tensor) -> torch.Tensor:
        """Returns a mask of the ranks that belong to other rows' mixes: [blocks, rows, ranks] bool.

        The mask is made once for each layout of ranks.
        """
        layout = id(owners)
        if layout not in self._foreign:
            owner_of_row = torch.full((len(self._segments), self._block_rows, 1), -2)
            for block, segments in enumerate(self._segments):
                first = self._start + block * self._block_rows
                for place, segment in enumerate(segments):
                    owner_of_row[block, max(0, segment.start - first) : segment.end - first] = place
            self._foreign[layout] = copied_early(owner_of_row, owners.device) != owners
        return self._foreign[layout]


class TorchProducts:
    """Plans the matrix products of a step. A segment is a range of tokens that use the same adapters.

    Each long segment gets a product of its own. Neighbouring short segments share one product. Its matrices are a copy
    of the matrices of all their adapters (a pack, see packs.py).
    """

    def __init__(self, packs: PackCache, rules: BatchInvariance) -> None:
        self._packs = packs
        self._rules = rules

    def __call__(self, segments: Sequence[Segment], num_rows: int) -> list[LoraProduct]:
        """Plans the products of a step. `num_rows` counts all rows of the batch, including base rows and padding."""
        return list(self._products(segments, num_rows))

    def _products(self, segments: Sequence[Segment], num_rows: int) -> Iterator[LoraProduct]:
        for is_long, run in groupby(segments, self._is_long):
            if is_long:
                yield from (SegmentProduct(one.start, one.num_rows, _only_adapter(one), self._rules) for one in run)
            else:
                yield from (self._packed_product(near, num_rows) for near in _without_gaps(list(run)))

    def _is_long(self, segment: Segment) -> bool:
        adapter = segment.mix.single
        if adapter is None or segment.num_rows < max(LONG_SEGMENT_ROWS, self._rules.min_rows):
            return False
        widths = [delta.num_ranks for delta in adapter.deltas.values()]
        return all(width == 0 or width >= self._rules.min_columns for width in widths)

    def _packed_product(self, run: list[Segment], num_rows: int) -> PackedProduct:
        block_rows = min(BLOCK_ROWS, num_rows)
        num_blocks = -(-(run[-1].end - run[0].start) // block_rows)
        start = min(run[0].start, num_rows - num_blocks * block_rows)
        assert start >= 0, "a batch with adapters has whole blocks of rows"
        blocks = [
            [one for one in run if one.start < first + block_rows and one.end > first]
            for first in range(start, start + num_blocks * block_rows, block_rows)
        ]
        pack = self._packs.get([[segment.mix for segment in block] for block in blocks])
        return PackedProduct(start, block_rows, blocks, pack)


class LoraBatch:
    """Applies the adapters of one step in every layer. The matrix products are planned once, for all layers."""

    def __init__(
        self,
        segments: Sequence[Segment],
        make_lanes: ProductPlanner,
        rules: BatchInvariance,
        num_rows: int,
        routed: RoutedLora | None = None,
    ) -> None:
        """`num_rows` counts all rows of the batch, including base rows and padding (see `padded_rows`).

        `routed` applies the adapters to experts; without it, torch does.
        """
        self.segments = tuple(segments)
        self._rules = rules
        self._make_lanes = make_lanes
        self._with_columns = [segment for segment in self.segments if not segment.mix.is_low_rank]
        self._products = make_lanes(self.segments, num_rows)
        self._routed = routed or RoutedTorch(RowOwners(self.segments, num_rows), rules)

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds the LoRA delta of each row's adapter to `y`, in place. A row is one token of the step.

        `group` names the linear layers to change: layers with the same input, such as q, k and v. `x` is their input,
        and `y` is the output of the base model's weights.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        self._change_columns(y, layer, group)
        for product in self._products:
            product.add_to(y, x, layer, group)

    @property
    def changes_experts(self) -> bool:
        return any(segment.mix.changes_experts for segment in self.segments)

    def add_routed(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str, rows: HostRows) -> None:
        """Adds the LoRA deltas of experts to `y`, in place. See StepLora.add_routed."""
        self._routed.add_to(y, x, (layer, group), rows)

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Changes the base model's embeddings of the tokens, in place, as each token's adapter says.

        An adapter either adds a LoRA delta, or brings an embedding of its own, which replaces the base model's.

        hidden: [num_rows, hidden_size], token_ids: [num_rows].
        """
        for segment in self.segments:
            adapter = segment.mix.single
            if adapter is None:
                continue  # a mixture has no such part
            rows = slice(segment.start, segment.end)
            if adapter.saved_embedding is not None:
                hidden[rows] = functional.embedding(token_ids[rows], adapter.saved_embedding)
            if adapter.embedding is not None:
                self._add_embedded(hidden[rows], token_ids[rows], adapter.embedding)

    def change_inputs(self, inputs: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds LoRA deltas to the inputs of all layers, in place. See StepLora.change_inputs."""
        for segment in self.segments:
            adapter = segment.mix.single
            if adapter is not None and adapter.input_embedding is not None:
                rows = slice(segment.start, segment.end)
                self._add_embedded(inputs[rows], token_ids[rows], adapter.input_embedding)

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Changes the base model's logits, in place, as each token's adapter says.

        An adapter either adds a LoRA delta, or brings an output head of its own. The logits of that head replace the
        base model's.

        x: [num_sampled, hidden_size], logits: [num_sampled, vocab]. There is one row for each token whose next token
        the step samples. Both may have more rows at the end, which are padding.
        """
        touched = [segment.of_sampled() for segment in self.segments if _has_head(segment.mix)]
        touched = [segment for segment in touched if segment.num_rows]
        for segment in touched:
            adapter = segment.mix.single
            if adapter is not None and adapter.saved_head is not None:
                rows = slice(segment.start, segment.end)
                logits[rows] = self._product(x[rows], adapter.saved_head.t())
        if touched:
            over_samples = LoraBatch(touched, self._make_lanes, self._rules, len(x))
            over_samples.add_deltas(logits, x, HEAD_LAYER, HEAD.name)

    def _change_columns(self, y: torch.Tensor, layer: int, group: str) -> None:
        """Applies DoRA's scales and the biases to the base's outputs, in place."""
        for segment in self._with_columns:
            rows = y[segment.start : segment.end]
            for adapter, _ in segment.mix.parts:
                delta = adapter.deltas.get((layer, group))
                if delta is None:
                    continue
                if delta.column_scale is not None:
                    rows.mul_(delta.column_scale)
                if delta.column_shift is not None:
                    rows.add_(delta.column_shift)

    def _add_embedded(self, rows: torch.Tensor, token_ids: torch.Tensor, delta: EmbeddingDelta) -> None:
        v = functional.embedding(token_ids, delta.A)  # [rows, ranks]
        rows.add_(self._product(v, delta.B), alpha=delta.scale)

    def _product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Returns x @ matrix. The bits of a row do not depend on the number of rows."""
        missing = self._rules.rows(len(x)) - len(x)
        padded = functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x
        return multiply(padded, matrix, self._rules.rows_at_once(x.shape[1]))[: len(x)]


def _without_gaps(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Splits segments where at least one whole block of rows between them has no adapter, so that no block of zeros is
    multiplied.
    """
    start = 0
    for place, (one, following) in enumerate(pairwise(segments), start=1):
        if following.start - one.end >= BLOCK_ROWS:
            yield segments[start:place]
            start = place
    yield segments[start:]


def _only_adapter(segment: Segment) -> ResidentAdapter:
    adapter = segment.mix.single
    assert adapter is not None
    return adapter


def padded_rows(num_rows: int, rules: BatchInvariance, *, with_adapters: bool) -> int:
    """Returns to how many rows (tokens) a step is padded, so that a row's bits do not depend on the number of rows.

    If the step uses adapters and has more than `BLOCK_ROWS` rows, the result is a multiple of `BLOCK_ROWS`.
    """
    rows = rules.rows(num_rows)
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS if with_adapters and rows > BLOCK_ROWS else rows


def _has_head(mix: AdapterMix) -> bool:
    return any(adapter.saved_head is not None or (HEAD_LAYER, HEAD.name) in adapter.deltas for adapter, _ in mix.parts)


class TorchLora:
    """The LoRA backend in plain torch, for any device."""

    def __init__(self, packs: PackCache, rules: BatchInvariance) -> None:
        self._packs = packs
        self.rules = rules
        self.products = TorchProducts(packs, rules)
        self.rows = LoraRows()

    def place(self, adapter: ResidentAdapter) -> None:
        """Does nothing. Copies of an adapter's matrices are made when a step first needs them."""

    def forget(self, digest: str) -> None:
        self._packs.forget(digest)

    @property
    def copied_bytes(self) -> int:
        return self._packs.num_bytes

    def step(self, segments: Sequence[Segment], num_rows: int) -> LoraBatch:
        for segment in segments:
            self.rows.count(segment, by_torch=segment.num_rows)
        return LoraBatch(segments, self.products, self.rules, num_rows)

    def check_integrity(self) -> None:
        self._packs.check_integrity()
