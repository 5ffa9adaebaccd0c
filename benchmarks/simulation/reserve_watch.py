"""Asserts that nobody pushes another party below its reserve, on the device or on the host."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import Residency
from graftwork.engine.kv.index.radix_tree import Owner

TIERS = (Tier.DEVICE, Tier.HOST)


class ReserveWatch:
    """Compares what each party has before and after an operation of one of them."""

    def __init__(self, residency: Residency, owners: Collection[Owner], saving_pages: Callable[[Owner], int]) -> None:
        """`saving_pages` counts a party's pages on their way to the host, for which it may have given up older ones."""
        self._residency = residency
        self._owners = owners
        self._saving_pages = saving_pages
        self.num_checks = 0
        self.num_at_reserve = 0
        """Times that somebody who had lost pages by an operation was left with its reserve and not one more."""

    @contextmanager
    def others_than(self, owner: Owner) -> Iterator[None]:
        """Whatever is done in here for `owner`, all others keep their reserve, or what they had of it."""
        residency, others = self._residency, [one for one in self._owners if one != owner]
        before = {(tier, other): self._kept(tier, other) for tier in TIERS for other in others}
        sure = {tier: residency.reserve_pages(tier) for tier in TIERS}
        yield
        for (tier, other), had in before.items():
            least = min(sure[tier], residency.reserve_pages(tier))  # it grows when a party is gone
            kept = self._kept(tier, other)
            own_change = kept[1] - had[1]
            self.num_checks += 1
            self.num_at_reserve += kept[0] < had[0] and kept[0] <= least
            assert kept[0] + own_change >= min(had[0], least), f"{other!r} was pushed below its reserve on the {tier}"

    def _kept(self, tier: Tier, owner: Owner) -> tuple[int, int]:
        """Pages that a party has, and those that it is about to have."""
        return self._residency.used_pages(tier, owner), self._saving_pages(owner) if tier is Tier.HOST else 0
