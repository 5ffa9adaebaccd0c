"""Tests of the simulator of the KV memory: no leak, reserves that hold, and the value of the policy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import memory_simulator
from benchmarks.agent_traces import Shape, Trace
from benchmarks.memory_simulator import SCENES, make_trace, play
from benchmarks.simulation.hardware import Hardware, ScaledHardware, scaled
from benchmarks.simulation.policies import LRU, OURS, POLICIES, Policy
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.world import Load, World

from graftwork.engine.kv.transfer.plan import TransferKind

FACTOR = 400.0
"""Contexts of some tens of pages, and tiers to match."""


def small_hardware() -> ScaledHardware:
    return scaled(Hardware(), FACTOR / 4)


def small_load(shape: Shape, num_turns: int, num_live: int = 60) -> Load:
    return Load(make_trace(replace(SCENES[shape], trace_factor=FACTOR), shape, 5, num_turns), num_live, num_turns)


def flooded(trace: Trace) -> Trace:
    """Returns the same sessions, with three of four in one domain and the others in another."""
    domains: list[str] = []
    for session in trace.sessions:
        own = "quiet" if session.number % 4 == 0 else "flood"
        domains.append(own if session.parent is None else domains[session.parent.session])
    named = zip(trace.sessions, domains, strict=True)
    return Trace(trace.shape, tuple(replace(session, domain=domain) for session, domain in named))


def test_events_happen_in_the_order_of_their_times() -> None:
    """Events happen in the order of their times, also those that an event plans."""
    timeline = Timeline()
    seen: list[tuple[str, float]] = []

    timeline.after(3.0, lambda: seen.append(("third", timeline.now)))
    timeline.after(1.0, lambda: timeline.after(1.0, lambda: seen.append(("second", timeline.now))))
    timeline.after(1.0, lambda: seen.append(("first", timeline.now)))
    timeline.run()

    assert seen == [("first", 1.0), ("second", 2.0), ("third", 3.0)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("shape", Shape)
def test_closing_every_session_empties_every_tier(shape: Shape, policy: Policy) -> None:
    """After all sessions are closed no tier has a page, and every turn was served, under every policy."""
    world = World(policy, small_load(shape, 400), small_hardware())

    figures = world.run()

    assert figures.num_turns == 400
    world.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "num_live"), [(Shape.CODING, 120), (Shape.SUPPORT, 4000), (Shape.RESEARCH, 120)])
def test_thirty_thousand_turns_leak_nothing(shape: Shape, num_live: int) -> None:
    """After 30,000 turns with copies of every kind, no tier has lost a page."""
    world = World(OURS, small_load(shape, 30_000, num_live), small_hardware())

    figures = world.run()

    assert figures.num_turns == 30_000
    assert all(world.copies.moved_pages[kind] for kind in TransferKind)
    world.check_empty()


@pytest.mark.parametrize("policy", [LRU, OURS], ids=lambda policy: policy.name)
def test_a_flooding_party_pushes_nobody_below_its_reserve(policy: Policy) -> None:
    """While one domain has three of four sessions, the other keeps its reserve of both tiers at every step."""
    load = small_load(Shape.CODING, 1200, num_live=120)
    world = World(policy, replace(load, trace=flooded(load.trace)), small_hardware())

    world.run()  # its watch compares before and after every operation

    assert world.watch.num_checks > 1200
    assert world.watch.num_at_reserve > 0, "nobody was ever as low as its reserve: nothing was tested"


@pytest.mark.parametrize("shape", Shape)
def test_the_policy_finds_no_less_on_the_device_than_least_recently_used(shape: Shape) -> None:
    """The engine's policy finds as many prompt tokens on the device as LRU, and recomputes no more."""
    scene = replace(SCENES[shape], trace_factor=FACTOR)
    trace = make_trace(scene, shape, 1, 1000)

    lru, ours = (play(scene, trace, policy, 1000) for policy in (LRU, OURS))

    assert ours.shares["device"] >= lru.shares["device"]
    assert ours.shares["recomputed"] < lru.shares["recomputed"] + 0.001
    assert sum(ours.shares.values()) == pytest.approx(1.0)


def test_the_command_prints_every_policy_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints one table and writes a file from which the table can be made again."""
    out = tmp_path / "figures.json"

    memory_simulator.main(["--turns", "40", "--seeds", "1", "--shape", "research", "--json", str(out)])

    assert "TTFT mean s" in capsys.readouterr().out
    assert {run["policy"] for run in json.loads(out.read_text())["runs"]} == {policy.name for policy in POLICIES}
