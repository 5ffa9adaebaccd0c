"""A draft model for the hash model, whose guesses are mostly right."""

from collections.abc import Sequence

from graftwork.engine.core.requests import EngineRequest
from graftwork.engine.core.step import SampleSpec
from graftwork.engine.speculative.draft_model import DraftContext, Guess, GuessPass
from graftwork.platform.ids import RequestId
from tests.engine.hash_model import CONTEXT, Tokens, chosen


class HashDraftModel:
    """A DraftModel that gives the next token of the hash model without its grammar and penalties, so mostly the right one.

    It asserts that it is asked only for what the request has got so far.
    """

    relative_cost = 0.01

    def __init__(self, requests: dict[RequestId, EngineRequest]) -> None:
        self.texts: dict[RequestId, Tokens] = {}
        """The text of each request that it was last asked about, without draft tokens."""
        self._requests = requests

    def reaches(self, context: DraftContext, max_tokens: int) -> bool:
        return context.num_tokens + max_tokens < CONTEXT

    def num_missing(self, context: DraftContext) -> int:
        return max(context.num_tokens - len(self.texts.get(context.request_id, ())), 1)

    def guess(self, contexts: Sequence[DraftContext]) -> GuessPass:
        num_rows = sum(map(self.num_missing, contexts))
        return GuessPass(tuple(map(self._guess, contexts)), num_rows)

    def _guess(self, context: DraftContext) -> Guess | None:
        request, known = self._requests[context.request_id], tuple(context.token_ids)
        before = self.texts.get(context.request_id, request.prompt_token_ids)
        assert known[: len(before)] == before, "a token of a request has changed"
        self.texts[context.request_id] = known
        text = (*known, *context.drafted)
        if len(text) % 7 == 6:
            return None
        spec = SampleSpec(context.sampling, context.seed, len(text))
        token = chosen(text, sorted(request.adapter_digests), spec, None)
        return None if token is None else Guess(token if len(text) % 5 else 3, 0.9)

    def forget(self, request_id: RequestId) -> None:
        self.texts.pop(request_id, None)

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
