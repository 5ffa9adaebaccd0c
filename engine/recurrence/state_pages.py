"""Gives access to the recurrent states in the pages of the KV cache.

A page holds the keys and values of its tokens, and beside them the state of each recurrent layer after the last of its
tokens that was computed. So a full page is a snapshot from which any request can continue: the prefix tree, the host and
the disk keep states with the pages, under the same keys, checks and budgets, and no other part of the engine knows them.

Never decides which page is read or written (see step_states.py), and never allocates one.

    frame:  [ states | keys of all layers with attention ] [ states | values of all layers with attention ]

The first half of the layers have their states before the keys, the others before the values. A layer's state is fp32:
the state of all heads, [heads, state_size, head_dim], and the last inputs of the convolution, [conv_tokens - 1,
conv_width].
"""

from dataclasses import dataclass

import torch

from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache
from graftwork.engine.model.recurrence import RecurrenceConfig

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one recurrent layer in all pages. Writing to them changes the pages."""

    heads: torch.Tensor  # fp32 [frames, heads, state_size, head_dim]
    inputs: torch.Tensor  # fp32 [frames, conv_tokens - 1, conv_width], the oldest token first


class StatePages:
    """Views of the states of all recurrent layers in the pages of one KV cache."""

    def __init__(self, config: RecurrenceConfig, memory: DeviceMemory, cache: KvCache) -> None:
        self._gates = cache.gates
        self._first_layer = config.layers[0]
        half_bytes = torch.Size(cache.page_shape).numel() * cache.dtype.itemsize // 2
        assert half_bytes % _ITEM_BYTES == 0, "the values of a page begin in the middle of a number of the state"
        frames = memory.frames.view(torch.float32)  # [frames, numbers]
        in_first_half = -(-len(config.layers) // 2)
        numbers = config.layer_state_bytes // _ITEM_BYTES
        starts = [
            index * numbers if index < in_first_half else half_bytes // _ITEM_BYTES + (index - in_first_half) * numbers
            for index in range(len(config.layers))
        ]
        self._parts = [
            frames[:, first : first + count * numbers]
            for first, count in ((starts[0], in_first_half), (half_bytes // 4, len(config.layers) - in_first_half))
            if count
        ]
        num_heads = config.num_heads * config.state_size * config.head_dim
        heads = (config.num_heads, config.state_size, config.head_dim)
        inputs = (config.conv_tokens - 1, config.conv_width)
        self.layers = tuple(
            LayerStates(
                frames[:, start : start + num_heads].view(-1, *heads),
                frames[:, start + num_heads : start + numbers].view(-1, *inputs),
            )
            for start in starts
        )
        """The states of each recurrent layer, in the order of the layers."""

    def wait(self) -> None:
        """Waits until the states of pages that are being loaded have arrived. Raises LoadFailed if one did not."""
        self._gates.wait(self._first_layer)

    def copy(self, source: int, target: int) -> None:
        """Copies the states of all layers from one page to another."""
        for part in self._parts:
            part[target] = part[source]

    def clear(self, page: int) -> None:
        """Sets the states of all layers in a page to those before the first token."""
        for part in self._parts:
            part[page] = 0
