"""Runs planned steps: launches them, lands them, and decides what a failed step means.

    without overlap     launch n      sample n   land n                  (CPU)
    with overlap        launch n + 1  land n     sample n + 1            (GPU)

With overlap, the host lands step n (waits for its tokens, ends requests, sends outputs) and later plans step n + 2 while
the device computes step n + 1. Step n + 1 takes the tokens of step n from the device. Only the choice of its own tokens
waits until step n has landed, because grammars and penalties need the tokens of step n on the host.

Owns the runner and the one step that is in flight between two calls. Never plans a step: the scheduler does.

A failed step fails only its own requests. A device that can compute nothing after a failure is lost, and ends the loop:
a CUDA error can leave a process without a usable device, so a new process must take over.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from graftwork.engine.core.events import RequestOutput
from graftwork.engine.core.progress import LoopProgress
from graftwork.engine.core.step import Flight, Runner, StepPlan
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.runner.forward import StepPaths
from graftwork.engine.runner.model_runner import PrefillMeter
from graftwork.engine.scheduler.scheduler import Scheduler
from graftwork.engine.step_recorder import NO_RECORDER, StepRecorder
from graftwork.platform.errors import CapacityContended, GraftworkError, InternalFailure

_log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_AFTER_S = 1.0


class DeviceLost(Exception):
    """The device can compute nothing any more. The engine's process must end."""


@dataclass(slots=True)
class _Step:
    """A step that was planned and has not landed."""

    plan: StepPlan
    waits_for_loads: bool
    """Whether the step waits for KV pages that are being copied to the device."""
    flight: Flight | None = None
    """The running step; None if it has failed."""
    failure: GraftworkError | None = None
    """The error with which the step's requests end; None unless the step has failed."""


class StepPipeline:
    """Runs steps one after another, or overlaps the host's work on one step with the device's work on the other."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        gates: LayerGates,
        prefills: PrefillMeter,
        progress: LoopProgress,
        *,
        overlaps: bool,
        paths: StepPaths | None = None,
        recorder: StepRecorder = NO_RECORDER,
    ) -> None:
        """If `overlaps` is true, one step stays in flight between two calls of `advance`. The runner counts in `paths`."""
        self.runner = runner
        """Runs the steps. It may be replaced while no step is in flight, for example by a runner that records them."""
        self._scheduler = scheduler
        self._gates = gates
        self._prefills = prefills
        self._progress = progress
        self._overlaps = overlaps
        self._recorder = recorder
        self.paths = paths or StepPaths()
        """How the steps were computed."""
        self._in_flight: _Step | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return self._in_flight is not None

    def advance(self, plan: StepPlan | None) -> list[RequestOutput]:
        """Launches `plan`, and lands the step before it. Without overlap, also lands the new step.

        `plan` is None if nothing can run now. Returns the outputs of the steps that have landed. Raises DeviceLost.
        """
        step = None if plan is None else self._launch(plan)
        outputs = self.land()
        self._in_flight = step
        if step is None:
            return outputs
        if step.flight is not None:
            self._attempt(step, step.flight.sample)
        if step.failure is not None or not self._overlaps:
            outputs += self.land()
        return outputs

    def land(self) -> list[RequestOutput]:
        """Waits for the step in flight, and processes its result. Returns its outputs; none if no step is in flight.

        Raises DeviceLost.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        result = None if step.flight is None else self._attempt(step, step.flight.result)
        self._progress.advance()
        self._prefills.step_ended(step.plan, waited=step.waits_for_loads or result is None)
        self._recorder.landed(step.plan)
        landed = self._scheduler.land(step.plan)
        outputs = None if result is None else self._attempt(step, lambda: self._scheduler.absorb(landed, result))
        if outputs is not None:
            return outputs
        assert step.failure is not None
        return self._scheduler.fail([piece.request_id for piece in landed.slices], step.failure)

    def _launch(self, plan: StepPlan) -> _Step:
        loads = self._scheduler.pending_loads.read_by(plan)
        self._gates.select(loads)
        self._progress.advance()
        self._recorder.launched(plan)
        self._prefills.step_begins()
        step = _Step(plan, waits_for_loads=bool(loads))
        step.flight = self._attempt(step, lambda: self.runner.launch(plan))
        return step

    def _attempt(self, step: _Step, act: Callable[[], T]) -> T | None:
        """Calls `act`, a part of `step`. If it fails, records the failure of the step and returns None."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - the outermost loop: one failed step must not end the engine
            step.failure = _failure(step.plan, error)
        step.flight = None
        self._recover()  # after the error has gone: its traceback holds the tensors of the step
        return None

    def _recover(self) -> None:
        try:
            self.runner.recover()
        except Exception as error:
            raise DeviceLost("The device can compute nothing after a failed step.") from error


def _failure(plan: StepPlan, error: Exception) -> GraftworkError:
    """Logs the error of a step, and returns the error for its requests."""
    _log.error("step_failed", exc_info=error, extra={"request_ids": [piece.request_id for piece in plan.slices]})
    if isinstance(error, torch.OutOfMemoryError):
        return CapacityContended(
            "The device had too little memory for this step; requests with shorter prompts may fit. Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )
    return InternalFailure("The engine failed while it computed this request; the engine's log says why.")
