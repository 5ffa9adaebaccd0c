"""A step may begin while its KV comes up from the host: layer by layer, and with the same tokens."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.kv.transfer.layer_gates import LayerGate, LayerGates, LoadFailed
from graftwork.engine.runner.attention import PagedAttention
from graftwork.platform.errors import InternalFailure
from tests.engine.harness import Harness

MakeEngine = Callable[..., Harness]
PROMPT = [5 + n % 50 for n in range(41)]
MORE = [9, 8, 7]
_WITHIN_S = 20


def nothing() -> None:
    """The copies have been made."""


def test_a_layer_is_waited_for_and_no_later_one() -> None:
    """A reader gets as far as the layers that were let through, and on when the next are."""
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
    """Each layer waits for the event behind its own group, whichever groups have been let through since."""
    gate, waited = LayerGate(5), list[str]()
    gate.open_layers(2, lambda: waited.append("first"))
    gate.open_layers(4, lambda: waited.append("second"))
    gate.open_layers(5, lambda: waited.append("third"))

    for layer in range(5):
        gate.wait(layer)

    assert waited == ["first", "first", "second", "second", "third"]


def test_a_load_that_fails_lets_nobody_read_what_is_missing() -> None:
    gates, gate = LayerGates(), LayerGate(4)
    gates.add("load", gate)
    gate.open_layers(2, nothing)
    gate.fail()

    gates.wait(3)  # nobody reads it yet
    gates.select(["load"])
    gates.wait(1)
    with pytest.raises(LoadFailed, match="layer 2"):
        gates.wait(2)
    gates.remove("load")
    gates.select(["load"])
    gates.wait(2)


class SlowUpperLayers:
    """Holds back the copies of all but the first layer, until attention has been in that one, or by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, by_hand: bool = False) -> None:
        self.is_armed = False
        self.layers_copied_late = 0
        self.go_on = Event()
        attend, write_layers = PagedAttention.attend, KvCache.write_layers

        def watched_attend(cache: PagedAttention, layer: int, *rest: Any) -> torch.Tensor:
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

        monkeypatch.setattr(PagedAttention, "attend", watched_attend)
        monkeypatch.setattr(KvCache, "write_layers", late_write)


def suspended(harness: Harness) -> list[int]:
    """A session's first turn, whose KV is on the host alone; returns its history."""
    first = harness.run(PROMPT, session=SessionUse(SessionKey("s")), max_tokens=9, ignore_eos=True)
    history = PROMPT + first.token_ids
    harness.command(SessionVerb.SUSPEND, "s", history)
    memory = harness.command(SessionVerb.READ, "s", history)
    assert (memory.device_tokens, memory.host_tokens) == (0, 48)
    return history


def test_a_step_begins_before_its_load_has_ended(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upper layers are not copied until attention has run in the first: the tokens are a cold engine's."""
    slow = SlowUpperLayers(monkeypatch)
    harness = make_engine(overlap_loads=True)
    history = suspended(harness)
    expected = make_engine().run(history + MORE, max_tokens=12, ignore_eos=True).token_ids

    slow.is_armed = True
    second = harness.run(
        history + MORE, session=SessionUse(SessionKey("s"), len(history)), max_tokens=12, ignore_eos=True
    )

    assert second.token_ids == expected
    assert second.cache is not None
    assert second.cache.host_tokens == 48
    assert slow.layers_copied_late > 0
    stats = harness.loop.stats()
    assert (stats.in_flight_pages, stats.host_in_flight_pages, stats.active_pages) == (0, 0, 0)


def test_a_load_that_fails_under_a_step_fails_its_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is told so; no page stays held, and the engine serves the next one as a cold one does."""
    slow = SlowUpperLayers(monkeypatch, fails=True)
    harness = make_engine(overlap_loads=True)
    history = suspended(harness)
    expected = make_engine().run(history + MORE, max_tokens=12, ignore_eos=True).token_ids

    slow.is_armed = True
    second = harness.run(
        history + MORE, session=SessionUse(SessionKey("s"), len(history)), max_tokens=12, ignore_eos=True
    )
    slow.is_armed = False
    harness.rest()

    assert isinstance(second.error, InternalFailure)
    stats = harness.loop.stats()
    assert (stats.in_flight_pages, stats.host_in_flight_pages, stats.active_pages) == (0, 0, 0)
    assert harness.run(history + MORE, max_tokens=12, ignore_eos=True).token_ids == expected


def test_others_do_not_wait_for_a_load_that_they_do_not_read(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a prefetch is held back half done, a stranger's request is served from its first token to its last."""
    slow = SlowUpperLayers(monkeypatch, by_hand=True)
    harness = make_engine(overlap_loads=True)
    history = suspended(harness)
    expected = make_engine().run(PROMPT[::-1], max_tokens=6, ignore_eos=True).token_ids

    slow.is_armed = True
    harness.command_now(SessionVerb.PREFETCH, "s", history)
    stranger = harness.run(PROMPT[::-1], domain=b"stranger", max_tokens=6, ignore_eos=True)
    slow.go_on.set()
    harness.rest()

    assert stranger.token_ids == expected
    assert slow.layers_copied_late > 0
