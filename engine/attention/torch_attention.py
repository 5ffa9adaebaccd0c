"""Computes attention over the pages of the KV cache, in torch.

Never owns the pages: the KV cache does. Never writes them: RowOps has written the keys and values of the step's tokens
before, and has waited for the copies of the layer's other pages. Copies whole pages into one tensor. On a CPU this
makes a step a fifth faster than copying single tokens.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.key_groups import ChunkRows, DecodeRows, KeyGrouper, KeyGroups
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.kv_format import StoredKv
from graftwork.engine.model.config import ModelConfig

Sinks = Sequence[torch.Tensor] | None
"""The sinks of each layer, fp32 [heads]. None if the model has none."""
Pages = tuple[StoredKv, StoredKv]
"""The keys and the values of one layer in all pages."""


class TorchAttention:
    """The attention backend in torch, for any device. The reference of all other backends."""

    serves_rolling = False

    def __init__(self, config: ModelConfig, cache: KvCache, grouper: KeyGrouper, sinks: Sinks = None) -> None:
        self._config = config
        self._cache = cache
        self._grouper = grouper
        self._sinks = sinks

    def plan(self, batch: AttentionBatch) -> "TorchStepAttention":
        return TorchStepAttention(self._config, self._cache, self._grouper.group(batch), self._sinks)


class TorchStepAttention:
    """Computes the attention of one step over keys and values in the pages of one KV cache."""

    def __init__(self, config: ModelConfig, cache: KvCache, groups: KeyGroups, sinks: Sinks) -> None:
        self._config = config
        self._cache = cache
        self._groups = groups
        self._sinks = sinks
        self._decoded = cache.format.decode
        self._is_one_decode, self._is_one_chunk = groups.is_one_decode, groups.is_one_chunk
        self._visible_by_window = {window: groups.visible(window) for window in dict.fromkeys(config.windows)}
        self._cap = config.scales.attention_cap
        self._scale = config.scales.attention
        if scores_need_fp32(config):
            self._scale = config.score_scale

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        pages = self._cache.stored(layer)
        sinks = None if self._sinks is None else self._sinks[layer]
        visible = self._visible_by_window[self._config.windows[layer]]
        group = self._cache.group_of[layer]
        if self._is_one_decode:
            return self._decode(query, pages, self._groups.decodes[0], group, visible.decodes[0], sinks).flatten(1)
        if self._is_one_chunk:
            return self._chunk(query, pages, self._groups.chunks[0], group, visible.chunks[0], sinks).flatten(1)
        mixed = torch.zeros_like(query)
        for decode, mask in zip(self._groups.decodes, visible.decodes, strict=True):
            mixed[decode.rows] = self._decode(query[decode.rows], pages, decode, group, mask, sinks)
        for chunk, mask in zip(self._groups.chunks, visible.chunks, strict=True):
            rows_of_chunk = slice(chunk.start_row, chunk.end_row)
            mixed[rows_of_chunk] = self._chunk(query[rows_of_chunk], pages, chunk, group, mask, sinks)
        return mixed.flatten(1)

    def _decode(
        self,
        query: torch.Tensor,
        pages: Pages,
        decode: DecodeRows,
        group: int,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes attention for rows of one query each, in a layer of a layer group. Query heads that share a KV head are computed as several
        queries of it.
        """
        count, kv_heads = len(decode), self._config.num_kv_heads
        grouped = query.view(count, kv_heads, -1, query.shape[-1])  # [queries, kv_heads, group, head_dim]
        keys, values = (
            self._gather(one, decode.tables[group], decode.num_tables).expand(count, -1, -1, -1) for one in pages
        )
        own_sinks = None if sinks is None else sinks.view(1, kv_heads, -1, 1)
        mixed = self._mix(grouped, keys, values, mask, own_sinks)
        return mixed.flatten(1, 2)  # [queries, heads, head_dim]

    def _chunk(
        self,
        query: torch.Tensor,
        pages: Pages,
        chunk: ChunkRows,
        group: int,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes attention for several queries of one request, in a layer of a layer group. Each query sees the keys up to its own position."""
        kv_heads = self._config.num_kv_heads
        grouped = query.view(query.shape[0], kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
        keys, values = (self._keys_of_heads(one, chunk, group).expand(-1, grouped.shape[1], -1, -1) for one in pages)
        own_sinks = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
        mixed = self._mix(grouped, keys, values, mask, own_sinks)  # [kv_heads, group, queries, head_dim]
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)  # [queries, heads, head_dim]

    def _keys_of_heads(self, pages: StoredKv, chunk: ChunkRows, group: int) -> torch.Tensor:
        """Returns the keys or values that a chunk attends to, by head.  # [kv_heads, 1, num_keys, head_dim]"""
        return self._gather(pages, chunk.tables[group], 1)[:, :, : chunk.num_keys].transpose(0, 1)

    def _mix(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self._cap is None and sinks is None:
            return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._scale)
        assert self._scale is not None
        return attention_in_fp32(query, keys, values, attn_mask=mask, scale=self._scale, cap=self._cap, sinks=sinks)

    def _gather(self, pages: StoredKv, page_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the pages of `count` page tables.  # [count, kv_heads, pages * page_tokens, head_dim]"""
        gathered = self._decoded(pages.at_pages(page_ids))  # [count * pages, page_tokens, kv_heads, head_dim]
        return gathered.view(count, -1, *gathered.shape[2:]).transpose(1, 2)


def scores_need_fp32(config: ModelConfig) -> bool:
    """Returns whether scores are computed in fp32, because torch's own attention has neither caps nor sinks."""
    return config.scales.attention_cap is not None or config.block.has_sinks


def attention_in_fp32(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    attn_mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention with scores cap * tanh(scale * product / cap), if there is a cap, and with sinks, in fp32.

    query: [batch, heads, queries, head_dim]; keys, values: [batch, heads, keys, head_dim]; attn_mask: True where a key
    may be seen; sinks: fp32 logits without values, to be broadcast to [batch, heads, queries, 1]. Returns [batch, heads,
    queries, head_dim] in the dtype of `query`. Operands are arranged in one way first: the library multiplies others in
    another order, and how pages were gathered would decide.
    """
    query32, keys32, values32 = (one.float().contiguous() for one in (query, keys, values))
    scores = (query32 @ keys32.transpose(-1, -2)) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~attn_mask, float("-inf"))
    if sinks is None:
        return (scores.softmax(dim=-1) @ values32).to(query.dtype)
    peaks = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - peaks)
    masses = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - peaks)
    return ((weights / masses) @ values32).to(query.dtype)
