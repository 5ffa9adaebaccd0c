"""The tiers that can hold a page of KV, and the number that names a page on one tier."""

from enum import StrEnum
from typing import NewType


class Tier(StrEnum):
    """Nearest to the model first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


PageId = NewType("PageId", int)
