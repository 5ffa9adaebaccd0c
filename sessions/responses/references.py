"""Replaces the item references in the input of a response with copies of the stored items.

A client that does not send its history again names the items of earlier answers by their ids. Owns the rule which item
an id names. Never changes a stored item: the copy gets an id of its own, because each item belongs to one history.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from graftwork.platform.errors import NotFound, PayloadTooLarge
from graftwork.platform.ids import ItemId
from graftwork.platform.tenancy.principals import TenantScope
from graftwork.sessions.core.items import Item, copied
from graftwork.sessions.store.session_store import SessionStore

_LATER_PART = re.compile(r"(msg_[^_]+)_\d+")
"""The id of a message that follows a call in a streamed answer. The history has its text in the answer's first message.
"""


_MOST_CHARACTERS = 8 * 1024 * 1024
"""The most characters of the items that the references of one request name, as their JSON. A reference is short, so
without this limit a small request could copy gigabytes."""


@dataclass(frozen=True, slots=True)
class ItemReference:
    """An entry of an input that names a stored item by its id."""

    item_id: str
    param: str
    """The path of the entry in the request body, such as `input[1]`."""


InputEntry = Item | ItemReference
"""One entry of the input of a response, or of a new conversation."""


async def resolve_references(
    store: SessionStore, scope: TenantScope, entries: Sequence[InputEntry]
) -> tuple[Item, ...]:
    """Returns the entries with a copy of the stored item for each reference.

    Raises NotFound for an id that no stored item of the tenant has. The error names the entry. Raises PayloadTooLarge
    before it reads an item if the copies would be longer than a request's body may be.
    """
    wanted = {entry.item_id for entry in entries if isinstance(entry, ItemReference)}
    if not wanted:
        return tuple(entry for entry in entries if isinstance(entry, Item))
    candidates = sorted({*wanted, *map(_first_part, wanted)})
    found = await store.find_items(scope, candidates, partial(_check_sizes, entries))
    resolved: list[Item] = []
    for entry in entries:
        if isinstance(entry, Item):
            resolved.append(entry)
        elif not _follows_first_part(entry.item_id, wanted, found):
            resolved.append(copied(_named(entry, found)))
    return tuple(resolved)


def _check_sizes(entries: Sequence[InputEntry], sizes: Mapping[ItemId, int]) -> None:
    num_characters = 0
    for entry in entries:
        if isinstance(entry, ItemReference):
            size = sizes.get(ItemId(entry.item_id)) or sizes.get(ItemId(_first_part(entry.item_id)), 0)
            num_characters += size
            if num_characters > _MOST_CHARACTERS:
                raise PayloadTooLarge(
                    f"{entry.param}: the items that the references name have more than {_MOST_CHARACTERS} characters "
                    "together: name fewer items.",
                    param=entry.param,
                )


def _first_part(item_id: str) -> str:
    later = _LATER_PART.fullmatch(item_id)
    return item_id if later is None else later[1]


def _follows_first_part(item_id: str, wanted: set[str], found: Mapping[ItemId, Item]) -> bool:
    """Returns whether the item's text is in the answer's first message, and the input has that message too."""
    return item_id not in found and _first_part(item_id) != item_id and _first_part(item_id) in wanted


def _named(reference: ItemReference, found: Mapping[ItemId, Item]) -> Item:
    item = found.get(ItemId(reference.item_id)) or found.get(ItemId(_first_part(reference.item_id)))
    if item is None:
        raise NotFound(
            f"{reference.param}: there is no stored item {reference.item_id!r}. Items of responses with store=false, "
            "of failed and of deleted responses are not stored: send the item itself.",
            param=f"{reference.param}.id",
            code="item_not_found",
        )
    return item
