"""Random steps over random pages, and what the kernels make of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.kernel_shape import AttentionShape, chunk_blocks, decode_blocks
from graftwork.engine.attention.packed_words import PackedWords
from graftwork.engine.attention.rolling_tiles import cut_rolling, parted, turn_distances
from graftwork.engine.attention.tiles import Cutting, QueryTiles, cut_chunks, cut_decoding, page_tables
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.step import RequestSlice
from tests.engine.attention.batches import batch_of, piece, rolling_piece

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TextRotation:
    """How a layer rotates, as engine/kernels/angles.py has it, which needs triton."""

    frequencies: torch.Tensor  # [rotated features / 2]
    is_interleaved: bool = False


@dataclass(frozen=True)
class Step:
    """A step over pages. What no token has been written to, and every page of no request, is NaN where it can be."""

    shape: AttentionShape
    pieces: tuple[RequestSlice, ...]
    query: torch.Tensor  # [num_rows, heads, head_dim]
    keys: torch.Tensor  # [num_pages, page_tokens, kv_heads, head_dim] numbers, or codes of one byte
    values: torch.Tensor
    num_padding: int = 0
    key_scales: torch.Tensor | None = None  # bf16 [num_pages, page_tokens, kv_heads], where there are codes
    value_scales: torch.Tensor | None = None

    @property
    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as numbers. A code times its scale is exact in fp32."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        pairs = (self.keys, self.key_scales), (self.values, self.value_scales)
        keys, values = (codes.float() * scales.float()[..., None] for codes, scales in pairs)
        return keys, values

    @property
    def batch(self) -> AttentionBatch:
        return batch_of(self.pieces, self.num_padding)


def random_step(
    shape: AttentionShape,
    slices: Sequence[tuple[int, int, int]],
    num_padding: int = 0,
    seed: int = 0,
    windows: Sequence[RollingWindow | None] | None = None,
) -> Step:
    """`slices` are the first position, the number of tokens and the number of drafts of each request, and `windows` their
    rolling windows. Pages that such a request has given up are NaN too.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + count) // shape.page_tokens) for start, count, _ in slices]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    pages = torch.full((len(order), 2, shape.page_tokens, shape.num_kv_heads, shape.head_dim), float("nan"))
    pieces = []
    for number, (count, (start, length, num_drafts)) in enumerate(zip(counts, slices, strict=True)):
        own, order = order[:count], order[count:]
        window = None if windows is None else windows[number]
        if window is None:
            pieces.append(piece(str(number), start, length, own, num_drafts))
        else:
            tokens = start, length, num_drafts
            pieces.append(rolling_piece(str(number), tokens, window, own, shape.page_tokens))
        for index, page in enumerate(own):
            if page not in pieces[-1].pages:
                continue
            used = min(shape.page_tokens, start + length - index * shape.page_tokens)
            pages[page, :, :used] = torch.randn(2, used, *pages.shape[3:], generator=generator)
    stored, scales = pages, None
    if shape.kv_dtype.itemsize == 1:
        # Scales from 2^-10 to 2^-3 beside each other; those of what no token was written to are NaN.
        sizes = torch.exp2(torch.randint(-9, -3, pages.shape[:-1], generator=generator) + pages[..., 0].sign() / 2)
        scales = sizes.to(torch.bfloat16).transpose(2, 3).contiguous().transpose(2, 3)  # adjacent in a page, by head
        stored = (20 * pages).nan_to_num(113)
    stored = stored.to(shape.kv_dtype)
    num_rows = sum(length for _, length, _ in slices) + num_padding
    # Rows of queries, keys and values are parts of one product, as in the engine.
    width = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(num_rows, width, shape.head_dim, generator=generator).to(shape.dtype)
    queries = qkv[:, : shape.num_heads]
    both = (None, None) if scales is None else (scales[:, 0], scales[:, 1])
    return Step(shape, tuple(pieces), queries, stored[:, 0], stored[:, 1], num_padding, *both)


def run_kernels(
    launch: ModuleType,
    step: Step,
    rules: Any,
    num_programs: int = 3,
    device: torch.device = CPU,
    rotation: TextRotation | None = None,
) -> torch.Tensor:
    """What the kernels of a copy of the module `launch` make of a step. Memory that they do not write is NaN.

    `rotation` is that of the layer, by which queries with a rolling window are turned back.
    """
    shape, batch = step.shape, step.batch
    decode, chunk = (blocks.rows // shape.group for blocks in (decode_blocks(shape), chunk_blocks(shape)))
    cutting = Cutting(shape.num_kv_heads, decode, chunk, rules.window)
    tables = page_tables(batch.placed)
    (others, own_tables), rolling = parted(batch.placed, tables)
    end = batch.num_rows - step.num_padding
    tiles, num_slots = cut_decoding(others, range(end, batch.num_rows), own_tables, cutting)
    chunks = cut_chunks(others, range(0), own_tables, cutting)
    cut = cut_rolling(*rolling, cutting, tiles, num_slots)
    tiles, num_slots = cut.merged, cut.num_slots
    sums = launch.PartialSums.empty(shape, num_slots, device)
    for tensor in sums.arguments.values():
        tensor.fill_(float("nan"))
    output = torch.full(
        (batch.num_rows, shape.num_heads * shape.head_dim), float("nan"), dtype=shape.dtype, device=device
    )
    parts = (step.keys, step.values, step.key_scales, step.value_scales)
    pages = launch.LayerPages(*(None if part is None else _moved(part, device) for part in parts))
    layer = launch.LayerAttention(shape, rules, _moved(step.query, device), output, pages)
    programs = min(num_programs, len(tiles.item_tile) * shape.num_kv_heads)
    launch.attend_chunks(layer, launch.Chunks(_on_device(chunks, tables.page_ids, device), len(chunks.tile_row)))
    if rolling[0]:
        distances = torch.tensor(turn_distances(batch.placed, batch.num_rows), device=device)
        turns = None if rotation is None else _turns(launch, rotation, distances)
        tile_arrays, part_arrays = (_on_device(one, tables.page_ids, device) for one in (cut.chunk, cut.decode))
        launch.attend_rolling_chunks(layer, launch.Chunks(tile_arrays, len(cut.chunk.tile_row)), turns)
        programs_of_parts = min(num_programs, len(cut.decode.item_tile) * shape.num_kv_heads)
        launch.attend_rolling_decoding(layer, launch.Decoding(part_arrays, programs_of_parts, 0), turns, sums)
    arrays = _on_device(tiles, tables.page_ids, device)
    launch.attend_decoding(layer, launch.Decoding(arrays, programs, len(tiles.query_row)), sums)
    return output


def _turns(launch: ModuleType, rotation: TextRotation, distances: torch.Tensor) -> Any:
    """The angles of each row, in torch."""
    angles = -torch.outer(distances.double(), rotation.frequencies.to(distances.device).double())
    both = angles.repeat_interleave(2, 1) if rotation.is_interleaved else torch.cat([angles, angles], 1)
    rows = launch.RowAngles(both.cos().float(), -both.sin().float())
    return launch.QueryTurns(rows, rotation.is_interleaved)


def _moved(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device with the view's own strides."""
    copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device)
    return copy.copy_(view)


def _on_device(tiles: QueryTiles, page_ids: Any, device: torch.device) -> dict[str, torch.Tensor]:
    arrays = {field.name: getattr(tiles, field.name) for field in fields(tiles)}
    return PackedWords.of(arrays | {"page_ids": page_ids}, device).arrays
