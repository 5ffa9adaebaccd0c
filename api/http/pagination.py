"""Defines how a request selects a page of a list (`limit`, `after`, `order`), and how the answer shows the page.

Never reads the database.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

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


async def _page_of_numbers(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: NumberCursor = None,
    order: Order = Order.DESCENDING,
) -> PageRequest:
    return PageRequest(limit, after, order)


PageQuery = Annotated[PageRequest, Depends(_page_request)]
"""A parameter that selects a page of a list. By default the newest entry comes first."""
HistoryPageQuery = Annotated[PageRequest, Depends(_page_of_a_history)]
"""A parameter that selects a page of a history. By default the oldest entry comes first."""
NumberPageQuery = Annotated[PageRequest, Depends(_page_of_numbers)]
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
