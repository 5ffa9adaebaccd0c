"""How near the attention kernels come to the floor that memory sets, for the sizes of Llama-3.1-8B in bf16.

    python benchmarks/paged_attention.py [--json OUT] [--dry-run]

Decoding: the floor of one layer is the bytes of the keys and values that its rows see, over the bandwidth that a large
copy reaches on this device. The kernels are replayed from a CUDA graph over pages in random order. Prefill: the floor is
the operations of the products over the rate that a large product of matrices reaches. Each output is compared with fp64
on a few rows before it is timed. `--dry-run` cuts one step of each cell on the host, prints its sizes, and runs nothing.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.attention.kernel_shape import AttentionShape, chunk_blocks, decode_blocks
from graftwork.engine.attention.tiles import Cutting, cut_chunks, cut_decoding, page_tables
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.core.tiers import PageId
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.platform.ids import RequestId

PAGE_TOKENS = 16
SHAPE = AttentionShape(32, 8, 128, PAGE_TOKENS, torch.bfloat16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Cell:
    """A step: so many rows, the tokens that each computes, and the tokens before them."""

    name: str
    num_requests: int
    num_tokens: int
    context: int


CELLS = (
    *(Cell("decode", rows, 1, context) for rows in (1, 8, 32, 128) for context in (1024, 8192)),
    Cell("decode", 1, 1, 65_536),
    Cell("decode", 32, 1, 32_768),
    *(Cell("prefill", 1, tokens, context) for tokens in (512, 2048, 8192) for context in (0, 8192)),
    Cell("prefill", 16, 32, 4096),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds; the floor is by bytes for decoding, by operations for prefill."""

    cell: Cell
    plan_host_s: float
    num_items: int
    layer_s: float | None = None
    floor_s: float | None = None

    def line(self) -> str:
        cell = self.cell
        sizes = f"{cell.name:<8} {cell.num_requests:>5} {cell.num_tokens:>7} {cell.context:>8}"
        host = f"{self.plan_host_s * 1e6:>9.0f} {self.num_items:>7}"
        if self.layer_s is None or self.floor_s is None:
            return f"{sizes} {host}"
        return (
            f"{sizes} {host} {self.layer_s * 1e6:>10.1f} {self.floor_s * 1e6:>9.1f} {self.floor_s / self.layer_s:>6.0%}"
        )


HEADING = "kind      rows  tokens  context   plan us   items   layer us  floor us  floor"


