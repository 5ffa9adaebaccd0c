"""What tests of compiled kernels share."""

import os
import subprocess
import sys
from typing import Any


def assert_fits(built: Any, *, spilled_bytes: int = 0) -> None:
    """Assert that a compiled kernel fits its architecture, and spills at most `spilled_bytes` bytes of a thread."""
    from graftwork.engine.kernels.compile_ahead import SHARED_LIMIT_BYTES

    name = f"{built.variant.kernel.__name__} {built.variant.name} sm_{built.capability}"
    assert built.cubin_bytes > 0, name
    assert built.shared_bytes <= SHARED_LIMIT_BYTES[built.capability], name
    assert 0 < built.registers <= 255, name
    assert built.spilled_bytes <= spilled_bytes, name


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with kernels that are compiled unless `environment` says otherwise."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
