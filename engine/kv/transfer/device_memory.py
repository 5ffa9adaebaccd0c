"""The memory of one device that is cut into frames: whoever needs some of it takes whole frames.

A frame holds one KV page of all layers; an adapter lies in a run of frames that follow one another. Behind those that
are handed out lie two more: the null frame, always zero, and one for scraps, which nobody reads.
It never knows who has which frame: that is PagePool's business.
"""

from collections.abc import Iterable, Iterator

import torch

from graftwork.engine.kv.transfer.layer_gates import LayerGates
from graftwork.engine.model.config import ModelConfig

_ALIGNMENT = 64
"""Of every frame, in bytes."""


class DeviceMemory:
    """`num_frames` frames of at least `used_bytes` bytes, numbered from 0, in one block of memory."""

    def __init__(self, num_frames: int, used_bytes: int, device: torch.device) -> None:
        self.num_frames = num_frames
        self.frame_bytes = frame_bytes_for(used_bytes)
        self.frames = torch.empty((num_frames + 2, self.frame_bytes), dtype=torch.uint8, device=device)
        self.frames[self.null_frame] = 0

    @property
    def null_frame(self) -> int:
        return self.num_frames

    @property
    def scrap_frame(self) -> int:
        return self.num_frames + 1

    @property
    def device(self) -> torch.device:
        return self.frames.device

    def frames_for(self, num_bytes: int) -> int:
        """Frames that so many bytes take."""
        return -(-num_bytes // self.frame_bytes)

    def block(self, first_frame: int, num_bytes: int) -> torch.Tensor:
        """Memory from the start of a frame on; writing it writes the frames.  # [num_bytes] uint8"""
        start = first_frame * self.frame_bytes
        return self.frames.flatten()[start : start + num_bytes]

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Carry frames to others, as if all at once, in stream order.

        `moves` are (source, target), each named once on its side; what stood in a target that goes nowhere is lost.
        """
        for source, target in _in_turn(moves, self.scrap_frame):
            self.frames[target].copy_(self.frames[source])


def frame_bytes_for(used_bytes: int) -> int:
    """Bytes of a frame that holds so many."""
    return -(-used_bytes // _ALIGNMENT) * _ALIGNMENT


def _in_turn(moves: Iterable[tuple[int, int]], scrap: int) -> Iterator[tuple[int, int]]:
    """Moves one by one, so that nothing is overwritten that has yet to go: chains from their end, then the circles,
    each opened by way of `scrap`."""
    source_of = {target: source for source, target in moves}
    waiting = set(source_of.values())
    for end in [target for target in source_of if target not in waiting]:
        target = end
        while (source := source_of.get(target)) is not None:
            yield source, target
            waiting.remove(source)
            target = source
    while waiting:
        first = target = waiting.pop()
        yield first, scrap
        while (source := source_of[target]) != first:
            yield source, target
            waiting.remove(source)
            target = source
        yield scrap, target


class KvCache:
    """Keys and values of every layer: a page is one frame, and the null frame the page of zeros that pads tables."""

    def __init__(self, config: ModelConfig, device_memory: DeviceMemory, page_tokens: int, dtype: torch.dtype) -> None:
        """`device_memory` has frames of at least `bytes_per_page` bytes."""
        self.page_shape = (2, config.num_layers, page_tokens, config.num_kv_heads, config.head_dim)
        """Of one page: keys and values of every layer."""
        elements = torch.Size(self.page_shape).numel()
        frames = device_memory.frames.view(dtype)[:, :elements]
        self._pages = frames.view(-1, *self.page_shape)  # [frames, *page_shape]; a page's elements are contiguous
        self.gates = LayerGates()
        """What layers wait for before they read."""

    @property
    def num_layers(self) -> int:
        return self.page_shape[1]

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def dtype(self) -> torch.dtype:
        return self._pages.dtype

    def read_page(self, page: int, target: torch.Tensor) -> None:
        """Copy one page's KV into `target`, a tensor of `page_shape`."""
        target.copy_(self._pages[page])

    def write_page(self, page: int, source: torch.Tensor) -> None:
        """Make one page hold `source`, a tensor of `page_shape`."""
        self._pages[page].copy_(source)

    def write_layers(self, page: int, source: torch.Tensor, layers: range) -> None:
        """Make a page hold some layers of `source`, a tensor of `page_shape`; on CUDA, once the stream is there."""
        for part in range(2):  # keys, values: each is one run of bytes
            target = self._pages[page, part, layers.start : layers.stop]
            target.copy_(source[part, layers.start : layers.stop], non_blocking=True)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, to read and to write.  # each [frames, page_tokens, kv_heads, head_dim]"""
        return self._pages[:, 0, layer], self._pages[:, 1, layer]


def bytes_per_page(config: ModelConfig, page_tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of one page over all layers."""
    return 2 * config.num_layers * page_tokens * config.kv_width * dtype.itemsize
