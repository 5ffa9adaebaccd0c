"""Tests of the attention kernels for requests with a rolling window under Triton's interpreter, against attention in fp64."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.attention.kernel_shape import AttentionShape
from graftwork.engine.core.sampling import RollingWindow
from tests.engine.attention.batches import piece
from tests.engine.attention.cases import Step, TextRotation, random_step, run_kernels
from tests.engine.attention.test_kernels import shape_of, some_slow

FREQUENCIES = 1 / 10.0 ** (torch.arange(8) / 8)
ROTATION = TextRotation(FREQUENCIES)
SLICES = ((700, 1, 0), (270, 3, 2), (0, 17, 0), (250, 25, 3), (40, 1, 0))
"""Decoding rows, drafts over the border of a split, a prompt, and a chunk with drafts behind it."""


def error(
    modules: dict[str, ModuleType],
    shape: AttentionShape,
    windows: Sequence[RollingWindow | None],
    slices: Any = SLICES,
    rotation: TextRotation | None = ROTATION,
    **rules: Any,
) -> float:
    """The largest difference between the kernels and fp64, relative to the largest result if that is above 1; NaN if they read
    or leave anything that is not there."""
    step = random_step(shape, slices, windows=windows)
    chosen = modules["launch"].ScoreRules(shape.head_dim**-0.5, **rules)
    actual = run_kernels(modules["launch"], step, chosen, rotation=rotation)
    expected = modules["reference"].attend(step.query, *step.numbers, step.batch, chosen, rotation)
    return float((actual.double() - expected).abs().max() / max(float(expected.abs().max()), 1.0))


@pytest.mark.parametrize("sinks", some_slow([0, 1, 4, 37], [16, 300]))
@pytest.mark.parametrize("window", some_slow([1, 18, 256], [15, 16, 300, 1000]))
def test_a_query_sees_its_sinks_and_its_window(interpreted: dict[str, ModuleType], sinks: int, window: int) -> None:
    """No sink, less than a page of them and more, and windows within and over pages, blocks, splits and the text give the
    attention of fp64, with all pages between them given up."""
    assert error(interpreted, shape_of(), [RollingWindow(sinks, window)] * len(SLICES)) < 3e-6


@pytest.mark.parametrize("page_tokens", some_slow([4], [1, 48]))
def test_any_size_of_pages_is_read(interpreted: dict[str, ModuleType], page_tokens: int) -> None:
    """Pages of 1, 4 and 48 tokens, with sinks that end within a page, give the attention of fp64."""
    assert error(interpreted, shape_of(page_tokens=page_tokens), [RollingWindow(5, 70)] * len(SLICES)) < 3e-6


def test_windows_begin_anywhere_in_blocks(interpreted: dict[str, ModuleType]) -> None:
    """Tiles of a prompt whose last query begins to see one key behind the border of a block give the attention of fp64."""
    assert error(interpreted, shape_of(), [RollingWindow(4, 79)], ((96, 80, 0),)) < 3e-6


def test_keys_that_nobody_sees_are_not_read(interpreted: dict[str, ModuleType]) -> None:
    """Results stay finite if all other keys are NaN in pages that are kept: those behind the sinks, and before the window."""
    window = RollingWindow(5, 20)
    slices = ((599, 1, 0), (300, 90, 0), (300, 3, 2))
    step = random_step(shape_of(), slices, windows=[window] * len(slices))
    for one in step.pieces:
        first_key = one.start + 1 - window.window
        for tensor in (step.keys, step.values):
            tensor[one.pages[0], window.sinks :] = float("nan")
            tensor[one.pages[first_key // 16 - one.num_given_up], : first_key % 16] = float("nan")

    mixed = run_kernels(interpreted["launch"], step, interpreted["launch"].ScoreRules(0.25), rotation=ROTATION)

    assert mixed.isfinite().all()


def test_each_request_has_a_window_of_its_own(interpreted: dict[str, ModuleType]) -> None:
    """Windows from 1 to over the whole text, sinks of none to all, and requests without a window stand in one step."""
    windows = [RollingWindow(3, 40), None, RollingWindow(0, 1), None, RollingWindow(60, 2)]

    assert error(interpreted, shape_of(), windows) < 3e-6
    assert error(interpreted, shape_of(), [RollingWindow(1 << 30, 1 << 30), *windows[1:]]) < 3e-6


def test_texts_of_a_million_tokens_are_read_where_their_pages_are(interpreted: dict[str, ModuleType]) -> None:
    """At positions up to 2^20, only the pages of sinks and window are there, and results are those of fp64."""
    far = 1 << 20
    slices = ((far - 3, 3, 2), (far - 77, 40, 0))

    assert error(interpreted, shape_of(page_tokens=64), [RollingWindow(4, 300)] * 2, slices) < 3e-6


@pytest.mark.parametrize(
    "rotation",
    [None, TextRotation(FREQUENCIES[:6]), TextRotation(FREQUENCIES, is_interleaved=True)],
    ids=["none", "a part", "neighbours"],
)
def test_any_rotary_embedding_is_turned_back(interpreted: dict[str, ModuleType], rotation: TextRotation | None) -> None:
    """Layers that rotate nothing, a part of each head, and neighbours give the attention of fp64."""
    assert error(interpreted, shape_of(), [RollingWindow(20, 30)] * len(SLICES), rotation=rotation) < 3e-6


@pytest.mark.parametrize("group", some_slow([3], [1, 8, 20]))
def test_heads_are_padded_capped_and_have_learned_sinks(interpreted: dict[str, ModuleType], group: int) -> None:
    """Uneven groups and heads, a soft cap and learned sinks beside the sinks of the text give the attention of fp64."""
    learned = torch.linspace(-9.0, 5.0, 2 * group)
    shape, windows = shape_of(heads=2 * group, head_dim=24), [RollingWindow(4, 30)] * len(SLICES)

    assert error(interpreted, shape, windows, cap=0.7) < 3e-6
    assert error(interpreted, shape, windows, cap=2.0, sinks=learned) < 3e-6


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_multiplied_by_the_scales_of_their_heads(
    interpreted: dict[str, ModuleType], kv_dtype: torch.dtype
) -> None:
    """Pages of one byte a number, in which each head of each token has a scale of its own, give the attention of fp64."""
    windows = [RollingWindow(4, 60)] * len(SLICES)

    assert error(interpreted, shape_of(kv_dtype=kv_dtype), windows) < 4e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_halves_are_rounded_once(interpreted: dict[str, ModuleType], dtype: torch.dtype, tolerance: float) -> None:
    """In bf16 and fp16, results are within one rounding of fp64."""
    assert error(interpreted, shape_of(dtype=dtype), [RollingWindow(4, 60)] * len(SLICES)) < tolerance


def some_rows(whole: Step, *parts: tuple[int, int, int, int]) -> Step:
    """A step of some rows of the requests of `whole`: the number of the request, its first row, and the number of rows and of
    drafts.
    """
    pieces, rows = [], list[int]()
    starts = list(accumulate((one.num_tokens for one in whole.pieces), initial=0))
    for number, first, count, num_drafts in parts:
        request = whole.pieces[number]
        start = request.start + first
        cut = piece(f"{number} {first}", start, count, request.pages, num_drafts)
        pages = request.pages[: -(-(start + count) // whole.shape.page_tokens) - request.num_given_up]
        window, given_up = request.rolling_window, request.num_given_up
        pieces.append(replace(cut, pages=pages, rolling_window=window, num_given_up=given_up))
        rows += range(starts[number] + first, starts[number] + first + count)
    return replace(whole, pieces=tuple(pieces), query=whole.query[rows])


@pytest.mark.parametrize("window", [RollingWindow(5, 21), RollingWindow(260, 290)])
def test_the_bits_of_a_row_follow_from_its_request_alone(
    interpreted: dict[str, ModuleType], window: RollingWindow
) -> None:
    """Drafts over the borders of sinks and splits, a chunk that is cut anywhere, and rows of requests without a window have the
    bits that they have alone, beside any other rows and by any grid."""
    launch = interpreted["launch"]
    slices, windows = ((250, 12, 0), (0, 80, 0), (600, 1, 0), (30, 20, 0)), (window, window, None, None)
    whole = random_step(shape_of(), slices, windows=windows)
    rules = launch.ScoreRules(0.25)

    def run(*parts: tuple[int, int, int, int], num_programs: int = 3) -> torch.Tensor:
        return run_kernels(launch, some_rows(whole, *parts), rules, num_programs, rotation=ROTATION)

    alone = [run((0, row, 1, 0)) for row in range(12)]
    together = (2, 0, 1, 0), (0, 0, 12, 11), (1, 0, 80, 0), (3, 0, 20, 0)
    drafts = run(*together, num_programs=7)
    cut = [run((1, first, count, 0), (3, 0, 20, 0)) for first, count in ((0, 2), (2, 31), (33, 47))]

    assert torch.equal(drafts, run(*together, num_programs=1))
    assert torch.equal(drafts[1:13], torch.cat(alone))
    assert torch.equal(drafts[13:93], torch.cat([one[:-20] for one in cut]))
    assert torch.equal(drafts[:1], run((2, 0, 1, 0)))
    assert torch.equal(drafts[93:], run((3, 0, 20, 0)))
