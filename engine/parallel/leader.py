"""Runs the steps of a tensor-parallel engine on rank 0: sends each plan to the workers, and computes its own part.

Only rank 0 computes logits and samples. A step fails alone if the failure is in sampling. A failure in the forward pass
leaves the ranks at different places of the step, from which they cannot go on together: the engine must end.
"""

from typing import Protocol

from graftwork.engine.core.step import Flight, Runner, StepPlan, StepResult
from graftwork.engine.kv.transfer.plan import LayerGates
from graftwork.engine.parallel.commands import step_command
from graftwork.engine.parallel.mirrors import MirroredCopier
from graftwork.engine.parallel.workers import WorkerLost, Workers
from graftwork.engine.runner.model_runner import ModelRunner


class StepRunner(Runner, Protocol):
    """A Runner that can also run one step to its end."""

    def run(self, plan: StepPlan) -> StepResult: ...


class LeadingRunner:
    """The Runner of a tensor-parallel engine, on rank 0."""

    def __init__(self, own: ModelRunner, workers: Workers, copies: MirroredCopier, gates: LayerGates) -> None:
        """`own` computes rank 0's part. `gates` tell which loads of KV a step waits for."""
        self._own = own
        self._workers = workers
        self._copies = copies
        self._gates = gates
        self._is_out_of_step = False

    def launch(self, plan: StepPlan) -> "LeadingFlight":
        self._workers.check()
        self._is_out_of_step = True
        self._workers.send(step_command(plan, self._copies.running_numbers(self._gates.selected_loads)))
        flight = self._own.launch(plan)
        self._is_out_of_step = False
        return LeadingFlight(flight, self._workers)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, and waits for its end. The plan must not await tokens."""
        flight = self.launch(plan)
        flight.sample()
        return flight.result()

    def recover(self) -> None:
        """See Runner.recover. Raises WorkerLost if a worker has ended, or if the ranks are at different places."""
        self._workers.check()
        if self._is_out_of_step:
            raise WorkerLost("A step failed in the middle of its forward pass, and the ranks cannot go on together.")
        self._own.recover()


class LeadingFlight:
    """A step that all ranks compute."""

    def __init__(self, own: Flight, workers: Workers) -> None:
        self._own = own
        self._workers = workers

    def sample(self) -> None:
        self._own.sample()

    def result(self) -> StepResult:
        """See Flight.result. Raises WorkerLost if a worker has ended, because then the result may be wrong."""
        result = self._own.result()
        self._workers.check()
        self._workers.commands_done()
        return result
