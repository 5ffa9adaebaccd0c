"""Plans which states a step reads and writes: for each request, from which state it continues, and through which pages.

The state of a running request is in the page of its last computed token that is no draft. A step changes it in place; where
a page is full, its state stays behind as a snapshot, and the next page begins with a copy. A page that other requests
may read is full, so it is never written.

A draft token may be rejected, and a state cannot go back. So draft tokens are computed with a copy of the state, and what
they give to the recurrence is kept (see draft_inputs.py). The next slice of the request begins after the accepted ones:
they are replayed from what was kept, by the same operations and so with the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graftwork.engine.attention.backend import PlacedSlice
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.recurrence.draft_inputs import DraftInputs


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a slice whose tokens are in one page: the inputs [start, end) of the slice."""

    page: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How the recurrence of one slice runs.

    Its inputs are the replayed tokens, then the slice's own known tokens, then its drafts.
    """

    first_row: int
    """Where the slice's own rows begin in the step."""
    num_rows: int
    replayed: DraftInputs | None
    """What accepted drafts of the request's last slice have given. None if none was accepted."""
    num_replayed: int
    segments: tuple[Segment, ...]
    """The pages through which the state goes. Drafts belong to none."""
    num_drafts: int
    piece: RequestSlice

    @property
    def num_inputs(self) -> int:
        return self.num_replayed + self.num_rows

    @property
    def num_kept(self) -> int:
        """The number of inputs that change the state for good."""
        return self.num_inputs - self.num_drafts


def plan_slice(one: PlacedSlice, kept: DraftInputs | None, page_tokens: int) -> SlicePlan:
    """Returns how a slice runs. `kept` is what the drafts of the request's last slice have given, if it had some."""
    piece = one.piece
    starts_page = piece.start % page_tokens == 0
    replayed = None if kept is None or starts_page or not kept.precedes(piece) else kept
    num_replayed = 0 if replayed is None else piece.start - replayed.position
    segments = tuple(_segments(piece.pages, piece.start - num_replayed, piece.known_end, page_tokens))
    return SlicePlan(
        first_row=one.start_row,
        num_rows=piece.num_tokens,
        replayed=replayed,
        num_replayed=num_replayed,
        segments=segments,
        num_drafts=piece.num_drafts,
        piece=piece,
    )


def page_before(plan: SlicePlan, page_tokens: int) -> int | None:
    """Returns the page whose state the slice's first page begins with. None if its state is that of the first page itself, or
    if the slice begins the prompt.
    """
    position = plan.piece.start - plan.num_replayed
    if position == 0 or position % page_tokens:
        return None
    return plan.piece.pages[position // page_tokens - 1]


def _segments(pages: Sequence[int], start: int, end: int, page_tokens: int) -> Iterator[Segment]:
    first = start
    while first < end:
        page = first // page_tokens
        last = min((page + 1) * page_tokens, end)
        yield Segment(pages[page], first - start, last - start)
        first = last
