"""Divides lists into pages. A request names the id of the last item that the caller has seen, and gets the items after
it.

This works because ids sort by the time of their creation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Item = TypeVar("Item")

NUMBER_PATTERN = "^[0-9]{1,9}$"
"""The form of `PageRequest.after` in lists whose items have numbers for ids."""


class Order(StrEnum):
    """The order of a list: oldest first, or newest first."""

    ASCENDING = "asc"
    DESCENDING = "desc"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The part of a list that a caller asks for: how many items, after which id, and in which order."""

    limit: int = 20
    """The most items of a page, from 1 to 100."""
    after: str | None = None
    """The id of the last item that the caller has seen. The page begins with the next item. None begins with the first
    item.
    """
    order: Order = Order.DESCENDING


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a list, in the order that the caller asked for. `has_more` tells whether more items follow the page."""

    items: tuple[Item, ...]
    has_more: bool


def page_of(items: Sequence[Item], request: PageRequest, cursor: Callable[[Item], str]) -> Page[Item]:
    """Returns one page of `items`, which must be sorted oldest first. `cursor` returns the id of an item.

    If no item has the id `request.after`, the page begins with the first item.
    """
    ordered = list(items) if request.order is Order.ASCENDING else list(reversed(items))
    starts = [index + 1 for index, item in enumerate(ordered) if cursor(item) == request.after]
    return cut(ordered[max(starts, default=0) :], request)


def cut(found: Sequence[Item], request: PageRequest) -> Page[Item]:
    """Returns a page with at most `request.limit` items: the first items of `found`.

    The caller reads one item more than the limit from the database. If `found` has this extra item, `has_more` is true.
    """
    return Page(tuple(found[: request.limit]), has_more=len(found) > request.limit)


FIRST_PAGE = PageRequest()
"""The first page by default: the newest items, at most 20."""
