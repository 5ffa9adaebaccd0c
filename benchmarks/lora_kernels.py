"""How near the LoRA kernels come to the floor that memory sets, on the layers of Llama-3.1-8B in bf16.

    python benchmarks/lora_kernels.py [--json OUT]

The floor of one fused layer is its bytes over the bandwidth that a large copy reaches on this device: the weights of
each distinct adapter once, x read once, y read and written once. Row-wise and grouped kernels are measured side by side
in alternation; `chosen` is the one that the engine would take, `*` marks it where it is not the faster. Times are
medians over graph replays with a cold L2. The base column is the layer's own GEMM, measured alike; the last says what
the chosen kernels add to it. Each output is compared with plain fp32 torch before it is timed.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from graftwork.engine.lora.triton.launch_plan import ROW_WISE, StepShape, grouped_tile_rows, tile_rows_for
from graftwork.engine.lora.triton.random_adapters import random_slots
from graftwork.engine.lora.triton.reference import add_lora
from graftwork.engine.lora.triton.slice_table import SliceTable, build_table
from graftwork.engine.lora.triton.tiles import LoraSegments, build_segments
from graftwork.engine.lora.weights import LoraPair

DTYPE = torch.bfloat16
LAYERS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
BATCHES = ((1, 1), (8, 1), (8, 8), (32, 1), (32, 8), (32, 32), (64, 64), (256, 64), (2048, 4), (8192, 8))
"""(rows, distinct adapters)."""
RANKS = (8, 16, 64)
MIXED_RANKS = (8, 16, 64, 8)
ROUNDS = 5
MAX_ROW_WISE_ROWS = 256  # above, row-wise re-reads the weights for so long that the table would never end


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer in one step; adapters have the ranks in turn."""

    layer: str
    num_rows: int
    num_adapters: int
    ranks: tuple[int, ...]

    @property
    def in_features(self) -> int:
        return LAYERS[self.layer][0]

    @property
    def widths(self) -> tuple[int, ...]:
        return LAYERS[self.layer][1]

    @property
    def ranks_by_adapter(self) -> list[int]:
        return [self.ranks[adapter % len(self.ranks)] for adapter in range(self.num_adapters)]

    @property
    def owners(self) -> list[int]:
        return [row * self.num_adapters // self.num_rows for row in range(self.num_rows)]

    @property
    def chosen_tile_rows(self) -> int:
        return tile_rows_for(StepShape(self.num_rows, self.num_adapters, sum(self.ranks_by_adapter)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds."""

    cell: Cell
    row_wise_s: float | None
    grouped_s: float
    base_s: float
    floor_s: float

    @property
    def is_row_wise(self) -> bool:
        return self.cell.chosen_tile_rows == ROW_WISE and self.row_wise_s is not None

    @property
    def chosen_s(self) -> float:
        return self.row_wise_s if self.is_row_wise and self.row_wise_s is not None else self.grouped_s

    def line(self) -> str:
        cell = self.cell
        row_wise = f"{self.row_wise_s * 1e6:>11.1f}" if self.row_wise_s is not None else f"{'-':>11}"
        is_slower = self.row_wise_s is not None and self.chosen_s > min(self.row_wise_s, self.grouped_s)
        chosen = ("row-wise" if self.is_row_wise else "grouped") + ("*" if is_slower else "")
        ranks = str(cell.ranks[0]) if len(cell.ranks) == 1 else "mixed"
        return (
            f"{cell.layer:<8} {cell.num_rows:>5} {cell.num_adapters:>8} {ranks:>5} {row_wise} "
            f"{self.grouped_s * 1e6:>10.1f} {chosen:<9} {self.floor_s * 1e6:>8.1f} "
            f"{self.floor_s / self.chosen_s:>6.0%} {self.base_s * 1e6:>8.1f} {self.chosen_s / self.base_s:>6.0%}"
        )


HEADING = "layer     rows adapters ranks row-wise us grouped us chosen    floor us  floor  base us  added"


def copy_bandwidth() -> float:
    """Bytes a second that a 2 GiB copy moves, reads and writes together."""
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.nbytes / (milliseconds * 1e-3))


def table_of(cell: Cell, device: str = "cuda") -> SliceTable:
    """Adapters on a device, each in memory of its own."""
    generator = torch.Generator().manual_seed(0)
    by_rank = {
        rank: random_slots([[rank] * len(cell.widths)], cell.in_features, cell.widths, DTYPE, generator)[0]
        for rank in set(cell.ranks)
    }
    slots = [
        [
            LoraPair(pair.A.to(device, copy=True), pair.B.t().contiguous().to(device, copy=True).t(), pair.scale)
            for pair in by_rank[rank]
            if pair
        ]
        for rank in cell.ranks_by_adapter
    ]
    return build_table(slots, cell.widths, cell.in_features, DTYPE, device)


@dataclass(frozen=True, slots=True)
class Replay:
    """A captured graph, and the tensors whose addresses it holds. They must live as long as it is replayed."""

    graph: torch.cuda.CUDAGraph
    holds: tuple[object, ...]

    def __call__(self) -> None:
        self.graph.replay()


def lora_graph(cell: Cell, table: SliceTable, tile_rows: int, x: torch.Tensor, y: torch.Tensor) -> Replay:
    """The captured launches of one way; their first run is held to the oracle."""
    from graftwork.engine.lora.triton.launch import apply_lora

    segments = build_segments(cell.owners, "cuda", tile_rows=tile_rows)
    found = y.clone()
    apply_lora(x, found, table, segments)  # compiles
    check(found, cell, table, segments, x, y)
    return Replay(captured(lambda: apply_lora(x, y, table, segments)), (x, y, table, segments))


def check(
    found: torch.Tensor, cell: Cell, table: SliceTable, segments: LoraSegments, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Compares what kernels made of y with what plain torch does in fp32. Raises AssertionError."""
    slots = [
        [LoraPair(A, B.t(), table.scales[slot, index].item()) for index, (A, B) in enumerate(pairs_of(table, slot))]
        for slot in range(cell.num_adapters)
    ]
    torch.testing.assert_close(found, add_lora(x, y, segments, slots, cell.widths), rtol=2**-7, atol=2e-2)


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `launch` launches. Its kernels must have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def pairs_of(table: SliceTable, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and transposed B by slice; every slice has both here."""
    weights = table.rows[slot].weights
    return list(zip(weights[::2], weights[1::2], strict=True))


def measure(cell: Cell, bandwidth: float) -> Measurement:
    table = table_of(cell)
    x = torch.randn(cell.num_rows, cell.in_features, device="cuda").to(DTYPE)
    y = torch.randn(cell.num_rows, sum(cell.widths), device="cuda").to(DTYPE)
    weight = torch.randn(sum(cell.widths), cell.in_features, device="cuda").to(DTYPE)
    grouped_rows = grouped_tile_rows(cell.num_rows, cell.num_adapters)
    replays = {"grouped": lora_graph(cell, table, grouped_rows, x, y)}
    if cell.num_rows <= MAX_ROW_WISE_ROWS:
        replays["row-wise"] = lora_graph(cell, table, ROW_WISE, x, y)
    torch.mm(x, weight.t(), out=y)
    base = captured(lambda: torch.mm(x, weight.t(), out=y))
    replays["base"] = Replay(base, (x, y, weight))
    seconds = in_alternation(replays)
    weight_bytes = sum(matrix.nbytes for row in table.rows for matrix in row.weights)
    return Measurement(
        cell=cell,
        row_wise_s=seconds.get("row-wise"),
        grouped_s=seconds["grouped"],
        base_s=seconds["base"],
        floor_s=(weight_bytes + x.nbytes + 2 * y.nbytes) / bandwidth,
    )


def in_alternation(replays: dict[str, Replay]) -> dict[str, float]:
    """Median seconds of each, over rounds in which each is measured once."""
    from triton.testing import do_bench

    rounds: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            rounds[name].append(do_bench(replay, warmup=5, rep=20, return_mode="median") * 1e-3)
    return {name: median(times) for name, times in rounds.items()}


def cells() -> list[Cell]:
    ranks: Sequence[tuple[int, ...]] = [*((rank,) for rank in RANKS), MIXED_RANKS]
    return [Cell(layer, *batch, of_adapters) for layer in LAYERS for batch in BATCHES for of_adapters in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA kernels against their floor.")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here.")
        return
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {bandwidth / 1e12:.2f} TB/s")
    print(HEADING)
    measurements = []
    for cell in cells():
        measurements.append(measure(cell, bandwidth))
        print(measurements[-1].line(), flush=True)
    if arguments.json is not None:
        figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
        arguments.json.write_text(json.dumps(figures | {"cells": [asdict(found) for found in measurements]}, indent=1))


if __name__ == "__main__":
    main()
