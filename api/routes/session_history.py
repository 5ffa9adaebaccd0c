"""Defines the routes that read a session's items, its turns, its events, and the state of its cache."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from graftwork.api.deps.read_streams import read_stream
from graftwork.api.deps.resources import ForSessions, ReadingKey
from graftwork.api.deps.route_classes import NativeRoute
from graftwork.api.http.pagination import HistoryPageQuery, PageQuery, page_answer
from graftwork.api.http.streaming import EventStream, write_session_events
from graftwork.api.openapi.declare import also
from graftwork.platform.answers.base import Page
from graftwork.platform.answers.sessions import Item, SessionCache, Turn
from graftwork.sessions.core.views import item_answer, session_cache_answer, turn_answer

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["sessions"], route_class=NativeRoute)

Sequence = Annotated[int, Query(ge=0, lt=1 << 62)]
LastSeen = Annotated[int | None, Header(ge=0, lt=1 << 62)]


@router.get("/items")
async def list_session_items(
    session_id: str, resources: ForSessions, principal: ReadingKey, page: HistoryPageQuery
) -> Page[Item]:
    """List the items of the session's history up to its head, which is the latest checkpoint."""
    return page_answer(await resources.sessions.items(principal, session_id, page), item_answer)


@router.get("/turns")
async def list_session_turns(
    session_id: str, resources: ForSessions, principal: ReadingKey, page: PageQuery
) -> Page[Turn]:
    """List the turns that the session itself has run, with their tokens and cache figures. The newest comes first.

    A fork does not list the turns that it shares with its parent.
    """
    return page_answer(await resources.sessions.list_turns(principal, session_id, page), turn_answer)


@router.get("/events", response_class=StreamingResponse, responses=also(stream="session"))
async def follow_session_events(
    session_id: str,
    resources: ForSessions,
    principal: ReadingKey,
    after: Sequence = 0,
    last_event_id: LastSeen = None,
) -> EventStream:
    """Stream the session's events with numbers above `after` and above `Last-Event-ID`.

    First send the stored events. Then follow the running turn until it ends.
    """
    seen = max(after, last_event_id or 0)
    events = await resources.sessions.events(principal, session_id, seen)
    return read_stream(resources.work, principal, partial(write_session_events, events))


@router.get("/cache")
async def get_session_cache(session_id: str, resources: ForSessions, principal: ReadingKey) -> SessionCache:
    """Get how much of the session's history each cache tier has.

    Also get the number of prompt tokens that the latest turn had to compute, because the cache did not have them.
    """
    session, memory = await resources.sessions.read_cache(principal, session_id)
    return session_cache_answer(session, memory, resources.clock.now())
