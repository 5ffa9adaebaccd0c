"""Tests of the self-test that the kernels pass before an engine uses them."""

from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_compute_pass(interpreted: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """Both pairs of kernels pass the self-test in every served dtype."""
    assert interpreted["selftest"].why_kernels_fail(CPU, dtype) is None


@pytest.mark.parametrize("way", ["row_kernels", "tile_kernels"])
def test_kernels_that_compute_something_else_are_found_out(
    interpreted: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The self-test reports the error and the tile of kernels that leave the output as it was."""
    names = {"row_kernels": "expand_rows_kernel", "tile_kernels": "expand_tiles_kernel"}
    idle = interpreted["launch"].Launch
    run = idle.run
    kernel = getattr(interpreted[way], names[way])
    monkeypatch.setattr(idle, "run", lambda launch: None if launch.kernel is kernel else run(launch))

    failure = interpreted["selftest"].why_kernels_fail(CPU, torch.float32)

    assert failure is not None
    assert f"at {1 if way == 'row_kernels' else 16} rows a tile" in failure


def test_kernels_that_cannot_be_launched_say_why() -> None:
    """The self-test returns the error's text of kernels that cannot be launched."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    from graftwork.engine.lora.triton.selftest import why_kernels_fail

    failure = why_kernels_fail(CPU, torch.float32)

    assert failure is not None
    assert "Error: " in failure
