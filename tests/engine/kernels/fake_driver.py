"""A Triton driver without a GPU: kernels are compiled and bound to their arguments as on an H100, but never run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_DEVICE = 1000
"""No real device has this number, so the kernels of real devices are cached apart."""


@dataclass(frozen=True)
class FakeLaunch:
    """One launch that reached the driver."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class FakeDriver:
    """Takes the place of Triton's driver for CUDA, and records launches. Tensors may be on any device."""

    def __init__(self) -> None:
        self.launches: list[FakeLaunch] = []
        self.utils = self

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[object, str, int, int, int]:
        """Returns a module, a function, registers, spills, and the most threads of a program."""
        return object(), name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Returns what Triton calls to launch a compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, function: str, *others: Any) -> None:
            # A compiled kernel outlives the driver that it was first launched with.
            driver.active.launches.append(FakeLaunch(function, (x, y, z), others[4:]))  # after metadata and hooks

        return launch


@contextmanager
def fake_driver() -> Iterator[FakeDriver]:
    """Makes a FakeDriver Triton's active driver for a while. Kernels that interpreted modules hold are not affected."""
    fake = FakeDriver()
    driver.set_active(fake)
    try:
        yield fake
    finally:
        driver.set_active(None)  # the next launch looks for a GPU; reset_active would look at once
