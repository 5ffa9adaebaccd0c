"""How fast a quantised base decodes on one core beside the same base in bf16, at one row and at more.

    python benchmarks/quantised_decode.py [--layers 6] [--rows 1,4,8,32] [--rounds 5] [--json OUT]

The model has the linear layers of an 8-billion-parameter Llama (hidden 4096, intermediate 14336, 8 KV heads) in fewer
layers, so that its weights are larger than the caches in every form: 6 layers are 2.6 GB in bf16 and 0.7 GB in int4. A
figure is the time of all linear layers for some decoding rows, as the engine computes them. The forms take turns; the
time is processor time of this thread, which other programs on a busy machine disturb less, and the fastest round counts.
Weights are random: no product depends on them.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from graftwork.engine.model.layers import Linear
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

HIDDEN, INTERMEDIATE, KV_WIDTH = 4096, 14336, 1024
SHAPES = {
    "qkv": ((HIDDEN, KV_WIDTH, KV_WIDTH), HIDDEN),
    "o": ((HIDDEN,), HIDDEN),
    "gate_up": ((INTERMEDIATE, INTERMEDIATE), HIDDEN),
    "down": ((HIDDEN,), INTERMEDIATE),
}
"""The outputs of each projection in a joined layer, and its input features."""
LINE = {"int8": 1.5, "int4": 2.0}
"""How many times faster than bf16 one row must be."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for all linear layers of a step, and gigabytes of weights."""

    form: str
    rows: int
    step_ms: float
    times_bf16: float
    weights_gb: float


Layer = Linear | QuantizedLinear


def make_layers(form: str, count: int) -> list[Layer]:
    """Returns the linear layers of a form, in the order of a step."""
    return [make_layer(form, outputs, width) for _ in range(count) for outputs, width in SHAPES.values()]


def make_layer(form: str, outputs: tuple[int, ...], width: int) -> Layer:
    """Returns a layer with memory of its own."""
    if form == "bf16":
        layer = Linear(plain_weight(sum(outputs), width).clone())
        layer.pack()
        return layer
    kind, group = {"int8": (Codes.INT8, WHOLE_ROW), "int4": (Codes.INT4, 128), "fp8": (Codes.FLOAT8, WHOLE_ROW)}[form]
    weights = [make_weight(kind, out, width, group) for out in outputs]
    own = [replace(one, packed=one.packed.clone(), scales=one.scales.clone()) for one in weights]
    return QuantizedLinear(own, None, torch.bfloat16, StepKinds())


@cache
def plain_weight(out: int, width: int) -> torch.Tensor:
    return torch.randn(out, width, dtype=torch.bfloat16)


@cache
def make_weight(kind: Codes, out: int, width: int, group: int) -> QuantizedWeight:
    codes = torch.randint(-8, 8, (out, width), dtype=torch.int8)
    if kind is Codes.FLOAT8:
        codes = codes.to(torch.float8_e4m3fn)
    scales = torch.rand(out, -(-width // group), dtype=torch.float32)
    return QuantizedWeight.of(codes, scales, kind=kind, group_size=group)


def seconds(layers: list[Layer], inputs: dict[int, torch.Tensor], rows: int) -> float:
    """Returns the processor time of all layers for some rows."""
    widths = [width for _ in range(len(layers) // len(SHAPES)) for _, width in SHAPES.values()]
    start = time.thread_time()
    for layer, width in zip(layers, widths, strict=True):
        layer(inputs[width][:rows])
    return time.thread_time() - start


def measure(num_layers: int, row_counts: list[int], rounds: int) -> list[Timing]:
    forms = {form: make_layers(form, num_layers) for form in ("bf16", "int8", "int4", "fp8")}
    inputs = {width: torch.randn(max(row_counts), width, dtype=torch.bfloat16) for _, width in SHAPES.values()}
    timings: list[Timing] = []
    for rows in row_counts:
        best = dict.fromkeys(forms, float("inf"))
        for _ in range(rounds + 1):  # the first of them warms up, and is never the fastest
            for form, layers in forms.items():
                best[form] = min(best[form], seconds(layers, inputs, rows))
        for form, layers in forms.items():
            size = sum(layer.num_bytes for layer in layers) / 1e9
            timings.append(Timing(form, rows, best[form] * 1e3, best["bf16"] / best[form], size))
    return timings


def show(timings: list[Timing]) -> None:
    table = Table("weights", "rows", "ms a step", "× bf16", "GB", box=None)
    for one in timings:
        table.add_row(one.form, str(one.rows), f"{one.step_ms:.1f}", f"{one.times_bf16:.2f}", f"{one.weights_gb:.2f}")
    console = Console()
    console.print(table)
    for one in timings:
        if one.rows == 1 and one.form in LINE:
            verdict = "holds" if one.times_bf16 >= LINE[one.form] else "does NOT hold"
            console.print(f"{one.form}: {one.times_bf16:.2f} × bf16 at one row, wanted {LINE[one.form]}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers")
    parser.add_argument("--rows", default="1,4,8,32", help="comma-separated numbers of decoding rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timings = measure(options.layers, [int(rows) for rows in options.rows.split(",")], options.rounds)
    show(timings)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in timings], indent=1) + "\n")


if __name__ == "__main__":
    main()
