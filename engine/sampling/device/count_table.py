"""Keeps the token counts of requests with penalties on the device, one row (slot) of a table for each request.

The host sends only what has changed since the last step, a few tokens for each request, however long its prompt and its
answer are. It sends whole entries, not differences: sending one twice does no harm. The first step of a request sends
all of its counts.

Owns which request has which slot. A request is known by its TokenHistory. A slot whose history is gone, or was not used
for longest, is given to the next request.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

import numpy as np
import torch

from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.sampling.device.columns import CountChanges

_LARGEST_COUNT = 2**14 - 1
"""A token that was generated more often counts as if it had been generated this often."""


@dataclass(slots=True)
class _Followed:
    """A request whose counts are on the device, or will be there in this step."""

    history: "ReferenceType[TokenHistory]"
    slot: int
    num_generated: int
    """The number of generated tokens that the table has counted."""


class CountTable:
    """The table on the device, and the slots of the requests in it. The caller launches the kernel that writes it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """`num_slots` is the most requests that one step may sample."""
        self.entries = torch.zeros(num_slots, vocab_size, dtype=torch.int16, device=device)
        """[slots, vocab] twice the number of times that a token was generated, plus 1 if it is in the prompt."""
        self._free = list(range(num_slots))
        self._followed: OrderedDict[int, _Followed] = OrderedDict()  # by the id of the history, the last used last

    def follow(self, specs: Sequence[SampleSpec]) -> list[CountChanges | None]:
        """Returns, for each row, the request's slot and the entries that the step must write; None without penalties.

        Rows of one request get the same. Raises RuntimeError if the step has more requests than the table has slots.
        """
        own = {id(spec.history): spec.history for spec in specs if spec.history is not None}
        changes = {key: self._changes(key, history, own.keys()) for key, history in own.items()}
        return [None if spec.history is None else changes[id(spec.history)] for spec in specs]

    def check_integrity(self) -> None:
        """Checks that each slot is free or belongs to one request. Raises AssertionError if not."""
        taken = [followed.slot for followed in self._followed.values()]
        assert sorted([*taken, *self._free]) == list(range(len(self.entries)))

    def _changes(self, key: int, history: TokenHistory, in_step: Collection[int]) -> CountChanges:
        followed = self._followed.get(key)
        if followed is None or followed.history() is not history:
            if followed is not None:
                self._release(key)
            followed = _Followed(ref(history), self._take_slot(in_step), history.num_generated_tokens)
            self._followed[key] = followed
            self.entries[followed.slot].zero_()
            changed = history.all_counts()
        else:
            changed = history.changed_since(followed.num_generated)
            followed.num_generated = history.num_generated_tokens
            self._followed.move_to_end(key)
        pairs = [(token, 2 * min(count, _LARGEST_COUNT) + is_prompt) for token, count, is_prompt in changed]
        return CountChanges(followed.slot, np.array(pairs, dtype=np.int32).reshape(-1, 2))

    def _take_slot(self, in_step: Collection[int]) -> int:
        """Returns a free slot. If there is none, takes the slot of the request that was not used for longest."""
        if not self._free:
            oldest = next((key for key in self._followed if key not in in_step), None)
            if oldest is None:
                raise RuntimeError(f"the step has penalties for more than {len(self.entries)} requests")
            self._release(oldest)
        return self._free.pop()

    def _release(self, key: int) -> None:
        self._free.append(self._followed.pop(key).slot)
