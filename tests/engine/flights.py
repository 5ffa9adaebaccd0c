"""Runners for tests that stand between the engine's loop and its runner, and flights that have ended already."""

import threading

from graftwork.engine.core.step import Flight, Runner, StepPlan, StepResult


class LandedFlight:
    """A step that has ended already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self) -> None:
        """Does nothing, because the tokens are chosen already."""

    def result(self) -> StepResult:
        return self._result


class RunnerAround:
    """A runner that lets another runner do the work. Tests override what they look at."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner

    def launch(self, plan: StepPlan) -> Flight:
        return LandedFlight(self.run(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, and waits for its end."""
        flight = self.inner.launch(plan)
        flight.sample()
        return flight.result()

    def recover(self) -> None:
        self.inner.recover()


class BlockedRunner(RunnerAround):
    """A runner whose steps wait while `gate` is closed, except the first `num_free`."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.num_free = 0
        self.gate = threading.Event()
        self.waits = threading.Event()
        """Is set when a step waits."""

    def run(self, plan: StepPlan) -> StepResult:
        self.num_free -= 1
        if self.num_free >= 0:
            return super().run(plan)
        self.waits.set()
        assert self.gate.wait(60)
        return super().run(plan)
