"""Copies of pages between tiers: planned whole, carried out elsewhere, known to have landed by a message.

A TransferPlan is immutable and names every page it touches; all of them are leased before the first byte moves, and
nothing is dropped while a plan is made. Who waits for a page attaches to the plan that is under way.

    SAVE   device → host      STORE  host → disk
    LOAD   host → device      FETCH  disk → device
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
    """One page's way. A side that is on disk has no page number: the key names it."""

    key: PageKey
    source: PageId | None
    target: PageId | None


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Pages of one path, from the root down, that are copied together."""

    kind: TransferKind
    domain: Domain
    moves: tuple[PageMove, ...]
    nodes: tuple[Node, ...] = field(repr=False)
    """Whose copies they are, in the order of the moves."""


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A plan's event has fired: its pages may be touched again."""

    plan: TransferPlan
    num_good: int
    """Moves that succeeded, counted from the first; what stands behind them was not copied."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReadable:
    """A load has begun, and steps may be planned with its pages: each layer waits at the gate for what is missing."""

    plan: TransferPlan
    gate: LayerGate


Report = Callable[[TransferDone | LoadReadable], None]
"""Takes the end of a transfer, and before it what else is known; called on whichever thread carries it out."""


class CopyEngine(Protocol):
    """Moves bytes. Plans of one kind are carried out in the order in which they are begun."""

    def begin(self, plan: TransferPlan) -> None:
        """Start a plan and return at once; its end is reported exactly once, whatever happens.

        A load may be reported as readable before, once.
        """
        ...

    def sweep(self) -> None:
        """Have what was forgotten removed from the disk, behind the plans that write there; returns at once."""
        ...

    def close(self) -> None:
        """Finish what has begun, and stop."""
        ...


def domain_digest(domain: Domain) -> bytes:
    """How files name a domain: 32 bytes that do not tell who it is."""
    return hashlib.sha256(domain).digest()
