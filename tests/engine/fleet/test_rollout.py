"""Tests of which engines a fleet starts and stops, against a fleet that follows the changes."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.fleet.rollout import PresentEngine, changes, free_id


def engine(name: str, generation: int = 1, *, is_ready: bool = True, requests: int = 0) -> PresentEngine:
    return PresentEngine(name, generation, is_ready, requests=requests)


def test_a_fleet_grows_and_shrinks_to_what_is_wanted() -> None:
    """Missing engines start, surplus ones stop: those that are not ready first, then those with the fewest requests."""
    busy, idle, starting = engine("a", requests=5), engine("b"), engine("c", is_ready=False)

    assert changes(3, 1, [busy]).start == 2
    assert changes(2, 1, [busy, idle, starting]).stop == ("c",)
    assert changes(1, 1, [busy, idle, starting]).stop == ("c", "b")
    assert changes(3, 1, [busy, idle, starting]) == changes(0, 1, [])


def test_an_upgrade_starts_a_new_engine_before_it_stops_a_former_one() -> None:
    """With a surge of one, one new engine starts beside all former ones; a former one stops once it is ready."""
    former = [engine("a"), engine("b")]

    assert changes(2, 2, former).start == 1
    assert changes(2, 2, former).stop == ()
    assert changes(2, 2, [*former, engine("c", 2, is_ready=False)]) == changes(0, 2, [])
    assert changes(2, 2, [*former, engine("c", 2)]).stop == ("a",)


def test_an_upgrade_without_a_surge_stops_one_engine_first() -> None:
    """Where there is no room for one engine more, one former engine at a time stops before a new one starts."""
    former = [engine("a"), engine("b"), engine("c")]

    assert changes(3, 2, former, surge=0) == changes(3, 2, former, surge=0)
    assert changes(3, 2, former, surge=0).start == 0
    assert changes(3, 2, former, surge=0).stop == ("a",)
    assert changes(3, 2, [engine("b"), engine("c")], surge=0).start == 1
    assert changes(3, 2, [engine("b"), engine("c"), engine("d", 2, is_ready=False)], surge=0).stop == ()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2)), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_every_fleet_gets_where_it_should_be(
    first: list[tuple[bool, int]], targets: list[int], surge: int, random: "object"
) -> None:
    """However engines get ready and end, a fleet comes to its target, and stops no ready engine that it still needs."""
    fleet = {f"f-{number}": engine(f"f-{number}", made, is_ready=ready) for number, (ready, made) in enumerate(first)}
    for generation, target in enumerate(targets, start=2):
        for _ in range(60):
            found = changes(target, generation, list(fleet.values()), surge)
            ready = sum(one.is_ready and not one.is_stopping for one in fleet.values())
            stopped = [fleet[name] for name in found.stop]
            left = ready - sum(one.is_ready for one in stopped)
            assert left >= min(ready, target - (surge == 0))
            live = sum(not one.is_stopping for one in fleet.values()) - len(stopped) + found.start
            assert found.start == 0 or live <= target + surge
            for name in found.stop:
                del fleet[name]
            for _ in range(found.start):
                name = free_id("f", [*fleet])
                fleet[name] = engine(name, generation, is_ready=False)
            for name in list(fleet):
                if random.random() < 0.5:  # type: ignore[attr-defined]
                    fleet[name] = engine(name, fleet[name].generation)
        for name, one in list(fleet.items()):
            fleet[name] = engine(name, one.generation)
        for _ in range(40):
            found = changes(target, generation, list(fleet.values()), surge)
            for name in found.stop:
                del fleet[name]
            for _ in range(found.start):
                name = free_id("f", [*fleet])
                fleet[name] = engine(name, generation)
        assert [one.generation for one in fleet.values()] == [generation] * target


def test_ids_are_used_again() -> None:
    """A new engine takes the first id that is free, and so the files of the engine that had it."""
    assert free_id("f", []) == "f-0"
    assert free_id("f", ["f-0", "f-2"]) == "f-1"
