"""Applies the adapters of one step to the experts of routed layers.

A row of a routed layer is one token at one of its experts (see engine/experts/routes.py). Each row needs the factors of
its token's adapters for its expert. Rows that need the same factors are a group: they are adjacent, because rows are
sorted by expert, and tokens of one segment are adjacent.

Owns which tokens of a step use which mix of adapters. RoutedTorch is the reference of expert_tables.py.
Invariant: the bits of a row's delta depend on the row alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from graftwork.engine.experts.routes import HostRows, Numbers
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.resident_adapter import ExpertDelta
from graftwork.engine.lora.segments import Segment
from graftwork.engine.model.batch_invariance import BatchInvariance

ExpertKey = tuple[int, str]
"""A layer and one of EXPERT_GROUPS, as in ResidentAdapter.experts."""


class RoutedLora(Protocol):
    """Applies the adapters of one step to the experts of all layers."""

    def add_to(self, y: torch.Tensor, x: torch.Tensor, key: ExpertKey, rows: HostRows) -> None:
        """Adds the deltas of all rows to y, in place. x: [num_rows, in_features], y: [num_rows, out_features]."""
        ...


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """The rows of a routed layer that have an adapter, in groups of one mix and one expert."""

    rows: Numbers  # [num_owned] the number of each row
    starts: Numbers  # [num_groups + 1] where each group begins, and where the last one ends
    owners: Numbers  # [num_groups] the mix of each group, by its place among the mixes of the step
    experts: Numbers  # [num_groups]


class RowOwners:
    """Knows which mix of adapters each token of a step uses, of those mixes that change experts."""

    def __init__(self, segments: Sequence[Segment], num_tokens: int) -> None:
        touching = [segment for segment in segments if segment.mix.changes_experts]
        self.mixes: list[AdapterMix] = [segment.mix for segment in touching]
        self._keys = {key for mix in self.mixes for adapter, _ in mix.parts for key in adapter.experts}
        self._owner_of_token = np.full(num_tokens, -1, np.int64)
        for owner, segment in enumerate(touching):
            self._owner_of_token[segment.start : segment.end] = owner

    def touches(self, key: ExpertKey) -> bool:
        """Returns whether any adapter of the step changes these projections."""
        return key in self._keys

    def owned(self, rows: HostRows) -> OwnedRows:
        """Returns the rows whose tokens have a mix that changes experts. The rows must be sorted by expert and token."""
        owners = self._owner_of_token[rows.tokens]
        chosen = owners >= 0
        owners, experts = owners[chosen], rows.experts[chosen]
        is_first = np.ones(len(owners), bool)
        is_first[1:] = (owners[1:] != owners[:-1]) | (experts[1:] != experts[:-1])
        firsts = np.flatnonzero(is_first)
        return OwnedRows(rows.rows[chosen], np.append(firsts, len(owners)), owners[firsts], experts[firsts])


class RoutedTorch:
    """Applies adapters to experts in plain torch, one product after another, on any device."""

    def __init__(self, owners: RowOwners, rules: BatchInvariance) -> None:
        self._owners = owners
        self._rules = rules

    def add_to(self, y: torch.Tensor, x: torch.Tensor, key: ExpertKey, rows: HostRows) -> None:
        if not self._owners.touches(key):
            return
        owned = self._owners.owned(rows)
        for group, (owner, expert) in enumerate(zip(owned.owners, owned.experts, strict=True)):
            own = torch.from_numpy(owned.rows[owned.starts[group] : owned.starts[group + 1]]).to(x.device)
            inputs = x.index_select(0, own)
            for delta, weight in _deltas(self._owners.mixes[owner], key):
                y.index_add_(0, own, self._delta(inputs, delta, int(expert), weight))

    def _delta(self, inputs: torch.Tensor, delta: ExpertDelta, expert: int, weight: float) -> torch.Tensor:
        """Returns one adapter's change of the outputs of one expert: [num_rows, out_features]."""
        A, B = delta.A[expert], delta.B[expert]  # [ranks, in_features], [ranks, out_features]
        no_rows, no_ranks = self._rules.rows(len(inputs)) - len(inputs), max(self._rules.min_columns - len(A), 0)
        v = functional.pad(inputs, (0, 0, 0, no_rows)) @ functional.pad(A, (0, 0, 0, no_ranks)).t()  # [rows, ranks]
        if delta.scales is not None:
            v[:, : len(A)] *= delta.scales[expert]
        return ((v * weight) @ functional.pad(B, (0, 0, 0, no_ranks)))[: len(inputs)]


def _deltas(mix: AdapterMix, key: ExpertKey) -> Iterator[tuple[ExpertDelta, float]]:
    for adapter, weight in mix.parts:
        delta = adapter.experts.get(key)
        if delta is not None:
            yield delta, weight
