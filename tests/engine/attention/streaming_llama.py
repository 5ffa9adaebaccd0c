"""StreamingLLM over a Llama of transformers, token by token, as its authors wrote it: the reference of rolling windows.

Keys are kept as they are before the rotation. Each new token drops what lies between sinks and window, and rotates all keys
that are left by their places in the cache. Shares no code with the engine.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class StreamingLlama:
    """One model with a cache of `sinks` first tokens and the last `window` ones, the new one included."""

    def __init__(self, model: torch.nn.Module, sinks: int, window: int) -> None:
        self.model: Any = model
        self.sinks, self.window = sinks, window

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The logits after each token of a text: [tokens, vocab]."""
        inner: Any = next(module for module in self.model.modules() if type(module).__name__ == "LlamaModel")
        head: Any = next(module for name, module in self.model.named_modules() if name.endswith("lm_head"))
        caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in inner.layers]
        rows = []
        for token in token_ids:
            hidden = inner.embed_tokens(torch.tensor([token]))  # [1, hidden]
            for layer, cache in zip(inner.layers, caches, strict=True):
                hidden = hidden + self._attend(inner, layer.self_attn, layer.input_layernorm(hidden), cache)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            rows.append(head(inner.norm(hidden))[0])
        return torch.stack(rows)

    def _attend(
        self, inner: Any, attention: Any, x: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        size = attention.head_dim
        query = attention.q_proj(x).view(1, 1, -1, size).transpose(1, 2)  # [1, heads, 1, size]
        cache.append((attention.k_proj(x).view(-1, size), attention.v_proj(x).view(-1, size)))
        if len(cache) > self.sinks + self.window:
            del cache[self.sinks]
        keys = torch.stack([key for key, _ in cache], dim=1)[None]  # [1, kv_heads, cached, size]
        values = torch.stack([value for _, value in cache], dim=1)[None]
        cos, sin = inner.rotary_emb(values, torch.arange(len(cache))[None])
        wide = query.shape[1] // keys.shape[1]
        query, _ = apply_rotary_pos_emb(query, query, cos[:, -1:], sin[:, -1:])
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        keys, values = (one.repeat_interleave(wide, dim=1) for one in (keys, values))
        weights = (query @ keys.transpose(2, 3) / size**0.5).softmax(-1)
        output: torch.Tensor = attention.o_proj((weights @ values).transpose(1, 2).reshape(1, -1))
        return output
