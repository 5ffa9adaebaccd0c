"""Tells which devices torch sees on this machine, without building an engine."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The devices of this machine."""

    torch_version: str
    num_gpus: int
    gpu_name: str = ""
    """The name of the first GPU."""
    gpu_bytes: int = 0
    """The memory of the first GPU."""


def machine_report() -> MachineReport:
    """Returns what torch sees. Loads torch, and its CUDA library where there is one."""
    if not torch.cuda.is_available():
        return MachineReport(torch.__version__, 0)
    gpu = torch.cuda.get_device_properties(0)
    return MachineReport(torch.__version__, torch.cuda.device_count(), gpu.name, gpu.total_memory)
