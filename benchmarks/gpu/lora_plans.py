"""LoRA kernels with other block sizes than the engine takes: which plan is the fastest for a decoding step of 16 adapters.

The layers are those of Llama-3.1-8B in bf16, of rank 16. Shrink and expand are timed apart, so that the best of each can be
put together, also of different kinds; and both in one graph. Each plan's result is compared with plain fp32 torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import lora_kernels
import torch
from gpu.phase_run import PhaseRun

from graftwork.engine.kernels.launch import Launch
from graftwork.engine.lora.triton.launch import bounds_of, empty_planes, expand_launch, plan_of, shrink_launch
from graftwork.engine.lora.triton.launch_plan import ROW_WISE
from graftwork.engine.lora.triton.slice_table import SliceTable
from graftwork.engine.lora.triton.tiles import LoraSegments, build_segments

_BATCHES = ((32, 16), (8, 8), (32, 32))
"""(rows, adapters)."""
_TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Way:
    """How one layer is computed."""

    name: str
    tile_rows: int
    plan: dict[str, int]
    """What is other than in the engine's plan."""
    expand: dict[str, int] = field(default_factory=dict)
    """The options of the compiler for expand that are other than in the engine."""


WAYS = (
    Way("rows", ROW_WISE, {}),
    Way("rows, 1024 columns", ROW_WISE, {"block_out": 1024}),
    Way("tiles", _TILE_ROWS, {}),
    Way("tiles, 256 columns", _TILE_ROWS, {"block_out": 256}),
    Way("tiles, 512 columns, 8 warps", _TILE_ROWS, {"block_out": 512}, {"num_warps": 8}),
    Way("tiles, 80 registers", _TILE_ROWS, {}, {"maxnreg": 80}),
    Way("tiles, 64 registers", _TILE_ROWS, {}, {"maxnreg": 64}),
    Way("tiles, 256 columns, 8 warps, 64 registers", _TILE_ROWS, {"block_out": 256}, {"num_warps": 8, "maxnreg": 64}),
    Way("tiles, 8 spans", _TILE_ROWS, {"num_spans": 8}),
    Way("tiles, 16 spans", _TILE_ROWS, {"num_spans": 16}),
    Way("tiles, 8 spans, 80 registers", _TILE_ROWS, {"num_spans": 8}, {"maxnreg": 80}),
    Way("tiles, 4 stages", _TILE_ROWS, {"num_stages": 4}),
)


def measure_lora_plans(run: PhaseRun) -> None:
    """Each way beside the others, layer by layer. Without a GPU, the launches are built and not run."""
    cells = [lora_kernels.Cell(layer, *batch, (16,)) for batch in _BATCHES for layer in lora_kernels.LAYERS]
    for cell in run.while_time(cells):
        table = lora_kernels.table_of(cell, run.device)
        x = torch.randn(cell.num_rows, cell.in_features).to(run.device, lora_kernels.DTYPE)
        for way in WAYS:
            run.add("lora_plans", {"cell": asdict(cell), "way": way.name} | _measure(run, cell, table, x, way))
        if not run.is_dry:
            torch.cuda.empty_cache()


def _measure(
    run: PhaseRun, cell: lora_kernels.Cell, table: SliceTable, x: torch.Tensor, way: Way
) -> dict[str, float | None]:
    """Returns the seconds of shrink, of expand and of both; None without a GPU."""
    y = torch.randn(cell.num_rows, sum(cell.widths)).to(run.device, lora_kernels.DTYPE)
    segments = build_segments(cell.owners, run.device, tile_rows=way.tile_rows)
    shrink, expand = launches(x, changed := y.clone(), table, segments, way)
    parts = {"shrink_s": [shrink], "expand_s": [expand], "both_s": [shrink, expand]}
    if run.is_dry:
        return dict.fromkeys(parts)
    _run(parts["both_s"])  # compiles
    lora_kernels.check(changed, cell, table, segments, x, y)
    replays = {
        name: lora_kernels.Replay(lora_kernels.captured(partial(_run, part)), (x, changed, table, segments, part))
        for name, part in parts.items()
    }
    return {**lora_kernels.in_alternation(replays)}


def _run(launched: Sequence[Launch]) -> None:
    for launch in launched:
        launch.run()


def launches(
    x: torch.Tensor, y: torch.Tensor, table: SliceTable, segments: LoraSegments, way: Way
) -> tuple[Launch, Launch]:
    """Returns the two launches of one layer: shrink and expand. x, y: [rows, features]."""
    bounds = bounds_of(table)
    plan = replace(plan_of(x, table, segments, bounds), **way.plan)
    planes = empty_planes(table, segments, plan, bounds.rank)
    shrink = shrink_launch(x, planes, table, segments, plan)
    expand = expand_launch(planes, y, table, segments, plan, has_columns=False)
    return shrink, replace(expand, options={**expand.options, **way.expand})
