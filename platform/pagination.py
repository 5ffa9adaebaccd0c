"""Cuts lists into pages. A page begins after the id of the last item that the caller has seen.

Ids sort by the time they were made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Order(StrEnum):
    """The order of a list: oldest first, or newest first."""

    ASCENDING = "asc"
    DESCENDING = "desc"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The page that a caller asks for."""

    limit: int = 20
    """The most items of a page, from 1 to 100."""
    after: str | None = None
    """The page begins after this id. None begins at the start."""
    order: Order = Order.DESCENDING


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a list: items in the order that the caller asked for."""

    items: tuple[Item, ...]
    has_more: bool


def page_of(items: Sequence[Item], request: PageRequest, cursor: Callable[[Item], str]) -> Page[Item]:
    """Returns a page of a list that is sorted oldest first. If `after` is an unknown id, begins at the start."""
    ordered = list(items) if request.order is Order.ASCENDING else list(reversed(items))
    starts = [index + 1 for index, item in enumerate(ordered) if cursor(item) == request.after]
    return cut(ordered[max(starts, default=0) :], request)


def cut(found: Sequence[Item], request: PageRequest) -> Page[Item]:
    """Returns a page with the first items of `found`, up to the limit.

    The caller asks the database for one item more than the limit. If `found` has that item, more items follow the page.
    """
    return Page(tuple(found[: request.limit]), has_more=len(found) > request.limit)


FIRST_PAGE = PageRequest()
"""The first page by default: the newest items, at most 20."""
