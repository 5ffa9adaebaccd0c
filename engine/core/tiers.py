"""Names the tiers (device, host, disk) that can hold KV pages, and the type of a page number."""

from enum import StrEnum
from typing import NewType


class Tier(StrEnum):
    """A kind of memory that can hold KV pages. The tiers are in the order of their speed, the fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


PageId = NewType("PageId", int)
