"""Several adapters side by side in one stack of matrices, so that many short segments cost a few multiplications.

The rows of a lane are cut into blocks, and every block brings the adapters that its rows use:

    block 0    rows of a, a, b, …    @    [A of a | A of b | 0]    →    v, what is foreign to a row set to 0    @    B's
    block 1    rows of b, c, c, …    @    [A of b | A of c | A of d]

A row meets the ranks of strangers only as exact zeros, and a sum that exact zeros are added to keeps its bits. What a
sum's bits do depend on, on this path, was measured (benchmarks/row_bits.py): not on the other rows or columns, if
there are at least `min_rows` and `min_columns` of them; not on how many zeros stand before or behind its own ranks, if
they stand at a multiple of eight and the sum is no longer than `WINDOW_RANKS`. Those are the rules here.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from graftwork.engine.resident_adapter import GroupDelta, ResidentAdapter, SliceDelta

WINDOW_RANKS = 192
"""Ranks that are summed in one product; a mixture of more has a window of its own."""


@dataclass(frozen=True, slots=True)
class Graft:
    """What one row of a batch adds to the base: one adapter, or a few by weight."""

    parts: tuple[tuple[ResidentAdapter, float], ...]

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        return tuple((adapter.digest, weight) for adapter, weight in self.parts)

    @property
    def is_low_rank(self) -> bool:
        """Whether nothing but low-rank factors is added; always so in a mixture."""
        return all(adapter.is_low_rank for adapter, _ in self.parts)

    @property
    def changes_vocabulary(self) -> bool:
        """Whether anything happens at the embedding or at the head."""
        return any(adapter.changes_vocabulary for adapter, _ in self.parts)

    @property
    def single(self) -> ResidentAdapter | None:
        """The adapter that the graft is, if it is no mixture."""
        (adapter, weight), *others = self.parts
        return adapter if weight == 1.0 and not others else None


Block = Sequence[Graft]
"""The grafts that the rows of one block use."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """A window of one slice: v[:, :, rank_start:rank_end] @ B goes to y[:, :, out_start:out_end]."""

    B: torch.Tensor  # [blocks, ranks, out_features]
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """One group's deltas of all blocks."""

    A_transposed: torch.Tensor  # [blocks, in_features, ranks]
    scales: torch.Tensor | None  # [blocks, 1, ranks] fp32, weights of mixtures included; None where all are 1
    parts: tuple[PackedPart, ...]
    owners: torch.Tensor  # [blocks, 1, ranks] int64: each rank's graft by its place in the block; -1 is padding
    memory: torch.Tensor  # [num_bytes / 4] fp32: A and all B behind one another

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def read_ahead(self) -> None:
        """Bring the matrices into the cache in one sequential pass.

        A product reads its weights in small steps, at a third of the memory's speed; after this pass it finds them.
        """
        self.memory.sum()


@dataclass(frozen=True, slots=True)
class _Piece:
    """One adapter's factors of one slice, on their way into a block."""

    place: int
    delta: GroupDelta
    part: SliceDelta
    weight: float

    @property
    def num_ranks(self) -> int:
        return self.part.rank_end - self.part.rank_start


Window = list[_Piece]


class Pack:
    """Copies of the factors that some blocks use; a group is packed when a layer first asks for it."""

    def __init__(self, blocks: Sequence[Block], min_columns: int) -> None:
        self._blocks = tuple(tuple(block) for block in blocks)
        self._min_columns = min_columns
        self._groups: dict[tuple[int, str], PackedGroup | None] = {}
        self._owners: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        self.num_bytes = 0

    def group(self, layer: int, name: str) -> PackedGroup | None:
        """None where no graft of the pack has anything to add."""
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
    for place, graft in enumerate(block):
        for adapter, weight in graft.parts:
            delta = adapter.deltas.get(key)
            if delta is not None:
                yield from (_Piece(place, delta, part, weight) for part in delta.slices)


