"""Computes attention of single queries in fp64, one after another: the oracle that the Triton kernels are held to."""

from collections.abc import Sequence

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.attention.launch import ScoreRules
from graftwork.engine.kernels.angles import Rotation

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A query as it meets some keys, fp64 [heads, head_dim], and these keys and values, fp64 [num_keys, kv_heads, head_dim]."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    rules: ScoreRules,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Computes attention of all rows of a step. Padding rows are zero.

    query: [num_rows, heads, head_dim]; keys, values: [num_pages, page_tokens, kv_heads, head_dim]. `rotation` is that of the
    layer, by which queries with a rolling window are turned back. Returns [num_rows, heads * head_dim] in fp64.
    """
    mixed = torch.zeros(query.shape, dtype=torch.float64)
    for one in batch.placed:
        for row in range(one.start_row, one.start_row + one.piece.num_tokens):
            parts = [
                (near, _rows_of(keys, one, first, end), _rows_of(values, one, first, end))
                for near, first, end in _seen(query[row].double(), one, one.num_keys(row), rules, rotation)
                if first < end
            ]
            mixed[row] = _attend_one(parts, rules)
    return mixed.flatten(1)


def _seen(
    query: torch.Tensor, one: PlacedSlice, num_keys: int, rules: ScoreRules, rotation: Rotation | None
) -> list[tuple[torch.Tensor, int, int]]:
    """Returns the ranges of keys that a query sees, and the query as it meets them."""
    window = one.piece.rolling_window
    if window is None or rules.window is not None:
        return [(query, 0 if rules.window is None else max(num_keys - rules.window, 0), num_keys)]
    sinks, distance = min(window.sinks, num_keys), max(num_keys - window.sinks - window.window, 0)
    near = query if rotation is None else _turned_back(query, distance, rotation)
    return [(near, 0, sinks), (query, max(num_keys - window.window, sinks), num_keys)]


def _turned_back(query: torch.Tensor, distance: int, rotation: Rotation) -> torch.Tensor:
    """Returns a query as if it stood `distance` positions earlier. A pair of features is a complex number."""
    turn = torch.polar(torch.ones(()).double(), -distance * rotation.frequencies.cpu().double())  # [pairs]
    turned = query.clone()
    half = len(turn)
    if rotation.is_interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        firsts, seconds = slice(0, half), slice(half, 2 * half)
    pairs = torch.complex(query[:, firsts], query[:, seconds]) * turn
    turned[:, firsts], turned[:, seconds] = pairs.real, pairs.imag
    return turned


def _rows_of(tensor: torch.Tensor, one: PlacedSlice, first: int, end: int) -> torch.Tensor:
    """Returns the keys or values [first, end) of one request: fp64 [end - first, kv_heads, head_dim]."""
    page_tokens, window = tensor.shape[1], one.piece.rolling_window
    places = torch.arange(first, end)
    numbers = places // page_tokens
    if window is not None and end > window.sinks:
        numbers = numbers - one.piece.num_given_up
    pages = torch.tensor(one.piece.pages)[numbers]
    return tensor[pages, places % page_tokens].double()


def _attend_one(parts: Sequence[Part], rules: ScoreRules) -> torch.Tensor:
    """Returns [heads, head_dim] of one query."""
    scores, values = [], []
    for query, keys, own in parts:
        group = query.shape[0] // keys.shape[1]
        found = torch.einsum("hd,khd->hk", query, keys.repeat_interleave(group, dim=1)) * rules.scale
        scores.append(found if rules.cap is None else rules.cap * torch.tanh(found / rules.cap))
        values.append(own.repeat_interleave(group, dim=1))  # [num_keys, heads, head_dim]
    mixed = torch.cat(values)
    if rules.sinks is not None:
        scores.append(rules.sinks.double()[:, None])
    weights = torch.cat(scores, dim=1).softmax(dim=1)[:, : len(mixed)]
    return torch.einsum("hk,khd->hd", weights, mixed)
