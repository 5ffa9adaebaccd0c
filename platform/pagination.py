"""One page of a list, by cursor: the id of the last item seen, since ids sort by the time they were made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Order(StrEnum):
    """Oldest first, or newest first."""

    ASCENDING = "asc"
    DESCENDING = "desc"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The page that a caller asks for."""

    limit: int = 20
    """Items at most, from 1 to 100."""
    after: str | None = None
    """The page begins after this id. None begins at the start."""
    order: Order = Order.DESCENDING


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some items in the order asked for."""

    items: tuple[Item, ...]
    has_more: bool


def page_of(items: Sequence[Item], request: PageRequest, cursor: Callable[[Item], str]) -> Page[Item]:
    """Cut a page out of a whole list, which is sorted oldest first. An unknown `after` begins at the start."""
    ordered = list(items) if request.order is Order.ASCENDING else list(reversed(items))
    starts = [index + 1 for index, item in enumerate(ordered) if cursor(item) == request.after]
    return cut(ordered[max(starts, default=0) :], request)


def cut(found: Sequence[Item], request: PageRequest) -> Page[Item]:
    """Cut `found` to the limit. It was fetched with one item more than the limit, which tells whether more follow."""
    return Page(tuple(found[: request.limit]), has_more=len(found) > request.limit)


FIRST_PAGE = PageRequest()
"""The newest items, as many as a page holds by default."""
