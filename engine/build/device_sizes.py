"""Decides how much device memory an engine takes for KV pages and adapters. Computes with numbers only.

Never reads the state of a device: warm_up.py measures it. Never allocates memory: kv.py does.

The memory of a device is divided so:

    [ weights | one step at the largest batch | copies of adapters | frames: KV pages and adapters | left free ]
              |<-------------------- memory_share of what is free after the weights ------------->|

What is left free serves CUDA graphs, fragments of the allocator, and other processes. It is never less than the graphs
take, by what the warm-up measured.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.transfer.device_memory import EXTRA_FRAMES, frame_bytes_for
from graftwork.platform.errors import InvalidRequest

_SHARE_STEPS = 1000
"""A refusal names a share in thousandths."""


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """What was measured on a device that has the weights of the model, and no KV pages yet. All sizes are in bytes."""

    device: str
    """The name of the device, for messages: `cuda:0`."""
    free_bytes: int
    """Free memory."""
    step_bytes: int
    """The most memory that a step at the largest batch took at a time, besides weights and KV pages."""
    copies_bytes: int
    """The most memory that the LoRA backend takes for copies of adapters."""
    graphs_bytes: int = 0
    """What the CUDA graphs will take, by a few that were captured. All are captured later, in what is left free."""

    def budget(self, share: float) -> int:
        """Returns the bytes for all frames, if steps, copies and frames together take `share` of the free memory, or
        what the graphs leave of it, if that is less.

        Negative if steps and copies alone take more.
        """
        most = min(int(self.free_bytes * share), self.free_bytes - self.graphs_bytes)
        return most - self.step_bytes - self.copies_bytes

    def least_share(self, frames_bytes: int) -> float | None:
        """Returns the smallest share, in whole thousandths, that leaves `frames_bytes` for frames.

        None if even the whole free memory is too little.
        """
        steps = range(_SHARE_STEPS + 1)
        step = bisect_left(steps, frames_bytes, key=lambda step: self.budget(step / _SHARE_STEPS))
        return step / _SHARE_STEPS if step in steps else None

    def least_free_bytes(self, frames_bytes: int, share: float) -> int:
        """Returns how much memory must be free for `frames_bytes` of frames at this share."""
        own = frames_bytes + self.step_bytes + self.copies_bytes
        return max(math.ceil(own / share) + 1, own + self.graphs_bytes)


@dataclass(frozen=True, slots=True)
class FrameSizer:
    """Decides the number of frames of one engine, and refuses a device that is too small for it.

    A frame is device memory of the size of one KV page. The device must hold one request of the largest context length,
    and beside it the smallest adapter.
    """

    wanted: KvSizes
    """The sizes of the engine. `device_pages` is not used, because this object decides it."""
    context_tokens: int
    """The longest context that is served."""
    adapter_bytes: int
    """The size of the smallest adapter."""

    @property
    def frame_bytes(self) -> int:
        return frame_bytes_for(self.wanted.page_bytes)

    def given(self, device_bytes: int) -> KvSizes:
        """Returns the sizes if the operator gives frames `device_bytes` bytes.

        Raises InvalidRequest if this is too little.
        """
        self._check_shares()
        pages = device_bytes // self.frame_bytes
        if pages >= self.least_pages:
            return replace(self.wanted, device_pages=pages)
        raise InvalidRequest(
            f"--device-bytes {device_bytes} is too little: {self._needs()}. {self._shorter_context(pages)}"
            f"Give --device-bytes of at least {self.least_pages * self.frame_bytes} bytes.",
            param="device_bytes",
        )

    def measured(self, device: MeasuredDevice, share: float) -> KvSizes:
        """Returns the sizes if frames take what steps and copies leave of `share` of the free memory.

        Raises InvalidRequest if this is too little.
        """
        self._check_shares()
        budget = device.budget(share)
        pages = max(budget // self.frame_bytes - EXTRA_FRAMES, 0)
        if pages >= self.least_pages:
            return replace(self.wanted, device_pages=pages)
        least = (self.least_pages + EXTRA_FRAMES) * self.frame_bytes
        least_share = device.least_share(least)
        other = (
            f"take a device with {device.least_free_bytes(least, share)} bytes free beside the weights"
            if least_share is None
            else f"give --memory-share of at least {least_share}"
        )
        raise InvalidRequest(
            f"--memory-share {share} of the {device.free_bytes} bytes that are free on {device.device} beside the weights "
            f"leaves KV and adapters {max(budget, 0)} bytes, because a step takes {device.step_bytes}, copies of "
            f"adapters {device.copies_bytes} and graphs {device.graphs_bytes}: {self._needs()}. "
            f"{self._shorter_context(pages)}Or {other}.",
            param="memory_share",
        )

    def given_on(self, device: MeasuredDevice, device_bytes: int) -> KvSizes:
        """Returns the sizes if the operator gives frames `device_bytes` bytes of a measured device.

        Raises InvalidRequest if this is too little, or more than steps and copies leave of the free memory.
        """
        sizes = self.given(device_bytes)
        most = device.budget(1.0) - EXTRA_FRAMES * self.frame_bytes
        if sizes.device_pages * self.frame_bytes <= most:
            return sizes
        self.measured(device, 1.0)  # raises if no number of bytes would do
        raise InvalidRequest(
            f"--device-bytes {device_bytes} is too much: {device.device} has {device.free_bytes} bytes free beside the "
            f"weights, of which a step takes {device.step_bytes}, copies of adapters {device.copies_bytes} and graphs "
            f"{device.graphs_bytes}. Give --device-bytes of at most {most} bytes, or leave it out.",
            param="device_bytes",
        )

    @property
    def least_pages(self) -> int:
        """The fewest frames with which the engine can serve."""
        return self.wanted.device_pages_for(self._adapter_frames)

    def longest_context(self, pages: int) -> int:
        """Returns the longest context, in tokens, that a device of `pages` frames can serve beside the smallest adapter.

        Returns 0 if it can serve none.
        """
        size = self.wanted.page_tokens
        most = pages_for(self.context_tokens, size)
        fewer = bisect_left(
            range(most + 1),
            True,
            key=lambda fewer: self._has_room(pages, self.wanted.frames_for((most - fewer) * size)),
        )
        return min(max(most - fewer, 0) * size, self.context_tokens)

    def _has_room(self, pages: int, context_pages: int) -> bool:
        sizes = replace(self.wanted, device_pages=pages, context_pages=context_pages)
        return context_pages <= pages and sizes.max_lora_pages >= self._adapter_frames

    def _check_shares(self) -> None:
        """Raises InvalidRequest if the reserves for KV leave adapters nothing, however large the device is."""
        if self.wanted.reserve_share >= 1 and self.wanted.lora_floor_share <= 0:
            raise InvalidRequest(
                f"kv_reserve_share {self.wanted.reserve_share} reserves the whole device for KV, and lora_floor_share "
                f"{self.wanted.lora_floor_share} reserves nothing for adapters, so that no adapter can ever be used. Give a "
                "smaller kv_reserve_share (0.5 is the default), or lora_floor_share above 0.",
                param="kv_reserve_share",
            )

    @property
    def _adapter_frames(self) -> int:
        return -(-self.adapter_bytes // self.frame_bytes)

    def _needs(self) -> str:
        return (
            f"one context of {self.context_tokens} tokens takes {self.wanted.context_pages * self.frame_bytes} bytes, and "
            f"the smallest adapter {self._adapter_frames * self.frame_bytes}"
        )

    def _shorter_context(self, pages: int) -> str:
        longest = self.longest_context(pages)
        return f"Give --max-context-tokens of at most {longest}. " if longest else ""
