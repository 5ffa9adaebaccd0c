"""Remembers what a draft head has read of the texts of running requests, and divides its pages among them.

    token         0     1     2     3     4        token 3 is the last that the served model has computed
    features      f0    f1    f2    f3    (g2)     of the served model up to token 3; behind them the head's own outputs
    pairs        (0,1) (1,2) (2,3) (3,4)           pair p joins the features of token p and token p + 1

Owns the pages and these records; the features and the KV of the pairs are in the pages. Positions here count from the
first token of a text that the head has features of: a text begins late if its prefix was cached, or if its pages were
taken. Never computes anything.
Invariant: each page belongs to one text or is free.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.step import RequestSlice
from graftwork.engine.core.tiers import PageId
from graftwork.engine.speculative.draft_model import DraftContext
from graftwork.platform.ids import RequestId


@dataclass(slots=True)
class HeadText:
    """The text of one request, as far as the head has read it."""

    first: int
    """The position in the request of this text's token 0."""
    featured: list[int | None] = field(default_factory=list)
    """The tokens whose features are those of the served model. None: a token that only the device knew then."""
    num_known: int = 0
    """How many of `featured` certainly are tokens of the request: those behind were drafts when they were computed."""
    paired: list[int] = field(default_factory=list)
    """The second token of each pair whose KV is computed."""
    num_true: int = 0
    """How many pairs were computed from the served model's features. Those behind began with the head's own output."""
    pages: list[PageId] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position in the request behind the last token with features."""
        return self.first + len(self.featured)

    def restart(self, position: int) -> list[PageId]:
        """Forgets everything, so that the text begins at a position of the request. Returns the pages it had."""
        pages, self.pages = self.pages, []
        self.first, self.featured, self.num_known, self.paired, self.num_true = position, [], 0, [], 0
        return pages

    def extend(self, piece: RequestSlice) -> None:
        """Notes that the served model has computed the tokens of a slice, which begins within or right behind the text."""
        start = piece.start - self.first
        self.featured[start:] = (None,) if piece.awaits_token else piece.token_ids
        self.num_known = piece.known_end - self.first
        self.num_true = min(self.num_true, start)
        del self.paired[self.num_true :]

    def num_features(self, context: DraftContext) -> int:
        """Returns how many tokens of the request have features of the served model here."""
        known = context.token_ids
        count, most = self.num_known, min(len(self.featured), len(known) - self.first)
        while count < most and self.featured[count] in (None, known[self.first + count]):
            count += 1
        return min(count, most)

    def follows(self, context: DraftContext) -> bool:
        """Returns whether features reach to the token before the last of the request, so that guesses can go on."""
        return 0 < self.num_features(context) == len(context.token_ids) - 1 - self.first

    def num_paired(self, context: DraftContext) -> int:
        """Returns how many of the first pairs need not be computed again. The text must follow the context."""
        num_features = len(context.token_ids) - 1 - self.first
        if self.num_true < num_features:
            return self.num_true
        count, drafted = self.num_true, context.drafted
        for token, own in zip(drafted, self.paired[num_features:], strict=False):
            if token != own:
                break
            count += 1
        return count

    def num_pairs(self, context: DraftContext) -> int:
        """Returns the number of pairs of which the last gives the guess behind a context."""
        return context.num_tokens - self.first - 1

    def second_tokens(self, context: DraftContext, start: int, end: int) -> tuple[int, ...]:
        """Returns the second tokens of the pairs [start, end)."""
        start, end, num_known = start + self.first + 1, end + self.first + 1, len(context.token_ids)
        drafted = context.drafted[max(start - num_known, 0) : max(end - num_known, 0)]
        return (*context.token_ids[start:end], *drafted)


class HeadTexts:
    """The texts of all running requests, and the pages of a draft head."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = [PageId(page) for page in reversed(range(num_pages))]
        self._texts: OrderedDict[RequestId, HeadText] = OrderedDict()
        """The text that was read longest ago first."""

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def get(self, request_id: RequestId) -> HeadText | None:
        return self._texts.get(request_id)

    def forget(self, request_id: RequestId) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free.extend(text.pages)

    def clear(self) -> None:
        """Forgets all texts."""
        for request_id in list(self._texts):
            self.forget(request_id)

    def read(self, slices: Sequence[RequestSlice]) -> None:
        """Notes that the served model has computed a step, and gives texts pages for the features of its tokens.

        A text for whose tokens there are no pages begins anew with the last of them that have some.
        """
        served = {piece.request_id for piece in slices}
        for piece in slices:
            text = self._texts.get(piece.request_id)
            if text is None:
                text = self._texts[piece.request_id] = HeadText(piece.start)
            self._texts.move_to_end(piece.request_id)
            if not text.first <= piece.start <= text.end:
                self._free.extend(text.restart(piece.start))
            if self.grow(text, piece.end - text.first, served):
                text.extend(piece)
            else:
                self._restart(text, piece)

    def _restart(self, text: HeadText, piece: RequestSlice) -> None:
        """Begins a text anew with the last tokens of a slice, as many as have room in free pages."""
        self._free.extend(text.restart(piece.end))
        num_tokens = min(len(self._free) * self.page_tokens, piece.num_known) if piece.num_drafts == 0 else 0
        if num_tokens:
            text.first = piece.end - num_tokens
            text.featured.extend((None,) if piece.awaits_token else piece.token_ids[-num_tokens:])
            text.num_known = num_tokens
            self.grow(text, num_tokens, ())

    def grow(self, text: HeadText, num_tokens: int, served: Collection[RequestId]) -> bool:
        """Gives a text the pages for its first tokens. Returns whether there were enough.

        Takes them from texts that are not `served` in this step, the one first that was read longest ago; then from the
        texts with the most pages, if they have more than their part. These begin anew.
        """
        num_lacking = pages_for(num_tokens, self.page_tokens) - len(text.pages)
        if num_lacking <= 0:
            return True
        if pages_for(num_tokens, self.page_tokens) > self.num_pages:
            return False
        while len(self._free) < num_lacking:
            victim = self._victim(text, served)
            if victim is None:
                return False
            self._free.extend(victim.restart(victim.end))
        text.pages.extend(self._free.pop() for _ in range(num_lacking))
        return True

    def _victim(self, text: HeadText, served: Collection[RequestId]) -> HeadText | None:
        others = [(key, one) for key, one in self._texts.items() if one is not text and one.pages]
        idle = next((one for key, one in others if key not in served), None)
        if idle is not None or not others:
            return idle
        largest = max((one for _, one in others), key=lambda one: len(one.pages))
        part = self.num_pages // len(self._texts)
        return largest if len(largest.pages) > max(part, len(text.pages)) else None

    def check_integrity(self) -> None:
        """Checks that each page belongs to one text or is free, and that texts have room in their pages."""
        held = [page for text in self._texts.values() for page in text.pages]
        assert sorted(held + self._free) == list(range(self.num_pages)), "a page is lost, or has two owners"
        for text in self._texts.values():
            assert text.num_known <= len(text.featured) <= len(text.pages) * self.page_tokens
            assert text.num_true <= len(text.paired) <= len(text.pages) * self.page_tokens