def _windows(pieces: list[_Piece]) -> list[Window]:
    """Cut where a window is full, never inside a graft: its sum stays in one product."""
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
    """The matrices of one group while they are put together, block by block and window by window."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        self._like = like
        self._A: list[list[torch.Tensor]] = [[] for _ in range(num_blocks)]
        self._scales: list[list[float]] = [[] for _ in range(num_blocks)]
        self._owners: list[list[int]] = [[] for _ in range(num_blocks)]
        self._parts: list[PackedPart] = []
        self._num_ranks = 0

    def add_window(self, windows: Sequence[Window], out_start: int, out_end: int) -> None:
        """The same window of every block, filled up with zeros to the widest."""
        width = max(sum(piece.num_ranks for piece in window) for window in windows)
        B = [self._add_pieces(block, window, width, out_end - out_start) for block, window in enumerate(windows)]
        end = self._num_ranks + width
        self._parts.append(PackedPart(torch.stack(B), self._num_ranks, end, out_start, out_end))
        self._num_ranks = end

    def _add_pieces(self, block: int, window: Window, width: int, out_features: int) -> torch.Tensor:
        B: list[torch.Tensor] = []
        for piece in window:
            ranks = slice(piece.part.rank_start, piece.part.rank_end)
            own = [1.0] * piece.num_ranks if piece.delta.scales is None else piece.delta.scales[ranks].tolist()
            self._A[block].append(piece.delta.A[ranks])
            self._scales[block] += [scale * piece.weight for scale in own]
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
        """Groups of one layout share their owners, so that a step masks each layout once."""
        device = self._like.device
        layout = tuple(map(tuple, self._owners))
        if layout not in known_owners:
            known_owners[layout] = torch.tensor(layout, device=device).unsqueeze(1)
        matrices, memory = _in_one_piece(
            [torch.stack([torch.cat(rows) for rows in self._A]), *(part.B for part in self._parts)]
        )
        is_scaled = any(scale != 1.0 for scales in self._scales for scale in scales)
        return PackedGroup(
            matrices[0].transpose(1, 2),
            torch.tensor(self._scales, device=device).unsqueeze(1) if is_scaled else None,
            tuple(replace(part, B=B) for part, B in zip(self._parts, matrices[1:], strict=True)),
            known_owners[layout],
            memory,
        )


def _in_one_piece(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copies that lie behind one another, and all of their memory."""
    flat = torch.cat([matrix.flatten() for matrix in matrices])
    pieces = torch.split(flat, [matrix.numel() for matrix in matrices])
    return [piece.view(matrix.shape) for piece, matrix in zip(pieces, matrices, strict=True)], flat.view(torch.float32)


PackKey = tuple[tuple[tuple[tuple[str, float], ...], ...], ...]


class PackCache:
    """Packs of the last batches, least recently used first out, within a budget of bytes.

    While a batch decodes, its adapters stay the same from step to step and nothing is copied.
    """

    def __init__(self, budget_bytes: int, min_columns: int) -> None:
        self._budget_bytes = budget_bytes
        self._min_columns = min_columns
        self._packs: OrderedDict[PackKey, Pack] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(pack.num_bytes for pack in self._packs.values())

    def get(self, blocks: Sequence[Block]) -> Pack:
        key = tuple(tuple(graft.key for graft in block) for block in blocks)
        pack = self._packs.pop(key, None) or Pack(blocks, self._min_columns)
        self._packs[key] = pack
        while self.num_bytes > self._budget_bytes and len(self._packs) > 1:
            self._packs.popitem(last=False)
        return pack

    def forget(self, digest: str) -> None:
        """Drop every pack that holds an adapter: it has left the device, and its bytes with it."""
        held = [
            key for key in self._packs if any(digest == name for block in key for graft in block for name, _ in graft)
        ]
        for key in held:
            del self._packs[key]

    def check_integrity(self) -> None:
        """The packs keep their budget; only a single pack may be larger than it."""
        assert len(self._packs) <= 1 or self.num_bytes <= self._budget_bytes
