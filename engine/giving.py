"""One order of giving way: whoever holds what ranks lowest gives it up first, a page or an adapter alike."""

from collections.abc import Sequence
from typing import Protocol

from graftwork.engine.drop_order import Rank


class Giver(Protocol):
    """Holds something that it could do without."""

    def rank(self) -> Rank | None:
        """Of what it would give next; None if it has nothing to give."""
        ...

    def give(self) -> None:
        """Give up what `rank` has just spoken of."""
        ...


class Lodger(Giver, Protocol):
    """Lives in the frames of a tier beside its pages, and gives way like them."""

    @property
    def spare_pages(self) -> int:
        """Pages that would be free once it had given all it can."""
        ...

    @property
    def claimed_pages(self) -> int:
        """Pages that it has waited for so long that nobody new is let in at their cost."""
        ...


class NoLodger:
    """A tier of pages alone."""

    spare_pages = 0
    claimed_pages = 0

    def rank(self) -> Rank | None:
        return None

    def give(self) -> None:
        """There is nothing to give."""


def give_way(givers: Sequence[Giver]) -> bool:
    """The lowest of what all of them would give goes, the first named at a tie; False if nobody has anything."""
    ranked = [(rank, place) for place, giver in enumerate(givers) if (rank := giver.rank()) is not None]
    if not ranked:
        return False
    givers[min(ranked)[1]].give()
    return True
