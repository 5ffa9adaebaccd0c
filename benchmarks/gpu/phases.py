"""Lists the phases of the day, in the order in which they run. A phase is imported only in the process that runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from gpu.phase_run import PhaseRun


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: a function `measure_…` of a module of this folder."""

    name: str
    seconds: float
    """The time that it may take. It is killed at one and a half times that."""
    module: str
    function: str
    interprets: bool = False
    """Whether a dry run interprets the kernels on the CPU (TRITON_INTERPRET=1)."""
    tool: tuple[str, ...] = ()
    """A program that the phase runs under, with its options. The phase is left out where the program is not installed. A
    dry run does without.
    """
    shape: str | None = None
    """The shape that this phase always takes; None for the shape of the day."""

    def load(self) -> Callable[[PhaseRun], None]:
        function: Callable[[PhaseRun], None] = getattr(import_module(f"gpu.{self.module}"), self.function)
        return function


_MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
PHASES = (
    Phase("machine", 20, "kernel_trials", "measure_machine"),
    Phase("trials", 80, "kernel_trials", "measure_trials", interprets=True),
    Phase("memcheck", 80, "kernel_trials", "measure_trials", True, tool=_MEMCHECK, shape="tiny"),
    Phase("attention", 50, "kernel_floors", "measure_attention"),
    Phase("lora", 50, "kernel_floors", "measure_lora"),
    Phase("lora_plans", 60, "lora_plans", "measure_lora_plans"),
    Phase("weights", 50, "weight_products", "measure_weights"),
    Phase("experts", 50, "expert_products", "measure_experts"),
    Phase("sampler", 20, "kernel_floors", "measure_sampler"),
    Phase("steps", 150, "engine_steps", "measure_steps"),
    Phase("mixed", 60, "mixed_steps", "measure_mixed"),
    Phase("trace", 40, "engine_steps", "measure_trace"),
    Phase("copies", 60, "copies", "measure_copies"),
    Phase("coded_kv", 90, "engine_steps", "measure_coded_kv"),
)
PHASE_BY_NAME = {phase.name: phase for phase in PHASES}
