"""The host's KV pages: one block of memory, a page of all layers to a row.

Whole pages lie together, so a page is one run of bytes for the disk and one copy for the device, where it lies alike.
Where there is CUDA the block is pinned, so that copies run beside the compute.
"""

import torch


class HostMemory:
    """`num_pages` rows of bytes, and the same rows as KV."""

    def __init__(self, num_pages: int, page_shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> None:
        self.num_pages = num_pages
        self.page_bytes = dtype.itemsize * int(torch.Size(page_shape).numel())
        self._bytes = torch.empty((num_pages, self.page_bytes), dtype=torch.uint8, pin_memory=pinned and num_pages > 0)
        self._pages = self._bytes.view(dtype).view(num_pages, *page_shape)

    def page(self, index: int) -> torch.Tensor:
        """One page as KV; writing it writes the memory.  # page_shape"""
        return self._pages[index]

    def bytes_of(self, index: int) -> memoryview:
        """One page as bytes; writing them writes the memory."""
        return self._bytes[index].numpy().data

    def all_bytes(self) -> memoryview:
        """All pages as one run of bytes."""
        return self._bytes.numpy().data.cast("B")
