"""Lists the variants of the kernels of quantised weights that are compiled ahead (see engine/kernels/compile_ahead.py).

A variant is made from the launch itself, with tensors of the device `meta`: they have shapes and dtypes but no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.projections import GROUPS, group_shapes
from graftwork.engine.quantization.rounding import group_for
from graftwork.engine.quantization.scheme import Method, Scheme
from graftwork.engine.quantization.triton.float8_kernels import multiply_float8_kernel
from graftwork.engine.quantization.triton.float8_launch import Float8Product
from graftwork.engine.quantization.triton.launch import CodesTable, Product
from graftwork.engine.quantization.weight import BLOCK, WHOLE_ROW, Codes

_META = torch.device("meta")
_ROWS = (1, 32, 1 << 16)
"""Numbers of rows for which tiles are small, large, and so many that no spans are parallel."""
FLOAT8_CAPABILITY = 89
_WORD_CODES = {Codes.INT4: 8, Codes.FLOAT4: 8, Codes.INT8: 1, Codes.FLOAT8: 4}


@dataclass(frozen=True, slots=True)
class CodesForm:
    """What decides which kernels multiply with a weight, besides its sizes."""

    kind: Codes
    group_size: int
    has_zeros: bool
    dtype: torch.dtype
    """The model's."""
    rounds_rows: bool = False
    """Whether rows are rounded too, if codes are of FLOAT8."""

    @classmethod
    def of(cls, scheme: Scheme, in_features: int, dtype: torch.dtype, *, rounds_rows: bool = False) -> "CodesForm":
        """Returns the form of the weights of a scheme."""
        kind = Codes.FLOAT8 if scheme.method is Method.FLOAT8 else Codes.INT4 if scheme.bits == 4 else Codes.INT8
        group = scheme.group_size or WHOLE_ROW
        if scheme.method is Method.ROUND_INT4:
            found = group_for(in_features, group)
            group = WHOLE_ROW if found == in_features else found
        return cls(kind, group, not scheme.is_symmetric, dtype, rounds_rows and kind is Codes.FLOAT8)

    def table(self, out_features: int, in_features: int) -> CodesTable:
        """Returns the table of a weight without memory."""
        width = -(-in_features // BLOCK) * BLOCK
        groups = -(-width // self.group_size)
        words = width // (1 if self.rounds_rows else _WORD_CODES[self.kind])
        word = torch.int8 if self.kind is Codes.INT8 else torch.int32
        if self.rounds_rows:
            word = torch.float8_e4m3fn
        scale_dtype = torch.uint8 if self.kind is Codes.FLOAT4 else torch.float32
        scales = torch.empty(groups, out_features, dtype=scale_dtype, device=_META)
        packed = torch.empty(out_features, words, dtype=word, device=_META)
        return CodesTable(self.kind, packed, scales, scales if self.has_zeros else None, self.group_size, in_features)

    def variants(self, name: str, shape: tuple[int, int], *, has_bias: bool, width: int = 0) -> Iterator[KernelVariant]:
        """Yields the variants for a layer of (out_features, in_features). `width` are the outputs of the layer with which it
        is joined.
        """
        out_features, in_features = shape
        table = self.table(out_features, in_features)
        bias = torch.empty(out_features, dtype=self.dtype, device=_META) if has_bias else None
        for num_rows in _ROWS:
            x, y = (
                torch.empty(num_rows, columns, dtype=self.dtype, device=_META)
                for columns in (in_features, max(width, out_features))
            )
            product = (Float8Product if self.rounds_rows else Product)(x, table, bias, y[:, :out_features])
            for launch in product.launches():
                least = FLOAT8_CAPABILITY if launch.kernel is multiply_float8_kernel else 80
                tile = launch.arguments.get("BLOCK_ROWS", "")
                yield variant_of(f"{name} {tile}".rstrip(), launch, least_capability=least)


EXAMPLES = (
    ("int4 groups bf16", CodesForm(Codes.INT4, 128, False, torch.bfloat16)),
    ("int4 zeros fp16", CodesForm(Codes.INT4, 128, True, torch.float16)),
    ("int4 small groups bf16", CodesForm(Codes.INT4, 32, True, torch.bfloat16)),
    ("int8 bf16", CodesForm(Codes.INT8, WHOLE_ROW, False, torch.bfloat16)),
    ("int8 zeros bf16", CodesForm(Codes.INT8, WHOLE_ROW, True, torch.bfloat16)),
    ("int8 groups fp32", CodesForm(Codes.INT8, 64, False, torch.float32)),
    ("fp8 bf16", CodesForm(Codes.FLOAT8, WHOLE_ROW, False, torch.bfloat16)),
    ("fp8 blocks bf16", CodesForm(Codes.FLOAT8, 128, False, torch.bfloat16)),
    ("fp8 rows bf16", CodesForm(Codes.FLOAT8, WHOLE_ROW, False, torch.bfloat16, rounds_rows=True)),
    ("fp8 rows, blocks bf16", CodesForm(Codes.FLOAT8, 128, False, torch.bfloat16, rounds_rows=True)),
)
"""The forms that are compiled. Together they cover each kind of codes, scale, zero point and dtype."""


def weight_variants() -> Iterator[KernelVariant]:
    """Yields the variants of each form, for layers of Llama-3.1-8B."""
    for name, form in EXAMPLES:
        yield from form.variants(name, (4096, 4096), has_bias=False)
        yield from form.variants(name, (28_672, 4096), has_bias=True)


def served_weight_variants(
    model: ModelConfig, dtype: torch.dtype, *, rounds_rows: bool = False
) -> Iterator[KernelVariant]:
    """Yields what an engine may launch for the quantised layers of a model. It has none if its weights are plain.

    Experts have kernels of their own (engine/experts/triton).
    """
    if model.quantization is None:
        return
    scheme = model.quantization.scheme
    for name, in_features, widths, has_bias in dict.fromkeys(_layers(model)):
        form = CodesForm.of(scheme, in_features, dtype, rounds_rows=rounds_rows)
        whole = sum(widths)
        joined = () if scheme.has_order else (whole,)  # each of several sorted parts may have an order of its own
        for width in dict.fromkeys((*joined, *(widths if scheme.has_order or model.quantization.excluded else ()))):
            yield from form.variants(name, (width, in_features), has_bias=has_bias, width=whole)


def _layers(model: ModelConfig) -> Iterator[tuple[str, int, tuple[int, ...], bool]]:
    """Yields the name, the input features, the widths of the parts of each layer that may be quantised, and whether it has a
    bias.
    """
    targets = {group.name: group.targets for group in GROUPS}
    for (_, name), shape in group_shapes(model).items():
        yield name, shape.in_features, shape.widths, any(one in model.biased_targets for one in targets[name])
    yield "head", model.hidden_size, (model.vocab_size,), False
