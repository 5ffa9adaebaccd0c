"""Where a page of KV can lie."""

from enum import StrEnum
from typing import NewType


class Tier(StrEnum):
    """The tiers, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


PageId = NewType("PageId", int)
