"""Defines the interface of a LoRA backend. An engine chooses one backend at start, by its device (see
engine/build/lora.py).

A backend is told when an adapter comes to the device (`place`) and when it leaves (`forget`). Once a step, `step`
returns the object that all layers of the decoder call.

A backend owns what it derives from resident adapters (those in the device's memory): packed copies, tables of
addresses. LoraPool owns the adapters. Invariant: nothing that is derived from an adapter outlives `forget`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.torch_backend import Segment


class StepLora(Protocol):
    """Applies the adapters of one step. Valid until the next step, or until an adapter is placed or forgotten."""

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds each row's LoRA delta to the base's output of one group of projections, in place.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        ...

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds each row's LoRA delta to the base's embeddings, in place. hidden: [num_rows, hidden]."""
        ...

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Adds each row's LoRA delta to the base's logits of the sampled rows, in place.

        x: [num_sampled, hidden], logits: [num_sampled, vocab]. Both may have further rows, which are not sampled.
        """
        ...


class LoraBackend(Protocol):
    """Applies adapters. Only the engine loop's thread calls it."""

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        """Starts to apply an adapter that became resident, or that was moved on the device.

        `on_device` holds views of the adapter's block on the device. `on_host` holds equal tensors that are cheap to
        read.
        """
        ...

    def forget(self, digest: str) -> None:
        """Stops applying an adapter that leaves the device or is moved. The backend drops every view of the adapter."""
        ...

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        """Prepares one step. Rows with the same mix (adapter or mixture) are adjacent.

        `num_rows` also counts padding.
        """
        ...

    def check_integrity(self) -> None:
        """Checks that the copies and tables that are derived from adapters are complete and consistent."""
        ...
