"""Defines the interface of a LoRA backend. An engine chooses one backend at its start (see engine/build/lora.py).

The adapter pool calls `place` when an adapter has been copied to the device, and `forget` when it leaves the device.
The runner calls `step` once in each step. The layers of the decoder then call the object that `step` returns.

LoraPool owns the adapters. A backend owns only what it makes from the adapters on the device: copies of their matrices,
and tables of the addresses of their matrices. Invariant: after `forget`, nothing that was made from the adapter is
left.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from graftwork.engine.experts.routes import HostRows
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraRows


class StepLora(Protocol):
    """Applies the adapters of one step.

    The object must not be used after the next step has begun, or after any adapter was placed or forgotten.
    """

    def add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str) -> None:
        """Adds the LoRA delta of each row's adapter to `y`, in place. A row is one token of the step.

        `group` names the linear layers to change: layers with the same input, such as q, k and v. `x` is their input,
        and `y` is the output of the base model's weights.

        x: [num_rows, in_features], y: [num_rows, out_features of the group].
        """
        ...

    @property
    def changes_experts(self) -> bool:
        """Whether an adapter of the step changes experts. If not, nobody needs to know their rows for `add_routed`."""
        ...

    def add_routed(self, y: torch.Tensor, x: torch.Tensor, layer: int, group: str, rows: HostRows) -> None:
        """Adds the LoRA deltas of each row's adapter to `y`, in place. Here a row is one token at one of its experts.

        `group` is one of EXPERT_GROUPS, `x` the input of the expert's projections, and `y` the output of the base
        model's weights. `rows` says which rows there are besides padding, and their tokens.

        x: [num_rows, in_features], y: [num_rows, out_features].
        """
        ...

    def change_embedding(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Changes the base model's embeddings of the tokens, in place, as each token's adapter says.

        An adapter either adds a LoRA delta, or brings an embedding of its own, which replaces the base model's.

        hidden: [num_rows, hidden_size], token_ids: [num_rows].
        """
        ...

    def change_inputs(self, inputs: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds LoRA deltas to what the base model's second table has for the tokens: the inputs of all layers. In place.

        inputs: [num_rows, layers * input_width], token_ids: [num_rows], of that table.
        """
        ...

    def change_logits(self, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Changes the base model's logits, in place, as each token's adapter says.

        An adapter either adds a LoRA delta, or brings an output head of its own. The logits of that head replace the
        base model's.

        x: [num_sampled, hidden_size], logits: [num_sampled, vocab]. There is one row for each token whose next token
        the step samples. Both may have more rows at the end, which are padding.
        """
        ...


class LoraBackend(Protocol):
    """Applies adapters to the tokens of each step. Only the engine loop's thread calls it."""

    def place(self, adapter: ResidentAdapter) -> None:
        """Prepares an adapter for use, after its weights were copied to the device or moved within device memory.

        Its tensors are views of the device's memory. It has `shares` only just after it was copied, and only if the engine
        has several ranks. Never reads their content, which would wait for the device.
        """
        ...

    def forget(self, digest: str) -> None:
        """Drops everything that was made from an adapter's weights on the device.

        Called before the weights leave the device or are moved within device memory.
        """
        ...

    @property
    def copied_bytes(self) -> int:
        """Bytes on the device of all copies that were made from adapters' weights."""
        ...

    @property
    def rows(self) -> LoraRows:
        """The rows of all steps that had an adapter, by what applied it."""
        ...

    def step(self, segments: Sequence[Segment], num_rows: int) -> StepLora:
        """Prepares the LoRA work of one step.

        A segment is a range of rows (tokens of the step) that use the same adapter, or the same mixture (several
        adapters with weights). `num_rows` counts all rows of the step, including padding.
        """
        ...

    def check_integrity(self) -> None:
        """Checks the backend's own records of the placed adapters, such as its address tables.

        Raises AssertionError if they contradict each other.
        """
        ...
