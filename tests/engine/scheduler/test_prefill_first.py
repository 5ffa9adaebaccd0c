"""Tests of which prompts are computed before the next step of the decoding requests."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.requests import ServiceTier
from graftwork.engine.kv.index.cost_model import PrefillCost
from graftwork.platform.ids import IsolationDomain
from tests.engine.scheduler.scheduler_driver import SchedulerDriver
from tests.hypothesis_profiles import examples

ROWS_COST = PrefillCost(fixed_s=0.001, token_s=0.001, attended_s=0.0)
"""A device on which a row takes as long as a step without rows."""
BOTH_COST = PrefillCost(fixed_s=0.02, token_s=0.001, attended_s=0.0)
"""A device on which 20 rows take as long as a step without rows."""
STEPS_COST = PrefillCost(fixed_s=0.1, token_s=0.0001, attended_s=0.0)
"""A device on which a step takes as long with few rows as with many."""
FLOOD, LIGHT = IsolationDomain(b"flood"), IsolationDomain(b"light")


def flooded(
    cost: PrefillCost, num_rows: int = 30, tier: ServiceTier = ServiceTier.DEFAULT, **more: float
) -> SchedulerDriver:
    """Returns a driver in which one domain decodes `num_rows` requests, on a device with these costs."""
    driver = SchedulerDriver(pages=400, budget=64, max_running=32, **more)  # type: ignore[arg-type]
    for number in range(num_rows):
        driver.submit(f"flood {number}", [20 + number], max_tokens=30, domain=FLOOD, tier=tier)
    driver.step()
    driver.step()
    driver.scheduler.step_times.costs.start_from(cost)
    return driver


def names(driver: SchedulerDriver) -> set[str]:
    """Runs a step, and returns the requests in it by the first word of their names."""
    plan = driver.step()
    return set() if plan is None else {piece.request_id.split()[0] for piece in plan.slices}


def test_a_new_prompt_of_another_domain_goes_first_and_the_others_go_on_in_the_next_step() -> None:
    """The light domain's prompt does not wait for the 30 rows of the flood, which then get a step with all of them."""
    driver = flooded(ROWS_COST)
    driver.submit("light", 3, domain=LIGHT)

    steps = [names(driver), names(driver)]

    assert steps == [{"light"}, {"flood", "light"}]
    assert len(driver.plans[-1].slices) == 31


def test_a_prompt_runs_beside_the_others_where_a_step_of_its_own_gains_little() -> None:
    """Not on a device that needs as long for few rows, not beside few rows, not for a prompt that is long itself, and not where
    both steps together take 73 ms in place of 53.
    """
    for cost, num_rows, prompt in ((STEPS_COST, 30, 3), (ROWS_COST, 1, 3), (ROWS_COST, 10, 30), (BOTH_COST, 30, 3)):
        driver = flooded(cost, num_rows)
        driver.submit("light", prompt, domain=LIGHT)

        assert names(driver) == {"flood", "light"}


def test_a_prompt_of_the_flood_itself_runs_beside_the_others() -> None:
    """A domain that has its share of the places delays nobody, not even itself."""
    driver = flooded(ROWS_COST)
    driver.submit("more", 3, domain=FLOOD)

    assert names(driver) == {"flood", "more"}


def test_a_domain_with_more_than_half_its_places_goes_beside_the_others() -> None:
    """With 17 rows of the flood, of 32 places, the other domain's ninth request still goes first, and its tenth does not."""
    driver = flooded(ROWS_COST, num_rows=17)
    first = []
    for number in range(9):
        driver.submit(f"light {number}", [60 + number], max_tokens=30, domain=LIGHT)
        names(driver)
        names(driver)
        driver.submit(f"probe {number}", 3, max_tokens=1, domain=LIGHT)
        first.append(names(driver) == {"probe"})

    assert first == [True] * 7 + [False] * 2


def test_a_better_tier_goes_first_on_every_device() -> None:
    """A priority prompt does not wait for the default rows of its own domain, and a flex prompt does."""
    for cost in (ROWS_COST, STEPS_COST):
        for tier, first in ((ServiceTier.PRIORITY, {"urgent"}), (ServiceTier.FLEX, {"flood", "urgent"})):
            driver = flooded(cost)
            driver.submit("urgent", 3, domain=FLOOD, tier=tier)

            assert names(driver) == first


def test_prompts_of_flex_requests_lengthen_steps_by_little_while_a_higher_tier_is_active() -> None:
    """With 30 rows a step takes 31 ms, so a flex prompt may add 12.4 ms, 12 tokens, until a minute after the last request
    of a higher tier has started. Other prompts are not limited by this, nor is flex before and after."""
    sizes = []
    for tier, pause_s in ((ServiceTier.DEFAULT, 59.0), (ServiceTier.DEFAULT, 61.0), (ServiceTier.FLEX, 0.0)):
        driver = flooded(ROWS_COST, tier=tier)
        driver.clock.advance(pause_s)
        driver.submit("flex", [95] * 25, domain=LIGHT, tier=ServiceTier.FLEX)
        plan = driver.step()
        assert plan is not None
        sizes += [piece.num_tokens for piece in plan.slices if piece.request_id == "flex"]
    driver = flooded(ROWS_COST)
    driver.submit("default", [95] * 25, domain=LIGHT)
    plan = driver.step()
    assert plan is not None

    assert sizes == [12, 25, 25]
    assert [piece.num_tokens for piece in plan.slices if piece.request_id == "default"] == [25]


def test_both_steps_take_at_most_a_quarter_more_than_the_target_inter_token_time() -> None:
    """A step of 3 prompt tokens takes 4 ms, and one with the 30 rows 31 ms: the rows wait 35 ms, 1.25 times a target of 28."""
    for target_s, first in ((0.0279, {"flood", "light"}), (0.0281, {"light"})):
        driver = flooded(ROWS_COST, target_itl_s=target_s)
        driver.submit("light", 3, domain=LIGHT)

        assert names(driver) == first


@settings(max_examples=examples(30))
@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=5, max_size=15))
def test_decoding_requests_advance_in_every_second_step_whatever_arrives(arrivals: list[list[int]]) -> None:
    """However many new domains send prompts, no two steps in a row leave out the rows of the flood."""
    driver = flooded(ROWS_COST, num_rows=15)
    without_flood = []
    for number, prompts in enumerate(arrivals):
        for index, length in enumerate(prompts):
            domain = IsolationDomain(f"{number} {index}".encode())
            driver.submit(f"new {number} {index}", length, max_tokens=2, domain=domain)
        without_flood.append("flood" not in names(driver))

    assert not any(one and after for one, after in pairwise(without_flood))
