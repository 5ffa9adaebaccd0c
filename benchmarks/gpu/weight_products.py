"""Products of decoding rows with quantised weights, beside the bytes of the codes and the product of bf16.

The layers are those of the day's shape. Each form multiplies with several copies of a layer in turn, so that no cache has the
weights of the next product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu.phase_run import ModelShape, PhaseRun
from torch.nn import functional

from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight

DTYPE = torch.bfloat16
ROWS = (1, 16, 32, 512)
_GROUP = 128
_BEYOND_CACHES = 2**28
FORMS: dict[str, tuple[Codes, int, bool]] = {
    "int8": (Codes.INT8, WHOLE_ROW, False),
    "int4": (Codes.INT4, _GROUP, False),
    "int4 with zero points": (Codes.INT4, _GROUP, True),
    "fp8": (Codes.FLOAT8, WHOLE_ROW, False),
    "fp8 blocks": (Codes.FLOAT8, _GROUP, False),
    "fp8 rows": (Codes.FLOAT8, WHOLE_ROW, False),
    "mxfp4": (Codes.FLOAT4, 32, False),
}
"""By name: the codes, the features of a group, and whether there are zero points. In `fp8 rows` x is rounded too."""
OF_EXPERTS = ("mxfp4",)
"""The forms that experts alone have."""


@dataclass(frozen=True, slots=True)
class WeightCell:
    """One layer in one form."""

    form: str
    layer: str
    out_features: int
    in_features: int


def measure_weights(run: PhaseRun) -> None:
    """Each layer in each form, for each number of rows. `floor_s` is the time of a copy of the bytes of weights and rows."""
    from lora_kernels import copy_bandwidth

    bandwidth = None if run.is_dry else copy_bandwidth()
    for cell in run.while_time(_cells(run.shape)):
        copies = 1 if run.is_dry else _copies(cell)
        products = [_product(cell, run.device) for _ in range(copies)]
        for rows in ROWS:
            x = torch.randn(rows, cell.in_features, dtype=DTYPE, device=run.device)
            num_bytes = products[0].num_bytes + x.nbytes + rows * cell.out_features * DTYPE.itemsize
            works = [partial(product.multiply, x) for product in products]
            seconds = None if run.is_dry else median_seconds(works)
            run.add(
                "weights",
                {
                    "cell": {"form": cell.form, "layer": cell.layer, "rows": rows},
                    "bytes": num_bytes,
                    "seconds": seconds,
                    "floor_s": None if bandwidth is None else num_bytes / bandwidth,
                },
            )
        del products
        if not run.is_dry:
            torch.cuda.empty_cache()


def _cells(shape: ModelShape) -> Iterator[WeightCell]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    qkv = hidden + 2 * hidden // shape.num_heads * shape.num_kv_heads
    layers = {"qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for form in ("bf16", *(form for form in FORMS if form not in OF_EXPERTS)):
        yield from (WeightCell(form, layer, *sizes) for layer, sizes in layers.items())


def _copies(cell: WeightCell) -> int:
    bits = {"bf16": 16}.get(cell.form) or (4 if cell.form.startswith("int4") else 8)
    return max(-(-_BEYOND_CACHES * 8 // (cell.out_features * cell.in_features * bits)), 2)


@dataclass(frozen=True, slots=True)
class _Product:
    multiply: Callable[[torch.Tensor], torch.Tensor]
    num_bytes: int


def _product(cell: WeightCell, device: str) -> _Product:
    shape = (cell.out_features, cell.in_features)
    if cell.form == "bf16":
        plain = torch.randn(shape, dtype=DTYPE, device=device)
        return _Product(lambda x: functional.linear(x, plain), plain.nbytes)
    from graftwork.engine.quantization.triton.products import products_of

    products = products_of(rounds_rows=cell.form == "fp8 rows")(random_weight(cell.form, *shape, device))

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), cell.out_features)
        products.multiply(x, None, y)
        return y

    return _Product(multiply, products.weight.num_bytes + products.num_bytes)


def random_weight(form: str, out_features: int, in_features: int, device: str) -> QuantizedWeight:
    """Returns a weight of random codes in one of the forms."""
    kind, group, has_zeros = FORMS[form]
    groups = 1 if group == WHOLE_ROW else -(-in_features // group)
    if kind is Codes.FLOAT4:
        codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device=device)
        powers = torch.randint(115, 120, (out_features, groups), dtype=torch.uint8, device=device)
        return QuantizedWeight.of(codes, powers, kind=kind, group_size=group)
    scales = torch.rand(out_features, groups, device=device) * 1e-3
    zeros = torch.ones(out_features, groups, dtype=torch.int16, device=device) if has_zeros else None
    most = 8 if kind is Codes.INT4 else 127
    codes = torch.randint(-most, most, (out_features, in_features), dtype=torch.int8, device=device)
    if kind is Codes.FLOAT8:
        codes = codes.bfloat16().to(torch.float8_e4m3fn)
    return QuantizedWeight.of(codes, scales, zeros, kind=kind, group_size=group)


def median_seconds(works: Sequence[Callable[[], object]]) -> float:
    """Returns the median seconds of one of some works, in a graph of all of them."""
    from triton.testing import do_bench

    works[0]()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return float(do_bench(graph.replay, warmup=5, rep=30, return_mode="median")) * 1e-3 / len(works)
