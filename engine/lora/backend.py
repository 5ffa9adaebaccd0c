"""Defines the interface of a LoRA backend. An engine chooses one backend at start, by its device (see
engine/build/lora.py).

A backend is told when an adapter comes to the device (`place`) and when it leaves (`forget`). Once in each step, `step`
returns the object that all layers of the decoder call.

LoraPool owns the adapters. A backend owns only what it derives from the adapters on the device: packed copies and
tables of addresses. Invariant: nothing that is derived from an adapter outlives `forget`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.torch_backend import Segment


class StepLora(Protocol):
    """Applies the adapters of one step. The object is valid until the next step, or until an adapter is placed or
    forgotten.
    """

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds each row's LoRA delta to the output of the base model's linear layers in one group, in place.

        A group is the layers with the same input, such as q, k and v.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        ...

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Applies each row's adapter to the base model's embeddings, in place: adds a LoRA delta, or inserts a saved
        embedding.

        hidden: [num_rows, hidden_size], token_ids: [num_rows].
        """
        ...

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Applies each row's adapter to the base model's logits, in place: adds a LoRA delta, or inserts a saved head's
        logits.

        x: [num_sampled, hidden_size], logits: [num_sampled, vocab]. Both may have further rows, which are padding.
        """
        ...


class LoraBackend(Protocol):
    """Applies adapters to the rows of each step. Only the engine loop's thread calls it."""

    def place(self, on_host: ResidentAdapter, on_device: ResidentAdapter) -> None:
        """Makes an adapter ready to be applied, after its weights were copied to the device or moved on it.

        The tensors of `on_device` are views of the device's memory. `on_host` holds equal tensors that are cheap to
        read.
        """
        ...

    def forget(self, digest: str) -> None:
        """Drops every view of an adapter's weights, because they leave the device or are moved on it."""
        ...

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        """Prepares the LoRA work of one step. Each segment is a range of rows that use the same adapter or mixture.

        `num_rows` counts all rows of the batch, including padding.
        """
        ...

    def check_integrity(self) -> None:
        """Checks that the copies and tables that are derived from adapters are complete and consistent."""
        ...
