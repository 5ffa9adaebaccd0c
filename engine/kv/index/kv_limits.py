"""Knows which limits of KV bytes hold for which domains (usually one tenant each), alone and together.

Owns the limits of each domain and of each group of domains, and which domains are in a group. A group is known from the
requests of its domains: each request names the group of its domain and the group's limits, and the latest one counts.
Never counts pages and never evicts: the page store does.
Invariant: a domain is in one group at most, and a group has at least one domain.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from graftwork.engine.core.requests import NO_KV_LIMITS, KvGroupKey, KvLimits
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.radix_tree import Domain


@dataclass(frozen=True, slots=True)
class KvLimit:
    """How many bytes of KV some domains may have together on each tier. None means no limit."""

    domains: Collection[Domain]
    device_bytes: int | None
    host_bytes: int | None

    def max_bytes(self, tier: Tier) -> int | None:
        return self.device_bytes if tier is Tier.DEVICE else self.host_bytes


class KvLimitTable:
    """The limits of all domains and groups of one engine."""

    def __init__(self) -> None:
        self._own: dict[Domain, KvLimit] = {}
        self._groups: dict[KvGroupKey, KvLimit] = {}
        self._group_of: dict[Domain, KvGroupKey] = {}

    def set(self, domain: Domain, limits: KvLimits) -> None:
        """Replaces the limits of a domain and of its group, and puts the domain into this group."""
        if limits.device_bytes is None and limits.host_bytes is None:
            self._own.pop(domain, None)
        else:
            self._own[domain] = KvLimit((domain,), limits.device_bytes, limits.host_bytes)
        if limits.group != self._group_of.get(domain):
            self._leave_group(domain)
        if limits.group is not None:
            old = self._groups.get(limits.group)
            members = dict.fromkeys((*(() if old is None else old.domains), domain))  # in the order in which they came
            self._groups[limits.group] = KvLimit(members, limits.group_device_bytes, limits.group_host_bytes)
            self._group_of[domain] = limits.group

    def forget(self, domain: Domain) -> None:
        """Removes a domain, its limits, and its group if no other domain is in it."""
        self.set(domain, NO_KV_LIMITS)

    def of(self, domain: Domain) -> Sequence[KvLimit]:
        """Returns the limits that bind a domain: its own, then that of its group."""
        own, group = self._own.get(domain), self._group_of.get(domain)
        return [*(() if own is None else (own,)), *(() if group is None else (self._groups[group],))]

    def _leave_group(self, domain: Domain) -> None:
        group = self._group_of.pop(domain, None)
        if group is None:
            return
        left = self._groups[group]
        members = dict.fromkeys(one for one in left.domains if one != domain)
        if members:
            self._groups[group] = replace(left, domains=members)
        else:
            del self._groups[group]

    def check_integrity(self) -> None:
        """Checks that groups and domains name each other."""
        pairs = {(domain, group) for group, limit in self._groups.items() for domain in limit.domains}
        assert pairs == set(self._group_of.items()), "a domain and its group do not know each other"
        assert all(limit.domains for limit in self._groups.values()), "a group without domains is left"
