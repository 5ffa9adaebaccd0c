"""Tests of log-probabilities: which text delta carries them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason
from graftwork.engine.core.sampling import SamplingParams
from graftwork.sessions.generation.generator import GenerationEvent, GenerationFinished, TextDelta
from graftwork.sessions.generation.logprobs import OutputTokenLogprobs
from tests.hypothesis_profiles import examples
from tests.sessions.generation.test_generator import CALL, END, events_of, finished, one_by_one, request, spelled
from tests.sessions.scripted_engine import ScriptedEngine, logprobs_of

SCORED = SamplingParams(max_tokens=99, logprobs=2)


def told(events: list[GenerationEvent]) -> list[OutputTokenLogprobs]:
    """The log-probabilities in the order of a stream: those of the deltas, then the rest."""
    with_text = [score for event in events if isinstance(event, TextDelta) for score in event.logprobs]
    return [*with_text, *finished(events).unsent_logprobs]


def joined(scores: list[OutputTokenLogprobs]) -> bytes:
    return b"".join(score.token.spelling for score in scores)


async def test_every_token_has_its_own_score() -> None:
    """The spellings join to the text, each entry belongs to its token, and the stop token has none."""
    events = await events_of(ScriptedEngine(one_by_one("Grüße 🙂!")), request(sampling=SCORED))

    scores = finished(events).logprobs
    assert scores is not None
    assert joined(list(scores)).decode() == "Grüße 🙂!"
    assert [score.token.token_id for score in scores] == list(spelled("Grüße 🙂!"))
    for score in scores:
        (expected,) = logprobs_of([score.token.token_id], 2)
        assert score.token.logprob == expected.logprob
        assert [(one.token_id, one.logprob) for one in score.top] == list(expected.top)


async def test_no_scores_unless_they_are_wanted() -> None:
    """Without the request's `logprobs` the value is None; an empty answer that asked for them has an empty list."""
    events = await events_of(ScriptedEngine(one_by_one("hi")), request())
    scored = await events_of(ScriptedEngine([(END,)]), request(sampling=SCORED))

    assert (finished(events).logprobs, told(events)) == (None, [])
    assert finished(scored).logprobs == ()


@given(
    text=st.text(st.sampled_from("aST🙂é "), max_size=20),
    stop=st.sampled_from([(), ("ST",), ("aST", "a🙂"), ("é ",)]),
    sizes=st.integers(1, 4),
)
@settings(max_examples=examples(150))
async def test_told_in_pieces_or_at_once(text: str, stop: tuple[str, ...], sizes: int) -> None:
    """The deltas carry the same entries as the last event, and each entry's token begins in its delta."""
    tokens = spelled(text)
    steps = [tokens[start : start + sizes] for start in range(0, len(tokens), sizes)]

    events = await events_of(ScriptedEngine(steps, FinishReason.LENGTH), request(stop=stop, sampling=SCORED))

    done = finished(events)
    assert told(events) == list(done.logprobs or ())
    seen = ""
    for event in events:
        if isinstance(event, TextDelta):
            assert all(len(seen) <= score.offset < len(seen) + len(event.text) for score in event.logprobs)
            seen += event.text
    covered = joined(told(events)).decode(errors="ignore")
    assert covered.startswith(done.text) if stop else covered == done.text
    for score in done.logprobs or ():
        before = joined([other for other in done.logprobs or () if other.offset <= score.offset])
        assert text.encode().startswith(before)


async def test_tokens_of_a_stop_string_are_no_part_of_the_answer() -> None:
    """A token that begins before the stop string has an entry; a token wholly inside it has none."""
    events = await events_of(ScriptedEngine(one_by_one("one STOP two")), request(stop=("STOP",), sampling=SCORED))

    done = finished(events)
    assert done.text == "one "
    last = (done.logprobs or ())[-1]
    assert last.offset < len("one ") <= last.offset + len(last.token.spelling)


async def test_calls_are_scored_with_the_answer() -> None:
    """Tokens of a call have entries too; the last event carries them."""
    events = await events_of(ScriptedEngine(one_by_one(f"Hm.\n{CALL}")), request(calls=True, sampling=SCORED))

    assert isinstance(events[-1], GenerationFinished)
    assert joined(told(events)).decode() == f"Hm.\n{CALL}"
