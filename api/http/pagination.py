"""Pages of lists: how requests ask for them by `limit`, `after` and `order`, and how answers show them."""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

from fastapi import Depends, Query

from graftwork.platform.answers import base as answers
from graftwork.platform.pagination import Order, Page, PageRequest

Item = TypeVar("Item")


class HasId(Protocol):
    """An answer with an id, which is a list's cursor."""

    @property
    def id(self) -> str: ...


Shown = TypeVar("Shown", bound=HasId)

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


AfterCursor = Annotated[str | None, Query(max_length=200, pattern="^[ -~]*$")]
"""The id of the last entry that was seen."""


async def _page_request(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: AfterCursor = None,
    order: Order = Order.DESCENDING,
) -> PageRequest:
    return PageRequest(limit, after, order)


async def _page_of_a_history(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: AfterCursor = None,
    order: Order = Order.ASCENDING,
) -> PageRequest:
    return PageRequest(limit, after, order)


PageQuery = Annotated[PageRequest, Depends(_page_request)]
"""Newest first unless asked otherwise."""
HistoryPageQuery = Annotated[PageRequest, Depends(_page_of_a_history)]
"""Oldest first unless asked otherwise, as a history is read."""


def page_answer(page: Page[Item], show: Callable[[Item], Shown]) -> answers.Page[Shown]:
    """Show each item of a page."""
    return list_answer([show(item) for item in page.items], has_more=page.has_more)


def list_answer(entries: Sequence[Shown], *, has_more: bool = False) -> answers.Page[Shown]:
    """A list of entries that have ids, which `after` takes."""
    ends = [str(entry.id) for entry in (entries[0], entries[-1])] if entries else [None, None]
    return answers.Page(data=tuple(entries), has_more=has_more, first_id=ends[0], last_id=ends[1])
