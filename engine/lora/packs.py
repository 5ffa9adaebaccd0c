"""Copies the matrices of several adapters side by side (a pack), so that one matrix product serves several adapters.

This is for adapters with few rows each. A row is one token of the step. A and B are the low-rank factors of an adapter.
The rows of a product are cut into blocks. A block is multiplied by the factors of all adapters that its rows use:

    block 0    rows of a, a, b, …    @    [A of a | A of b | 0]    →    v, other adapters' ranks set to 0    @    B's
    block 1    rows of b, c, c, …    @    [A of b | A of c | A of d]

In the row's v, the ranks of other adapters are set to zero. Adding an exact zero does not change the bits of a sum.
This file keeps two rules, so that a row gets the same bits in every pack. The rules come from measurements
(benchmarks/row_bits.py):

- A product has at least `min_rows` rows and `min_columns` columns (see BatchInvariance). Then the other rows and
  columns do not change the bits.
- The ranks of an adapter start at a multiple of eight, and a sum has at most `WINDOW_RANKS` ranks. Then the number of
  zeros before and after these ranks does not change the bits.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from graftwork.engine.lora.resident_adapter import GroupDelta, ResidentAdapter, SliceDelta

WINDOW_RANKS = 192
"""The most ranks that are summed in one product (a window). A mixture with more ranks gets its own window."""


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """The adapters that a token of a step uses, each with its weight: one adapter, or several (a mixture)."""

    parts: tuple[tuple[ResidentAdapter, float], ...]

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        return tuple((adapter.digest, weight) for adapter, weight in self.parts)

    @property
    def is_low_rank(self) -> bool:
        """Whether the adapters change linear layers only, and only by low-rank factors.

        Always true if there are several adapters.
        """
        return all(adapter.is_low_rank for adapter, _ in self.parts)

    @property
    def changes_vocabulary(self) -> bool:
        """Whether any of the adapters changes the embedding or the output head."""
        return any(adapter.changes_vocabulary for adapter, _ in self.parts)

    @property
    def changes_experts(self) -> bool:
        """Whether any of the adapters changes experts of routed layers."""
        return any(adapter.experts for adapter, _ in self.parts)

    @property
    def single(self) -> ResidentAdapter | None:
        """The only adapter, if its weight is 1. None for a mixture (several adapters), or if the weight is not 1."""
        (adapter, weight), *others = self.parts
        return adapter if weight == 1.0 and not others else None


Block = Sequence[AdapterMix]
"""The adapters and mixtures that the rows of one block use."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Copies of the B matrices of one projection for a range of ranks, one for each block of tokens.

    A block's v = x @ A.T has ranks as columns. The columns [rank_start, rank_end) of v are multiplied by `B`. The
    product is added to the output columns [out_start, out_end).
    """

    B: torch.Tensor  # [blocks, ranks, out_features]
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """Copies of the A and B matrices of several adapters, for one group of projections and for all blocks of tokens.

    A group of projections is the linear layers with the same input, such as q, k and v.
    """

    A_transposed: torch.Tensor  # [blocks, in_features, ranks]
    scales: torch.Tensor | None  # [blocks, 1, ranks] fp32, weights of mixtures included; None where all are 1
    parts: tuple[PackedPart, ...]
    owners: torch.Tensor  # [blocks, 1, ranks] int64: each rank's mix by its place in the block; -1 is padding
    memory: torch.Tensor  # [num_bytes / 4] fp32: A and all B behind one another

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def read_ahead(self) -> None:
        """Reads all copied matrices once, in order, so that they are in the processor's cache.

        A matrix product without this reads them in small steps, at a third of the memory's speed.
        """
        self.memory.sum()


@dataclass(frozen=True, slots=True)
class _Piece:
    """One adapter's factors of one slice, to be copied into a block."""

    place: int
    delta: GroupDelta
    part: SliceDelta
    weight: float

    @property
    def num_ranks(self) -> int:
        return self.part.rank_end - self.part.rank_start


