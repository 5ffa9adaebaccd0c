"""Computes attention over the pages of the KV cache, in torch.

Never owns the pages: the KV cache does. Never writes them: RowOps has written the keys and values of the step's tokens
before, and has waited for the copies of the layer's other pages. Copies whole pages into one tensor. On a CPU this
makes a step a fifth faster than copying single tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import AttentionBatch
from graftwork.engine.attention.key_groups import ChunkRows, DecodeRows, KeyGrouper, KeyGroups
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig


class TorchAttention:
    """The attention backend in torch, for any device. The reference of all other backends."""

    def __init__(self, config: ModelConfig, cache: KvCache, grouper: KeyGrouper) -> None:
        self._config = config
        self._cache = cache
        self._grouper = grouper

    def plan(self, batch: AttentionBatch) -> "TorchStepAttention":
        return TorchStepAttention(self._config, self._cache, self._grouper.group(batch))


class TorchStepAttention:
    """Computes the attention of one step over keys and values in the pages of one KV cache."""

    def __init__(self, config: ModelConfig, cache: KvCache, groups: KeyGroups) -> None:
        self._config = config
        self._cache = cache
        self._groups = groups
        self._is_one_decode, self._is_one_chunk = groups.is_one_decode, groups.is_one_chunk
        self._visible_by_window = {window: groups.visible(window) for window in dict.fromkeys(config.windows)}
        cap = config.scales.attention_cap
        self._scale = config.scales.attention if cap is None else config.score_scale
        self._mix: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
        if cap is not None:
            self._mix = partial(capped_attention, cap=cap)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.layer(layer)  # each [frames, page_tokens, kv_heads, head_dim]
        visible = self._visible_by_window[self._config.windows[layer]]
        if self._is_one_decode:
            return self._decode(query, keys, values, self._groups.decodes[0], visible.decodes[0]).flatten(1)
        if self._is_one_chunk:
            return self._chunk(query, keys, values, self._groups.chunks[0], visible.chunks[0]).flatten(1)
        mixed = torch.zeros_like(query)
        for decode, mask in zip(self._groups.decodes, visible.decodes, strict=True):
            mixed[decode.rows] = self._decode(query[decode.rows], keys, values, decode, mask)
        for chunk, mask in zip(self._groups.chunks, visible.chunks, strict=True):
            rows_of_chunk = slice(chunk.start_row, chunk.end_row)
            mixed[rows_of_chunk] = self._chunk(query[rows_of_chunk], keys, values, chunk, mask)
        return mixed.flatten(1)

    def _decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, decode: DecodeRows, mask: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention for rows of one query each. Query heads that share a KV head are computed as several
        queries of it.
        """
        count, kv_heads = len(decode), self._config.num_kv_heads
        grouped = query.view(count, kv_heads, -1, query.shape[-1])  # [queries, kv_heads, group, head_dim]
        mixed = self._mix(
            grouped,
            self._gather(keys, decode.pages, decode.num_tables).expand(count, -1, -1, -1),
            self._gather(values, decode.pages, decode.num_tables).expand(count, -1, -1, -1),
            attn_mask=mask,
            scale=self._scale,
        )
        return mixed.flatten(1, 2)  # [queries, heads, head_dim]

    def _chunk(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: ChunkRows, mask: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention for several queries of one request. Each query sees the keys up to its own position."""
        by_kv_head = query.view(query.shape[0], self._config.num_kv_heads, -1, query.shape[-1])
        grouped = by_kv_head.permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
        mixed = self._mix(
            grouped,
            self._keys_of_heads(keys, chunk).expand(-1, grouped.shape[1], -1, -1),
            self._keys_of_heads(values, chunk).expand(-1, grouped.shape[1], -1, -1),
            attn_mask=mask,
            scale=self._scale,
        )
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)  # [queries, heads, head_dim]

    def _keys_of_heads(self, pages: torch.Tensor, chunk: ChunkRows) -> torch.Tensor:
        """Returns the keys or values that a chunk attends to, by head.  # [kv_heads, 1, num_keys, head_dim]"""
        return self._gather(pages, chunk.pages, 1)[:, :, : chunk.num_keys].transpose(0, 1)

    def _gather(self, pages: torch.Tensor, page_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the pages of `count` page tables.  # [count, kv_heads, pages * page_tokens, head_dim]"""
        gathered = pages.index_select(0, page_ids)  # [count * pages, page_tokens, kv_heads, head_dim]
        return gathered.view(count, -1, *pages.shape[2:]).transpose(1, 2)


def capped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    attn_mask: torch.Tensor,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Computes attention with scores cap * tanh(scale * product / cap), in fp32. torch's own function has no cap.

    query: [batch, heads, queries, head_dim]; keys, values: [batch, heads, keys, head_dim]; attn_mask: True where a key
    may be seen. Returns [batch, heads, queries, head_dim] in the dtype of `query`.
    """
    scores = (query.float() @ keys.float().transpose(-1, -2)) * scale
    scores = (torch.tanh(scores / cap) * cap).masked_fill(~attn_mask, float("-inf"))
    return (scores.softmax(dim=-1) @ values.float()).to(query.dtype)
