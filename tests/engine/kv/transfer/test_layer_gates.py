"""Tests steps that begin while their KV is being loaded from the host."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch

from graftwork.engine.attention.torch_attention import TorchStepAttention
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.plan import LayerGate, LayerGates, LoadFailed
from graftwork.platform.errors import InternalFailure
from tests.engine.engine_driver import EngineDriver

MakeEngine = Callable[..., EngineDriver]
PROMPT = [5 + n % 50 for n in range(41)]
MORE = [9, 8, 7]
_WITHIN_S = 60


def nothing() -> None:
    """No wait is needed: the copies are done."""


def test_a_reader_waits_for_its_layer_and_no_later_one() -> None:
    """A reader passes the open layers, waits at the next one, and goes on when it is opened."""
    gate = LayerGate(4)
    order: list[str] = []
    read_two = Event()

    def read() -> None:
        for layer in range(4):
            gate.wait(layer)
            order.append(f"read {layer}")
            if layer == 1:
                read_two.set()

    gate.open_layers(2, nothing)
    reader = Thread(target=read)
    reader.start()
    assert read_two.wait(_WITHIN_S)
    order.append("copied 2, 3")
    gate.open_layers(4, nothing)
    reader.join(_WITHIN_S)

    assert order == ["read 0", "read 1", "copied 2, 3", "read 2", "read 3"]


def test_the_stream_waits_for_the_group_that_holds_the_layer() -> None:
    """Each layer waits for the event of its own group, whichever groups were opened later."""
    gate, waited = LayerGate(5), list[str]()
    gate.open_layers(2, lambda: waited.append("first"))
    gate.open_layers(4, lambda: waited.append("second"))
    gate.open_layers(5, lambda: waited.append("third"))

    for layer in range(5):
        gate.wait(layer)
    gate.check_integrity()

    assert waited == ["first", "first", "second", "second", "third"]


def test_whole_loads_are_waited_for_at_once() -> None:
    """Waiting for all layers waits for the last group of each load that the step reads, and for no other load."""
    gates, waited = LayerGates(), list[str]()
    for name in ("one", "other", "third"):
        gate = LayerGate(4)
        gate.open_layers(2, lambda name=name: waited.append(f"{name} begins"))  # type: ignore[misc]
        gate.open_layers(4, lambda name=name: waited.append(f"{name} ends"))  # type: ignore[misc]
        gates.add(name, gate)

    gates.wait_for_all()  # none is selected yet
    gates.select(["one", "third"])
    gates.wait_for_all()

    assert waited == ["one ends", "third ends"]


def test_a_failed_load_lets_no_step_read_missing_layers() -> None:
    """The gate of a failed load raises LoadFailed at the first layer that is missing."""
    gates, gate = LayerGates(), LayerGate(4)
    gates.add("load", gate)
    gate.open_layers(2, nothing)
    gate.fail()

    gates.wait(3)  # not selected yet
    gates.select(["load"])
    gates.check_integrity()
    gates.wait(1)
    with pytest.raises(LoadFailed, match="layer 2"):
        gates.wait(2)
    gates.remove("load")
    gates.select(["load"])
    gates.wait(2)


class SlowUpperLayers:
    """Delays the copies of all layers but the first until attention has run in the first, or until the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, by_hand: bool = False) -> None:
        self.is_armed = False
        self.layers_copied_late = 0
        self.go_on = Event()
        attend, write_layers = TorchStepAttention.attend, KvCache.write_layers

        def watched_attend(cache: TorchStepAttention, layer: int, *rest: Any) -> torch.Tensor:
            mixed = attend(cache, layer, *rest)
            if self.is_armed and not by_hand:
                self.go_on.set()
            return mixed

        def late_write(cache: KvCache, page: int, source: torch.Tensor, layers: range) -> None:
            if self.is_armed and layers.start > 0:
                assert self.go_on.wait(_WITHIN_S), "nothing has happened before the load had ended"
                self.layers_copied_late += 1
                if fails:
                    raise RuntimeError("the device is gone")
            write_layers(cache, page, source, layers)

        monkeypatch.setattr(TorchStepAttention, "attend", watched_attend)
        monkeypatch.setattr(KvCache, "write_layers", late_write)


def suspended(driver: EngineDriver) -> list[int]:
    """Runs a session's first turn and suspends it, so that its KV is only on the host. Returns its history."""
    first = driver.run(PROMPT, session=SessionUse(SessionKey("s")), max_tokens=9, ignore_eos=True)
    history = PROMPT + first.token_ids
    driver.command(SessionVerb.SUSPEND, "s", history)
    memory = driver.command(SessionVerb.READ, "s", history)
    assert (memory.device_tokens, memory.host_tokens) == (0, 48)
    return history


def test_a_step_begins_before_its_load_has_ended(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs in the first layer before the upper layers are copied, and the tokens are those of a cold engine."""
    slow = SlowUpperLayers(monkeypatch)
    driver = make_engine(overlap_loads=True)
    history = suspended(driver)
    expected = make_engine().run(history + MORE, max_tokens=12, ignore_eos=True).token_ids

    slow.is_armed = True
    second = driver.run(
        history + MORE, session=SessionUse(SessionKey("s"), len(history)), max_tokens=12, ignore_eos=True
    )

    assert second.token_ids == expected
    assert second.cache is not None
    assert second.cache.host_tokens == 48
    assert slow.layers_copied_late > 0
    stats = driver.loop.stats()
    assert (stats.in_flight_pages, stats.host_in_flight_pages, stats.active_pages) == (0, 0, 0)


def test_a_load_that_fails_under_a_step_fails_its_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends with an error, no page stays held, and the next request is served as by a cold engine."""
    slow = SlowUpperLayers(monkeypatch, fails=True)
    driver = make_engine(overlap_loads=True)
    history = suspended(driver)
    expected = make_engine().run(history + MORE, max_tokens=12, ignore_eos=True).token_ids

    slow.is_armed = True
    second = driver.run(
        history + MORE, session=SessionUse(SessionKey("s"), len(history)), max_tokens=12, ignore_eos=True
    )
    slow.is_armed = False
    driver.rest()

    assert isinstance(second.error, InternalFailure)
    stats = driver.loop.stats()
    assert (stats.in_flight_pages, stats.host_in_flight_pages, stats.active_pages) == (0, 0, 0)
    assert driver.run(history + MORE, max_tokens=12, ignore_eos=True).token_ids == expected


def test_requests_do_not_wait_for_a_load_that_they_do_not_read(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a prefetch is stopped halfway, another request is served from its first token to its last."""
    slow = SlowUpperLayers(monkeypatch, by_hand=True)
    driver = make_engine(overlap_loads=True)
    history = suspended(driver)
    expected = make_engine().run(PROMPT[::-1], max_tokens=6, ignore_eos=True).token_ids

    slow.is_armed = True
    driver.command_now(SessionVerb.PREFETCH, "s", history)
    stranger = driver.run(PROMPT[::-1], domain=b"stranger", max_tokens=6, ignore_eos=True)
    slow.go_on.set()
    driver.rest()

    assert stranger.token_ids == expected
    assert slow.layers_copied_late > 0
