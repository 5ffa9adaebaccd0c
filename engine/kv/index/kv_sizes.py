"""Says how much memory KV pages and adapters get on the device and the host. Computes with numbers only."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.kv.index.page_windows import PageWindows, frames_for
from graftwork.engine.kv.index.rolling_pages import RollingPages

_DEVICE_SIZES = range(1 << 40)
"""Possible sizes of a device, in pages."""


@dataclass(frozen=True, slots=True)
class KvSizes:
    """The sizes of the device and host memory, and how much device memory KV pages and adapters always get.

    KV pages and adapters share the device memory. It is divided into frames; a frame is the memory of one page. KV
    pages always get at least `context_pages` and `device_reserve_pages`. Adapters always get at least
    `lora_floor_pages`. Both may use the rest.
    """

    page_tokens: int
    page_bytes: int
    device_pages: int
    """The number of frames (memory of one page each) on the device."""
    host_pages: int
    context_pages: int
    """The number of pages of one request with the largest context length, over all layer groups."""
    reserve_share: float = 0.5
    """The share of each tier's pages, in [0, 1], that is divided equally among the domains (tenants) that have pages
    there.

    A domain's part is its reserve: this many of its pages cannot be evicted to make room for other domains.
    """
    lora_floor_share: float = 0.0
    """The share of the device's frames that adapters can always get, in [0, 1]."""
    windows: PageWindows | None = None
    """What layer groups with a window keep. None if the model has one group of layers, so that a page holds all layers."""
    step_tokens: int = 1
    """The most tokens of one request that the steps in flight compute together."""
    layer_window: int = 0
    """The most tokens that a layer with a window of its own sees; 0 without such layers."""

    @property
    def frames_of_page(self) -> int:
        """How many frames hold the KV of one page of tokens, in all layer groups."""
        return 1 if self.windows is None else 1 + self.windows.num_groups

    def rolling_pages(self, window: RollingWindow | None) -> RollingPages | None:
        """Returns which pages requests with a rolling window keep; None for requests without one, which keep all."""
        if window is None:
            return None
        return RollingPages.of(window, self.page_tokens, self.step_tokens, self.layer_window)

    def frames_for(self, num_tokens: int, window: RollingWindow | None = None) -> int:
        """Returns the most frames that a request with `num_tokens` tokens holds at a time, over all layer groups. `window`
        is its rolling window.
        """
        frames = frames_for(num_tokens, self.page_tokens, self.windows)
        rolling = self.rolling_pages(window)
        if rolling is None:
            return frames
        return frames - pages_for(num_tokens, self.page_tokens) + rolling.most_pages(num_tokens)

    @property
    def lora_floor_pages(self) -> int:
        return min(int(self.lora_floor_share * self.device_pages), max(self.device_pages - self.context_pages, 0))

    @property
    def device_reserve_pages(self) -> int:
        """The sum of the reserves of all domains (usually, one domain is one tenant), in device pages.

        A domain's reserve is the number of its pages that cannot be evicted to make room for other domains.
        """
        most = self.device_pages - self.context_pages - self.lora_floor_pages
        return max(min(int(self.reserve_share * self.device_pages), most), 0)

    @property
    def max_lora_pages(self) -> int:
        """The largest amount of device memory that adapters may use, in pages.

        KV pages keep the rest: one context of full length, and the pages reserved for domains (tenants). The result is
        never below `lora_floor_pages`.
        """
        return max(self.device_pages - self.context_pages - self.device_reserve_pages, 0)

    def device_pages_for(self, lora_pages: int) -> int:
        """Returns the size, in pages, of the smallest device on which adapters may use the memory of `lora_pages`
        pages.
        """
        return bisect_left(
            _DEVICE_SIZES, lora_pages, key=lambda pages: replace(self, device_pages=pages).max_lora_pages
        )
