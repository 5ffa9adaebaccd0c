"""The machine that a measurement was made on, for the record."""

import os
import platform
from pathlib import Path
from typing import Any

_TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "neon",
    "asimd",
    "sve",
    "bf16",
)


def describe_machine() -> dict[str, Any]:
    """Processor, the flags that decide about bf16, cores, load and kernel; what the system does not tell is left out."""
    lines = _cpuinfo()
    flags = set(lines.get("flags", lines.get("Features", "")).split())
    return {
        "cpu": lines.get("model name", platform.processor() or platform.machine()),
        "family_model_stepping": [lines.get(name) for name in ("cpu family", "model", "stepping")],
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpuinfo() -> dict[str, str]:
    """Of the first core."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first, *_ = path.read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
