"""Keeps what draft tokens give to the recurrence, until the next slice of their request.

Owns one entry for each place in the batch, at most. An entry that its request does not take is dropped when the place is
used again. Never keeps states: an input is some hundred times smaller.
"""

from dataclasses import dataclass, field

import torch

from graftwork.engine.core.step import RequestSlice
from graftwork.platform.ids import RequestId


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The inputs of the recurrence of one request's draft tokens, in all recurrent layers."""

    request_id: RequestId
    position: int
    """The position of the first of the draft tokens. The request's state is that before it."""
    num_tokens: int
    by_layer: list[torch.Tensor] = field(default_factory=list)  # each fp32 [num_tokens, conv_width + heads]

    def precedes(self, piece: RequestSlice) -> bool:
        """Returns whether `piece` is the next slice of the same request, and begins after accepted draft tokens."""
        is_after = self.position < piece.start <= self.position + self.num_tokens
        return piece.request_id == self.request_id and is_after


class KeptDraftInputs:
    """The inputs of the draft tokens of the last step of each running request."""

    def __init__(self) -> None:
        self._by_place: dict[int, DraftInputs] = {}

    def take(self, piece: RequestSlice) -> DraftInputs | None:
        """Removes and returns the entry of the slice's place; None if there is none."""
        return self._by_place.pop(piece.place, None)

    def keep(self, piece: RequestSlice) -> DraftInputs:
        """Returns a new entry for the drafts of a slice. The layers add their inputs to it."""
        entry = DraftInputs(piece.request_id, piece.known_end, piece.num_drafts)
        self._by_place[piece.place] = entry
        return entry

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self._by_place.values() for tensor in entry.by_layer)
