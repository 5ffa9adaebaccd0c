"""Divides the memory of one device into frames, and provides frames as KV pages.

A frame is the memory of one KV page, which holds the KV of all layers. DeviceMemory owns the memory. KvCache reads and
writes frames as KV pages. An adapter uses a run of consecutive frames. Two more frames follow the numbered frames: the
null frame is always zero, and the scratch frame is only used while frames are moved. PagePool records which frames are
in use; this module does not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from graftwork.engine.kv.transfer.kv_format import KvFormat, PlainKv, StoredKv
from graftwork.engine.kv.transfer.layer_groups import LayerGroups, one_group
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.kv.transfer.system_memory import ClearedAhead, mapped_memory
from graftwork.engine.model.config import ModelConfig

_ALIGNMENT = 64
"""Every frame's size is a multiple of this, in bytes."""

EXTRA_FRAMES = 2
"""The frames behind the numbered ones: the null frame and the scratch frame."""


class DeviceMemory:
    """Owns one buffer of device memory, divided into `num_frames` numbered frames.

    Each frame can hold one KV page, whose size is `used_bytes` bytes.
    """

    def __init__(self, num_frames: int, used_bytes: int, device: torch.device) -> None:
        self.num_frames = num_frames
        self.frame_bytes = frame_bytes_for(used_bytes)
        shape = num_frames + EXTRA_FRAMES, self.frame_bytes
        self._ahead: ClearedAhead | None = None
        if device.type == "cpu":
            memory = mapped_memory(shape[0] * shape[1])
            self._ahead, self.frames = ClearedAhead(memory).start(), memory.view(shape)
        else:
            self.frames = torch.empty(shape, dtype=torch.uint8, device=device)
        self.frames[self.null_frame :] = 0  # padding rows read the page after it too, before they write there
        self.on_moved: Callable[[Sequence[tuple[int, int]]], None] = lambda moves: None
        """A callback that runs after frames were moved. Its argument is that of `move`."""

    @property
    def null_frame(self) -> int:
        return self.num_frames

    @property
    def scratch_frame(self) -> int:
        return self.num_frames + 1

    @property
    def device(self) -> torch.device:
        return self.frames.device

    def frames_for(self, num_bytes: int) -> int:
        """Returns how many frames (device memory of one page each) are needed to hold `num_bytes` bytes."""
        return -(-num_bytes // self.frame_bytes)

    def buffer(self, first_frame: int, num_bytes: int) -> torch.Tensor:
        """Returns `num_bytes` bytes of device memory, from the start of frame `first_frame` on.  # [num_bytes] uint8

        A frame is the memory of one page. Writing to the result changes the content of the frames.
        """
        start = first_frame * self.frame_bytes
        return self.frames.flatten()[start : start + num_bytes]

    def used_up_to(self, page: int) -> None:
        """Says that the KV pages up to this number will be written soon (see ClearedAhead). Any thread may say so."""
        if self._ahead is not None:
            self._ahead.used_up_to((page + 1) * self.frame_bytes)

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copies the content of frames (device memory of one page each) to other frames, as if all copies happened at
        once.

        `moves` are pairs (source, target) of frame numbers. No frame is a source twice or a target twice. The former
        content of a target is lost unless this frame is also a source. On CUDA, the copies run on the current stream.
        """
        moves = tuple(moves)
        for source, target in _in_safe_order(moves, self.scratch_frame):
            self.frames[target].copy_(self.frames[source])
        self.on_moved(moves)

    def check_integrity(self) -> None:
        """Checks that the null frame, which pads block tables, contains only zeros."""
        assert not self.frames[self.null_frame].any(), "the null frame was written"


def frame_bytes_for(used_bytes: int) -> int:
    """Returns the size in bytes of the smallest frame (device memory of one page) that can hold `used_bytes` bytes."""
    return -(-used_bytes // _ALIGNMENT) * _ALIGNMENT


def _in_safe_order(moves: Iterable[tuple[int, int]], scratch: int) -> Iterator[tuple[int, int]]:
    """Orders moves so that no frame is overwritten before it is read.

    Yields each chain of moves from its end. Breaks a cycle by moving its first frame to `scratch`.
    """
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
        yield first, scratch
        while (source := source_of[target]) != first:
            yield source, target
            waiting.remove(source)
            target = source
        yield scratch, target


class KvCache:
    """Reads and writes the KV of all layers in pages of device memory.

    Page number n is the frame number n of DeviceMemory. The null frame is the page of zeros that pads block tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        device_memory: DeviceMemory,
        page_tokens: int,
        dtype: torch.dtype,
        form: KvFormat | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        """A frame of `device_memory` must have at least `bytes_per_page` bytes.

        `dtype` is the model's. Without a `form`, keys and values are stored in it. Without `groups`, all layers are one.
        """
        self.format = form or PlainKv(dtype)
        """How one head of one token is stored."""
        width = self.format.width(config.head_dim)
        layer_bytes = 2 * page_tokens * config.num_kv_heads * _head_bytes(config, self.format)
        self.groups = groups or one_group(config)
        first = config.state_parts(layer_bytes)
        num_parts = first + self.groups.layers_of_page
        self.page_shape = (2, num_parts, page_tokens, config.num_kv_heads, width)
        """The sizes of one page as it is stored: keys and values, the layers of one group, tokens, heads, and items of a head.
        In what order the items of a layer are, `format` says. If the model has recurrent layers, the first parts of both
        hold the state after the page's last computed token (see state_pages.py).
        """
        elements = torch.Size(self.page_shape).numel()
        frames = device_memory.frames.view(self.format.storage_dtype)[:, :elements]
        self._pages = frames.view(-1, *self.page_shape)  # [frames, *page_shape]; a page's elements are contiguous
        places = {layer: first + place for layer, _, place in self.groups.places()}
        self.group_of = {layer: group for layer, group, _ in self.groups.places()}
        """The number of the layer group whose pages hold the KV that a layer reads, by layer."""
        halves = {layer: (self._pages[:, 0, place], self._pages[:, 1, place]) for layer, place in places.items()}
        self._layers = {
            layer: (self.format.of_pages(keys), self.format.of_pages(values))
            for layer, (keys, values) in halves.items()
        }
        for layer in config.query_layers:
            source = config.kv_source(layer)
            places[layer], self.group_of[layer] = places[source], self.group_of[source]
            self._layers[layer] = self._layers[source]
        recurrent = () if config.recurrence is None else config.recurrence.layers
        self.gates = LayerGates(places | dict.fromkeys(recurrent, first - 1))
        """The gates that attention waits for before it reads a layer."""

    @property
    def num_layers(self) -> int:
        """The number of parts of a page that are copied one by one."""
        return self.page_shape[1]

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which pages are stored."""
        return self._pages.dtype

    def read_page(self, page: int, target: torch.Tensor) -> None:
        """Copies the KV of page number `page` into `target`, a tensor of shape `page_shape`."""
        target.copy_(self._pages[page])

    def write_page(self, page: int, source: torch.Tensor) -> None:
        """Copies `source`, a tensor of shape `page_shape`, into page number `page`."""
        self._pages[page].copy_(source)

    def write_layers(self, page: int, source: torch.Tensor, layers: range) -> None:
        """Copies only `layers` of `source`, a tensor of shape `page_shape`, into page number `page`.

        On CUDA, the call returns before the copy has ended.
        """
        for part in range(2):  # keys, then values: each is one block of bytes
            target = self._pages[page, part, layers.start : layers.stop]
            target.copy_(source[part, layers.start : layers.stop], non_blocking=True)

    def stored(self, layer: int) -> tuple[StoredKv, StoredKv]:
        """Returns the keys and the values that one layer reads, in all pages, as `format` stores them. They may be those of
        another layer (see ModelConfig.kv_sources).

        Codes are [num_frames + 2, page_tokens, kv_heads, head_dim], and scales have no last dimension. Writing to these
        tensors changes the pages.
        """
        return self._layers[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the codes of `stored`: without a `form`, the keys and the values themselves."""
        keys, values = self._layers[layer]
        return keys.codes, values.codes


def bytes_per_page(
    config: ModelConfig,
    page_tokens: int,
    dtype: torch.dtype,
    form: KvFormat | None = None,
    groups: LayerGroups | None = None,
) -> int:
    """Returns the size in bytes of one KV page: the keys and values of `page_tokens` tokens in the layers of a group, and
    the recurrent state after them.

    `dtype`, `form` and `groups` are those of KvCache.
    """
    layer_bytes = 2 * page_tokens * config.num_kv_heads * _head_bytes(config, form or PlainKv(dtype))
    num_layers = (groups or one_group(config)).layers_of_page
    return (config.state_parts(layer_bytes) + num_layers) * layer_bytes


def _head_bytes(config: ModelConfig, form: KvFormat) -> int:
    """Returns the bytes of the key or the value of one token in one head."""
    return form.width(config.head_dim) * form.storage_dtype.itemsize
