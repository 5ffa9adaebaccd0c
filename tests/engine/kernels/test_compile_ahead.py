"""Tests of the compiler that needs no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.kernels.compiled import assert_fits, run_python

triton = pytest.importorskip("triton", reason="the kernels extra is not installed")
tl = triton.language


@triton.jit(do_not_specialize=["exact"], do_not_specialize_on_alignment=["anywhere"])  # type: ignore[untyped-decorator]
def sums_kernel(x, anywhere, exact, count, shift, scale, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
    """Keeps WIDTH numbers of each thread alive at once."""
    offsets = tl.arange(0, 128)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    block = tl.load(x + offsets).to(tl.float32) * scale + shift
    first = tl.load(anywhere + tl.arange(0, 128)) + exact + count
    tl.debug_barrier()
    block = block - tl.max(block, axis=1)[:, None]
    block = block / tl.sum(block * block, axis=1)[:, None] + first[:, None]
    tl.store(x + offsets, block.to(tl.bfloat16))


def launch_of(width: int, **changes: Any) -> Any:
    from graftwork.engine.kernels.launch import Launch

    arguments = {
        "x": torch.empty(128 * width, dtype=torch.bfloat16, device="meta"),
        "anywhere": torch.empty(128, dtype=torch.int32, device="meta"),
        "exact": 32,
        "count": 32,
        "shift": 1,
        "scale": 0.5,
        "WIDTH": width,
    }
    return Launch(sums_kernel, (1,), arguments | changes, {"num_warps": 4, "num_stages": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"exact": 1, "count": 2**31, "shift": -5, "scale": 7},
        {"x": torch.empty(200, dtype=torch.uint8)[1:], "anywhere": torch.empty(9, dtype=torch.float8_e4m3fn)},
        {"shift": None, "scale": True, "count": -(2**31)},
        {"x": torch.empty(2, dtype=torch.bool), "anywhere": torch.empty(9, dtype=torch.int64)[1:], "count": 0},
    ],
)
def test_a_launch_has_the_variant_that_triton_makes_of_it(changes: dict[str, Any]) -> None:
    """Types, constants and alignments of a launch's arguments are those that Triton itself finds."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from graftwork.engine.kernels.compile_ahead import variant_of

    launch = launch_of(4, **changes)
    found = {
        parameter.name: native_specialize_impl(
            BaseBackend,
            launch.arguments[parameter.name],
            False,
            not parameter.do_not_specialize,
            not parameter.do_not_specialize_on_alignment,
        )
        for parameter in sums_kernel.params[:-1]
    }

    variant = variant_of("sums", launch)

    assert variant.signature == {name: kind for name, (kind, _) in found.items()} | {"WIDTH": "constexpr"}
    assert variant.aligned == {name for name, (_, key) in found.items() if key == "D"}
    assert variant.constants == {"WIDTH": 4} | {
        name: launch.arguments[name] for name, (kind, _) in found.items() if kind == "constexpr"
    }


def test_registers_and_spills_are_read_from_the_cubin() -> None:
    """A kernel that may use fewer registers than it wants keeps what does not fit in local memory."""
    from graftwork.engine.kernels.compile_ahead import compile_variant, variant_of

    launch = launch_of(64)
    free = compile_variant(variant_of("sums", launch), 90)
    bound = compile_variant(variant_of("sums", replace(launch, options=launch.options | {"maxnreg": 24})), 90)

    assert_fits(free)
    assert free.registers > 48
    assert bound.registers == 24
    assert bound.spilled_bytes >= 4 * (free.registers - bound.registers)


def test_a_fake_driver_sees_what_is_launched() -> None:
    """Without a GPU a launch is compiled and bound to its arguments, and the driver sees its grid and its arguments."""
    from tests.engine.kernels.fake_driver import fake_driver

    launch = launch_of(4, x=torch.empty(512, dtype=torch.bfloat16), anywhere=torch.empty(128, dtype=torch.int32))

    with fake_driver() as driver:
        launch.run()
        replace(launch, grid=(3, 2)).run()

    arguments = tuple(launch.arguments.values())
    assert [(one.kernel, one.grid) for one in driver.launches] == [
        ("sums_kernel", (1, 1, 1)),
        ("sums_kernel", (3, 2, 1)),
    ]
    for one in driver.launches:
        assert all(found is given for found, given in zip(one.arguments, arguments, strict=True))


@pytest.mark.parametrize(
    ("width", "changes"), [(8, {}), (16, {"exact": 3, "count": 7}), (32, {"count": 1, "scale": 2.0})]
)
def test_a_launch_finds_in_the_cache_what_was_compiled_ahead(
    tmp_path: Path, width: int, changes: dict[str, Any]
) -> None:
    """The first launch of a kernel that was compiled ahead compiles nothing, whatever its arguments are."""
    from graftwork.engine.kernels.compile_ahead import compile_variant, variant_of
    from tests.engine.kernels.fake_driver import fake_driver

    tensors = {"x": torch.empty(128 * width, dtype=torch.bfloat16), "anywhere": torch.empty(129, dtype=torch.int32)[1:]}
    launch = launch_of(width, **tensors | changes)
    were_cached: list[bool] = []

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), fake_driver():
        triton.knobs.cache.dir = str(tmp_path)
        compile_variant(variant_of("sums", launch), 90)
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: were_cached.append(cache_hit)
        launch.run()

    assert were_cached == [True]


def test_the_printed_table_is_aligned() -> None:
    """A line of the printed table is as wide as its heading."""
    from graftwork.engine.kernels.compile_ahead import HEADING, compile_variant, line_of, variant_of

    line = line_of(compile_variant(variant_of("sums bf16", launch_of(4)), 80))

    assert len(line) == len(HEADING)


def test_interpreted_kernels_are_not_compiled() -> None:
    """Under the interpreter the command refuses to compile, and its error says what to do."""
    completed = run_python("-m", "graftwork.engine.build.compile_kernels", TRITON_INTERPRET="1")

    assert completed.returncode == 1
    assert "unset TRITON_INTERPRET" in completed.stderr
