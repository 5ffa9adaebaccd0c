"""Asserts that nobody pushes another domain below its reserve, on the device or on the host."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import Domain

TIERS = (Tier.DEVICE, Tier.HOST)


class ReserveWatch:
    """Compares what each domain has before and after an operation of one of them."""

    def __init__(
        self, page_store: PageStore, domains: Collection[Domain], saving_pages: Callable[[Domain], int]
    ) -> None:
        """`saving_pages` counts a domain's pages on their way to the host, for which it may have given up older ones."""
        self._page_store = page_store
        self._domains = domains
        self._saving_pages = saving_pages
        self.num_checks = 0
        self.num_at_reserve = 0
        """Times that somebody who had lost pages by an operation was left with its reserve and not one more."""

    @contextmanager
    def others_than(self, domain: Domain) -> Iterator[None]:
        """Whatever is done in here for `domain`, all others keep their reserve, or what they had of it."""
        page_store, others = self._page_store, [one for one in self._domains if one != domain]
        before = {(tier, other): self._kept(tier, other) for tier in TIERS for other in others}
        sure = {tier: page_store.reserve_pages(tier) for tier in TIERS}
        yield
        for (tier, other), had in before.items():
            least = min(sure[tier], page_store.reserve_pages(tier))  # it grows when a domain is gone
            kept = self._kept(tier, other)
            own_change = kept[1] - had[1]
            self.num_checks += 1
            self.num_at_reserve += kept[0] < had[0] and kept[0] <= least
            assert kept[0] + own_change >= min(had[0], least), f"{other!r} was pushed below its reserve on the {tier}"

    def _kept(self, tier: Tier, domain: Domain) -> tuple[int, int]:
        """Pages that a domain has, and those that it is about to have."""
        return self._page_store.used_pages(tier, domain), self._saving_pages(domain) if tier is Tier.HOST else 0
