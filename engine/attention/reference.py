"""Computes attention of single queries in fp64, one after another: the oracle that the Triton kernels are held to."""

from collections.abc import Sequence

import torch

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.launch import ScoreRules


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: AttentionBatch, rules: ScoreRules
) -> torch.Tensor:
    """Computes attention of all rows of a step. Padding rows are zero.

    query: [num_rows, heads, head_dim]; keys, values: [num_pages, page_tokens, kv_heads, head_dim]. Returns [num_rows,
    heads * head_dim] in fp64.
    """
    mixed = torch.zeros(query.shape, dtype=torch.float64)
    for one in batch.placed:
        pages = torch.tensor(one.piece.pages)
        for row in range(one.start_row, one.start_row + len(one.piece.token_ids)):
            end = one.num_keys(row)
            first = 0 if rules.window is None else max(end - rules.window, 0)
            own = [_rows_of(tensor, pages, first, end) for tensor in (keys, values)]
            mixed[row] = _attend_one(query[row].double(), own, rules)
    return mixed.flatten(1)


def _rows_of(tensor: torch.Tensor, pages: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Returns the keys or values [first, end) of one request: fp64 [end - first, kv_heads, head_dim]."""
    page_tokens = tensor.shape[1]
    first_page = first // page_tokens
    some = tensor[pages[first_page : -(-end // page_tokens)]].flatten(0, 1)
    return some[first - first_page * page_tokens : end - first_page * page_tokens].double()


def _attend_one(query: torch.Tensor, own: Sequence[torch.Tensor], rules: ScoreRules) -> torch.Tensor:
    """Returns [heads, head_dim] of one query, [heads, head_dim]."""
    group = query.shape[0] // own[0].shape[1]
    keys, values = (one.repeat_interleave(group, dim=1) for one in own)  # [num_keys, heads, head_dim]
    scores = torch.einsum("hd,khd->hk", query, keys * rules.key_scale) * rules.scale
    if rules.cap is not None:
        scores = rules.cap * torch.tanh(scores / rules.cap)
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks.double()[:, None]], dim=1)
    weights = scores.softmax(dim=1)[:, : len(keys)]
    return torch.einsum("hk,khd->hd", weights, values * rules.value_scale)
