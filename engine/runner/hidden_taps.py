"""Keeps the hidden states of a step after some of the model's layers, for a draft head that reads them.

Owns one buffer, which each step overwrites. An engine without a draft head has no taps, and its steps do no more than ask
for them once a layer.
"""

from collections.abc import Callable, Sequence

import torch

from graftwork.engine.core.step import RequestSlice

Reader = Callable[[Sequence[RequestSlice], torch.Tensor], None]
"""Takes the slices of a step in the order of its rows, and the states of these rows: [num_tokens, taps * hidden]."""


class HiddenTaps:
    """The hidden states after some layers of the running step.

    The buffer has one address for the life of the engine, so that a CUDA graph may write to it.
    """

    def __init__(
        self, after_layers: Sequence[int], hidden_size: int, max_rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`after_layers` says after how many layers states are kept. A step has at most `max_rows` tokens."""
        self._places = {after: place for place, after in enumerate(after_layers)}
        self._hidden_size = hidden_size
        self.buffer = torch.empty((max_rows, len(after_layers) * hidden_size), device=device, dtype=dtype)
        self.reader: Reader | None = None
        """Reads the states of each step right after its forward pass was started; None for nobody."""

    def take(self, num_layers: int, hidden: torch.Tensor) -> None:
        """Keeps the hidden states after `num_layers` layers, if they are wanted.

        hidden: [num_rows, hidden]. Rows above the buffer are padding.
        """
        place = self._places.get(num_layers)
        if place is not None:
            rows = min(len(hidden), len(self.buffer))
            start = place * self._hidden_size
            self.buffer[:rows, start : start + self._hidden_size].copy_(hidden[:rows])

    def deliver(self, slices: Sequence[RequestSlice]) -> None:
        """Gives the reader the states of a step's rows."""
        if self.reader is not None:
            self.reader(slices, self.buffer[: sum(piece.num_tokens for piece in slices)])
