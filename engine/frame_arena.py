"""The memory of one device that is cut into frames: whoever needs some of it takes whole frames.

A frame holds one KV page of all layers. Behind those that are handed out lie two more: the null frame, always zero,
and one for scraps, which nobody reads.
It never knows who has which frame: that is PagePool's business.
"""

import torch

_ALIGNMENT = 64
"""Of every frame, in bytes."""


class FrameArena:
    """`num_frames` frames of at least `used_bytes` bytes, numbered from 0, in one block of memory."""

    def __init__(self, num_frames: int, used_bytes: int, device: torch.device) -> None:
        self.num_frames = num_frames
        self.frame_bytes = framed_bytes(used_bytes)
        self.memory = torch.empty((num_frames + 2, self.frame_bytes), dtype=torch.uint8, device=device)
        self.memory[self.null_frame] = 0

    @property
    def null_frame(self) -> int:
        return self.num_frames

    @property
    def scrap_frame(self) -> int:
        return self.num_frames + 1

    @property
    def device(self) -> torch.device:
        return self.memory.device


def framed_bytes(used_bytes: int) -> int:
    """Bytes of a frame that holds so many."""
    return -(-used_bytes // _ALIGNMENT) * _ALIGNMENT
