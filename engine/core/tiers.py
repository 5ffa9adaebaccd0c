"""Defines the tiers that can hold a page of KV, and the type of a page number. Never holds a page itself."""

from enum import StrEnum
from typing import NewType


class Tier(StrEnum):
    """A kind of memory that can hold KV pages. The tier nearest to the model comes first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


PageId = NewType("PageId", int)