Window = list[_Piece]


class Pack:
    """Holds copies of the low-rank factors of several adapters, side by side.

    These are the adapters that some blocks of tokens use. The copies for one group of projections (such as q, k and v)
    are made when a layer first needs them.
    """

    def __init__(self, blocks: Sequence[Block], min_columns: int) -> None:
        self._blocks = tuple(tuple(block) for block in blocks)
        self._min_columns = min_columns
        self._groups: dict[tuple[int, str], PackedGroup | None] = {}
        self._owners: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        self.num_bytes = 0

    def group(self, layer: int, name: str) -> PackedGroup | None:
        """Returns the copied factors of one group of projections in one layer.

        Returns None if none of the copied adapters changes this group.
        """
        key = layer, name
        if key not in self._groups:
            packed = self._packed(key)
            self._groups[key] = packed
            self.num_bytes += packed.num_bytes if packed is not None else 0
        return self._groups[key]

    def _packed(self, key: tuple[int, str]) -> PackedGroup | None:
        pieces = [list(_pieces(block, key)) for block in self._blocks]
        every = [piece for block in pieces for piece in block]
        if not every:
            return None
        stack = _Stack(len(self._blocks), every[0].delta.A)
        for out_start, out_end in sorted({(piece.part.out_start, piece.part.out_end) for piece in every}):
            columns = [_windows([piece for piece in block if piece.part.out_start == out_start]) for block in pieces]
            for number in range(max(map(len, columns))):
                windows = [block[number] if number < len(block) else [] for block in columns]
                stack.add_window(windows, out_start, out_end)
        stack.pad(self._min_columns)
        return stack.finished(self._owners)


def _pieces(block: Block, key: tuple[int, str]) -> Iterator[_Piece]:
    for place, mix in enumerate(block):
        for adapter, weight in mix.parts:
            delta = adapter.deltas.get(key)
            if delta is not None:
                yield from (_Piece(place, delta, part, weight) for part in delta.slices)


def _windows(pieces: list[_Piece]) -> list[Window]:
    """Cuts the pieces into windows (see WINDOW_RANKS).

    All pieces of a mix stay together, so that one product sums them.
    """
    windows: list[Window] = []
    filled = 0
    by_place: dict[int, Window] = {}
    for piece in pieces:
        by_place.setdefault(piece.place, []).append(piece)
    for own in by_place.values():
        ranks = sum(piece.num_ranks for piece in own)
        if not windows or filled + ranks > WINDOW_RANKS:
            windows.append([])
            filled = 0
        windows[-1] += own
        filled += ranks
    return windows


