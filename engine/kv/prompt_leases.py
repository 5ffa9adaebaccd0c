"""Keeps the prompts of requests without a session for the time that the request names.

Owns the leases of prompts: which pages they protect, by domain (usually one tenant). A lease only changes the order of
eviction: until it ends, pages without a lease are evicted first. So it never makes an allocation fail.

A request names a time, but not where its reusable prefix ends in tokens. So all full pages of its prompt are leased:
the next request of the same conversation begins with them. Public pages, which all domains share, are not leased. They
cannot be evicted before the pages that follow them.

Invariant: after `lease` or `enforce_limits`, the leases of prompts protect no more pages of a domain than the domain's
reserve on the device. Otherwise one tenant could lease the device against all others. Above this limit, the pages that
were leased longest ago lose their lease first. Pages that were evicted, or whose lease has ended, leave the list in the
same order. So the number of leased pages may be counted too high, and never too low.
"""

from collections import OrderedDict
from collections.abc import Sequence

from graftwork.engine.core.prefix_keys import PageKey
from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_store import PageStore
from graftwork.engine.kv.index.radix_tree import PUBLIC, Domain, Lease, Node
from graftwork.platform.clock import Clock

_RETURN_PROBABILITY = 0.5
"""The assumed probability that a leased prompt is used again before its lease ends.

The engine has not measured it. It lies between a page without a lease (0.1) and a session whose turn begins (1.0).
"""


class PromptLeases:
    """Leases the pages of prompts, within each domain's reserve."""

    def __init__(self, page_store: PageStore, clock: Clock) -> None:
        self._page_store = page_store
        self._clock = clock
        self._leases: dict[Domain, OrderedDict[PageKey, Lease]] = {}
        """The leased pages of each domain, leased longest ago first, with their leases."""

    def num_pages(self, domain: Domain) -> int:
        """Returns how many pages of `domain` (usually one tenant) count as leased."""
        return len(self._leases.get(domain, ()))

    def lease(self, request: EngineRequest, nodes: Sequence[Node]) -> None:
        """Leases the full pages of a request's prompt from now on, for the time that the request names.

        Does nothing for a request that names no time or has a session. `nodes` are the nodes of the request's computed
        pages, first page first. A page with a lease that ends later keeps that lease.
        """
        if request.cache_ttl_s is None or request.session is not None:
            return
        prompt_pages = len(request.prompt_token_ids) // self._page_store.sizes.page_tokens
        own = [node for node in nodes[:prompt_pages] if node.domain != PUBLIC and node.depth < prompt_pages]
        own = own[: self._page_store.reserve_pages(Tier.DEVICE)]
        if not own:
            return
        lease = Lease(self._clock.monotonic() + request.cache_ttl_s, _RETURN_PROBABILITY)
        self._page_store.lease(own, lease)
        leases = self._leases.setdefault(own[0].domain, OrderedDict())
        for node in reversed(own):  # the last page is evicted first, so it also loses its lease first
            if node.lease is lease:
                leases[node.key] = lease
            if node.key in leases:
                leases.move_to_end(node.key)
        self.enforce_limits()

    def enforce_limits(self) -> None:
        """Ends the oldest leases of each domain (usually one tenant) that leases more pages than its reserve."""
        most, now = self._page_store.reserve_pages(Tier.DEVICE), self._clock.monotonic()
        for domain, leases in list(self._leases.items()):
            while leases and (len(leases) > most or next(iter(leases.values())).until <= now):
                self._end(*leases.popitem(last=False))
            if not leases:
                del self._leases[domain]

    def forget_domain(self, domain: Domain) -> None:
        """Forgets the leases of a domain (usually one tenant), whose pages are being removed."""
        self._leases.pop(domain, None)

    def _end(self, key: PageKey, lease: Lease) -> None:
        """Takes a lease from a page. A lease that has expired stays, because it explains a later cache miss."""
        node = self._page_store.tree.find(key)
        if node is not None and node.lease is lease and lease.until > self._clock.monotonic():
            node.lease = None
            self._page_store.requeue([key])

    def check_integrity(self) -> None:
        """Checks that each leased page belongs to the domain that it is counted for."""
        for domain, leases in self._leases.items():
            assert leases, "a domain without leases is kept"
            for key in leases:
                node = self._page_store.tree.find(key)
                assert node is None or node.domain == domain, "a leased page is counted for another domain"
