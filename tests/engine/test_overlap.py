"""Overlap: planning a step while the device computes the one before it changes no answer."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.core.events import FinishReason
from graftwork.engine.kv.transfer.plan import TransferKind
from tests.engine.hash_model import Moment
from tests.engine.overlap_history import HashEngine, History, Setting
from tests.hypothesis_profiles import examples

MOST_OFTEN = ("step", "step", "step", "submit")
actions = st.tuples(
    st.sampled_from((*MOST_OFTEN, "cancel", "finish_copy", "finish_load", "command", "forget", "wait")),
    st.integers(0, 2**20),
)
setting_values = st.builds(
    Setting,
    spare_pages=st.sampled_from((7, 9, 14)),
    host_pages=st.sampled_from((0, 6, 30)),
    budget=st.sampled_from((3, 7, 40)),
    max_draft_tokens=st.sampled_from((0, 0, 3)),
    moment=st.sampled_from(list(Moment)),
    tick_s=st.sampled_from((0.0, 0.001)),
    target_itl_s=st.sampled_from((None, 0.001, 0.02)),
    min_run_steps=st.sampled_from((0, 0, 4)),
)


def live(setting: Setting, acts: list[tuple[str, int]]) -> History:
    """Returns a history that two engines have lived through: one overlaps steps, and one does not."""
    history = History([HashEngine(setting, overlaps=overlaps) for overlaps in (True, False)])
    for name, number in acts:
        getattr(history, name)(number)
    history.end()
    return history


@settings(max_examples=examples(300, in_search=5000))
@given(setting_values, st.lists(actions, min_size=12, max_size=60))
def test_answers_do_not_depend_on_overlap(setting: Setting, acts: list[tuple[str, int]]) -> None:
    """In any history of messages, with and without overlap, each request gets the answer that the model gives it alone,
    nothing in flight is touched, and nothing is held at the end."""
    live(setting, acts)


def test_long_histories_reach_everything() -> None:
    """In histories of 400 random messages, all kinds of events happen while steps overlap, and no answer changes."""
    names = (*MOST_OFTEN, "submit", "cancel", "finish_copy", "finish_load", "finish_load", "command", "forget", "wait")
    seen: Counter[str] = Counter()

    for number, moment in enumerate((*Moment, Moment.LATE)):
        random = Random(number)
        setting = Setting(7, (30, 6)[number % 2], (7, 40)[number % 2], (0, 3)[number % 2], moment, 0.001)
        overlapped = live(setting, [(random.choice(names), random.randrange(2**20)) for _ in range(400)]).engines[0]
        seen += overlapped.seen + Counter(str(course.end) for course in overlapped.courses.values())
        seen["awaited"] += overlapped.device.num_awaited
        seen["preempted"] += overlapped.scheduler.counters.preemptions
        seen["moved"] += overlapped.cache.adapters.frame_allocator.num_relocated_pages
        seen["accepted"] += overlapped.scheduler.speculator.counts.accepted
        seen["generated"] += overlapped.scheduler.counters.generated_tokens

    ends = {*FinishReason, "grammar_dead_end", "None"}
    assert seen.keys() >= ends | {TransferKind.SAVE, TransferKind.LOAD, "preempted", "moved", "accepted"}
    assert seen["awaited"] > seen["generated"] / 4