class _Stack:
    """Collects the matrices of one group of projections, block by block and window by window."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        self._like = like
        self._A: list[list[torch.Tensor]] = [[] for _ in range(num_blocks)]
        self._scales: list[list[float]] = [[] for _ in range(num_blocks)]
        self._owners: list[list[int]] = [[] for _ in range(num_blocks)]
        self._parts: list[PackedPart] = []
        self._num_ranks = 0

    def add_window(self, windows: Sequence[Window], out_start: int, out_end: int) -> None:
        """Adds one window of each block. Narrower windows are padded with zeros to the width of the widest."""
        width = max(sum(piece.num_ranks for piece in window) for window in windows)
        B = [self._add_pieces(block, window, width, out_end - out_start) for block, window in enumerate(windows)]
        end = self._num_ranks + width
        self._parts.append(PackedPart(torch.stack(B), self._num_ranks, end, out_start, out_end))
        self._num_ranks = end

    def _add_pieces(self, block: int, window: Window, width: int, out_features: int) -> torch.Tensor:
        B: list[torch.Tensor] = []
        for piece in window:
            ranks = slice(piece.part.rank_start, piece.part.rank_end)
            self._A[block].append(piece.delta.A[ranks])
            self._scales[block] += [float(np.float32(piece.part.scale)) * piece.weight] * piece.num_ranks
            self._owners[block] += [piece.place] * piece.num_ranks
            B.append(piece.part.B)
        missing = width - sum(piece.num_ranks for piece in window)
        self._add_zeros(block, missing)
        return torch.cat([*B, self._like.new_zeros(missing, out_features)])

    def _add_zeros(self, block: int, count: int) -> None:
        self._A[block].append(self._like.new_zeros(count, self._like.shape[1]))
        self._scales[block] += [1.0] * count
        self._owners[block] += [-1] * count

    def pad(self, min_columns: int) -> None:
        missing = max(0, min_columns - self._num_ranks)
        for block in range(len(self._A)):
            self._add_zeros(block, missing)

    def finished(self, known_owners: dict[tuple[tuple[int, ...], ...], torch.Tensor]) -> PackedGroup:
        """Builds the packed group.

        Groups with the same layout of ranks share one `owners` tensor, so that a step makes one mask for each layout.
        """
        device = self._like.device
        layout = tuple(map(tuple, self._owners))
        if layout not in known_owners:
            known_owners[layout] = copied_early(torch.tensor(layout), device).unsqueeze(1)
        matrices, memory = _in_one_piece(
            [torch.stack([torch.cat(rows) for rows in self._A]), *(part.B for part in self._parts)]
        )
        is_scaled = any(scale != 1.0 for scales in self._scales for scale in scales)
        return PackedGroup(
            matrices[0].transpose(1, 2),
            copied_early(torch.tensor(self._scales), device).unsqueeze(1) if is_scaled else None,
            tuple(replace(part, B=B) for part, B in zip(self._parts, matrices[1:], strict=True)),
            known_owners[layout],
            memory,
        )


def copied_early(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of host values on a device. The host does not wait for the copy to a GPU."""
    on_host = values.pin_memory() if device.type == "cuda" else values
    return on_host.to(device, non_blocking=True)


def _in_one_piece(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copies tensors into one piece of memory. Returns the copies and the memory."""
    flat = torch.cat([matrix.flatten() for matrix in matrices])
    pieces = torch.split(flat, [matrix.numel() for matrix in matrices])
    return [piece.view(matrix.shape) for piece, matrix in zip(pieces, matrices, strict=True)], flat.view(torch.float32)


PackKey = tuple[tuple[tuple[tuple[str, float], ...], ...], ...]


class PackCache:
    """Keeps the packs of recent batches. A pack holds copies of the matrices of several adapters.

    If all packs together have more than `budget_bytes`, the least recently used are dropped. One pack always stays. A
    batch that decodes uses the same adapters in every step, so it finds its pack here and copies nothing.
    """

    def __init__(self, budget_bytes: int, min_columns: int) -> None:
        self._budget_bytes = budget_bytes
        self._min_columns = min_columns
        self._packs: OrderedDict[PackKey, Pack] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self._packs.values())

    def get(self, blocks: Sequence[Block]) -> Pack:
        key = tuple(tuple(mix.key for mix in block) for block in blocks)
        pack = self._packs.pop(key, None) or Pack(blocks, self._min_columns)
        self._packs[key] = pack
        while self.num_bytes > self._budget_bytes and len(self._packs) > 1:
            self._packs.popitem(last=False)
        return pack

    def forget(self, digest: str) -> None:
        """Drops all copies of this adapter, and the copies that are stored together with it.

        Called before the adapter leaves the device.
        """
        held = [key for key in self._packs if any(digest == name for block in key for mix in block for name, _ in mix)]
        for key in held:
            del self._packs[key]

    def check_integrity(self) -> None:
        """Checks that all packs together have at most `budget_bytes`. A single pack may be larger.

        A pack holds copies of the matrices of several adapters. Raises AssertionError if the check fails.
        """
        assert len(self._packs) <= 1 or self.num_bytes <= self._budget_bytes
