"""The division of draft rows over a batch, against all possible divisions."""

from collections.abc import Callable
from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.speculative.draft_budget import StepCost, budget_drafts

drafts = st.lists(
    st.lists(st.floats(0.01, 0.99), max_size=3).map(lambda rates: [prod(rates[: n + 1]) for n in range(len(rates))]),
    min_size=1,
    max_size=4,
)
"""By request, the probability of each draft token to be accepted: products of rates."""


def linear(shared: float, own: float) -> Callable[[int], float]:
    return lambda rows: shared + own * rows


@given(drafts, st.floats(0.1, 10), st.floats(0.001, 2), st.integers(0, 12))
def test_no_other_lengths_give_more_tokens_a_second(
    survivals: list[list[float]], shared: float, own: float, spare: int
) -> None:
    """No way to cut the drafts to the spare rows gives more tokens per second than the chosen one."""
    seconds = linear(shared, own)

    def pace(lengths: tuple[int, ...]) -> float:
        made = len(survivals) + sum(sum(chances[:n]) for chances, n in zip(survivals, lengths, strict=True))
        return float(made / seconds(len(survivals) + sum(lengths)))

    chosen = budget_drafts(survivals, seconds, spare)
    every_way = [way for way in product(*[range(len(one) + 1) for one in survivals]) if sum(way) <= spare]
    best = max(map(pace, every_way))
    nothing = pace((0,) * len(survivals))

    assert chosen.lengths in every_way
    if best > 1.1001 * nothing:
        assert pace(chosen.lengths) > best * (1 - 1e-9)
    elif best < 1.0999 * nothing:
        assert sum(chosen.lengths) == 0
    assert abs(nothing * (1 + chosen.gain) - pace(chosen.lengths)) < 1e-9 * nothing


def test_nothing_is_verified_where_a_row_costs_what_a_token_does() -> None:
    """If a step costs nothing but its rows, even certain drafts are not verified."""
    assert budget_drafts([[0.99, 0.98]] * 4, linear(0.0, 1.0), 99).lengths == (0, 0, 0, 0)


def test_the_likeliest_drafts_of_the_batch_come_first() -> None:
    """Of three spare rows, two go to the likeliest draft and one to the next."""
    chosen = budget_drafts([[0.3, 0.2], [0.9, 0.8, 0.1], [0.6]], linear(1.0, 0.01), 3)

    assert chosen.lengths == (0, 2, 1)


@given(drafts, st.integers(0, 12))
def test_only_certain_drafts_are_verified_if_prompts_wait(survivals: list[list[float]], spare: int) -> None:
    """Likely drafts that a step would verify are left out, and certain ones are not."""
    certain = [[0.99, 0.96, *chances] for chances in survivals]
    chosen = budget_drafts(certain, linear(1.0, 0.001), spare, only_certain=True)
    allowed = [sum(chance >= 0.95 for chance in chances) for chances in certain]

    assert all(length <= most for length, most in zip(chosen.lengths, allowed, strict=True))
    assert sum(chosen.lengths) == min(spare, sum(allowed))


def test_the_cost_of_rows_is_learned_and_learned_anew() -> None:
    """The fixed cost and the cost per row are told apart, and a later rise of the cost per row is followed."""
    cost = StepCost()
    for step in range(300):
        cost.record(8 + step % 9, 0.010 + 0.0005 * (8 + step % 9))
    first = cost.slope
    for step in range(600):
        cost.record(8 + step % 9, 0.010 + 0.002 * (8 + step % 9))

    assert 0.0004 < first < 0.0006
    assert 0.0018 < cost.slope < 0.0022
    assert 0.9 < cost.seconds(12) / 0.034 < 1.1


def test_a_step_that_was_held_up_moves_little() -> None:
    """A step that takes a hundred times as long changes the estimate by less than a tenth."""
    cost = StepCost()
    for step in range(100):
        cost.record(4 + step % 5, 0.010)
    before = cost.seconds(6)

    cost.record(8, 1.0)

    assert before <= cost.seconds(6) < 1.1 * before


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-5, 10)), max_size=50), st.integers(1, 500))
def test_more_rows_never_cost_less(steps: list[tuple[int, float]], rows: int) -> None:
    """For any measurements the estimate is positive and rises with the rows, at most in proportion."""
    cost = StepCost()
    for num_rows, seconds in steps:
        cost.record(num_rows, seconds)

    assert 0 < cost.seconds(rows) <= cost.seconds(rows + 1)
    assert cost.slope >= 0
