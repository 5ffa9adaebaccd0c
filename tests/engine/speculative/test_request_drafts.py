"""One sequence's guesses: in what order, how far, and what is learned from them."""

from dataclasses import dataclass

from graftwork.engine.speculative.acceptance import AcceptanceRates
from graftwork.engine.speculative.draft import Draft, DraftSource, DraftSpan
from graftwork.engine.speculative.draft_budget import DraftBackoff
from graftwork.engine.speculative.lookup import PromptLookup
from graftwork.engine.speculative.request_drafts import DraftCounts, RequestDrafts

END = 99
TEXT = [7, 8, 9, 1, 2, 3, 4, 5, END, 6]


@dataclass
class Spelling:
    """A constraint that spells out some tokens and allows those below a bound."""

    forced: tuple[int, ...]
    below: int = 1000

    def forced_token_ids(self, max_tokens: int) -> tuple[int, ...]:
        return self.forced[:max_tokens]

    def allowed_length(self, token_ids: tuple[int, ...]) -> int:
        return next((place for place, token in enumerate(token_ids) if token >= self.below), len(token_ids))


def drafts_of(tokens: list[int], constraint: Spelling | None = None) -> RequestDrafts:
    lookups = (PromptLookup(tokens),)
    return RequestDrafts(tokens, frozenset({END}), AcceptanceRates(), lookups, constraint=constraint)


def test_a_guess_ends_with_the_answer() -> None:
    """Behind a stop token there is nothing to verify, though the text that was found goes on."""
    drafts = drafts_of([*TEXT, 7, 8, 9])

    drafts.propose(10)

    assert drafts.draft.token_ids == (1, 2, 3, 4, 5, END)


def test_lookup_goes_on_where_forced_text_ends() -> None:
    """The constraint spells three tokens, and the session knows what stood behind them."""
    drafts = drafts_of([*TEXT, 50], Spelling((7, 8, 9)))

    drafts.propose(6)

    assert drafts.draft.token_ids == (7, 8, 9, 1, 2, 3)
    assert [span.source for span in drafts.draft.spans] == [DraftSource.GRAMMAR, DraftSource.SESSION]


def test_what_a_constraint_forbids_is_not_guessed() -> None:
    """A guess is cut before the first token that may not stand there."""
    drafts = drafts_of([*TEXT, 7, 8, 9], Spelling((), below=4))

    drafts.propose(6)

    assert drafts.draft.token_ids == (1, 2, 3)


def test_verified_guesses_are_counted_by_what_came() -> None:
    """Of five verified, three came; two of those were spelled out."""
    tokens = [0]
    drafts = drafts_of(tokens)
    drafts.draft = Draft((DraftSpan(DraftSource.GRAMMAR, 0, (1, 2)), DraftSpan(DraftSource.SESSION, 8, (3, 4, 5))))
    tokens += [1, 2, 3, 70]

    news = drafts.learn(num_verified=5, num_taken=4)

    assert news == drafts.counts == DraftCounts(drafted=5, accepted=3, forced=2)
    assert len(drafts.draft) == 0


def test_a_guess_that_was_not_verified_is_scored_all_the_same() -> None:
    """The step's own choice tells whether the first token was right, so that rates are learned before rows are spent."""
    tokens = [0]
    drafts = drafts_of(tokens)
    before = drafts.rates.rate(DraftSource.SESSION, 8)
    for token in range(20):
        drafts.draft = Draft((DraftSpan(DraftSource.SESSION, 8, (token,)),))
        tokens.append(token)
        assert drafts.learn(num_verified=0, num_taken=1) == DraftCounts()

    assert before < 0.8
    assert drafts.rates.rate(DraftSource.SESSION, 8) > 0.9


def test_a_sequence_trusts_its_own_record_and_lends_it_to_the_next() -> None:
    """Where one sequence's guesses fail it stops believing them at once; a new one begins with what all have seen."""
    engine = AcceptanceRates()
    good, bad = AcceptanceRates(engine), AcceptanceRates(engine)
    for _ in range(200):
        good.record(DraftSource.SESSION, 8, is_accepted=True)
    for _ in range(12):
        bad.record(DraftSource.SESSION, 8, is_accepted=False)

    assert bad.rate(DraftSource.SESSION, 8) < 0.35
    assert good.rate(DraftSource.SESSION, 8) > 0.95
    assert 0.8 < AcceptanceRates(engine).rate(DraftSource.SESSION, 8) < 0.97


def test_guessing_rests_where_it_costs_more_than_it_gains() -> None:
    """Without any gain it is tried once in 64 steps; with a gain, or in half the batch, in every step again."""
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
