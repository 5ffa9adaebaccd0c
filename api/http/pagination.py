"""Defines how a request selects a page of a list (`limit`, `after`, `order`), and how the answer shows the page.

Never reads the database.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Query

from graftwork.platform.answers import base as answers
from graftwork.platform.pagination import NUMBER_PATTERN, Order, Page, PageRequest

Item = TypeVar("Item")


class HasId(Protocol):
    """An entry of a list, with an id. To get the next page, a client sends the id of the last entry as `after`."""

    @property
    def id(self) -> str: ...


Shown = TypeVar("Shown", bound=HasId)

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


AfterCursor = Annotated[str | None, Query(max_length=200, pattern="^[ -~]*$")]
"""The id of the last list entry that the client has received. The page starts after this entry."""


NumberCursor = Annotated[str | None, Query(max_length=200, json_schema_extra={"pattern": NUMBER_PATTERN})]
"""An `AfterCursor` of a list whose entries have numbers for ids. The list itself refuses what is no such number."""


def _pages(first: Order, cursor: Any = AfterCursor) -> Any:
    """Returns a dependency that reads which page of a list is wanted. `first` is the order if the client names none."""

    async def page(
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
        after: cursor = None,
        order: Order = first,
    ) -> PageRequest:
        return PageRequest(limit, after, order)

    return Depends(page)


PageQuery = Annotated[PageRequest, _pages(Order.DESCENDING)]
"""A parameter that selects a page of a list. By default the newest entry comes first."""
HistoryPageQuery = Annotated[PageRequest, _pages(Order.ASCENDING)]
"""A parameter that selects a page of a history. By default the oldest entry comes first."""
NumberPageQuery = Annotated[PageRequest, _pages(Order.DESCENDING, NumberCursor)]
"""A `PageQuery` of a list whose entries have numbers for ids."""


def page_answer(page: Page[Item], show: Callable[[Item], Shown]) -> answers.Page[Shown]:
    """Converts a page of stored items to the body of an answer. `show` converts each item."""
    return list_answer([show(item) for item in page.items], has_more=page.has_more)


def list_answer(entries: Sequence[Shown], *, has_more: bool = False) -> answers.Page[Shown]:
    """Returns a page for an answer: these entries, and the ids of the first and the last entry.

    `has_more` says whether another page follows.
    """
    ends = [str(entry.id) for entry in (entries[0], entries[-1])] if entries else [None, None]
    return answers.Page(data=tuple(entries), has_more=has_more, first_id=ends[0], last_id=ends[1])
