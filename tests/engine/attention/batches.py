"""Slices of requests, and batches of them, for tests of attention."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.core.tiers import PageId
from graftwork.platform.ids import RequestId


def piece(name: str, start: int, count: int, pages: Sequence[int], num_drafts: int = 0) -> RequestSlice:
    """The tokens [start, start + count) of a request, the last `num_drafts` of which are drafts."""
    spec = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=start)
    samples = (spec,) * (num_drafts + 1) if num_drafts else ()
    return RequestSlice(RequestId(name), (0,) * count, start, tuple(map(PageId, pages)), (), samples)


def batch_of(pieces: Sequence[RequestSlice], num_padding: int = 0) -> AttentionBatch:
    """The slices one after another, and padding rows behind them."""
    starts = accumulate((len(one.token_ids) for one in pieces), initial=0)
    positions = [position for one in pieces for position in range(one.start, one.end)] + [0] * num_padding
    placed = tuple(PlacedSlice(start, one) for start, one in zip(starts, pieces, strict=False))
    return AttentionBatch(placed, torch.tensor(positions))
