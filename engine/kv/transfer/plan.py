"""Describes copies of pages between tiers.

    SAVE   device → host      STORE  host → disk
    LOAD   host → device      FETCH  disk → device

A TransferPlan is immutable and names all pages that it uses. The planner marks them as in flight before the copy
begins, and evicts nothing while it makes a plan. A CopyEngine runs plans on other threads. A TransferDone message
reports the end of a plan to the loop.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.tiers import PageId, Tier
from graftwork.engine.kv.index.radix_tree import Domain, Node
from graftwork.engine.kv.transfer.layer_gates import LayerGate


class TransferKind(StrEnum):
    SAVE = "save"
    LOAD = "load"
    STORE = "store"
    FETCH = "fetch"

    @property
    def source(self) -> Tier:
        """The tier that is read."""
        return {
            TransferKind.SAVE: Tier.DEVICE,
            TransferKind.LOAD: Tier.HOST,
            TransferKind.STORE: Tier.HOST,
            TransferKind.FETCH: Tier.DISK,
        }[self]


@dataclass(frozen=True, slots=True)
class PageMove:
    """The copy of one page. A page on disk is named by its key, and its number is None."""

    key: PageKey
    source: PageId | None
    target: PageId | None


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Pages of one path that are copied together, first page first."""

    kind: TransferKind
    domain: Domain
    moves: tuple[PageMove, ...]
    nodes: tuple[Node, ...] = field(repr=False)
    """The node of each page, in the order of `moves`."""


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A plan has ended: its pages are no longer in flight."""

    plan: TransferPlan
    num_good: int
    """Moves that succeeded, counted from the first. Pages after them were not copied."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReadable:
    """A load has begun and steps may use its pages. The gate makes each layer wait for its KV."""

    plan: TransferPlan
    gate: LayerGate


Report = Callable[[TransferDone | LoadReadable], None]
"""Receives messages about transfers. It is called on the thread that runs the transfer."""


class CopyEngine(Protocol):
    """Copies pages. Plans of the same kind run in the order in which they begin."""

    def begin(self, plan: TransferPlan) -> None:
        """Starts a plan and returns at once. The end of the plan is reported exactly once, even after a failure.

        Before that, a load may be reported once as readable.
        """
        ...

    def sweep(self) -> None:
        """Removes forgotten pages from the disk after all queued writes. Returns at once."""
        ...

    def close(self) -> None:
        """Finishes all plans that have begun, and stops the threads."""
        ...


def domain_digest(domain: Domain) -> bytes:
    """Returns the name of a domain in files: 32 bytes that do not reveal the domain."""
    return hashlib.sha256(domain).digest()
