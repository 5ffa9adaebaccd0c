"""Where a page of KV can lie."""

from enum import StrEnum


class Tier(StrEnum):
    """The tiers, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
