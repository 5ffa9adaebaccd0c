"""Tests of the numbering of events, and of the feed that readers follow."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.platform.ids import CallId, SessionId, TurnId
from graftwork.sessions.core.events import (
    EventDraft,
    EventFeed,
    EventType,
    SessionEvent,
    add_draft,
    number_events,
    output_text_delta,
    tool_call_arguments_delta,
    turn_created,
)

SESSION, TURN = SessionId("ses_1"), TurnId("turn_1")
drafts = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=3).map(output_text_delta),
        st.builds(
            tool_call_arguments_delta, st.sampled_from([CallId("call_1"), CallId("call_2")]), st.text(max_size=3)
        ),
        st.just(turn_created(None)),
    )
)


def events(first: int, last: int) -> tuple[SessionEvent, ...]:
    return number_events([output_text_delta("x")] * (last - first + 1), SESSION, TURN, last)


def test_payload_begins_with_the_four_that_all_events_have() -> None:
    """Type, number, session and turn come first, then the event's own fields."""
    (event,) = number_events([output_text_delta("Hi")], SESSION, TURN, 7)

    assert list(event.data().items()) == [
        ("type", "output_text.delta"),
        ("seq", 7),
        ("session_id", SESSION),
        ("turn_id", TURN),
        ("delta", "Hi"),
    ]


def test_numbers_end_with_the_last() -> None:
    """Drafts that are numbered together get consecutive numbers."""
    assert [event.seq for event in events(3, 5)] == [3, 4, 5]


@given(drafts)
def test_joining_deltas_keeps_every_character_in_its_place(some: list[EventDraft]) -> None:
    """Joined drafts have the same text as single ones, and no two neighbours could be joined further."""

    def spelled(parts: list[EventDraft]) -> list[tuple[object, object, str]]:
        return [
            (draft.type, draft.fields.get("call_id"), character)
            for draft in parts
            for character in draft.fields.get("delta", "|")
        ]

    joined: list[EventDraft] = []
    for draft in some:
        add_draft(joined, draft)

    assert spelled(joined) == spelled(some)
    for earlier, later in pairwise(joined):
        same = (earlier.type, earlier.fields.get("call_id")) == (later.type, later.fields.get("call_id"))
        assert not same or later.type is EventType.TURN_CREATED


def test_feed_answers_from_where_it_began() -> None:
    """A feed has the events since its start, and answers None for earlier ones."""
    feed = EventFeed(last_seq=4)
    feed.publish(events(5, 6))

    assert feed.after(3) is None
    assert feed.after(4) == events(5, 6)
    assert feed.after(5) == events(6, 6)
    assert feed.after(6) == ()


def test_feed_forgets_the_oldest() -> None:
    """A feed answers None to a reader that is too far behind."""
    feed = EventFeed(last_seq=0, max_events=3)
    feed.publish(events(1, 5))

    assert feed.after(1) is None
    assert feed.after(2) == events(3, 5)


async def test_closed_feed_answers_and_keeps_no_reader_waiting() -> None:
    """A closed feed still has its events, and its next change has happened, for readers of before and after."""
    feed = EventFeed(last_seq=0)
    before = feed.next_change()
    feed.publish(events(1, 2))

    feed.close()

    assert feed.after(0) == events(1, 2)
    assert before.is_set()
    assert feed.next_change().is_set()


def test_feed_takes_no_gap() -> None:
    """A feed asserts that each event has the next number."""
    with pytest.raises(AssertionError):
        EventFeed(last_seq=0).publish(events(2, 2))


async def test_change_that_comes_between_looking_and_waiting_is_seen() -> None:
    """A reader that takes the change before it reads the feed is woken by an event in between."""
    feed = EventFeed(last_seq=0)
    changed = feed.next_change()
    assert feed.after(0) == ()

    feed.publish(events(1, 1))

    assert changed.is_set()
    assert not feed.next_change().is_set()


def test_drafts_that_are_fixed_are_not_joined_to() -> None:
    """A delta after fixed drafts becomes a draft of its own."""
    drafts = [output_text_delta("a")]

    add_draft(drafts, output_text_delta("b"), num_fixed=1)

    assert drafts == [output_text_delta("a"), output_text_delta("b")]
