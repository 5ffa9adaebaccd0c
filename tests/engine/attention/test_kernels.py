"""Tests of the attention kernels under Triton's interpreter, against attention in fp64."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.attention.kernel_shape import AttentionShape
from tests.engine.attention.cases import random_step, run_kernels

SLICES = ((0, 1, 0), (15, 1, 0), (256, 1, 0), (270, 3, 2), (0, 17, 0), (30, 12, 1))
"""Around the borders of pages and splits: decoding rows, drafts, a prompt, and a chunk with a draft behind it."""


def some_slow(fast: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
    """All values as parameters; tests of the `slow` ones run in the slow suite."""
    return [*fast, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def shape_of(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, page_tokens, dtype, kv_dtype or dtype)


def error(
    modules: dict[str, ModuleType], shape: AttentionShape, slices: Any = SLICES, num_padding: int = 0, **rules: Any
) -> float:
    """The largest difference between the kernels and fp64, relative to the largest result if that is above 1; NaN if they read
    or leave anything that is not there."""
    step = random_step(shape, slices, num_padding)
    chosen = modules["launch"].ScoreRules(shape.head_dim**-0.5, **rules)
    actual = run_kernels(modules["launch"], step, chosen)
    expected = modules["reference"].attend(step.query, *step.numbers, step.batch, chosen)
    return float((actual.double() - expected).abs().max() / max(float(expected.abs().max()), 1.0))


@pytest.mark.parametrize("page_tokens", some_slow([4, 16], [1, 48]))
def test_any_size_of_pages_is_read(interpreted: dict[str, ModuleType], page_tokens: int) -> None:
    """Pages of 1, 4, 16 and 48 tokens give the attention of fp64, and no key after the last one is read."""
    assert error(interpreted, shape_of(page_tokens=page_tokens)) < 2e-6


@pytest.mark.parametrize("group", some_slow([1, 3, 8], [2, 4, 5, 6, 7, 20]))
def test_any_number_of_heads_shares_a_kv_head(interpreted: dict[str, ModuleType], group: int) -> None:
    """From 1 to 20 query heads over each of two KV heads give the attention of fp64."""
    assert error(interpreted, shape_of(heads=2 * group), SLICES[2:]) < 2e-6


@pytest.mark.parametrize("head_dim", some_slow([24, 128], [64, 80, 96, 256]))
def test_any_head_size_is_padded(interpreted: dict[str, ModuleType], head_dim: int) -> None:
    """Head sizes that are no powers of two are padded in registers only."""
    assert error(interpreted, shape_of(head_dim=head_dim), ((256, 1, 0), (60, 5, 0))) < 3e-6


@pytest.mark.parametrize("window", some_slow([1, 17, 256], [15, 16, 64, 100, 1000]))
def test_a_query_sees_its_window(interpreted: dict[str, ModuleType], window: int) -> None:
    """Windows narrower and wider than pages, blocks and splits give the attention of fp64."""
    assert error(interpreted, shape_of(), (*SLICES[2:], (600, 1, 0), (700, 40, 3)), window=window) < 2e-6


def test_keys_outside_the_window_are_not_read(interpreted: dict[str, ModuleType]) -> None:
    """With a window of 20, results stay finite if all earlier keys are NaN."""
    step = random_step(shape_of(page_tokens=4), ((599, 1, 0), (300, 90, 0)))
    for one, first in zip(step.pieces, (580, 281), strict=True):
        pages, rest = list(one.pages[: first // 4]), first % 4
        for tensor in (step.keys, step.values):
            tensor[pages] = float("nan")
            tensor[one.pages[first // 4], :rest] = float("nan")

    mixed = run_kernels(interpreted["launch"], step, interpreted["launch"].ScoreRules(0.25, window=20))

    assert mixed.isfinite().all()


@pytest.mark.parametrize("window", [None, 40])
def test_scores_are_capped_and_sinks_take_weight(interpreted: dict[str, ModuleType], window: int | None) -> None:
    """A soft cap below the scores, and sinks from far below to far above them, give the attention of fp64."""
    sinks = torch.tensor([-50.0, 0.0, 3.0, 60.0])

    assert error(interpreted, shape_of(), SLICES[2:], window=window, cap=0.7) < 2e-6
    assert error(interpreted, shape_of(), SLICES[2:], window=window, cap=2.0, sinks=sinks) < 2e-6


CODES = pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])


@CODES
def test_codes_are_multiplied_by_the_scales_of_their_heads(
    interpreted: dict[str, ModuleType], kv_dtype: torch.dtype
) -> None:
    """Pages of one byte a number, in which each head of each token has a scale of its own, give the attention of fp64, and no
    code or scale is read where no token was written."""
    assert error(interpreted, shape_of(kv_dtype=kv_dtype)) < 3e-6
    assert error(interpreted, shape_of(2, 2, 24, 4, kv_dtype=kv_dtype), SLICES[2:], window=40) < 3e-6


@CODES
def test_scaled_scores_are_capped(interpreted: dict[str, ModuleType], kv_dtype: torch.dtype) -> None:
    """Scales come before a soft cap and beside sinks."""
    sinks = torch.tensor([-50.0, 0.0, 3.0, 60.0])

    assert error(interpreted, shape_of(kv_dtype=kv_dtype), SLICES[2:], cap=2.0, sinks=sinks) < 3e-6


@CODES
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_codes_in_halves_are_rounded_once(
    interpreted: dict[str, ModuleType], kv_dtype: torch.dtype, dtype: torch.dtype, tolerance: float
) -> None:
    """With codes, results in bf16 and fp16 are within one rounding of fp64 too."""
    assert error(interpreted, shape_of(dtype=dtype, kv_dtype=kv_dtype), SLICES[2:]) < tolerance


def test_scales_that_the_kernels_cannot_follow_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """Scales that are not adjacent by head, or differ in strides, are refused before a launch."""
    step = random_step(shape_of(kv_dtype=torch.int8), SLICES[:1])
    scales = step.key_scales
    assert scales is not None

    with pytest.raises(ValueError, match="those of a head in a page must be adjacent"):
        assert interpreted["launch"].LayerPages(step.keys, step.values, scales, scales.contiguous()).arguments


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_halves_are_rounded_once(interpreted: dict[str, ModuleType], dtype: torch.dtype, tolerance: float) -> None:
    """In bf16 and fp16, results are within one rounding of fp64."""
    assert error(interpreted, shape_of(dtype=dtype)) < tolerance


def test_padding_rows_are_zero(interpreted: dict[str, ModuleType]) -> None:
    """Rows behind the last request have zeros, as in the reference, also with sinks."""
    assert error(interpreted, shape_of(), ((40, 1, 0),), num_padding=3) < 2e-6
    assert error(interpreted, shape_of(), ((40, 3, 0),), num_padding=1, sinks=torch.zeros(4)) < 2e-6


@pytest.mark.parametrize("num_programs", [1, 64])
def test_any_grid_computes_all_items(interpreted: dict[str, ModuleType], num_programs: int) -> None:
    """Grids of 1, 3 and 64 programs share the items of a step, with the same bits."""
    step = random_step(shape_of(), ((0, 1, 0), (600, 2, 1)))
    rules = interpreted["launch"].ScoreRules(0.25)

    mixed = run_kernels(interpreted["launch"], step, rules, num_programs)

    assert torch.equal(mixed, run_kernels(interpreted["launch"], step, rules))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1000])
def test_mixed_lengths(interpreted: dict[str, ModuleType], window: int | None) -> None:
    """Sixteen lengths from 1 to 4,096 in one step, with drafts and chunks among them, give the attention of fp64."""
    lengths = torch.logspace(0, 12, 16, base=2).int().tolist()
    slices = [(length - 1, *((1, 0), (6, 5), (3, 0), (40, 0))[number % 4]) for number, length in enumerate(lengths)]

    assert error(interpreted, shape_of(heads=8, head_dim=64), slices, window=window) < 3e-6


def test_strides_that_the_kernels_cannot_follow_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """Queries whose elements are not adjacent are refused before a launch."""
    step = random_step(shape_of(), SLICES[:1])
    scattered = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    launch = interpreted["launch"]
    pages = launch.LayerPages(step.keys, step.values)
    layer = launch.LayerAttention(step.shape, launch.ScoreRules(1.0), scattered, scattered.flatten(1), pages)

    with pytest.raises(ValueError, match="adjacent"):
        launch.tiles_launch(layer, launch.Chunks({}, 1))
