"""How adapters are applied: one way for an engine's whole life, chosen by its device (see lora_assembly).

    place, forget    as adapters come to the device and leave it
    step             once a step: what all layers of the decoder then call

A backend owns what it derives from resident adapters (packed copies, tables of addresses), never the adapters: those
are LoraPool's. Invariant: nothing that is derived from an adapter outlives `forget`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from graftwork.engine.lora import LoraBatch, Segment, TorchLanes
from graftwork.engine.lora_packs import PackCache
from graftwork.engine.resident_adapter import ResidentAdapter
from graftwork.engine.row_rules import RowRules


class StepLora(Protocol):
    """The adapters of one step; good until the next step is made, or an adapter comes or goes."""

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Turn the base's output of one group into each row's own, in place.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        ...

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Turn the base's embeddings into each row's own, in place. hidden: [num_rows, hidden]."""
        ...

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Turn the base's logits of the sampled rows into each row's own, in place.

        x: [num_sampled, hidden], logits: [num_sampled, vocab]; both may have more rows than are sampled.
        """
        ...


class LoraBackend(Protocol):
    """Applies adapters. All methods are called by the loop's thread."""

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        """An adapter has become resident, or lies elsewhere on the device since it was forgotten.

        Its tensors are on the device, views of its block there; their equals on the host may be read freely.
        """
        ...

    def forget(self, digest: str) -> None:
        """A resident adapter has left the device, or its place there: no view of it may be kept."""
        ...

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        """The resident adapters of a batch, rows of one graft behind one another; `num_rows` are all, padding included."""
        ...

    def check_integrity(self) -> None:
        """Check that what is derived from adapters is complete and consistent."""
        ...


class TorchLora:
    """Plain torch, on any device: long segments straight from the adapter, short ones from packs."""

    def __init__(self, packs: PackCache, rules: RowRules) -> None:
        self._packs = packs
        self.rules = rules
        self.lanes = TorchLanes(packs, rules)

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        """Packs are made when a batch first needs them."""

    def forget(self, digest: str) -> None:
        self._packs.forget(digest)

    def step(self, segments: Sequence[Segment], num_rows: int) -> LoraBatch:
        return LoraBatch(segments, self.lanes, self.rules, num_rows)

    def check_integrity(self) -> None:
        self._packs.check_integrity()
