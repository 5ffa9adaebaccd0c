"""Tests of the fitted step times and of the room that they leave for prompts, with synthetic costs and no real time."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.step import StepPlan
from graftwork.engine.kv.index.cost_model import PrefillCost
from graftwork.engine.scheduler.step_time import PromptRoom, StepCosts, StepLoad
from tests.engine.scheduler.scheduler_driver import PAGE, SchedulerDriver
from tests.hypothesis_profiles import examples


@dataclass(frozen=True)
class Device:
    """A device whose steps take exactly this long, but for noise."""

    fixed_s: float = 0.008
    row_s: float = 0.0002
    token_s: float = 0.0001
    attended_s: float = 2e-8
    prompt_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        decoding_s = self.fixed_s + self.row_s * load.rows
        prompts_s = self.token_s * load.prompt_tokens + self.attended_s * load.attended + self.prompt_s * load.prompts
        return decoding_s + prompts_s


def random_load(random: Random) -> StepLoad:
    tokens, start = random.choice((0, random.randint(16, 1024))), random.randint(0, 30_000)
    prompts = random.randint(1, 4) if tokens else 0
    return StepLoad(random.randint(1, 64), tokens, tokens * (start + tokens / 2), prompts)


def taught(device: Device, steps: int, noise: float = 0.0, seed: int = 1) -> StepCosts:
    """Returns the costs that random steps of a device have taught."""
    random, costs = Random(seed), StepCosts()
    for _ in range(steps):
        load = random_load(random)
        costs.record(load, device.seconds(load) * random.uniform(1 - noise, 1 + noise))
        costs.check_integrity()
    return costs


devices = st.builds(
    Device,
    fixed_s=st.floats(1e-3, 0.1),
    row_s=st.floats(0, 1e-3),
    token_s=st.floats(1e-5, 1e-3),
    attended_s=st.floats(0, 1e-7),
    prompt_s=st.floats(0, 0.02),
)


@settings(max_examples=examples(40))
@given(devices, st.integers(0, 1000))
def test_the_costs_of_any_linear_device_are_learned(device: Device, seed: int) -> None:
    """After 300 random steps with 10 % noise, steps of any load are predicted within 15 %."""
    costs = taught(device, 300, noise=0.1, seed=seed)
    random = Random(seed + 1)

    for _ in range(30):
        load = random_load(random)
        assert costs.seconds(load) == pytest.approx(device.seconds(load), rel=0.15)


def test_pauses_do_not_change_the_costs() -> None:
    """If one step in 25 takes 50 times as long, the others are still predicted within 25 %."""
    device, random, costs = Device(), Random(3), StepCosts()
    for number in range(600):
        load = random_load(random)
        costs.record(load, device.seconds(load) * (50 if number % 25 == 24 else 1))

    for _ in range(30):
        load = random_load(random)
        assert costs.seconds(load) == pytest.approx(device.seconds(load), rel=0.25)


def test_a_device_that_becomes_slower_is_followed() -> None:
    """A hundred steps after a device has become six times slower, its steps are predicted within 20 %."""
    costs, random = taught(Device(), 500), Random(5)
    slow = Device(0.048, 0.0012, 0.0006, 1.2e-7)
    for _ in range(100):
        load = random_load(random)
        costs.record(load, slow.seconds(load))

    for _ in range(30):
        load = random_load(random)
        assert costs.seconds(load) == pytest.approx(slow.seconds(load), rel=0.2)


def test_an_hour_of_decoding_does_not_erase_the_costs_of_prompts() -> None:
    """After 5,000 noisy steps without a prompt, the cost of a prompt's tokens is as it was, within 5 %, and one step that
    takes three times as long as expected does not double it."""
    costs, random = taught(Device(), 300), Random(7)
    before = [costs.token_s, costs.attended_s]
    for _ in range(5000):
        load = StepLoad(rows=random.randint(15, 17))
        costs.record(load, Device().seconds(load) * random.uniform(0.9, 1.1))

    assert [costs.token_s, costs.attended_s] == pytest.approx(before, rel=0.05)
    load = StepLoad(16, 512, 512 * 256)
    expected = costs.seconds(load)
    costs.record(load, 3 * expected)
    assert costs.seconds(load) < 2 * expected


def test_the_measured_start_is_the_first_estimate() -> None:
    """Before any step, a prefill is expected to take what was measured at start."""
    costs = StepCosts()
    assert not costs.is_known
    prefill = PrefillCost(token_s=0.001, attended_s=1e-6, fixed_s=0.01)

    costs.start_from(prefill)

    assert costs.is_known
    expected = prefill.seconds(100, 50)
    assert costs.seconds(StepLoad(0, 100, 100 * (50 + 100 / 2))) == pytest.approx(expected)


@settings(max_examples=examples(60))
@given(devices, st.integers(1, 64), st.floats(0.01, 1.0), st.lists(st.integers(0, 30_000), min_size=1, max_size=4))
def test_prompts_fill_the_target_and_no_more(device: Device, rows: int, target_s: float, starts: list[int]) -> None:
    """Chunks of any prompts make a step last the target at most, or are one page; one page more would exceed it."""
    costs, page = taught(device, 150), 16
    target_s = max(target_s, (costs.seconds(StepLoad(rows)) + costs.prompt_s) / 0.6)
    room = PromptRoom(costs, rows, target_s, page)

    chunks = [(start, room.take(start, 100_000)) for start in starts]

    tokens, prompts = sum(length for _, length in chunks), sum(length > 0 for _, length in chunks)
    load = StepLoad(rows, tokens, sum(length * (start + length / 2) for start, length in chunks), prompts)
    longest = costs.most_prompt_tokens
    assert chunks[0][1] >= page
    assert tokens == page or costs.seconds(load) <= target_s * 1.0001
    ends_in = prompts + (chunks[-1][1] == 0)
    more = StepLoad(rows, tokens + page, load.attended + page * (starts[-1] + chunks[-1][1] + page), ends_in)
    assert costs.seconds(more) > target_s * 0.9999 or tokens + page > longest


@settings(max_examples=examples(60))
@given(devices, st.integers(1, 64), st.floats(0.01, 1.0), st.integers(0, 30_000), st.integers(2, 3000))
def test_the_end_of_a_prompt_may_exceed_the_target_by_its_share(
    device: Device, rows: int, target_s: float, start: int, wanted: int
) -> None:
    """A prompt ends in this step if the step then takes at most 1.25 times the target; without the share it gets what fits
    into the target. Nothing fits behind an end that exceeds the target.
    """
    costs, page = taught(device, 150), 16
    target_s = max(target_s, (costs.seconds(StepLoad(rows)) + costs.prompt_s) / 0.6)
    whole_s = costs.seconds(StepLoad(rows, wanted, wanted * (start + wanted / 2), 1))
    room = PromptRoom(costs, rows, target_s, page, end_share=0.25)

    taken = room.take(start, wanted)

    plain = PromptRoom(costs, rows, target_s, page).take(start, wanted)
    assert taken in (plain, wanted)
    if wanted < costs.most_prompt_tokens and not 1.249 < whole_s / target_s < 1.251:
        assert (taken == wanted) == (whole_s < 1.25 * target_s or plain == wanted)
    if taken > plain:
        assert room.take(start, wanted) == 0


def test_a_target_below_the_time_of_decoding_leaves_prompts_a_third_of_the_step() -> None:
    """If decoding alone takes longer than the target, a prompt still gets half of that time."""
    costs = taught(Device(), 300)
    decoding_s = costs.seconds(StepLoad(64))

    taken = PromptRoom(costs, 64, target_s=decoding_s / 2, page_tokens=16).take(0, 100_000)

    assert costs.seconds(StepLoad(64, taken, taken * taken / 2)) == pytest.approx(1.5 * decoding_s, rel=0.02)


def test_a_prompt_is_not_cut_where_its_presence_costs_most() -> None:
    """A device computes 16 rows in 6 ms, any prompt beside them in 3 ms, and each of its tokens in 0.03. With a target of 12 ms,
    a prompt of 130 tokens ends in one step, although most prompts so far had 60 tokens: as if each token had cost 0.08.
    """
    device, random, costs = Device(0.006, 0.0, 0.00003, 0.0, prompt_s=0.003), Random(2), StepCosts()
    for _ in range(200):
        tokens = random.choice((0, random.randint(50, 70)))
        load = StepLoad(16, tokens, tokens * tokens / 2, int(tokens > 0))
        costs.record(load, device.seconds(load) * random.uniform(0.95, 1.05))

    assert PromptRoom(costs, 16, 0.012, 16, end_share=0.25).take(0, 130) == 130


def test_chunks_longer_than_any_measured_one_are_approached_by_doubling() -> None:
    """On a device whose first tokens are free, no chunk is more than twice as long as the longest measured one."""
    costs = StepCosts()
    costs.record(StepLoad(16), 0.01)
    lengths = []
    for _ in range(5):
        length = PromptRoom(costs, 16, target_s=0.05, page_tokens=16).take(0, 10_000)
        lengths.append(length)
        costs.record(StepLoad(16, length, length * length / 2), max(0.01, 1e-5 * length))

    assert lengths[:3] == [256, 512, 1024]
    assert all(after <= 2 * before for before, after in pairwise(lengths))


class TimedDriver(SchedulerDriver):
    """A scheduler whose steps take the time of a device on a clock that stands still otherwise."""

    def __init__(self, device: Device, noise: float = 0.0, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.device = device
        self.random = Random(0)
        self.noise = noise
        self.seconds: list[tuple[StepPlan, float]] = []

    def ran(self, plan: StepPlan) -> None:
        """Lets the time of a step pass."""
        took = self.device.seconds(StepLoad.of(plan)) * self.random.uniform(1 - self.noise, 1 + self.noise)
        self.clock.advance(took)
        self.seconds.append((plan, took))


def test_a_long_prompt_does_not_stretch_the_steps_of_decoding_requests() -> None:
    """Beside 16 decoding requests, a prompt of 30,000 tokens keeps the 99th percentile of their inter-token times within
    1.5 times the target, ends, and fills most of the target."""
    target_s = 0.05
    driver = TimedDriver(
        Device(), 0.2, pages=10_000, budget=2048, max_running=17, context=40_000, target_itl_s=target_s
    )
    for number in range(16):
        driver.submit(f"short {number}", [number + 1, 2, 3], max_tokens=20_000, sampling={"ignore_eos": True})
    for _ in range(30):
        driver.step()
    begun = len(driver.seconds)
    driver.submit("long", [20 + n % 70 for n in range(30_000)], max_tokens=2)

    while "long" not in driver.finished():
        driver.step()

    beside = sorted(took for plan, took in driver.seconds[begun:])
    assert all(len(plan.slices) == 17 for plan, _ in driver.seconds[begun:-1])
    assert beside[int(0.99 * len(beside))] <= 1.5 * target_s
    assert beside[len(beside) // 2] >= 0.8 * target_s


def test_without_decoding_requests_prompts_have_the_whole_step() -> None:
    """Alone, a prompt is computed in chunks of the token budget, whatever the target."""
    driver = TimedDriver(Device(), pages=10_000, budget=2048, max_running=17, context=40_000, target_itl_s=0.01)
    driver.submit("first", [5] * 5000, max_tokens=1)
    driver.drain()
    driver.submit("second", [7] * 5000, max_tokens=1)
    driver.drain()

    assert [plan.num_tokens for plan, _ in driver.seconds] == 2 * [2048, 2048, 904]


def test_every_prompt_ends_whatever_the_target() -> None:
    """With a target that no step can meet, each step beside a decoding request computes one page of the first prompt."""
    driver = TimedDriver(Device(fixed_s=1e-6, token_s=1.0), pages=100, max_running=4, target_itl_s=1e-6)
    driver.submit("decodes", 3, max_tokens=30)
    driver.step()
    driver.step()
    driver.submit("one", 20, max_tokens=1)
    driver.submit("two", [50] * 20, max_tokens=1)

    driver.drain()

    chunks = [piece.num_tokens for plan in driver.plans[2:] for piece in plan.slices if piece.request_id != "decodes"]
    assert chunks == 10 * [PAGE]
    assert driver.finished().keys() == {"decodes", "one", "two"}