def batch_of(cell: Cell, device: str) -> tuple[AttentionBatch, int]:
    """A step of the cell over pages in random order, and the number of pages."""
    num_pages = -(-(cell.context + cell.num_tokens) // PAGE_TOKENS)
    order = torch.randperm(num_pages * cell.num_requests, generator=torch.Generator().manual_seed(0)).tolist()
    placed = []
    for number in range(cell.num_requests):
        pages = tuple(PageId(page) for page in order[number * num_pages : (number + 1) * num_pages])
        start = cell.context - (1 if cell.num_tokens == 1 else 0)
        piece = RequestSlice(RequestId(str(number)), (0,) * cell.num_tokens, start, pages, (), ())
        placed.append(PlacedSlice(number * cell.num_tokens, piece))
    positions = torch.zeros(cell.num_requests * cell.num_tokens, dtype=torch.int64, device=device)
    return AttentionBatch(tuple(placed), positions), len(order)


def cut(batch: AttentionBatch) -> int:
    """Cuts a step as the engine does; returns the items of its decoding rows and the tiles of its chunks."""
    decode, chunk = (blocks.rows // SHAPE.group for blocks in (decode_blocks(SHAPE), chunk_blocks(SHAPE)))
    cutting = Cutting(SHAPE.num_kv_heads, decode, chunk, None)
    tables = page_tables(batch.placed)
    tiles, _ = cut_decoding(batch.placed, range(0), tables, cutting)
    return len(tiles.item_tile) + len(cut_chunks(batch.placed, range(0), tables, cutting).tile_row)


def measure_host(cell: Cell) -> Measurement:
    batch, _ = batch_of(cell, "cpu")
    cut(batch)
    began_at = perf_counter()
    num_items = cut(batch)
    return Measurement(cell, perf_counter() - began_at, num_items)


def model() -> ModelConfig:
    """One layer of the sizes of Llama-3.1-8B."""
    return ModelConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=1, num_heads=SHAPE.num_heads,
        num_kv_heads=SHAPE.num_kv_heads, head_dim=SHAPE.head_dim, rms_norm_eps=1e-5, ropes=(RopeConfig(500_000.0),),
        biased_targets=(), has_qk_norm=False, windows=(None,), tie_word_embeddings=False, context_tokens=131_072,
        eos_token_ids=(), dtype="bfloat16",
    )  # fmt: skip


def measure(cell: Cell, bandwidth: float, operations: float) -> Measurement:
    """Times one layer on the GPU."""
    from triton.testing import do_bench

    from graftwork.engine.attention.launch import ScoreRules
    from graftwork.engine.attention.reference import attend
    from graftwork.engine.attention.triton_attention import TritonAttention
    from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page

    host = measure_host(cell)
    batch, num_pages = batch_of(cell, "cuda")
    device = torch.device("cuda")
    memory = DeviceMemory(num_pages, bytes_per_page(model(), PAGE_TOKENS, SHAPE.dtype), device)
    cache = KvCache(model(), memory, PAGE_TOKENS, SHAPE.dtype)
    keys, values = cache.layer(0)
    for pages in (keys, values):
        pages.normal_()
    query = torch.randn(batch.num_rows, SHAPE.num_heads, SHAPE.head_dim, device=device, dtype=SHAPE.dtype)
    step = TritonAttention(model(), cache, SHAPE.dtype).plan(batch)
    mixed = step.attend(0, query)  # compiles
    if batch.num_rows * (cell.context + cell.num_tokens) <= 2**19:
        expected = attend(query.cpu(), keys.cpu(), values.cpu(), batch, ScoreRules(SHAPE.head_dim**-0.5))
        torch.testing.assert_close(mixed.cpu().double(), expected, rtol=2**-6, atol=2e-2)
    layer_s = do_bench(captured(lambda: step.attend(0, query)), warmup=10, rep=60, return_mode="median") * 1e-3
    return Measurement(cell, host.plan_host_s, host.num_items, layer_s, floor(cell, bandwidth, operations))


def captured(launch: Callable[[], object]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def floor(cell: Cell, bandwidth: float, operations: float) -> float:
    """Seconds that one layer takes at least: by bytes read, or by operations, whichever is more."""
    num_keys = cell.context + (0 if cell.num_tokens == 1 else cell.num_tokens)
    num_bytes = cell.num_requests * num_keys * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * SHAPE.kv_dtype.itemsize
    pairs = cell.num_requests * sum(num_keys - row for row in range(cell.num_tokens))
    return max(num_bytes / bandwidth, 4 * pairs * SHAPE.num_heads * SHAPE.head_dim / operations)


def ceilings() -> tuple[float, float]:
    """Bytes a second that a 2 GiB copy moves, reads and writes together, and operations a second of a large product."""
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = do_bench(lambda: left @ right, return_mode="median") * 1e-3
    return 2 * source.nbytes / copy_s, 2 * 8192**3 / product_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention kernels against their floor.")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--dry-run", action="store_true", help="only cut the steps on the host")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here. Give --dry-run for its host side.")
        return
    figures: dict[str, object] = {"torch": torch.__version__}
    bandwidth = operations = 0.0
    if not arguments.dry_run:
        bandwidth, operations = ceilings()
        figures |= {
            "device": torch.cuda.get_device_name(),
            "copy_bytes_per_s": bandwidth,
            "operations_per_s": operations,
        }
    print(figures, HEADING, sep="\n")
    measurements = []
    for cell in CELLS:
        found = measure_host(cell) if arguments.dry_run else measure(cell, bandwidth, operations)
        measurements.append(found)
        print(found.line(), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(figures | {"cells": [asdict(one) for one in measurements]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
