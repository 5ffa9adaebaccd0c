"""Overlap: planning a step while the device computes the one before it changes no answer.

Histories have loads of KV that steps read layer by layer, some of which fail, and adapters that are copied late, evicted
and compacted.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason
from graftwork.engine.kv.transfer.plan import TransferKind
from tests.engine.hash_engine import Setting
from tests.engine.hash_model import Moment
from tests.engine.overlap_history import History
from tests.hypothesis_profiles import examples

MOST_OFTEN = ("step", "step", "step", "submit")
OTHERS = ("cancel", "finish_copy", "finish_load", "announce", "resume", "crowd", "command", "forget", "wait")
PARTS = examples(1, in_search=10)
"""How many tests the 5,000 histories of the slow suite are divided into, so that they run on all cores and each has a time
limit of its own.
"""
actions = st.tuples(st.sampled_from((*MOST_OFTEN, *OTHERS)), st.integers(0, 2**20))
setting_values = st.builds(
    Setting,
    spare_pages=st.sampled_from((7, 9, 14, 22)),
    host_pages=st.sampled_from((0, 6, 30)),
    budget=st.sampled_from((3, 7, 40)),
    max_draft_tokens=st.sampled_from((0, 0, 3)),
    moment=st.sampled_from(list(Moment)),
    tick_s=st.sampled_from((0.0, 0.001)),
    copies_adapters_late=st.booleans(),
    target_itl_s=st.sampled_from((None, 0.001, 0.02)),
    min_run_steps=st.sampled_from((0, 0, 4)),
    has_draft_model=st.booleans(),
)


def live(setting: Setting, acts: list[tuple[str, int]]) -> History:
    """Returns a history that two engines have lived through: one overlaps steps, and one does not."""
    history = History(setting)
    for name, number in acts:
        getattr(history, name)(number)
    history.end()
    return history


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=examples(100, in_search=5000 // PARTS))
@given(setting=setting_values, acts=st.lists(actions, min_size=12, max_size=48))
def test_answers_do_not_depend_on_overlap(part: int, setting: Setting, acts: list[tuple[str, int]]) -> None:
    """In any history of messages, with and without overlap, each request gets the answer that the model gives it alone,
    nothing in flight is touched, and nothing is held at the end."""
    live(setting, acts)


def test_long_histories_reach_everything() -> None:
    """In histories of 300 random messages, all kinds of events happen while steps overlap, and no answer changes.

    Four histories mostly show all kinds; the rarest, a load that fails under steps, may take more.
    """
    names = (*MOST_OFTEN, *OTHERS, "submit", "finish_load")
    ends = {*FinishReason, "grammar_dead_end", "None"}
    events = {"preempted", "moved", "compacted", "accepted", "guessed", "gated", "failed_loads", "adapter_copy"}
    wanted = Counter(ends | events | {TransferKind.SAVE, TransferKind.LOAD})
    seen: Counter[str] = Counter()

    for number, moment in enumerate((*Moment, Moment.LATE) * 5):
        if number >= len(Moment) and +seen >= wanted:
            break
        random = Random(number)
        odd = number % 2
        setting = Setting(
            (14, 7)[odd], (30, 6)[odd], (7, 40)[odd], (0, 3)[odd], moment, 0.001, odd == 1, has_draft_model=odd == 1
        )
        overlapped = live(setting, [(random.choice(names), random.randrange(2**20)) for _ in range(300)]).engines[0]
        seen += overlapped.seen + Counter(str(course.end) for course in overlapped.courses.values())
        seen["awaited"] += overlapped.device.num_awaited
        seen["preempted"] += overlapped.scheduler.counters.preemptions
        seen["gated"] += overlapped.device.num_gated
        seen["failed_loads"] += len(overlapped.device.failed)
        seen["moved"] += overlapped.cache.adapters.frame_allocator.num_relocated_pages
        seen["compacted"] += overlapped.cache.adapters.frame_allocator.num_moved_runs
        seen["accepted"] += overlapped.scheduler.speculator.counts.accepted
        seen["guessed"] += overlapped.scheduler.speculator.counts.model_accepted
        seen["generated"] += overlapped.scheduler.counters.generated_tokens

    assert +seen >= wanted
    assert seen["awaited"] > seen["generated"] / 4
