"""Grouped products of experts: with codes beside bf16, and beside the bytes of the experts that tokens chose.

The layers are those of gpt-oss-20b and Qwen3-30B-A3B. Each measurement multiplies for several choices in turn, so that few
experts do not stay in caches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu.phase_run import ModelShape, PhaseRun
from gpu.weight_products import DTYPE, FORMS, median_seconds, random_weight

from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import AnyLinear
from graftwork.engine.quantization.linear import QuantizedLinear, StepKinds

TOKENS = (1, 16, 64, 1024)
_MOST_CHOICES = 32


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One projection of the experts of a model."""

    model: str
    projection: str
    num_experts: int
    num_chosen: int
    out_features: int
    in_features: int


LAYERS = (
    ExpertLayer("gpt-oss-20b", "gate_up", 32, 4, 5760, 2880),
    ExpertLayer("gpt-oss-20b", "down", 32, 4, 2880, 2880),
    ExpertLayer("qwen3-30b-a3b", "gate_up", 128, 8, 1536, 2048),
    ExpertLayer("qwen3-30b-a3b", "down", 128, 8, 2048, 768),
)
TINY_LAYERS = (ExpertLayer("tiny", "gate_up", 4, 2, 128, 64), ExpertLayer("tiny", "down", 4, 2, 64, 64))


@dataclass(frozen=True, slots=True)
class ExpertCell:
    """One projection in one form: bf16, or one of FORMS."""

    layer: ExpertLayer
    form: str


def measure_experts(run: PhaseRun) -> None:
    """Each projection in each form, for each number of tokens. `floor_s` is the time of a copy of the bytes of the chosen experts
    and of the rows.
    """
    from lora_kernels import copy_bandwidth

    bandwidth = None if run.is_dry else copy_bandwidth()
    for cell in run.while_time(
        _cells(run.shape), name=lambda one: f"{one.layer.model} {one.layer.projection} {one.form}"
    ):
        linears = [_linear(cell, run.device) for _ in range(cell.layer.num_experts)]
        for num_tokens in TOKENS:
            choices = _choices(cell.layer, num_tokens, run.device)
            num_bytes = _bytes(cell.layer, linears, choices)
            seconds = None if run.is_dry else _seconds(cell.layer, linears, choices)
            run.add(
                "experts",
                {
                    "cell": {
                        "model": cell.layer.model,
                        "projection": cell.layer.projection,
                        "form": cell.form,
                        "tokens": num_tokens,
                    },
                    "bytes": num_bytes,
                    "seconds": seconds,
                    "floor_s": None if bandwidth is None else num_bytes / bandwidth,
                },
            )
        del linears
        if not run.is_dry:
            torch.cuda.empty_cache()


def _cells(shape: ModelShape) -> Iterator[ExpertCell]:
    forms = ["bf16", "mxfp4", *(form for form in FORMS if form != "mxfp4")]
    for layer in TINY_LAYERS if shape.name == "tiny" else LAYERS:
        yield from (ExpertCell(layer, form) for form in forms)


def _linear(cell: ExpertCell, device: str) -> AnyLinear:
    from graftwork.engine.quantization.triton.products import products_of

    layer = cell.layer
    if cell.form == "bf16":
        return Linear(torch.randn(layer.out_features, layer.in_features, dtype=DTYPE, device=device))
    weight = random_weight(cell.form, layer.out_features, layer.in_features, device)
    made = QuantizedLinear([weight], None, DTYPE, StepKinds())
    made.take_kernels(products_of(rounds_rows=cell.form == "fp8 rows"))
    return made


def _choices(layer: ExpertLayer, num_tokens: int, device: str) -> list[torch.Tensor]:
    """Returns several random choices of a step, [num_tokens, num_chosen], which together take every expert if they can."""
    generator = torch.Generator().manual_seed(num_tokens)
    order = torch.randperm(layer.num_experts, generator=generator)
    count = min(max(layer.num_experts // (num_tokens * layer.num_chosen), 2), _MOST_CHOICES)
    found = []
    for number in range(count):
        scores = torch.rand(num_tokens, layer.num_experts, generator=generator)
        if num_tokens == 1:
            scores[0, order[number * layer.num_chosen : (number + 1) * layer.num_chosen]] += 1.0
        found.append(scores.topk(layer.num_chosen, dim=1).indices.to(device))
    return found


def _bytes(layer: ExpertLayer, linears: Sequence[AnyLinear], choices: Sequence[torch.Tensor]) -> int:
    """Returns the mean bytes of one step: the experts that it chose, and its rows."""
    of_experts = sum(linears[expert].num_bytes for one in choices for expert in one.unique().tolist())
    features = layer.in_features + layer.out_features
    return of_experts // len(choices) + choices[0].numel() * features * DTYPE.itemsize


def _seconds(layer: ExpertLayer, linears: Sequence[AnyLinear], choices: Sequence[torch.Tensor]) -> float:
    from graftwork.engine.experts.triton.launch import TiledRows, TileGrid, arrange_launches, empty_rows
    from graftwork.engine.experts.triton.products import group_products

    products = group_products(linears)

    def arranged(chosen: torch.Tensor) -> TiledRows:
        rows = empty_rows(TileGrid.of(chosen, layer.num_experts, products.tile_rows), chosen.device)
        for launch in arrange_launches(chosen.contiguous(), rows):
            launch.run()
        return rows

    x = torch.randn(choices[0].numel(), layer.in_features, dtype=DTYPE, device=choices[0].device)
    y = x.new_empty(len(x), layer.out_features)
    return median_seconds([partial(products.multiply, x, y, arranged(chosen)) for chosen in choices])
