"""Keeps the tokens of a prompt that its last queries attend to most, and copies their KV into pages of their own.

Runs inside the step that computes the end of the prompt: in each layer after attention, when all keys of the prompt are
there. Owns nothing between two steps. Never changes the pages that it reads: they may be shared.

Invariant: the choice follows from the request's own queries and keys alone. Among equal scores, the earlier token is kept.
Source: SnapKV (Li et al. 2024, arXiv 2404.14469). Query heads that share a KV head vote together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import PlacedSlice, StepAttention
from graftwork.engine.core.step import KvEviction
from graftwork.engine.kv.index.kv_budget import KEPT_SINKS, OBSERVED_QUERIES, POOLED_KEYS
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.model.config import ModelConfig


class PromptEvictor:
    """Evicts prompts in one KV cache."""

    def __init__(self, config: ModelConfig, cache: KvCache, sinks: Sequence[torch.Tensor] | None = None) -> None:
        """`sinks` are the learned sinks of the model's layers, fp32 [heads], which have logits and no tokens."""
        self._layers = _Layers(config, cache, sinks)

    def around(self, attention: StepAttention, placed: Sequence[PlacedSlice]) -> StepAttention:
        """Returns the attention of a step that also evicts the prompts which end in it; `attention` itself if none does."""
        for one in placed:  # a generator would be another call for each step
            if one.piece.eviction is not None:
                break
        else:
            return attention
        ending = tuple(one for one in placed if one.piece.eviction is not None)
        return _EvictingStep(attention, self._layers, ending)


class _EvictingStep:
    """Computes the attention of a step in which prompts with a budget end."""

    def __init__(self, attention: StepAttention, layers: "_Layers", ending: tuple[PlacedSlice, ...]) -> None:
        self._attention, self._layers, self._ending = attention, layers, ending

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        mixed = self._attention.attend(layer, query)
        for one in self._ending:
            eviction = one.piece.eviction
            assert eviction is not None
            observed = query[one.chunk_rows.stop - OBSERVED_QUERIES : one.chunk_rows.stop]
            self._layers.evict(layer, observed, one.piece.pages, one.piece.known_end, eviction)
        return mixed


@dataclass(frozen=True, slots=True)
class _Layers:
    """What the choice needs of the model, and the pages."""

    config: ModelConfig
    cache: KvCache
    sinks: Sequence[torch.Tensor] | None

    def evict(
        self, layer: int, observed: torch.Tensor, pages: Sequence[int], num_prompt: int, eviction: KvEviction
    ) -> None:
        """Copies what a layer keeps of a prompt into the target pages.

        observed: [OBSERVED_QUERIES, heads, head_dim], the queries of the prompt's last tokens.
        """
        keys, values = self.cache.stored(layer)
        source = torch.tensor(pages, device=self.cache.device)
        own = self.cache.format.decode(keys.at_pages(source)).flatten(0, 1)[:num_prompt]  # [prompt, kv_heads, head_dim]
        scores = self._scores(layer, observed, own)
        kept = kept_tokens(scores, eviction.num_kept, num_prompt)  # [kv_heads, kept]
        target = torch.tensor(eviction.targets, device=self.cache.device)
        for part in (*keys.parts, *values.parts):
            _copy_tokens(part, source, target, kept)

    def _scores(self, layer: int, observed: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Returns how much the observed queries attend to each key, summed over them and over the heads that share it.

        keys: [prompt, kv_heads, head_dim]. The result is fp32 [kv_heads, prompt]. One KV head at a time takes least memory.
        """
        num_prompt, kv_heads = len(keys), self.config.num_kv_heads
        positions = torch.arange(num_prompt, device=keys.device)
        later = positions > positions[-len(observed) :, None]  # [observed, prompt]
        grouped = observed.float().view(len(observed), kv_heads, -1, observed.shape[-1]).permute(1, 2, 0, 3)
        cap, found = self.config.scales.attention_cap, []
        for head in range(kv_heads):
            scores = (grouped[head].contiguous() @ keys[:, head].float().T) * self.config.score_scale
            if cap is not None:
                scores = torch.tanh(scores / cap) * cap
            scores = scores.masked_fill(later, -torch.inf)  # [group, observed, prompt]
            if self.sinks is not None:
                learned = self.sinks[layer].view(kv_heads, -1, 1, 1)[head].expand(-1, len(observed), 1)
                scores = torch.cat([scores, learned], dim=-1)
            found.append(scores.softmax(-1)[..., :num_prompt].sum(dim=(0, 1)))
        return torch.stack(found)


def kept_tokens(scores: torch.Tensor, num_kept: int, num_prompt: int) -> torch.Tensor:
    """Returns the positions that each KV head keeps, ascending: [kv_heads, num_kept].

    scores: fp32 [kv_heads, num_prompt], the attention that each key gets. Sinks and observed tokens are kept in any case.
    """
    end = num_prompt - OBSERVED_QUERIES
    pooled = functional.max_pool1d(scores[None, :, :end], POOLED_KEYS, stride=1, padding=POOLED_KEYS // 2)[0]
    order = pooled[:, KEPT_SINKS:].sort(dim=1, descending=True, stable=True).indices + KEPT_SINKS
    chosen = order[:, : num_kept - KEPT_SINKS - OBSERVED_QUERIES]
    fixed = torch.arange(num_prompt, device=scores.device)
    always = torch.cat([fixed[:KEPT_SINKS], fixed[end:]]).expand(len(scores), -1)
    return torch.cat([always, chosen], dim=1).sort(dim=1).values


def _copy_tokens(stored: torch.Tensor, source: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> None:
    """Copies tokens of a page table into the pages `target`, one after another. Zeroes the rest of the last page.

    stored: [frames, page_tokens, kv_heads, …]; kept: [kv_heads, tokens], the tokens that each head copies.
    """
    page_tokens, kv_heads = stored.shape[1], stored.shape[2]
    heads = torch.arange(kv_heads, device=stored.device)[:, None]
    tokens = stored[source[kept // page_tokens], kept % page_tokens, heads]  # [kv_heads, tokens, …]
    places = torch.arange(kept.shape[1], device=stored.device)
    stored[target[-1]] = 0
    stored[target[places // page_tokens], places % page_tokens] = tokens.transpose(0, 1)
