"""Leaves out the oldest items of a history that does not fit in the context, as OpenAI's `truncation: "auto"` does.

Owns which items may be left out, and how many are. Never changes the stored history: only the prompt is shorter.
System and developer messages always stay. A tool call and its output stay together or go together.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from graftwork.platform.errors import InvalidRequest
from graftwork.sessions.core.items import Item, ItemType
from graftwork.sessions.text.encoding import Prompt

_KEPT_ROLES = ("system", "developer")
_MOST_ROOM = 4
"""The answer gets at most one part of this many of the context, when items are left out to make room for it."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A prompt without the oldest items of its history."""

    token_ids: tuple[int, ...]
    num_dropped: int


@dataclass(frozen=True, slots=True)
class Truncation:
    """Shortens the prompts of one request."""

    encode: Callable[[Prompt], Awaitable[tuple[int, ...]]]
    """Returns the token ids of a prompt. Raises ContextLengthExceeded if the context has fewer tokens."""
    context_tokens: int
    answer_tokens: int | None
    """The client's limit on the answer; None if there is no limit."""

    async def shorten(self, items: Sequence[Item], prompt_of: Callable[[Sequence[Item]], Prompt]) -> Truncated | None:
        """Leaves out as few of the oldest items as are needed. Returns None if even the shortest prompt does not fit.

        Makes room for the whole answer, but not for more than a quarter of the context. If the prompt then still does
        not fit, makes room for one token. The rest begins with a message of the user if such a rest fits.
        """
        cuts = possible_cuts(items)
        of_user = [cut for cut in cuts if items[cut].type is ItemType.MESSAGE and items[cut].body["role"] == "user"]
        quarter = self.context_tokens // _MOST_ROOM
        for room in (min(self.answer_tokens or quarter, quarter), 1):
            for choice in (of_user, cuts):
                found = await self._fewest(items, choice, self.context_tokens - room, prompt_of)
                if found is not None:
                    return found
        return None

    async def _fewest(
        self,
        items: Sequence[Item],
        cuts: Sequence[int],
        most_tokens: int,
        prompt_of: Callable[[Sequence[Item]], Prompt],
    ) -> Truncated | None:
        """Returns the prompt after the first of the cuts that leaves at most `most_tokens`. Searches by halving."""
        low, high, middle = 0, len(cuts), len(cuts) - 1  # the last cut first: if it is too long, all are
        found: Truncated | None = None
        while low < high:
            kept = kept_after(items, cuts[middle])
            token_ids = await self._encoded(prompt_of(kept))
            if token_ids is not None and len(token_ids) <= most_tokens:
                found, high = Truncated(token_ids, len(items) - len(kept)), middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return found

    async def _encoded(self, prompt: Prompt) -> tuple[int, ...] | None:
        """Returns the token ids of a prompt; None if it is too long, or if the chat template refuses its messages."""
        try:
            return await self.encode(prompt)
        except InvalidRequest:
            return None


def possible_cuts(items: Sequence[Item]) -> list[int]:
    """Returns the indexes of the items with which the rest of a history may begin, in order.

    No tool call before such an index has its output after it, and at least one item before it can be left out.
    """
    cuts: list[int] = []
    waiting: set[str] = set()
    may_drop = False
    for index, item in enumerate(items):
        if _always_stays(item):
            continue
        if may_drop and not waiting:
            cuts.append(index)
        may_drop = True
        if item.is_call:
            waiting.add(item.call_id)
        elif item.is_output:
            waiting.discard(item.call_id)
    return cuts


def kept_after(items: Sequence[Item], cut: int) -> tuple[Item, ...]:
    """Returns the items from the index `cut` on, after the system and developer messages before it."""
    return (*filter(_always_stays, items[:cut]), *items[cut:])


def _always_stays(item: Item) -> bool:
    return item.type is ItemType.MESSAGE and item.body["role"] in _KEPT_ROLES
