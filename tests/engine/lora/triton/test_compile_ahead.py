"""Tests of the compiled kernels on a machine without a GPU. Each test is a process of its own, because Triton
compiles or interprets per process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels extra is not installed")

REPORT_SCRIPT = r"""
import json, re
from graftwork.engine.lora.triton.compile_ahead import HEADING, SHAPES, SHARED_LIMIT_BYTES, compile_all, line_of
print(json.dumps([
    {
        "name": f"{built.kernel} {built.shape.name} sm_{built.capability}",
        "line_width": len(line_of(built)) - len(HEADING),
        "has_matrices": built.shape.dtype.itemsize == 2 and built.shape.tile_rows > 1,
        "shared_bytes": built.shared_bytes,
        "limit_bytes": SHARED_LIMIT_BYTES[built.capability],
        "cubin_bytes": built.cubin_bytes,
        "matrix_instructions": sorted(set(re.findall(r"mma\.sync|wgmma|tcgen05\.mma", built.ptx))),
        "narrow_loads": len(re.findall(r"ld\.global[.\w]*\.[bu]16", built.ptx)),
        "is_row_wise": built.shape.tile_rows == 1,
        "wide_loads": len(re.findall(r"ld\.global[.\w]*\.v4\.b32", built.ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", built.ptx)),
    }
    for built in [*compile_all((90,)), *compile_all((80, 100), SHAPES[:2])]
]))
"""


def run_python(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"TRITON_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton_cache")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> list[dict[str, Any]]:
    """All kernels for every architecture, and every shape on one of them; built once."""
    completed = run_python("-c", REPORT_SCRIPT, cache=cache)
    assert completed.returncode == 0, completed.stderr
    return list(json.loads(completed.stdout))


def test_all_kernels_build_and_fit(compiled: list[dict[str, Any]]) -> None:
    """Each kernel compiles for Ampere, Hopper and Blackwell within the shared memory limit."""
    built_for = {(built["name"].split()[0], built["name"].split()[-1]) for built in compiled}
    kernels = {f"{step}_{way}_kernel" for step in ("shrink", "expand") for way in ("tiles", "rows")}
    assert built_for == {(kernel, target) for kernel in kernels for target in ("sm_80", "sm_90", "sm_100")}
    for built in compiled:
        assert built["cubin_bytes"] > 0, built["name"]
        assert built["shared_bytes"] <= built["limit_bytes"], built["name"]


def test_one_matrix_instruction_serves_all_tiles(compiled: list[dict[str, Any]]) -> None:
    """Tiles of both sizes use mma.sync on every architecture, so a row's bits do not depend on its tile's size.
    Row-wise kernels and fp32 use none."""
    for built in compiled:
        assert built["matrix_instructions"] == (["mma.sync"] if built["has_matrices"] else []), built["name"]


def test_loads_are_wide(compiled: list[dict[str, Any]]) -> None:
    """No load fetches a single 16-bit number, though the addresses are known only at run time."""
    assert {built["name"]: built["narrow_loads"] for built in compiled if built["narrow_loads"]} == {}
    assert [built["name"] for built in compiled if built["is_row_wise"] and not built["wide_loads"]] == []


def test_nothing_is_summed_atomically(compiled: list[dict[str, Any]]) -> None:
    """No kernel has an atomic addition, so the order of each sum is fixed."""
    assert {built["name"]: built["atomics"] for built in compiled if built["atomics"]} == {}


def test_the_printed_table_is_aligned(compiled: list[dict[str, Any]]) -> None:
    """Each line of the printed table is as wide as its heading."""
    assert {built["line_width"] for built in compiled} == {0}


def test_interpreted_kernels_are_not_compiled(cache: Path) -> None:
    """Under the interpreter the module refuses to compile, and its error says what to do."""
    completed = run_python("-m", "graftwork.engine.lora.triton.compile_ahead", cache=cache, TRITON_INTERPRET="1")

    assert completed.returncode == 1
    assert "unset TRITON_INTERPRET" in completed.stderr


def test_triton_is_imported_with_the_kernels_only(cache: Path) -> None:
    """Metadata, tables, plans and the reference can be imported without triton."""
    script = (
        "import sys; from graftwork.engine.lora.triton import launch_plan, random_adapters, reference, "
        "slice_table, tiles; sys.exit('triton' in sys.modules)"
    )

    assert run_python("-c", script, cache=cache).returncode == 0
