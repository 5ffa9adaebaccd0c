"""Tests all invariants of the KV cache after random operations in random order."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.tiers import Tier
from graftwork.engine.kv.index.page_windows import PageWindows
from graftwork.engine.kv.transfer.plan import TransferKind
from graftwork.engine.lora.device_pool import PlacementResult
from tests.engine.kv.expected_requests import OPERATIONS
from tests.engine.kv.random_cache_operations import CONTEXT, HOST, SIZE, RandomCacheOperations
from tests.hypothesis_profiles import examples

number = st.integers(0, 7)
new_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=2 * SIZE)


def windows_of(window: int, num_groups: int) -> PageWindows:
    """Windowed layer groups of which a request gets all pages at once."""
    return PageWindows(window, num_groups, SIZE, step_tokens=CONTEXT * SIZE)


windows = st.none() | st.builds(windows_of, st.integers(1, 2 * SIZE + 1), st.integers(1, 2))
rollings = st.none() | st.builds(RollingWindow, st.integers(0, 2 * SIZE), st.integers(1, 3 * SIZE))


class KvCacheMachine(RuleBasedStateMachine):
    """Lets Hypothesis search for the shortest sequence of operations that breaks an invariant."""

    @initialize(
        disk_pages=st.sampled_from([0, 6, 200]),
        host=st.sampled_from([0, HOST, 3 * HOST]),
        windows=windows,
        rolling=rollings,
    )
    def begin(self, disk_pages: int, host: int, windows: PageWindows | None, rolling: RollingWindow | None) -> None:
        self.operations = RandomCacheOperations(disk_pages=disk_pages, host=host, windows=windows, rolling=rolling)

    @rule(name=st.sampled_from(OPERATIONS), first=number, second=number, tokens=new_tokens)
    def operate(self, name: str, first: int, second: int, tokens: list[int]) -> None:
        self.operations.operate(name, first, second, tokens)

    def teardown(self) -> None:
        if hasattr(self, "operations"):
            self.operations.end()


TestMemoryMachine = KvCacheMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=examples(60), stateful_step_count=60)


@pytest.mark.parametrize(
    ("windows", "rolling"),
    [
        (None, None),
        (windows_of(3, 2), None),
        (windows_of(2, 1), None),
        (None, RollingWindow(1, 2)),
        (windows_of(2, 1), RollingWindow(1, 2)),
    ],
    ids=["one group", "three", "two", "rolling", "two and rolling"],
)
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_operations_break_no_invariant(
    seed: int, windows: PageWindows | None, rolling: RollingWindow | None
) -> None:
    """Runs of 5,000 random operations break no invariant, with one layer group, with windowed ones and with rolling windows,
    and every kind of copy, failure, move and wait occurs in them."""
    random = Random(seed)
    operations = RandomCacheOperations(
        disk_pages=(200, 12)[seed % 2], host=HOST if windows is None else 2 * HOST, windows=windows, rolling=rolling
    )

    for _ in range(5000):
        tokens = [random.randrange(2) for _ in range(random.randint(1, 2 * SIZE))]
        operations.operate(random.choice(OPERATIONS), random.randrange(8), random.randrange(8), tokens)
    operations.end()

    cut_short = {f"{kind} cut short" for kind in TransferKind}
    told = {
        "adapters were evicted",
        "KV was evicted",
        "relocations",
        "compactions",
        *(result.name for result in PlacementResult),
    }
    assert {
        *Tier,
        *TransferKind,
        *cut_short,
        "waits",
        "restarts",
        "forgotten domains",
        "no room",
        "kept prompts",
        "limits of groups",
        *told,
        *(() if rolling is None else ("pages that rolled by",)),
        *(() if windows is None else ("windows that moved on", "prefixes that cannot be continued")),
    } <= set(+operations.seen)
