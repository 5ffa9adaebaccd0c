"""Tests of whose upload is inspected next."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from graftwork.adapters.inspection.turns import InspectionTurns


@given(
    num_workers=st.integers(1, 3),
    actions=st.lists(st.tuples(st.sampled_from(["ask", "end", "cancel"]), st.integers(0, 9)), max_size=40),
)
async def test_workers_are_shared_evenly_and_never_lost(num_workers: int, actions: list[tuple[str, int]]) -> None:
    """No worker is idle while an owner waits, none is lent twice, and none goes to an owner that has more than another
    that waits.
    """
    turns = InspectionTurns(num_workers)
    waiting: dict[asyncio.Task[None], str] = {}
    held: Counter[str] = Counter()

    async def settle() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        served = [task for task in waiting if task.done()]
        asked = Counter(waiting.values())
        for task in served:
            owner = waiting.pop(task)
            asked[owner] -= 1
            others = [each for each in +asked if each != owner]
            assert all(held[owner] <= held[each] for each in others)
            held[owner] += 1

    for action, number in actions:
        if action == "ask":
            owner = "abc"[number % 3]
            waiting[asyncio.create_task(turns.acquire(owner))] = owner
        elif action == "end" and held:
            owner = sorted(held)[number % len(held)]
            held[owner] -= 1
            held = +held
            turns.release(owner)
        elif action == "cancel" and waiting:
            task = list(waiting)[number % len(waiting)]
            del waiting[task]
            task.cancel()
        await settle()

        assert held.total() <= num_workers
        assert held.total() == num_workers or not waiting

    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_one_owner_is_served_in_order() -> None:
    """The uploads of one owner are inspected in the order in which they came."""
    turns, served = InspectionTurns(1), list[int]()

    async def use(number: int) -> None:
        await turns.acquire("a")
        served.append(number)
        turns.release("a")

    await turns.acquire("a")
    tasks = [asyncio.create_task(use(number)) for number in range(5)]
    await asyncio.sleep(0)
    turns.release("a")
    await asyncio.gather(*tasks)

    assert served == [0, 1, 2, 3, 4]
