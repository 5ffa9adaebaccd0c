"""Slices of requests, and batches of them, for tests of attention."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.core.tiers import PageId
from graftwork.platform.ids import RequestId


def piece(name: str, start: int, count: int, pages: Sequence[int], num_drafts: int = 0) -> RequestSlice:
    """The tokens [start, start + count) of a request, the last `num_drafts` of which are drafts."""
    spec = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=start)
    samples = (spec,) * (num_drafts + 1) if num_drafts else ()
    return RequestSlice(RequestId(name), (0,) * count, start, tuple(map(PageId, pages)), (), samples)


def rolling_piece(
    name: str,
    tokens: tuple[int, int, int],
    window: RollingWindow,
    pages: Sequence[int],
    page_tokens: int,
) -> RequestSlice:
    """The first position, the number of tokens and that of drafts of a request with a rolling window, which has given up all
    pages that it needs no more. `pages` are those that it would have in all.
    """
    start, count, num_drafts = tokens
    sink_pages = -(-window.sinks // page_tokens)
    first = max(sink_pages, (start + 1 - window.window) // page_tokens)
    kept = [*pages[:sink_pages], *pages[first:]]
    given_up = max(len(pages) - len(kept), 0)
    return replace(piece(name, start, count, kept, num_drafts), rolling_window=window, num_given_up=given_up)


def batch_of(pieces: Sequence[RequestSlice], num_padding: int = 0) -> AttentionBatch:
    """The slices one after another, and padding rows behind them."""
    starts = accumulate((len(one.token_ids) for one in pieces), initial=0)
    positions = [position for one in pieces for position in range(one.start, one.end)] + [0] * num_padding
    placed = tuple(PlacedSlice(start, one) for start, one in zip(starts, pieces, strict=False))
    return AttentionBatch(placed, torch.tensor(positions))
