"""Computes attention for requests with a rolling window: each token sees the first tokens of its text and the last ones.

    text      0 1 2 3 | 4 5 … 990 | 991 … 2014      sinks 4, window 1024, for token 2014
    seen      0 1 2 3 |           | 991 … 2014
    places    0 1 2 3 |             4   … 1027      as StreamingLLM counts positions: within what is seen

Rotary embeddings see only distances. Keys in the window have the distances of the text, so the query is taken as it is. A
sink's key would be far behind, so the query is turned back to its place among what is seen, and then meets the sinks.
Reads only the pages of what is seen, so a decoded token costs the same in a long text as in a short one.
Layers with a window of their own keep it, and see no sinks. Rows of other requests are computed by the backend beneath.
Triton's kernels compute the same on GPUs (rolling_kernels.py).
Source: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.attention.backend import AttentionBackend, AttentionBatch, PlacedSlice, StepAttention
from graftwork.engine.attention.torch_attention import Sinks
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.kv_format import StoredKv
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rotary import RotaryTurn


class RollingRows:
    """Computes the rows of requests with a rolling window, in torch, beside a backend that leaves them out."""

    def __init__(self, config: ModelConfig, cache: KvCache, page_tokens: int, sinks: Sinks = None) -> None:
        """`sinks` are the learned sinks of the model's layers, which have logits and no tokens."""
        self._layers = _Layers(config, cache, page_tokens, sinks, _turns(config, cache.device))

    def around(self, attention: StepAttention, placed: Sequence[PlacedSlice]) -> StepAttention:
        """Returns the attention of a step with these rows; `attention` itself if there are none."""
        rolling = tuple(one for one in placed if one.piece.rolling_window is not None)
        return RollingStep(self._layers, rolling, attention) if rolling else attention


class RollingAttention:
    """An attention backend that computes the rows of requests with a rolling window, above one that computes the others."""

    serves_rolling = True

    def __init__(self, rows: RollingRows, others: AttentionBackend) -> None:
        self.others = others
        self._rows = rows

    def plan(self, batch: AttentionBatch) -> StepAttention:
        for one in batch.placed:  # a generator would be another call for each step
            if one.piece.rolling_window is not None:
                break
        else:
            return self.others.plan(batch)
        rest = tuple(one for one in batch.placed if one.piece.rolling_window is None)
        return self._rows.around(self.others.plan(AttentionBatch(rest, batch.positions)), batch.placed)


