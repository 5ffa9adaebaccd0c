"""Divides the layers of a model into groups, each of which has pages and page tables of its own.

    layers    0 1 2 3 4 5 | 6 7 8 9 10 11        F: full attention, W: a window
              W W W W W F | W W W W W  F
    groups    (5, 11)  (0, 1)  (2, 3)  (4, 6)  (7, 8)  (9, 10)

All groups have the same number of layers, so all pages have the same size and any frame of device memory holds a page of
any group. The first group keeps pages for the whole context. The others have only layers with a window: they keep the
pages that a query can still see. Never imports torch, and never allocates a page.

A layer that reads the keys and values of another one is in no group: it has no pages.

Invariant: a layer without a window is in the first group. If the layers cannot be divided well, all are in it.

Source: the hybrid KV cache manager of vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from graftwork.engine.kv.index.page_windows import PageWindows, frames_for
from graftwork.engine.model.config import ModelConfig

_MOST_GROUPS = 8
"""A step has a page table of each request for each group."""
_MOST_PADDING = 0.1
"""The largest share of a page's layers that may stay empty, because the last group has too few."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model by the page table that they use."""

    groups: tuple[tuple[int, ...], ...]
    """The layers of each group. The first group keeps the whole context, the others a window."""
    window: int | None = None
    """The widest window of the groups after the first; None if there is one group."""

    @property
    def num_windowed(self) -> int:
        """The number of groups that keep only a window."""
        return len(self.groups) - 1

    @property
    def layers_of_page(self) -> int:
        """The number of layers whose keys and values a page has room for."""
        return len(self.groups[0])

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yields each layer with keys and values, its group, and its place among the layers of a page."""
        for group, layers in enumerate(self.groups):
            for place, layer in enumerate(layers):
                yield layer, group, place


def one_group(model: ModelConfig) -> LayerGroups:
    """Returns a division in which all layers keep the whole context."""
    return LayerGroups((model.kv_layers,))


def layer_groups(model: ModelConfig) -> LayerGroups:
    """Returns the division with the smallest first group, as a long context takes least memory with it.

    If no layer may keep the whole context, because all have a window, the first group still does: the prefix tree hangs
    on its pages.
    """
    if model.recurrence is not None or all(window is None for window in model.windows):
        return one_group(model)
    full = [layer for layer in model.kv_layers if model.windows[layer] is None]
    windowed = [layer for layer in model.kv_layers if model.windows[layer] is not None]
    num_layers = len(model.kv_layers)
    for size in range(max(len(full), 1), num_layers):
        num_groups = -(-num_layers // size)
        if num_groups <= _MOST_GROUPS and size * num_groups <= (1 + _MOST_PADDING) * num_layers:
            kept = size - len(full)
            first, rest = (*full, *windowed[:kept]), windowed[kept:]
            others = (tuple(rest[start : start + size]) for start in range(0, len(rest), size))
            widths = [width for layer in rest if (width := model.windows[layer]) is not None]
            return LayerGroups((tuple(sorted(first)), *others), max(widths))
    return one_group(model)


def request_bytes(model: ModelConfig, num_tokens: int, item_bytes: int) -> int:
    """Returns the bytes of KV of one request that decodes behind `num_tokens` tokens, in whole pages."""
    size, groups = model.page_tokens, layer_groups(model)
    if groups.window is None:
        return frames_for(num_tokens, size, None) * model.kv_page_bytes(size, item_bytes)
    windows = PageWindows(groups.window, groups.num_windowed, size, step_tokens=1)
    page_bytes = groups.layers_of_page * model.kv_page_bytes(size, item_bytes) // len(model.kv_layers)
    return frames_for(num_tokens, size, windows) * page_bytes
