"""Lists as the API shows them: `{object, data, has_more, first_id, last_id}`, asked for by `limit`, `after`, `order`."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query

from graftwork.platform.pagination import Order, Page, PageRequest

Item = TypeVar("Item")

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


async def _page_request(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: Annotated[str | None, Query(max_length=200)] = None,
    order: Order = Order.DESCENDING,
) -> PageRequest:
    return PageRequest(limit, after, order)


async def _page_of_a_history(
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT,
    after: Annotated[str | None, Query(max_length=200)] = None,
    order: Order = Order.ASCENDING,
) -> PageRequest:
    return PageRequest(limit, after, order)


AskedPage = Annotated[PageRequest, Depends(_page_request)]
"""Newest first unless asked otherwise."""
AskedHistoryPage = Annotated[PageRequest, Depends(_page_of_a_history)]
"""Oldest first unless asked otherwise, as a history is read."""


def list_body(page: Page[Item], show: Callable[[Item], dict[str, Any]], cursor: str = "id") -> dict[str, Any]:
    """`cursor` is the field that `after` names; lists of things without one have null ends."""
    data = [show(item) for item in page.items]
    return {
        "object": "list",
        "data": data,
        "has_more": page.has_more,
        "first_id": data[0].get(cursor) if data else None,
        "last_id": data[-1].get(cursor) if data else None,
    }
