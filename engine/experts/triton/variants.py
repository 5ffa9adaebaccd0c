"""Lists the variants of the kernels of routed layers that are compiled ahead (see engine/kernels/compile_ahead.py).

A variant is made from the launch itself, with tensors of the device `meta`: they have shapes and dtypes but no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from graftwork.engine.experts.triton.code_kernels import multiply_float8_tiles_kernel
from graftwork.engine.experts.triton.code_launch import CodeExpertProduct, CodeExpertTable
from graftwork.engine.experts.triton.float8_launch import Float8ExpertProduct
from graftwork.engine.experts.triton.launch import (
    TILE_ROWS,
    ExpertTable,
    TiledRows,
    TileGrid,
    arrange_launches,
    empty_rows,
    multiply_launch,
)
from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import MXFP4_BLOCK
from graftwork.engine.quantization.triton.float8_launch import TILE_ROWS as FLOAT8_TILE_ROWS
from graftwork.engine.quantization.triton.variants import FLOAT8_CAPABILITY, CodesForm
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes

_META = torch.device("meta")
_FEW_TOKENS, _MANY_TOKENS = 2, 1 << 16
"""Numbers of tokens for which tiles are small, and large."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """The sizes of a routed layer that decide which variants are compiled."""

    name: str
    num_experts: int
    num_chosen: int
    gate_up: tuple[int, int]
    down: tuple[int, int]
    has_biases: bool
    dtype: torch.dtype
    codes: CodesForm | None = None
    """The form of the weights; None if they are plain."""
    down_codes: CodesForm | None = None
    """The form of `down`, if it has another one."""
    has_order: bool = False
    """Whether each weight's columns may be sorted. Gate and up are then apart, because they have orders of their own."""

    @property
    def variants(self) -> Iterator[KernelVariant]:
        """The variants of all kernels, for tiles of each size."""
        only_rows = FLOAT8_TILE_ROWS if self.codes is not None and self.codes.rounds_rows else None
        for num_tokens in (_FEW_TOKENS, _MANY_TOKENS) if only_rows is None else (_FEW_TOKENS,):
            grid = TileGrid(num_tokens, self.num_chosen, self.num_experts, only_rows)
            rows, size = empty_rows(grid, _META), f"{grid.tile_rows} rows"
            assert grid.tile_rows in (*TILE_ROWS, only_rows)
            for launch in arrange_launches(rows.places, rows):
                yield variant_of(f"{self.name} {size}", launch)
            for word in ("gate_up", "down"):
                for launch in self._products(word, rows):
                    least = FLOAT8_CAPABILITY if launch.kernel is multiply_float8_tiles_kernel else 80
                    yield variant_of(f"{self.name} {word} {size}", launch, least_capability=least)

    def _products(self, word: str, rows: TiledRows) -> Iterator[Launch]:
        out_features, in_features = self.gate_up if word == "gate_up" else self.down
        x, y = (
            torch.empty(rows.grid.num_rows, width, dtype=self.dtype, device=_META)
            for width in (in_features, out_features)
        )
        if self.codes is None:
            yield multiply_launch(x, y, self._table(out_features, in_features), rows)
            return
        codes = self.codes if word == "gate_up" else self.down_codes or self.codes
        for has_order in dict.fromkeys((False, self.has_order)):
            widths = (out_features, out_features // 2) if has_order and word == "gate_up" else (out_features,)
            for width in widths:
                table = self._code_table(codes, width, in_features, has_order=has_order)
                product = Float8ExpertProduct if codes.rounds_rows else CodeExpertProduct
                yield from product(x, table, y[:, :width], rows).launches()

    def _table(self, out_features: int, in_features: int) -> ExpertTable:
        addresses = torch.empty(self.num_experts, dtype=torch.int64, device=_META)
        alignment = 16 if in_features * self.dtype.itemsize % 16 == 0 else 1
        biases = addresses if self.has_biases else None
        return ExpertTable(addresses, biases, out_features, in_features, self.dtype, alignment)

    def _code_table(self, codes: CodesForm, out_features: int, in_features: int, *, has_order: bool) -> CodeExpertTable:
        form = codes.table(out_features, in_features)
        addresses = torch.empty(self.num_experts, dtype=torch.int64, device=_META)
        return CodeExpertTable(
            form,
            addresses,
            addresses,
            addresses if codes.has_zeros else None,
            addresses if has_order else None,
            addresses if self.has_biases else None,
            self.dtype if self.has_biases else None,
            alignment=16,
        )


_QWEN = RoutedShape("qwen3-30b bf16", 128, 8, (1536, 2048), (2048, 768), False, torch.bfloat16)
_GPT_OSS = RoutedShape("gpt-oss-20b bf16", 32, 4, (5760, 2880), (2880, 2880), True, torch.bfloat16)
SHAPES = (
    _QWEN,
    _GPT_OSS,
    RoutedShape("mixtral-8x7b fp16", 8, 2, (28672, 4096), (4096, 14336), False, torch.float16),
    RoutedShape("glm-4.5-air fp32", 128, 8, (2816, 4096), (4096, 1408), False, torch.float32),
)
"""The models that are compiled. Together they cover every dtype, with and without biases."""


def mxfp4(dtype: torch.dtype) -> CodesForm:
    """Returns the form of experts in MXFP4. `dtype` is the model's."""
    return CodesForm(Codes.FLOAT4, MXFP4_BLOCK, False, dtype)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
CODE_SHAPES = (
    replace(_GPT_OSS, name="gpt-oss-20b mxfp4 bf16", codes=mxfp4(_BF16)),
    replace(_GPT_OSS, name="gpt-oss-20b mxfp4 fp16", dtype=_FP16, codes=mxfp4(_FP16)),
    replace(_QWEN, name="qwen3-30b int4 bf16", codes=CodesForm(Codes.INT4, 128, False, _BF16)),
    replace(_QWEN, name="qwen3-30b awq fp16", dtype=_FP16, codes=CodesForm(Codes.INT4, 128, True, _FP16)),
    replace(
        _QWEN,
        name="qwen3-30b sorted int4, small groups bf16",
        codes=CodesForm(Codes.INT4, 32, True, _BF16),
        has_order=True,
    ),
    replace(_QWEN, name="qwen3-30b int8 bf16", codes=CodesForm(Codes.INT8, WHOLE_ROW, False, _BF16)),
    replace(_QWEN, name="qwen3-30b fp8 bf16", codes=CodesForm(Codes.FLOAT8, WHOLE_ROW, False, _BF16)),
    replace(_QWEN, name="qwen3-30b fp8 blocks bf16", codes=CodesForm(Codes.FLOAT8, 128, False, _BF16)),
    replace(
        _QWEN,
        name="qwen3-30b fp8 rows bf16",
        codes=CodesForm(Codes.FLOAT8, WHOLE_ROW, False, _BF16, rounds_rows=True),
    ),
    replace(
        _QWEN,
        name="qwen3-30b fp8 rows, blocks bf16",
        codes=CodesForm(Codes.FLOAT8, 128, False, _BF16, rounds_rows=True),
    ),
    replace(_QWEN, name="qwen3-30b int4 fp32", dtype=_FP32, codes=CodesForm(Codes.INT4, 128, False, _FP32)),
)
"""Models whose experts are codes. Together they cover each kind of codes, scale and zero point."""


def expert_variants() -> Iterator[KernelVariant]:
    """Yields the variants of all kernels for each model."""
    for shape in (*SHAPES, *CODE_SHAPES):
        yield from shape.variants


def served_expert_variants(
    model: ModelConfig, dtype: torch.dtype, *, rounds_rows: bool = False
) -> Iterator[KernelVariant]:
    """Yields what an engine may launch for the routed layers of a model."""
    if model.experts is None:
        return
    shapes = model.experts.shapes
    plain = RoutedShape(
        "experts",
        shapes.num_experts,
        model.experts.router.num_chosen,
        shapes.gate_up,
        shapes.down,
        model.experts.has_biases,
        dtype,
    )
    quantization = model.quantization
    if model.experts.is_mxfp4:
        yield from replace(plain, codes=mxfp4(dtype)).variants
    elif quantization is None:
        yield from plain.variants
    else:
        codes, down = (
            CodesForm.of(quantization.scheme, shape[1], dtype, rounds_rows=rounds_rows)
            for shape in (shapes.gate_up, shapes.down)
        )
        has_order = quantization.scheme.has_order
        yield from replace(plain, codes=codes, down_codes=down, has_order=has_order).variants
        if quantization.excluded:
            yield from plain.variants
