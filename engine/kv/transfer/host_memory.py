"""Allocates the host memory for KV pages.

Owns one block of memory with one row for each page. A page has the same layout as on the device, so one copy operation
transfers it. The bytes of a page are consecutive, so they are written to disk unchanged. On CUDA the block is pinned
(see system_memory.py), so that copies can run at the same time as computation.
"""

import torch

from graftwork.engine.kv.transfer.system_memory import ClearedAhead, HostRegistry, PinnedBlock, mapped_memory


class HostMemory:
    """Owns host memory for `num_pages` KV pages. Provides each page as a tensor and as raw bytes."""

    def __init__(
        self, num_pages: int, page_shape: tuple[int, ...], dtype: torch.dtype, registry: HostRegistry | None = None
    ) -> None:
        """If there is a `registry`, the memory is pinned with it. Raises RuntimeError if that is not possible."""
        self.num_pages = num_pages
        self.page_bytes = dtype.itemsize * int(torch.Size(page_shape).numel())
        num_bytes = num_pages * self.page_bytes
        self._pinned = PinnedBlock(num_bytes, registry) if registry is not None and num_bytes else None
        block = mapped_memory(num_bytes) if self._pinned is None else self._pinned.data
        self._ahead = ClearedAhead(block).start() if self._pinned is None else None
        self._bytes = block.view(num_pages, self.page_bytes)
        self._pages = self._bytes.view(dtype).view(num_pages, *page_shape)

    def close(self) -> None:
        """Ends the pinning, if the memory is pinned. No copy may use the memory any more."""
        if self._pinned is not None:
            self._pinned.close()

    def used_up_to(self, page: int) -> None:
        """Says that the pages up to this number will be written soon (see ClearedAhead). Any thread may say so."""
        if self._ahead is not None:
            self._ahead.used_up_to((page + 1) * self.page_bytes)

    @property
    def block(self) -> torch.Tensor:
        """The memory of all pages.  # [num_pages, page_bytes] uint8"""
        return self._bytes

    def page(self, index: int) -> torch.Tensor:
        """Returns the KV page with number `index` as a tensor of shape `page_shape`. Writing to the result changes the
        page.
        """
        return self._pages[index]

    def bytes_of(self, index: int) -> memoryview:
        """Returns the content of the KV page with number `index` as bytes. Writing to the result changes the page."""
        return self._bytes[index].numpy().data

    def all_bytes(self) -> memoryview:
        """Returns the content of all pages as bytes, in the order of page numbers. Writing to the result changes the
        pages.
        """
        return self._bytes.numpy().data.cast("B")
