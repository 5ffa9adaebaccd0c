"""Defines the tiers that can hold a page of KV, and the type of a page number. Never holds a page itself."""

from enum import StrEnum
from typing import NewType


class Tier(StrEnum):
    """A place that can hold KV pages. The tiers are listed from the nearest to the model on."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


PageId = NewType("PageId", int)
