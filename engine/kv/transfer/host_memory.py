"""Allocates the host memory for KV pages.

Owns one block of memory with one row per page. A page has the same layout as on the device, so one copy moves it. The
bytes of a page are consecutive, so they are written to disk unchanged. On CUDA the block is pinned, so copies overlap
compute.
"""

import torch


class HostMemory:
    """Owns host memory for `num_pages` pages. A page can be read and written as bytes and as KV."""

    def __init__(self, num_pages: int, page_shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool) -> None:
        self.num_pages = num_pages
        self.page_bytes = dtype.itemsize * int(torch.Size(page_shape).numel())
        self._bytes = torch.empty((num_pages, self.page_bytes), dtype=torch.uint8, pin_memory=pinned and num_pages > 0)
        self._pages = self._bytes.view(dtype).view(num_pages, *page_shape)

    def page(self, index: int) -> torch.Tensor:
        """Returns one page as KV. Writing to the result writes to the memory.  # page_shape"""
        return self._pages[index]

    def bytes_of(self, index: int) -> memoryview:
        """Returns one page as bytes. Writing to these bytes writes to the memory."""
        return self._bytes[index].numpy().data

    def all_bytes(self) -> memoryview:
        """Returns the bytes of all pages, in order."""
        return self._bytes.numpy().data.cast("B")
