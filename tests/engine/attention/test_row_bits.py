"""Tests that the bits of a row follow from its own request alone."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from graftwork.engine.attention.kernel_shape import AttentionShape
from tests.engine.attention.batches import piece
from tests.engine.attention.cases import Step, random_step, run_kernels

PAGE_TOKENS = 16


def step_of(whole: Step, *parts: tuple[int, int, int, int]) -> Step:
    """A step of some rows of the only request of `whole`: their first row, their number, how many of them are drafts,
    and a number of strange rows to compute before them."""
    (request,) = whole.pieces
    pieces, rows = [], []
    for number, (first, count, num_drafts, num_strange) in enumerate(parts):
        strange = list(range(len(whole.keys) - 1, len(whole.keys) - 1 - -(-(num_strange + 30) // PAGE_TOKENS), -1))
        if num_strange:
            pieces.append(piece(f"strange {number}", 30, num_strange, strange))
            rows += list(range(num_strange))
        start = request.start + first
        own = request.pages[: -(-(start + count) // PAGE_TOKENS)]
        pieces.append(piece(str(number), start, count, own, num_drafts))
        rows += list(range(first, first + count))
    return replace(whole, pieces=tuple(pieces), query=whole.query[rows])


def whole_request(
    start: int,
    count: int,
    dtype: torch.dtype,
    heads: int = 4,
    kv_heads: int = 2,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    """A request whose rows are cut in several ways. No page is NaN, so that strange rows can read any."""
    shape = AttentionShape(heads, kv_heads, 16, PAGE_TOKENS, dtype, kv_dtype or dtype)
    step = random_step(shape, ((start, count, 0), (0, 90, 0)))
    for tensor in (step.keys, step.values) if kv_dtype is None else (step.key_scales, step.value_scales):
        assert tensor is not None
        tensor.nan_to_num_(1.0)
    return replace(step, pieces=step.pieces[:1], query=step.query[:count])


DOUBLING = 31 * 256
"""From so many keys on, splits have 512 keys, if a model has 8 KV heads."""


@pytest.mark.parametrize(
    ("start", "window", "kv_heads", "dtype", "kv_dtype"),
    [
        (250, None, 2, torch.bfloat16, None),
        (250, None, 2, torch.bfloat16, torch.float8_e4m3fn),
        (600, 300, 2, torch.float32, None),
        pytest.param(DOUBLING - 5, None, 8, torch.float32, None, marks=pytest.mark.slow),
    ],
)
def test_drafts_have_the_bits_of_lone_rows(
    interpreted: dict[str, ModuleType],
    start: int,
    window: int | None,
    kv_heads: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    """Drafts over a split's border, within a window, and where splits double have the bits of rows one by one, also over
    codes with scales."""
    whole = whole_request(start, 10, dtype, 2 * kv_heads, kv_heads, kv_dtype)
    launch = interpreted["launch"]
    rules = launch.ScoreRules(0.25, window)

    together = run_kernels(launch, step_of(whole, (0, 10, 9, 0)), rules)
    alone = [run_kernels(launch, step_of(whole, (row, 1, 0, 0)), rules) for row in range(10)]

    assert torch.equal(together, torch.cat(alone))


def test_neighbours_change_no_bit(interpreted: dict[str, ModuleType]) -> None:
    """A decoding row, drafts and a chunk have the bits that they have alone, whatever stands before them."""
    whole = whole_request(290, 40, torch.float32)
    launch = interpreted["launch"]
    rules = launch.ScoreRules(0.25)
    parts = ((0, 1, 0), (1, 4, 3), (5, 35, 0))

    alone = torch.cat([run_kernels(launch, step_of(whole, (*part, 0)), rules) for part in parts])
    beside = run_kernels(launch, step_of(whole, *((*part, 7) for part in parts)), rules, num_programs=7)

    own = [row for start, (_, count, _) in zip((7, 15, 26), parts, strict=True) for row in range(start, start + count)]
    assert torch.equal(beside[own], alone)


@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (21, None), (None, torch.int8)])
def test_chunks_may_be_cut_anywhere(
    interpreted: dict[str, ModuleType], window: int | None, kv_dtype: torch.dtype | None
) -> None:
    """A prompt has the same bits as one chunk and as chunks of 2, 31 and 47 tokens, also over codes with scales."""
    whole = whole_request(0, 80, torch.float32, heads=6, kv_dtype=kv_dtype)
    launch = interpreted["launch"]
    rules = launch.ScoreRules(0.25, window)

    at_once = run_kernels(launch, step_of(whole, (0, 80, 0, 0)), rules)
    pieces = [run_kernels(launch, step_of(whole, (*cut, 0, 0)), rules) for cut in ((0, 2), (2, 31), (33, 47))]

    assert torch.equal(at_once, torch.cat(pieces))
