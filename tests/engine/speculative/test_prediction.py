"""Following a client's prediction when the answer differs from it."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.speculative.prediction import PredictionFollower

PROMPT = [900, 901]


def follow(prediction: list[int], answer: list[int]) -> tuple[PredictionFollower, int]:
    """Feed an answer token by token. Also returns how many tokens were drafted right as the next one."""
    tokens = list(PROMPT)
    follower = PredictionFollower(tokens, tuple(prediction), len(tokens))
    right = 0
    for token in answer:
        follower.observe()
        guess = follower.propose((), 4)
        right += guess is not None and guess.token_ids[0] == token
        tokens.append(token)
    follower.observe()
    return follower, right


def test_an_answer_as_predicted_is_guessed_from_its_first_token() -> None:
    """Every token is drafted right and counted, and nothing is drafted behind the end."""
    follower, right = follow([5, 6, 7, 8], [5, 6, 7, 8])

    assert (right, follower.num_matched, follower.num_unmatched) == (4, 4, 0)
    assert follower.propose((), 4) is None


def test_one_changed_token_costs_one_guess() -> None:
    """The token after a changed one is drafted right at once, as after a rename."""
    prediction = list(range(20, 40))

    follower, right = follow(prediction, [*range(20, 29), 777, *range(30, 40)])

    assert right == 19
    assert (follower.num_matched, follower.num_unmatched) == (19, 1)


def test_a_passage_left_out_or_put_in_costs_a_few_guesses() -> None:
    """Two tokens after an omission or an insertion, the prediction is followed again."""
    prediction = list(range(100, 160))

    _, after_gap = follow(prediction, [*range(100, 120), *range(140, 160)])
    _, after_addition = follow(prediction, [*range(100, 120), *range(500, 510), *range(120, 160)])

    assert after_gap >= 40 - 3
    assert after_addition >= 60 - 3


def test_a_passage_that_stands_elsewhere_is_found_there() -> None:
    """Of two equal passages the nearest one ahead is followed; without one ahead, an earlier one."""
    prediction = [1, 2, 50, 51, 1, 2, 60, 61, 9, 9]

    follower, _ = follow(prediction, [1, 2, 50, 51, 7, 8, 1, 2])
    first = follower.propose((), 2)
    moved, _ = follow(prediction, [*prediction, 50, 51])
    second = moved.propose((), 2)

    assert first is not None
    assert first.token_ids == (60, 61)
    assert second is not None
    assert second.token_ids == (1, 2)  # behind 50 and 51


@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=40))
def test_no_more_is_counted_than_a_prediction_and_its_answer_share(prediction: list[int], answer: list[int]) -> None:
    """Matched and unmatched tokens add up to the prediction, and no more are matched than the answer has."""
    follower, _ = follow(prediction, answer)

    assert follower.num_matched + follower.num_unmatched == len(prediction)
    assert 0 <= follower.num_matched <= min(len(prediction), len(answer))
    if answer[: len(prediction)] == prediction:
        assert follower.num_unmatched == 0
    if not set(prediction) & set(answer):
        assert follower.num_matched == 0
