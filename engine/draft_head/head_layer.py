"""Computes the forward pass of a draft head (EAGLE-3) over a flat batch of rows.

A row is a pair: the features of one token of a text, and the token after it. The features are the served model's hidden
states of the token, projected; or, behind the last token that the served model has computed, the head's own output for
the pair before. The output of a pair gives the head's guess of the token after both.
Owns no text: pages and rows come from the caller.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from graftwork.engine.attention.backend import AttentionBackend
from graftwork.engine.draft_head.head_weights import HeadWeights
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache
from graftwork.engine.runner.input_batch import BatchBuilder, BatchRows
from graftwork.engine.runner.row_ops import RowOps

_FINE_ROWS, _COARSE_ROWS = 64, 128
"""Up to so many rows, sizes are powers of two; above, they are multiples of the second number."""


def few_sizes(num_rows: int) -> int:
    """Returns to how many rows a batch of a head is padded.

    oneDNN prepares each product anew for each number of rows, in about 0.6 ms (see usual_rows in engine/model/layers.py). A
    head has five products, and a pass of one row takes less than that; its batches would often have a size of their own.
    """
    if num_rows <= _FINE_ROWS:
        return 1 << max(num_rows - 1, 0).bit_length()
    return -(-num_rows // _COARSE_ROWS) * _COARSE_ROWS


class HeadMemory:
    """The pages of a draft head: keys, values and features of `page_tokens` pairs each.

    A page's features stand behind its keys and values in the same frame.
    """

    def __init__(self, memory: DeviceMemory, cache: KvCache, page_tokens: int, hidden_size: int) -> None:
        """The frames of `memory` must have room for both."""
        self.memory = memory
        self.cache = cache
        self.page_tokens = page_tokens
        start = torch.Size(cache.page_shape).numel()
        frames = memory.frames.view(cache.dtype)[:, start : start + page_tokens * hidden_size]
        self.features = frames.view(-1, page_tokens, hidden_size)  # [frames, page_tokens, hidden]


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What computes the head's layer over its pages."""

    rows: RowOps
    attention: AttentionBackend
    builder: BatchBuilder


class HeadLayer:
    """Holds a head's weights and computes its forward pass. Changes only the pages of its memory."""

    def __init__(self, weights: HeadWeights, parts: HeadParts, memory: HeadMemory, vocab_size: int) -> None:
        """`vocab_size` is that of the served model."""
        self._weights = weights
        self._parts = parts
        self._memory = memory
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def keep(self, states: torch.Tensor, pages: list[int], offsets: list[int]) -> None:
        """Projects hidden states of the served model, and stores them as the features of tokens.

        states: [num_tokens, 3 * target_hidden], on the device. `pages` and `offsets` say where each token's features go.
        """
        num_tokens = len(states)
        padded = functional.pad(states, (0, 0, 0, few_sizes(num_tokens) - num_tokens))
        features = self._weights.states(padded)[:num_tokens]  # [num_tokens, hidden]
        self._memory.features.index_put_((self._indices(pages), self._indices(offsets)), features)

    def pairs(self, rows: BatchRows) -> torch.Tensor:
        """Computes the layer for the pairs of a step. Returns its output: [num_rows, hidden], padding included."""
        weights, ops = self._weights, self._parts.rows
        batch = self._parts.builder.tensors(rows)
        features = self._memory.features[batch.row_pages, batch.row_offsets]  # [num_rows, hidden]
        embedded = functional.embedding(batch.token_ids, weights.embedding)  # [num_rows, hidden]
        both = torch.cat([ops.norm(embedded, weights.input_norm), ops.norm(features, weights.states_norm)], dim=1)
        query = ops.plan(batch).rotate_and_store(weights.qkv(both), 0, None)  # [num_rows, heads, head_dim]
        mixed = self._parts.attention.plan(batch.attention).attend(0, query)  # [num_rows, query]
        hidden, after = ops.add_norm(features, weights.output(mixed), weights.mlp_norm)
        return ops.add(hidden, weights.down(ops.activate(weights.gate_up(after))))

    def put_features(self, outputs: torch.Tensor, pages: list[int], offsets: list[int]) -> None:
        """Stores outputs of pairs, [num, hidden], as the features of the tokens behind them."""
        self._memory.features.index_put_((self._indices(pages), self._indices(offsets)), outputs)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the served model's tokens: fp32 [num, vocab], for outputs [num, hidden].

        Those of tokens that the head cannot guess are minus infinity.
        """
        weights = self._weights
        own = weights.head(self._parts.rows.norm(outputs, weights.norm)).float()  # [num, draft_vocab]
        if weights.guessed_token_ids is None:
            return own
        logits = own.new_full((len(own), self._vocab_size), -torch.inf)
        logits[:, weights.guessed_token_ids] = own
        return logits

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._memory.memory.device)
