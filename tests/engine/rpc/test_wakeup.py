"""Tests of the signal between two tasks."""

from graftwork.engine.rpc.conversation import Wakeup


async def test_wake_ends_the_wait() -> None:
    """A waiting task continues after `wake` and not before."""
    wakeup = Wakeup()
    waiting = wakeup.wait()
    waited = not waiting.done()

    wakeup.wake()
    await waiting

    assert waited


async def test_a_wake_without_a_waiter_is_forgotten() -> None:
    """A wake that no task waits for ends no later wait."""
    wakeup = Wakeup()
    wakeup.wake()
    cancelled = wakeup.wait()
    cancelled.cancel()
    wakeup.wake()

    assert not wakeup.wait().done()