class RollingStep:
    """Computes the attention of a step in which some requests have a rolling window."""

    def __init__(self, layers: "_Layers", rolling: tuple[PlacedSlice, ...], others: StepAttention) -> None:
        self._layers = layers
        self._runs = [run for one in rolling for run in _runs(one)]
        self._others = others

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        mixed = self._others.attend(layer, query)
        for run in self._runs:
            rows = slice(run.start_row, run.start_row + run.num_rows)
            mixed[rows] = self._layers.attend(layer, query[rows], run).flatten(1)
        return mixed


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of one request that are computed together: a chunk of its prompt, or one decoding row.

    A decoding row is always computed alone, so its bits follow neither from drafts nor from other requests.
    """

    start_row: int
    num_rows: int
    position: int
    """The position of the first row in the text."""
    piece: RequestSlice
    """Has the page tables of all layer groups."""
    window: RollingWindow


def _runs(one: PlacedSlice) -> list[_Run]:
    piece, window = one.piece, one.piece.rolling_window
    assert window is not None
    found = [one.chunk_rows] if one.chunk_rows else []
    found += [range(row, row + 1) for row in one.decoding_rows]
    return [_Run(rows.start, len(rows), piece.start + rows.start - one.start_row, piece, window) for rows in found]


@dataclass(frozen=True, slots=True)
class _Layers:
    """What attention with a window needs of the model, and the pages that it reads."""

    config: ModelConfig
    cache: KvCache
    page_tokens: int
    sinks: Sinks
    turns: tuple[RotaryTurn | None, ...]
    """By layer; None for a layer that rotates nothing."""

    def attend(self, layer: int, query: torch.Tensor, run: _Run) -> torch.Tensor:
        """Returns [num_rows, heads, head_dim] for query [num_rows, heads, head_dim]."""
        own = self.config.windows[layer]
        sinks, window = (run.window.sinks, run.window.window) if own is None else (0, own)
        positions = torch.arange(run.position, run.position + run.num_rows, device=query.device)
        num_sinks = min(sinks, run.position + run.num_rows)
        first = max(num_sinks, run.position - window + 1)
        scores, values = self._part(layer, query, run, first, run.position + run.num_rows)
        keys = torch.arange(first, run.position + run.num_rows, device=query.device)
        later, earlier = keys > positions[:, None], keys <= positions[:, None] - window
        parts = [scores.masked_fill(later | earlier, -torch.inf)]  # [kv_heads, group, rows, keys]
        parts_of_values = [values]
        if num_sinks:
            near = self._turned_back(layer, query, positions - (sinks + window - 1))
            sink_scores, sink_values = self._part(layer, near, run, 0, num_sinks)
            unseen = torch.arange(num_sinks, device=query.device) > positions[:, None]
            parts.insert(0, sink_scores.masked_fill(unseen, -torch.inf))
            parts_of_values.insert(0, sink_values)
        if self.sinks is not None:
            learned = self.sinks[layer].view(*scores.shape[:2], 1, 1).expand(-1, -1, run.num_rows, 1)
            parts.append(learned)
        weights = torch.cat(parts, dim=-1).softmax(-1)
        all_values = torch.cat(parts_of_values, dim=2)  # [kv_heads, 1, keys, head_dim]
        mixed = weights[..., : all_values.shape[2]] @ all_values
        return mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)

    def _turned_back(self, layer: int, query: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        turn = self.turns[layer]
        return query if turn is None else turn.back(query, distances.clamp(min=0))

    def _part(
        self, layer: int, query: torch.Tensor, run: _Run, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores of all queries with the keys [start, end) of a text, and the values there.

        fp32 [kv_heads, group, rows, keys] and [kv_heads, 1, keys, head_dim].
        """
        table = run.piece.table(self.cache.group_of[layer])
        if end <= run.window.sinks and self.config.windows[layer] is None:
            table = 0, run.piece.pages  # pages of sinks are where they are in the text
        keys, values = (self._gathered(one, table, start, end) for one in self.cache.stored(layer))
        rows, kv_heads = len(query), self.config.num_kv_heads
        grouped = query.float().view(rows, kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
        scores = (grouped.contiguous() @ keys.transpose(-1, -2)) * self.config.score_scale
        cap = self.config.scales.attention_cap
        return scores if cap is None else torch.tanh(scores / cap) * cap, values

    def _gathered(self, pages: StoredKv, table: tuple[int, Sequence[int]], start: int, end: int) -> torch.Tensor:
        """Returns the keys or values [start, end) of a text: fp32 [kv_heads, 1, keys, head_dim].

        `table` is the first page that the layer's group keeps, and the pages from there on.
        """
        first, (first_kept, kept) = start // self.page_tokens, table
        assert first >= first_kept, "a page that the window needs is not kept"
        pages_of_keys = kept[first - first_kept : -(-end // self.page_tokens) - first_kept]
        wanted = torch.tensor(pages_of_keys, dtype=torch.int64, device=self.cache.device)
        found = self.cache.format.decode(pages.at_pages(wanted)).flatten(
            0, 1
        )  # [pages * page_tokens, kv_heads, head_dim]
        own = found[start - first * self.page_tokens : end - first * self.page_tokens]
        return own.float().transpose(0, 1).unsqueeze(1).contiguous()


def _turns(config: ModelConfig, device: torch.device) -> tuple[RotaryTurn | None, ...]:
    found = {
        rope: RotaryTurn(config.head_dim, rope, config.context_tokens, device)
        for rope in dict.fromkeys(config.ropes)
        if rope is not None
    }
    return tuple(None if rope is None else found[rope] for rope in config.ropes)
