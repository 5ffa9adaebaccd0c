"""Counts what a decode step asks of a GPU, for the tests of the dispatch gate."""

from typing import Any

from graftwork.engine.core.step import SampleSpec
from tests.engine.runner.device_gate import StepCounts, counted
from tests.engine.runner.llama_step import LlamaRunner, decode_plan


def step(model: LlamaRunner, specs: list[SampleSpec], **options: Any) -> StepCounts:
    """What the second of two equal steps asks for. The first one brings the penalties' counts to the device."""
    runner, plan = model.runner, decode_plan(specs, **options)
    with counted(model.pinned):
        runner.launch(decode_plan(specs)).sample()
    with counted(model.pinned) as counts:
        runner.launch(plan).sample()
    return counts
