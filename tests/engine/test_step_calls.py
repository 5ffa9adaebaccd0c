"""Tests of the host's work: how many functions of the engine a decoding step calls.

A step of a small model on a CPU takes a few milliseconds, and a call about a tenth of a microsecond. So a hundred more
calls for each request would cost a step of 32 requests several percent. A count is the same on every machine.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import graftwork
from tests.engine.engine_driver import EngineDriver

STEPS = 8
MOST_OF_A_ROW = 105
"""97 were counted when this was written."""
MOST_OF_A_STEP = 428
"""Besides its rows; 372 were counted when this was written, 405 with layer groups and rolling windows, and 416 since residual
streams are objects: five calls more in each of the model's two layers, and one around them. 426 since keys and values may
have scales beside them, two calls for each in a layer, and steps know what a prompt costs besides its tokens."""


def fewest_calls(driver: EngineDriver, num_requests: int) -> int:
    """Returns how many functions of the engine a step calls that decodes `num_requests` requests: the fewest of some steps,
    because now and then a step also charges for pages, or learns that the machine has another pace.
    """
    package, found = graftwork.__name__, []
    for number in range(num_requests):
        driver.submit([number, 7, 8, 9], max_tokens=STEPS + 8, ignore_eos=True)
    for _ in range(4):
        driver.step()
    count = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and str(frame.f_globals.get("__name__")).startswith(package)

    for _ in range(STEPS):
        count = 0
        sys.setprofile(watch)
        driver.loop.step()
        sys.setprofile(None)
        found.append(count)
    driver.finish()
    return min(found)


def test_a_decoding_row_costs_the_host_few_calls(make_engine: Callable[..., EngineDriver]) -> None:
    """A step of one request calls a bounded number of functions, and one of sixteen a bounded number more for each."""
    driver = make_engine(max_running=16, max_draft_tokens=0, device_bytes=4 * 2**20)

    one, sixteen = fewest_calls(driver, 1), fewest_calls(driver, 16)

    of_a_row = (sixteen - one) / 15
    assert 0 < of_a_row <= MOST_OF_A_ROW
    assert 0 < one - of_a_row <= MOST_OF_A_STEP
