"""The draft of one request: its order, its length, and what is learned from it."""

from dataclasses import dataclass

from graftwork.engine.speculative.draft import Draft, DraftSource, DraftSpan
from graftwork.engine.speculative.draft_budget import DraftBackoff
from graftwork.engine.speculative.lookup import PromptLookup
from graftwork.engine.speculative.request_drafts import AcceptanceRates, DraftCounts, RequestDrafts

END = 99
TEXT = [7, 8, 9, 1, 2, 3, 4, 5, END, 6]


@dataclass
class ForcedTokens:
    """A constraint that forces some tokens and allows those below a bound."""

    forced: tuple[int, ...]
    below: int = 1000

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        return self.forced[:max_tokens]

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        return next((place for place, token in enumerate(token_ids) if token >= self.below), len(token_ids))


def drafts_of(tokens: list[int], constraint: ForcedTokens | None = None) -> RequestDrafts:
    lookups = (PromptLookup(tokens),)
    return RequestDrafts(tokens, frozenset({END}), AcceptanceRates(), lookups, constraint=constraint)


def test_a_draft_ends_with_the_answer() -> None:
    """A draft is cut behind a stop token, even if the text that was found continues."""
    drafts = drafts_of([*TEXT, 7, 8, 9])

    drafts.propose(10)

    assert drafts.draft.token_ids == (1, 2, 3, 4, 5, END)


def test_lookup_continues_behind_forced_tokens() -> None:
    """The constraint forces three tokens, and the lookup continues with what followed them before."""
    drafts = drafts_of([*TEXT, 50], ForcedTokens((7, 8, 9)))

    drafts.propose(6)

    assert drafts.draft.token_ids == (7, 8, 9, 1, 2, 3)
    assert [span.source for span in drafts.draft.spans] == [DraftSource.GRAMMAR, DraftSource.SESSION]


def test_forbidden_tokens_are_not_drafted() -> None:
    """A draft is cut before the first token that the constraint forbids."""
    drafts = drafts_of([*TEXT, 7, 8, 9], ForcedTokens((), below=4))

    drafts.propose(6)

    assert drafts.draft.token_ids == (1, 2, 3)


def test_verified_drafts_are_counted_by_result() -> None:
    """Of five verified tokens three are accepted, two of them forced."""
    tokens = [0]
    drafts = drafts_of(tokens)
    drafts.draft = Draft((DraftSpan(DraftSource.GRAMMAR, 0, (1, 2)), DraftSpan(DraftSource.SESSION, 8, (3, 4, 5))))
    tokens += [1, 2, 3, 70]

    news = drafts.learn(num_verified=5, num_taken=4)

    assert news == drafts.counts == DraftCounts(drafted=5, accepted=3, forced=2)
    assert len(drafts.draft) == 0


def test_a_draft_that_was_not_verified_is_learned_from() -> None:
    """The sampled token shows whether the first draft token was right, so rates are learned before rows are spent."""
    tokens = [0]
    drafts = drafts_of(tokens)
    before = drafts.rates.rate(DraftSource.SESSION, 8)
    for token in range(20):
        drafts.draft = Draft((DraftSpan(DraftSource.SESSION, 8, (token,)),))
        tokens.append(token)
        assert drafts.learn(num_verified=0, num_taken=1) == DraftCounts()

    assert before < 0.8
    assert drafts.rates.rate(DraftSource.SESSION, 8) > 0.9


def test_a_request_has_rates_of_its_own_and_passes_them_on() -> None:
    """A request whose drafts fail lowers its rates at once; a new request starts from the rates of all requests."""
    engine = AcceptanceRates()
    good, bad = AcceptanceRates(engine), AcceptanceRates(engine)
    for _ in range(200):
        good.record(DraftSource.SESSION, 8, is_accepted=True)
    for _ in range(12):
        bad.record(DraftSource.SESSION, 8, is_accepted=False)

    assert bad.rate(DraftSource.SESSION, 8) < 0.35
    assert good.rate(DraftSource.SESSION, 8) > 0.95
    assert 0.8 < AcceptanceRates(engine).rate(DraftSource.SESSION, 8) < 0.97


def test_drafting_pauses_where_it_costs_more_than_it_gains() -> None:
    """Without gain, drafting is tried once in 64 steps; with gain, or in a batch of half the size, in every step."""
    backoff = DraftBackoff()

    def tries(num_requests: int, gain: float, steps: int) -> int:
        count = 0
        for _ in range(steps):
            if backoff.should_draft(num_requests):
                count += 1
                backoff.record(num_requests, gain, 0.02)
        return count

    at_first = tries(32, 0.0, 300)
    resting = tries(32, 0.0, 640)
    is_called_in_a_smaller_batch = backoff.should_draft(16)
    gaining = tries(16, 0.3, 100)

    assert at_first < 30
    assert resting == 10
    assert is_called_in_a_smaller_batch
    assert gaining > 90
